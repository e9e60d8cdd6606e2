//! The shapes of one global batch, each once: what of them does not depend on how the components run.

use dflop_types::{EncoderSegments, MicrobatchShape, SampleIndex, SampleShape};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The shapes of one global batch. Many samples have equal shapes, and each shape is priced once for each way to run the
/// components.
#[derive(Debug, Clone)]
pub(crate) struct BatchShapes<'a> {
    pub(crate) num_samples: u64,
    /// All samples as one microbatch.
    pub(crate) whole: MicrobatchShape,
    /// Each shape once, with the number of samples that have it, in the order in which they come.
    pub(crate) distinct: Vec<(&'a SampleShape, u64)>,
    /// The shapes that may take longest from the first forward to the last backward. Left out are those that another one
    /// exceeds: with equal encoder segments, as many parts, and no fewer LLM tokens and label tokens.
    pub(crate) longest: Vec<&'a SampleShape>,
}

impl<'a> BatchShapes<'a> {
    /// The shapes of the samples of `batch`; `shapes` has those of all samples.
    pub(crate) fn new(shapes: &'a [SampleShape], batch: &[SampleIndex]) -> Self {
        let samples = || batch.iter().map(|sample| &shapes[sample.index()]);
        let mut place_of: HashMap<&SampleShape, usize> = HashMap::new();
        let mut distinct: Vec<(&SampleShape, u64)> = Vec::new();
        for shape in samples() {
            match place_of.entry(shape) {
                Entry::Occupied(place) => distinct[*place.get()].1 += 1,
                Entry::Vacant(place) => {
                    place.insert(distinct.len());
                    distinct.push((shape, 1));
                }
            }
        }
        Self {
            num_samples: batch.len() as u64,
            whole: MicrobatchShape::pack(samples()),
            longest: longest(distinct.iter().map(|(shape, _)| *shape)),
            distinct,
        }
    }
}

/// The shapes that no other exceeds, as [`BatchShapes::longest`] says.
fn longest<'a>(shapes: impl Iterator<Item = &'a SampleShape>) -> Vec<&'a SampleShape> {
    let mut shapes: Vec<&SampleShape> = shapes.collect();
    shapes.sort_by_key(|shape| Reverse((shape.llm_tokens, shape.label_tokens)));
    let mut most_labels: HashMap<(&[EncoderSegments], u32), u32> = HashMap::new();
    shapes.retain(|shape| match most_labels.entry((&shape.encoder_segments, shape.num_parts())) {
        Entry::Occupied(most) if shape.label_tokens <= *most.get() => false,
        most => {
            *most.or_default() = shape.label_tokens;
            true
        }
    });
    shapes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(tiles: u32, llm_tokens: u32, label_tokens: u32) -> SampleShape {
        let encoder_segments = vec![EncoderSegments::of(tiles, 100)];
        SampleShape {
            encoder_segments,
            feature_tokens: 1,
            llm_tokens,
            label_tokens,
            ..SampleShape::default()
        }
    }

    #[test]
    fn equal_shapes_stand_once_and_only_those_that_none_exceeds_may_be_longest() {
        let shapes = [shape(1, 90, 5), shape(2, 50, 5), shape(1, 90, 5), shape(1, 80, 5), shape(1, 70, 9)];
        let batch: Vec<SampleIndex> = (0..5).map(SampleIndex).collect();
        let found = BatchShapes::new(&shapes, &batch);
        let counts: Vec<u64> = found.distinct.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [2, 1, 1, 1]);
        assert_eq!((found.num_samples, found.whole.total_llm_tokens()), (5, 380));
        // 80 tokens with 5 labels are less than 90 with 5. 70 with 9 have more labels; 50 have more tiles.
        assert_eq!(found.longest, [&shapes[0], &shapes[4], &shapes[1]]);
    }
}
