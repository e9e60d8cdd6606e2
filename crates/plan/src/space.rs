//! The candidates: every layout over all ranks of the cluster that this version runs, with its microbatch
//! counts.

use dflop_types::{ComponentLayout, Layout, Rejection};

/// A plan being judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Degrees of both components.
    pub layout: Layout,
    /// Microbatches of a step, on each LLM replica.
    pub num_microbatches: u32,
}

/// Candidates, and which of them are ruled out by their numbers alone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Space {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) rejections: Vec<Rejection>,
}

/// Layouts that use all `num_ranks`: encoder replicas 1..n-1, and each way to write the rest as LLM stages x
/// replicas.
///
/// Tensor parallelism and encoder stages stay at 1, as the runtime of this version runs no others.
///
/// *Complexity*: O(n sqrt n) in the ranks.
pub fn layouts(num_ranks: u32) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for encoder_dp in 1..num_ranks {
        let rest = num_ranks - encoder_dp;
        for pp in divisors(rest) {
            layouts.push(Layout::disaggregated(
                ComponentLayout { tp: 1, pp: 1, dp: encoder_dp },
                ComponentLayout { tp: 1, pp, dp: rest / pp },
            ));
        }
    }
    layouts
}

fn divisors(n: u32) -> Vec<u32> {
    let low: Vec<u32> = (1..=n.isqrt()).filter(|&d| n.is_multiple_of(d)).collect();
    let high = low.iter().rev().map(|d| n / d).filter(|d| low.binary_search(d).is_err());
    low.iter().copied().chain(high).collect()
}

/// Microbatch counts to try with `replicas` LLM replicas: powers of two, and the one that gives each bucket
/// one sample; none has more buckets than samples.
fn microbatch_counts(global_batch_size: u32, replicas: u32) -> Vec<u32> {
    let most = global_batch_size / replicas;
    let mut counts: Vec<u32> = (0..32).map(|power| 1 << power).take_while(|&m| m <= most).collect();
    if most > 0 && counts.last() != Some(&most) {
        counts.push(most);
    }
    counts
}

/// All candidates, and the rejections that need no profile's times. `is_tied`: embedding and head are one matrix.
/// `num_microbatches` is the one count to take, if given.
pub(crate) fn space(
    num_ranks: u32,
    num_llm_layers: u32,
    is_tied: bool,
    global_batch_size: u32,
    num_microbatches: Option<u32>,
) -> Space {
    let mut space = Space::default();
    for layout in layouts(num_ranks) {
        if layout.llm.pp > num_llm_layers {
            space
                .rejections
                .push(Rejection::StagesExceedLayers { stages: layout.llm.pp, layers: num_llm_layers });
            continue;
        }
        if is_tied && layout.llm.pp > 1 {
            space.rejections.push(Rejection::TiedStages { stages: layout.llm.pp });
            continue;
        }
        let counts = num_microbatches
            .map_or_else(|| microbatch_counts(global_batch_size, layout.llm.dp), |count| vec![count]);
        let fewest = u64::from(counts.first().copied().unwrap_or(1)) * u64::from(layout.llm.dp);
        if fewest > u64::from(global_batch_size) {
            let buckets = u32::try_from(fewest).unwrap_or(u32::MAX);
            space.rejections.push(Rejection::TooFewSamples { global_batch_size, buckets });
            continue;
        }
        space
            .candidates
            .extend(counts.into_iter().map(|num_microbatches| Candidate { layout, num_microbatches }));
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn three_ranks_have_three_layouts() {
        let degrees: Vec<_> = layouts(3).iter().map(|l| (l.encoder.dp, l.llm.pp, l.llm.dp)).collect();
        assert_eq!(degrees, [(1, 1, 2), (1, 2, 1), (2, 1, 1)]);
        assert!(layouts(1).is_empty());
    }

    #[test]
    fn counts_never_exceed_the_samples() {
        assert_eq!(microbatch_counts(64, 1), [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(microbatch_counts(60, 3), [1, 2, 4, 8, 16, 20]);
        assert!(microbatch_counts(2, 3).is_empty());
    }

    #[test]
    fn what_cannot_be_is_rejected_by_name() {
        // 3 ranks, 1 layer, 1 sample: pp 2 exceeds the layers, dp 2 exceeds the samples.
        let space = space(3, 1, false, 1, None);
        assert_eq!(space.candidates.len(), 1);
        assert_eq!(
            space.rejections,
            [
                Rejection::TooFewSamples { global_batch_size: 1, buckets: 2 },
                Rejection::StagesExceedLayers { stages: 2, layers: 1 },
            ]
        );
    }

    #[test]
    fn a_tied_head_stays_with_its_embedding() {
        let of = |is_tied| space(5, 8, is_tied, 64, Some(4));
        let stages: Vec<u32> = of(true).candidates.iter().map(|c| c.layout.llm.pp).collect();
        assert_eq!(stages, [1, 1, 1, 1]);
        let fallen: Vec<_> = of(true).rejections;
        assert_eq!(fallen, [2, 4, 3, 2].map(|stages| Rejection::TiedStages { stages }));
        assert_eq!(of(false).candidates.len(), 8);
    }

    proptest! {
        #[test]
        fn every_layout_uses_every_rank_and_none_twice(n in 2u32..64) {
            let mut layouts = layouts(n);
            prop_assert!(layouts.iter().all(|l| l.num_ranks() == n && l.encoder.pp == 1));
            // Encoder replicas e leave n - e ranks, which can be written as pp x dp in as many ways as it has
            // divisors.
            let ways: u32 = (1..n).map(|e| (1..=n - e).filter(|d| (n - e) % d == 0).count() as u32).sum();
            prop_assert_eq!(layouts.len() as u32, ways);
            layouts.sort_unstable();
            layouts.dedup();
            prop_assert_eq!(layouts.len() as u32, ways);
        }
    }
}
