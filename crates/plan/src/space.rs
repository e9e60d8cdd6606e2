//! The candidates: every layout over all ranks of the cluster that this version runs, with its microbatch
//! counts.

use crate::input::SearchInput;
use crate::only::Only;
use dflop_cost::CostModel;
use dflop_step::encoder_stages_max;
use dflop_types::{Component, ComponentLayout, Layout, PipelineOrder, Recomputation, Rejection, Zero};
use std::collections::BTreeSet;

/// A plan being judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// Degrees of both components.
    pub layout: Layout,
    /// Microbatches of a step, on each LLM replica.
    pub num_microbatches: u32,
    /// What the layers of each component recompute.
    pub recompute: Recomputation,
    /// Order of actions.
    pub order: PipelineOrder,
}

/// Candidates, and which of them are ruled out by their numbers alone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Space {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) rejections: Vec<Rejection>,
}

/// Ranks up to which every number of encoder replicas is a candidate.
const DENSE_RANKS: u32 = 1_024;
/// As [`DENSE_RANKS`], where layers are cut over several ranks or the encoder has several stages.
const DENSE_WIDE_RANKS: u32 = 128;

/// Numbers of encoder replicas to try on `num_ranks` ranks. Up to `dense` ranks: all numbers. With more ranks: `dense` / 2
/// numbers that are evenly spread, and the powers of two with their neighbours.
fn encoder_counts(num_ranks: u32, dense: u32) -> BTreeSet<u32> {
    if num_ranks <= dense {
        return (1..num_ranks).collect();
    }
    let parts = dense / 2;
    let spread = (1..parts)
        .map(|part| u64::from(num_ranks) * u64::from(part) / u64::from(parts))
        .filter_map(|n| u32::try_from(n).ok());
    let powers = (0..31).map(|power| 1_u32 << power).flat_map(|power| [power - 1, power, power + 1]);
    spread.chain(powers).filter(|&count| (1..num_ranks).contains(&count)).collect()
}

/// Layouts that use all `num_ranks`: encoder replicas 1..n-1, and each way to write the rest as LLM stages x
/// replicas. Of more than 1,024 ranks, not every number of encoder replicas.
///
/// Tensor parallel degrees and encoder stages stay at 1.
///
/// *Complexity*: O(n sqrt n) in the ranks, at most O(512 sqrt n).
pub fn layouts(num_ranks: u32) -> Vec<Layout> {
    layouts_with(num_ranks, 1, [1, 1])
}

/// As [`layouts`], with `encoder_stages` stages of the encoder, and with these tensor degrees of encoder and LLM backbone.
/// All of them are at least 1.
pub(crate) fn layouts_with(
    num_ranks: u32,
    encoder_stages: u32,
    [encoder_tp, llm_tp]: [u32; 2],
) -> Vec<Layout> {
    let mut layouts = Vec::new();
    let of_replica = encoder_stages.saturating_mul(encoder_tp);
    let dense = if of_replica.saturating_mul(llm_tp) > 1 { DENSE_WIDE_RANKS } else { DENSE_RANKS };
    let counts = encoder_counts(num_ranks / of_replica.max(1) + 1, dense).into_iter();
    for encoder_dp in counts.take_while(|dp| u64::from(*dp) * u64::from(of_replica) < num_ranks.into()) {
        let encoder = ComponentLayout { tp: encoder_tp, pp: encoder_stages, dp: encoder_dp };
        let rest = num_ranks - encoder.num_ranks();
        if !rest.is_multiple_of(llm_tp) {
            continue;
        }
        let groups = rest / llm_tp;
        for pp in divisors(groups) {
            layouts.push(Layout::disaggregated(encoder, ComponentLayout { tp: llm_tp, pp, dp: groups / pp }));
        }
    }
    layouts
}

/// Whether all ranks of each tensor group are on one node. Nodes have `ranks_per_node` ranks.
fn groups_within_nodes(layout: &Layout, ranks_per_node: u32) -> bool {
    let ranks_per_node = ranks_per_node.max(1);
    let is_within = |first: u32, degrees: ComponentLayout| {
        if ranks_per_node.is_multiple_of(degrees.tp) && first.is_multiple_of(degrees.tp) {
            return true;
        }
        let node = |rank: u32| rank / ranks_per_node;
        let mut groups = (0..degrees.pp * degrees.dp).map(|group| first + group * degrees.tp);
        degrees.tp == 1 || groups.all(|first| node(first) == node(first + degrees.tp - 1))
    };
    is_within(0, layout.encoder) && is_within(layout.encoder.num_ranks(), layout.llm)
}

pub(crate) fn divisors(n: u32) -> Vec<u32> {
    let low: Vec<u32> = (1..=n.isqrt()).filter(|&d| n.is_multiple_of(d)).collect();
    let high = low.iter().rev().map(|d| n / d).filter(|d| low.binary_search(d).is_err());
    low.iter().copied().chain(high).collect()
}

/// Microbatch counts to try with `replicas` LLM replicas: powers of two, and the one that gives each bucket
/// one sample; none has more buckets than samples.
pub(crate) fn microbatch_counts(global_batch_size: u32, replicas: u32) -> Vec<u32> {
    let most = global_batch_size / replicas;
    let mut counts: Vec<u32> = (0..32).map(|power| 1 << power).take_while(|&m| m <= most).collect();
    if most > 0 && counts.last() != Some(&most) {
        counts.push(most);
    }
    counts
}

/// The most microbatches of a colocated rank, unless somebody asks for a number. A rank takes the fewest that fit its
/// memory, so this is only a limit.
pub(crate) const COLOCATED_MICROBATCHES: u32 = 16;

/// Parameters are also cut over groups of several nodes that have at least so many ranks: of twice, four times ... a node's. Clusters
/// of at most so many ranks have no such groups. A ring takes a step for each of its ranks, and a gather over many waits longer for
/// these steps than for its bytes. On 1,024 H100, LLaVA-OneVision 7B took 1,300 ms over groups of 128 ranks and 1,357 over all of
/// them; on 256, Qwen2.5-VL 7B took 2.2 % less and two other models at most 0.5 %. Smaller groups were no better, lack memory, and
/// took longest to search (2026-11-28, estimated).
const OF_SEVERAL_NODES: u32 = 128;

/// Sizes of the groups that parameters may be cut over, in replicas of `tp` ranks; every group holds a whole copy. The group of one
/// node comes first, then those of several nodes ([`OF_SEVERAL_NODES`]). `tp` divides the ranks of a node.
pub(crate) fn node_groups([num_ranks, ranks_per_node]: [u32; 2], tp: u32) -> Vec<u32> {
    let nodes = std::iter::successors(Some(ranks_per_node), |ranks| ranks.checked_mul(2)).skip(1);
    let several =
        nodes.take_while(|&ranks| ranks <= num_ranks / 2).filter(|&ranks| ranks >= OF_SEVERAL_NODES);
    std::iter::once(ranks_per_node).chain(several).map(|ranks| ranks / tp).collect()
}

/// What replicas keep only a part of, and over how many of them it is cut where it is not over all: each sharding of colocated
/// replicas, as many as `encoders` of the encoder and `dp` of the LLM backbone. `groups` are sizes in
/// replicas: over them only parameters are cut, as every group then holds a whole copy. Over groups of a size that is asked for,
/// whatever can be is cut.
pub(crate) fn colocated_shardings(
    [encoders, dp]: [u32; 2],
    groups: &[u32],
    only: &Only,
) -> Vec<(Zero, Option<u32>)> {
    let mut found = vec![(Zero::Nothing, None)];
    let sharded = [Zero::States, Zero::Gradients, Zero::Parameters];
    if encoders > 1 {
        found.extend(sharded.map(|zero| (zero, None)));
    }
    let is_group = |&ranks: &u32| 1 < ranks && ranks < dp && dp.is_multiple_of(ranks);
    if let Some(ranks) = only.shard_ranks().filter(is_group) {
        found.extend(sharded.map(|zero| (zero, Some(ranks))));
    } else {
        let groups = groups.iter().copied().filter(is_group);
        found.extend(groups.map(|ranks| (Zero::Parameters, Some(ranks))));
    }
    found
}

/// All colocated candidates: both components on every rank, with each sharding and with these modes of recomputation. If
/// there are several nodes, parameters are also sharded over the ranks of one node only: then every node holds a whole
/// copy. If there are many nodes, parameters are also sharded over groups of several ([`node_groups`]).
pub(crate) fn colocated(
    num_ranks: u32,
    ranks_per_node: u32,
    global_batch_size: u32,
    num_microbatches: Option<u32>,
    modes: &[Recomputation],
    order: PipelineOrder,
    only: &Only,
) -> Vec<Candidate> {
    let groups = node_groups([num_ranks, ranks_per_node], 1);
    let layouts = colocated_shardings([num_ranks; 2], &groups, only);
    let of_rank = 2 * global_batch_size.div_ceil(num_ranks.max(1));
    let most = num_microbatches.unwrap_or_else(|| of_rank.max(COLOCATED_MICROBATCHES).min(global_batch_size));
    layouts
        .into_iter()
        .map(|(zero, shard_ranks)| Layout { shard_ranks, ..Layout::colocated(num_ranks, zero) })
        .filter(|layout| only.has_layout(layout))
        .flat_map(|layout| {
            let of = move |recompute| Candidate { layout, num_microbatches: most, recompute, order };
            modes.iter().copied().filter(|&mode| only.has_modes(mode)).map(of)
        })
        .collect()
}

/// The rules for pipelines that can be checked without any times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// Ranks of the cluster, and of a node.
    pub(crate) ranks: [u32; 2],
    /// Stages that the encoder can have, and the LLM backbone: their layers, mostly.
    pub(crate) layers: [u32; 2],
    /// Samples of a global batch.
    pub(crate) global_batch_size: u32,
    /// The one number of microbatches to take, if given.
    pub(crate) num_microbatches: Option<u32>,
    /// Order of actions of all candidates.
    pub(crate) order: PipelineOrder,
    /// The candidates to which the search is restricted.
    pub(crate) only: &'a Only,
}

impl<'a> Rules<'a> {
    /// The rules of a search; `model` says how many layers there are.
    pub(crate) fn of(input: &'a SearchInput<'_>, model: &CostModel) -> Self {
        Self {
            ranks: [input.cluster.num_ranks, input.cluster.ranks_per_node],
            layers: [
                encoder_stages_max(input.model_profile, model.num_encoder_layers()),
                model.num_llm_layers(),
            ],
            global_batch_size: input.global_batch_size,
            num_microbatches: input.num_microbatches,
            order: input.first_order(),
            only: &input.only,
        }
    }

    /// Pipelines with whole layers and one encoder stage. If other degrees are asked for, pipelines with those instead.
    pub(crate) fn plain(&self) -> Vec<Layout> {
        let [encoder, llm] = self.only.tensor_degrees().map(|degree| degree.unwrap_or(1));
        self.with_chunks(layouts_with(self.ranks[0], self.only.encoder_stages().unwrap_or(1), [encoder, llm]))
    }

    /// The layouts with as many chunks on each pipeline rank as are asked for. A pipeline of one rank has no chunks.
    pub(crate) fn with_chunks(&self, layouts: Vec<Layout>) -> Vec<Layout> {
        let chunks = self.only.chunks().unwrap_or(1);
        let of = |layout: Layout| {
            if layout.llm.pp > 1 { Layout { llm_interleave: chunks, ..layout } } else { layout }
        };
        layouts.into_iter().map(of).collect()
    }

    /// The candidates with the degrees of `layouts`, and the rejections by rules that need no times. `ways` gives the layouts
    /// to try for each of them: its shardings and cuts into stages.
    pub(crate) fn pipelines(
        &self,
        layouts: Vec<Layout>,
        mut ways: impl FnMut(&Layout) -> Vec<Layout>,
    ) -> Space {
        let mut space = Space::default();
        // Pipelines do not gather parameters: whatever else is wrong with a layout, it is no candidate.
        if self.only.zero() == Some(Zero::Parameters) {
            return space;
        }
        for layout in layouts.into_iter().filter(|layout| self.only.has_degrees(layout)) {
            if let Some(rejection) = self.rejection(&layout) {
                space.rejections.push(rejection);
                continue;
            }
            let counts = self.num_microbatches.map_or_else(
                || microbatch_counts(self.global_batch_size, layout.llm.dp),
                |count| vec![count],
            );
            let layouts = ways(&layout);
            for layout in layouts.into_iter().filter(|layout| self.only.has_layout(layout)) {
                let of = |&num_microbatches| Candidate {
                    layout,
                    num_microbatches,
                    recompute: self.only.first_modes(),
                    order: self.order,
                };
                space.candidates.extend(counts.iter().map(of));
            }
        }
        space
    }

    fn rejection(&self, layout: &Layout) -> Option<Rejection> {
        let components = [
            (Component::Encoder, layout.encoder.pp, self.layers[0].max(1)),
            (Component::Llm, layout.llm.pp, self.layers[1]),
        ];
        if let Some((component, stages, layers)) = components.into_iter().find(|(_, pp, layers)| pp > layers)
        {
            return Some(Rejection::StagesExceedLayers { component, stages, layers });
        }
        let (pp, chunks, layers) = (layout.llm.pp, layout.llm_interleave, self.layers[1]);
        if layout.num_llm_stages() > layers {
            return Some(Rejection::ChunksExceedLayers { pp, chunks, layers });
        }
        let ranks_per_node = self.ranks[1];
        if !groups_within_nodes(layout, ranks_per_node) {
            return Some(Rejection::GroupAcrossNodes { ranks_per_node });
        }
        let fewest = u64::from(self.num_microbatches.unwrap_or(1)) * u64::from(layout.llm.dp);
        let buckets = u32::try_from(fewest).unwrap_or(u32::MAX);
        let global_batch_size = self.global_batch_size;
        (fewest > u64::from(global_batch_size))
            .then_some(Rejection::TooFewSamples { global_batch_size, buckets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::Recompute;
    use proptest::prelude::*;

    fn space(
        ranks: [u32; 2],
        layers: [u32; 2],
        global_batch_size: u32,
        num_microbatches: Option<u32>,
        only: &str,
    ) -> Space {
        let only = only.parse().unwrap();
        let rules = Rules {
            ranks,
            layers,
            global_batch_size,
            num_microbatches,
            order: PipelineOrder::OneFOneB,
            only: &only,
        };
        rules.pipelines(rules.plain(), |layout| vec![*layout])
    }

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
        let space = space([3, 8], [1, 1], 1, None, "");
        assert_eq!(space.candidates.len(), 1);
        assert_eq!(
            space.rejections,
            [
                Rejection::TooFewSamples { global_batch_size: 1, buckets: 2 },
                Rejection::StagesExceedLayers { component: Component::Llm, stages: 2, layers: 1 },
            ]
        );
    }

    /// Several encoder stages are tried if they are asked for. Of 5 ranks the encoder takes 2 or 4, and it has no more stages
    /// than layers.
    #[test]
    fn encoder_stages_are_those_asked_for() {
        let of = |layers, only: &str| space([5, 8], [layers, 8], 64, Some(4), only);
        let degrees = |space: Space| -> Vec<[u32; 4]> {
            let of =
                |c: &Candidate| [c.layout.encoder.pp, c.layout.encoder.dp, c.layout.llm.pp, c.layout.llm.dp];
            space.candidates.iter().map(of).collect()
        };
        assert_eq!(degrees(of(6, "encoder.pp=2")), [[2, 1, 1, 3], [2, 1, 3, 1], [2, 2, 1, 1]]);
        assert_eq!(degrees(of(6, "encoder.pp=4")), [[4, 1, 1, 1]]);
        assert!(degrees(of(6, "encoder.pp=5")).is_empty());
        let fallen = of(3, "encoder.pp=4").rejections;
        let component = Component::Encoder;
        assert_eq!(fallen, [Rejection::StagesExceedLayers { component, stages: 4, layers: 3 }]);
        assert_eq!(fallen[0].to_string(), "encoder pp 4 exceeds the 3 layers of the encoder");
        let whole = Rejection::StagesExceedLayers { component, stages: 2, layers: 1 };
        assert_eq!(
            whole.to_string(),
            "encoder pp 2, but the encoder is one stage: it cannot be cut into several"
        );
    }

    /// Tensor groups have the sizes that are asked for, and each group is inside a node. There are 7 ranks.
    #[test]
    fn tensor_groups_are_those_asked_for_and_stand_on_one_node() {
        let of = |node, only: &str| space([7, node], [2, 8], 64, Some(4), only);
        let degrees = |space: &Space| -> Vec<[u32; 5]> {
            let of = |c: &Candidate| {
                let (encoder, llm) = (c.layout.encoder, c.layout.llm);
                assert_eq!(c.layout.num_ranks(), 7);
                [encoder.tp, encoder.dp, llm.tp, llm.pp, llm.dp]
            };
            space.candidates.iter().map(of).collect()
        };
        let all = [[1, 1, 2, 1, 3], [1, 1, 2, 3, 1], [1, 3, 2, 1, 2], [1, 3, 2, 2, 1], [1, 5, 2, 1, 1]];
        assert_eq!(degrees(&of(8, "llm.tp=2")), all);
        assert_eq!(degrees(&of(8, "encoder.tp=2,llm.tp=3")), [[2, 2, 3, 1, 1]]);
        // Nodes of four: the LLM's groups start at rank 1, 3 or 5, and one at 3.
        let split = of(4, "llm.tp=2");
        assert_eq!(degrees(&split), [[1, 5, 2, 1, 1]]);
        assert_eq!(split.rejections, vec![Rejection::GroupAcrossNodes { ranks_per_node: 4 }; 4]);
    }

    #[test]
    fn a_large_cluster_has_a_few_thousand_layouts() {
        let layouts = layouts(16_384);
        assert!(layouts.iter().all(|layout| layout.num_ranks() == 16_384));
        let counts: BTreeSet<u32> = layouts.iter().map(|layout| layout.encoder.dp).collect();
        // The multiples of 32; and 1 to 5, 7, 8, 9, 15, 16, 17, then both neighbours of each power up to 8,192, and 16,383.
        assert_eq!(counts.len(), 511 + 30);
        // Neighbours of powers of two leave a number of ranks that divides otherwise.
        assert!([1, 2, 3, 32, 127, 128, 129, 8_191, 8_193].iter().all(|count| counts.contains(count)));
    }

    #[test]
    fn colocated_ranks_shard_over_all_of_them_or_over_a_node() {
        let of = |ranks, only: &str| {
            let modes = [Recompute::None, Recompute::Full].map(Recomputation::both);
            colocated(ranks, 8, 256, None, &modes, PipelineOrder::OneFOneB, &only.parse().unwrap())
        };
        assert_eq!(of(64, "").len(), 2 * 5);
        // One node: nothing to copy. One rank: nothing to cut.
        assert_eq!(of(8, "").len(), 2 * 4);
        assert_eq!(of(1, "").len(), 2);
        let hybrid: Vec<_> = of(64, "zero=3,recompute=full");
        let shards: Vec<_> = hybrid.iter().map(|candidate| candidate.layout.shard_ranks).collect();
        assert_eq!(shards, [None, Some(8)]);
        let shards = |ranks| -> Vec<_> {
            let all = of(ranks, "zero=3,recompute=none");
            all.iter().map(|candidate| candidate.layout.shard_ranks.unwrap_or(ranks)).collect()
        };
        assert_eq!(shards(128), [128, 8]);
        assert_eq!(shards(1_024), [1_024, 8, 128, 256, 512]);
        // 45 nodes: no group of 16 divides them.
        assert_eq!((shards(360), shards(256)), (vec![360, 8], vec![256, 8, 128]));
        assert_eq!(node_groups([512, 8], 4), [2, 32, 64]);
        assert!(of(64, "colocated=false").is_empty());
        assert!(of(64, "llm.pp=2").is_empty());
        assert!(hybrid.iter().all(|candidate| candidate.num_microbatches == 16));
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
