//! Uneven cuts into stages. The first stage also holds the embedding and the last one the head, so equal numbers of
//! layers would make these stages the longest.

use dflop_types::{LayerCut, cut_layers};

/// The numbers of layers by stage that make the longest stage shortest. A layer takes `layer_ns`; the first and the last
/// stage take `ends_ns` more. `None` if the even cut is as short, or if a `LayerCut` cannot hold that many layers.
///
/// Each stage begins with one layer. Then each further layer goes to the stage that would be shortest with it; of equal
/// stages to the last one. All layers are equal, so no other cut has a shorter longest stage.
pub(crate) fn shortest_cut(
    num_layers: u32,
    stages: u32,
    layer_ns: u64,
    ends_ns: [u64; 2],
) -> Option<LayerCut> {
    if stages < 2 || num_layers <= stages {
        return None;
    }
    let last = stages as usize - 1;
    let mut layers = vec![1_u32; stages as usize];
    let load = |layers: &[u32], at: usize| {
        let more_ns = if at == 0 { ends_ns[0] } else { 0 } + if at == last { ends_ns[1] } else { 0 };
        u64::from(layers[at]).saturating_mul(layer_ns).saturating_add(more_ns)
    };
    for _ in stages..num_layers {
        let shortest = (0..layers.len()).min_by_key(|&at| (load(&layers, at), last - at))?;
        layers[shortest] += 1;
    }
    let longest = |layers: &[u32]| (0..layers.len()).map(|at| load(layers, at)).max();
    let even = cut_layers(num_layers, stages);
    if longest(&layers) >= longest(&even) {
        return None;
    }
    LayerCut::new(&layers).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ends_that_take_long_have_fewer_layers() {
        let cut = |layers, stages, ends| shortest_cut(layers, stages, 10, ends).map(Vec::from);
        // 28 layers and a head of 23: 4 stages of 7 would take 93; 8 + 8 + 7 + 5 takes 80.
        assert_eq!(cut(28, 4, [0, 23]), Some(vec![7, 8, 8, 5]));
        assert_eq!(cut(28, 4, [0, 0]), None);
        assert_eq!(cut(4, 4, [0, 90]), None);
        assert_eq!(cut(28, 1, [0, 90]), None);
    }

    proptest! {
        /// For few layers all cuts are tried: none has a shorter longest stage.
        #[test]
        fn no_cut_is_shorter(layers in 2u32..9, first in 0u64..40, end in 0u64..40) {
            let longest = |cut: &[u32]| {
                let last = cut.len() - 1;
                let of = |at: usize| u64::from(cut[at]) * 10
                    + if at == 0 { first } else { 0 } + if at == last { end } else { 0 };
                (0..cut.len()).map(of).max().unwrap()
            };
            for stages in 2..=layers.min(3) {
                let own = shortest_cut(layers, stages, 10, [first, end])
                    .map_or_else(|| cut_layers(layers, stages), Vec::from);
                let all: Vec<Vec<u32>> = if stages == 2 {
                    (1..layers).map(|a| vec![a, layers - a]).collect()
                } else {
                    (1..layers).flat_map(|a| (1..layers - a).map(move |b| vec![a, b, layers - a - b])).collect()
                };
                let best = all.iter().map(|cut| longest(cut)).min().unwrap();
                prop_assert_eq!(longest(&own), best);
            }
        }
    }
}
