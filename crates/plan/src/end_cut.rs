//! The cuts into stages that Megatron-LM has beside the even one: its first and its last pipeline rank may hold other numbers of
//! layers than the ranks between (`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`). The first rank
//! also runs the encoder and the embedding, the last one the head.

use dflop_types::cut_layers;

/// The uneven cuts that are tried of each shape of pipeline. The estimate that chooses them sees the mean of the microbatches, no
/// ramp and no memory, so it is not left to choose one alone.
const CUTS_TRIED: usize = 4;

/// Layers of the first pipeline rank, of each rank between, and of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndCut {
    pub(crate) first: u32,
    inner: u32,
    pub(crate) last: u32,
}

impl EndCut {
    /// Layers by pipeline rank.
    fn ranks(self, pp: u32) -> impl Iterator<Item = u32> {
        (0..pp).map(move |rank| match rank {
            0 => self.first,
            rank if rank == pp - 1 => self.last,
            _ => self.inner,
        })
    }

    /// Layers by stage. Each rank has `chunks` stages with equally many layers, as in Megatron.
    pub(crate) fn stages(self, pp: u32, chunks: u32) -> Vec<u32> {
        (0..chunks).flat_map(|_| self.ranks(pp)).map(|layers| layers / chunks).collect()
    }
}

/// The longest rank and the sum of squares of all: of two cuts whose longest ranks are equal the more even one is better.
type Load = (u64, u128);

/// The load of ranks with these numbers of layers. A layer takes `layer_ns`; the first and the last rank take `ends_ns` more.
fn load(layers: impl Iterator<Item = u32>, layer_ns: u64, ends_ns: [u64; 2]) -> Load {
    let layers: Vec<u32> = layers.collect();
    let last = layers.len() - 1;
    let of = |(rank, &layers): (usize, &u32)| {
        let more_ns = if rank == 0 { ends_ns[0] } else { 0 } + if rank == last { ends_ns[1] } else { 0 };
        u64::from(layers).saturating_mul(layer_ns).saturating_add(more_ns)
    };
    let all = || layers.iter().enumerate().map(of);
    (all().max().unwrap_or(0), all().map(|ns| u128::from(ns).saturating_pow(2)).sum())
}

/// The cuts with the shortest longest rank, the best first. There are at most [`CUTS_TRIED`], and a cut whose longest rank is
/// longer than that of the even cut is not among them. Each of the `pp` ranks has `chunks` equal stages. A layer takes `layer_ns`; the first and the last rank take
/// `ends_ns` more.
pub(crate) fn end_cuts(
    num_layers: u32,
    [pp, chunks]: [u32; 2],
    layer_ns: u64,
    ends_ns: [u64; 2],
) -> Vec<EndCut> {
    if pp < 2 || chunks == 0 || !num_layers.is_multiple_of(chunks) {
        return Vec::new();
    }
    // In units of one layer for each chunk.
    let units = num_layers / chunks;
    let inners = if pp == 2 { 0..1 } else { 1..units / (pp - 2) + 1 };
    let of_inner = |inner: u32| {
        let ends = units.saturating_sub(inner * (pp - 2));
        (1..ends).map(move |first| [first, inner, ends - first].map(|units| units * chunks))
    };
    let even = cut_layers(num_layers, pp * chunks);
    let of_rank = |rank: u32| even.iter().skip(rank as usize).step_by(pp as usize).sum::<u32>();
    let even: Vec<u32> = (0..pp).map(of_rank).collect();
    let (longest_ns, _) = load(even.iter().copied(), layer_ns, ends_ns);
    let mut cuts: Vec<(Load, EndCut)> = inners
        .flat_map(of_inner)
        .map(|[first, inner, last]| EndCut { first, inner, last })
        .filter(|cut| !cut.ranks(pp).eq(even.iter().copied()))
        .map(|cut| (load(cut.ranks(pp), layer_ns, ends_ns), cut))
        .filter(|&((ns, _), _)| ns <= longest_ns)
        .collect();
    // Of equals the one whose first rank, which also has the encoder's bytes, has fewer layers.
    cuts.sort_by_key(|&(load, cut)| (load, cut.first));
    cuts.into_iter().take(CUTS_TRIED).map(|(_, cut)| cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cuts(num_layers: u32, pp: u32, chunks: u32, ends: [u64; 2]) -> Vec<Vec<u32>> {
        let cuts = end_cuts(num_layers, [pp, chunks], 10, ends);
        cuts.into_iter().map(|cut| cut.stages(pp, chunks)).collect()
    }

    /// The encoder takes as long as two of 28 layers: 30 in all, so no rank of four can be below 8 layers' time. Four cuts of
    /// Megatron reach it. Two are as even as can be (64 + 64 + 49 + 49), and of those the one with fewer layers first leads.
    #[test]
    fn the_rank_with_the_encoder_gets_fewer_layers() {
        let found = cuts(28, 4, 1, [20, 0]);
        assert_eq!(found, [[5, 8, 8, 7], [6, 7, 7, 8], [4, 8, 8, 8], [6, 8, 8, 6]]);
        // Two ranks, 8 layers, 20 and 10 more: 5.5 layers' time each. 3 + 5 has 50 and 60; 4 + 4, the even cut, 60 and 50.
        assert_eq!(cuts(8, 2, 1, [20, 10]), [[3, 5]]);
        // An encoder longer than everything: the first rank keeps one layer, and the even cut's 4 bound the rest.
        assert_eq!(cuts(8, 2, 1, [900, 0]), [[1, 7], [2, 6], [3, 5]]);
    }

    #[test]
    fn nothing_is_better_than_an_even_cut_of_equal_ranks() {
        assert!(cuts(28, 4, 1, [0, 0]).is_empty());
        assert!(cuts(28, 1, 1, [90, 0]).is_empty());
        assert!(cuts(2, 2, 1, [90, 0]).is_empty());
        // 29 layers are 8 + 7 + 7 + 7. Their longest rank of 8 is also that of cuts with a long last rank.
        assert_eq!(cuts(29, 4, 1, [0, 0])[0], [7, 7, 7, 8]);
    }

    /// Two ranks of two chunks: the chunks of a rank are equal, so its layers are even in number.
    #[test]
    fn chunks_of_a_rank_are_equal() {
        // 16 layers and 60 before them: ranks of 4 + 12 layers take 100 and 120, ranks of 6 + 10 take 120 and 100.
        assert_eq!(cuts(16, 2, 2, [60, 0])[0], [2, 6, 2, 6]);
        assert!(cuts(15, 2, 2, [60, 0]).is_empty());
    }
}
