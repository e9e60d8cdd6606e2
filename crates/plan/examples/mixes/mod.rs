//! The sets of `fixtures/mixes`, as the examples of this folder read them.

use dflop_types::{EncoderParts, EncoderSegments, SampleShape};
use std::error::Error;

/// The shape of each row of a set.
///
/// # Errors
/// In words, where a row does not have the six fields.
pub(crate) fn shapes(csv: &str) -> Result<Vec<SampleShape>, Box<dyn Error>> {
    csv.lines()
        .skip(1)
        .map(|line| {
            let number: Vec<u32> = line.split(',').skip(1).map(str::parse).collect::<Result<_, _>>()?;
            let [tiles, tokens, feature_tokens, llm_tokens, label_tokens] = number[..] else {
                return Err("a row of the mix has six fields".into());
            };
            let encoder_segments =
                if tiles == 0 { Vec::new() } else { vec![EncoderSegments::of(tiles, tokens)] };
            // A video is encoded frame by frame; its newline belongs to the last frame.
            let frame = |count, feature_tokens| EncoderParts { count, segments: 1, feature_tokens };
            let each = feature_tokens / tiles.max(1);
            let encoder_parts = if line.starts_with("video") && tiles > 1 {
                vec![frame(tiles - 1, each), frame(1, feature_tokens - (tiles - 1) * each)]
            } else {
                Vec::new()
            };
            Ok(SampleShape { encoder_segments, encoder_parts, feature_tokens, llm_tokens, label_tokens })
        })
        .collect()
}
