//! Sharing: which encoder replica encodes which parts of a microbatch's samples.
//!
//! Samples are kept whole where that is even. Where one is large against the even share of a replica it is cut into
//! runs of parts, as few as the room on the replicas allows: each run is a message of its own.

use crate::error::PlanError;
use crate::predict::{self, Placement};
use crate::step::{BatchCosts, StepScheduler};
use dflop_schedule::{baseline, divide};
use dflop_sim::Simulator;
use dflop_types::{
    EncoderShare, PartRange, PipelineOrder, Rank, SampleIndex, SampleShape, Schedule, StageIndex,
};
use std::cmp::Reverse;

/// What each replica encodes: positions in a list of samples, with the parts; `None`: all of them.
pub(crate) type Shares = Vec<Vec<(usize, Option<PartRange>)>>;

/// A way to share out the samples at these positions of a batch.
type Way<'a> = &'a dyn Fn(&[usize]) -> Shares;

/// Time of the parts of a sample, in order: (how many equal ones, nanoseconds of each).
pub(crate) type PartCosts = Vec<(u32, u64)>;

/// Whole samples stay where their fullest replica has at most this much more than the even share: a part of 16.
const EVEN_ENOUGH: u64 = 16;

/// What crosses the boundary from encoder to LLM replicas in the forward pass of a step; as much comes back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Pairs of an encoder and an LLM replica that talk, over all microbatches.
    pub num_messages: u64,
    /// Feature tokens sent.
    pub feature_tokens: u64,
    /// Of those, sent to a rank of another node; 0 where the ranks of a node are not known.
    pub feature_tokens_across: u64,
    /// Samples that several encoder replicas encode.
    pub num_cut_samples: u64,
}

/// Sum of `costs`.
fn total(costs: &[(u32, u64)]) -> u64 {
    costs.iter().fold(0, |sum: u64, &(count, ns)| sum.saturating_add(ns.saturating_mul(u64::from(count))))
}

fn num_parts(costs: &[(u32, u64)]) -> u32 {
    costs.iter().map(|&(count, _)| count).sum()
}

/// Time of the first `parts` parts.
fn before(costs: &[(u32, u64)], parts: u32) -> u64 {
    let mut left = parts;
    costs.iter().fold(0, |sum: u64, &(count, ns)| {
        let taken = left.min(count);
        left -= taken;
        sum.saturating_add(ns.saturating_mul(u64::from(taken)))
    })
}

/// Number of parts whose time is nearest to `target_ns`.
fn nearest(costs: &[(u32, u64)], target_ns: u64) -> u32 {
    let (mut parts, mut left) = (0, target_ns);
    for &(count, ns) in costs {
        let whole = ns.saturating_mul(u64::from(count));
        if whole > left {
            // Rounded half up; less than `count`, or `count` where the last one is more than half in.
            return parts + u32::try_from((left + ns / 2) / ns).unwrap_or(count).min(count);
        }
        left -= whole;
        parts += count;
    }
    parts
}

/// Whole samples on the replicas that are named.
pub(crate) fn whole(replica_of: &[u32], replicas: u32) -> Shares {
    let mut shares = vec![Vec::new(); replicas as usize];
    for (position, &replica) in replica_of.iter().enumerate() {
        shares[replica as usize].push((position, None));
    }
    shares
}

/// Samples in runs of parts over `replicas`, so that none takes longer than the even share and one part, but for
/// samples of a single part: those go first, by LPT.
///
/// ```text
/// T = sum of all / replicas;   the room of a replica is what its load lacks to T
/// a sample that fits into the largest room goes there whole; else it fills the largest rooms one after the other,
/// cut where its parts are nearest to their ends: half a part too much at either end of a run
/// ```
///
/// *Complexity*: O(n (r log r + r g)) for r replicas and g groups of equal parts.
pub(crate) fn spread(costs: &[&PartCosts], replicas: u32) -> Shares {
    let replicas = (replicas as usize).max(1);
    let sum = costs.iter().fold(0, |sum: u64, costs| sum.saturating_add(total(costs)));
    let even_ns = sum.div_ceil(replicas as u64);
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&at| (num_parts(costs[at]) > 1, Reverse(total(costs[at])), at));
    let mut shares: Shares = vec![Vec::new(); replicas];
    let mut load_ns = vec![0u64; replicas];
    for at in order {
        let (costs, sample_ns) = (costs[at], total(costs[at]));
        let mut by_room: Vec<usize> = (0..replicas).collect();
        by_room.sort_by_key(|&replica| (load_ns[replica], shares[replica].len(), replica));
        let (parts, freest) = (num_parts(costs), by_room[0]);
        if parts < 2 || load_ns[freest].saturating_add(sample_ns) <= even_ns {
            shares[freest].push((at, None));
            load_ns[freest] = load_ns[freest].saturating_add(sample_ns);
            continue;
        }
        let (mut first, mut filled_ns) = (0, 0u64);
        for (turn, replica) in (1..).zip(by_room) {
            filled_ns = filled_ns.saturating_add(even_ns.saturating_sub(load_ns[replica]));
            // The rooms together hold every sample that is left; the last one all the same where sums pass 64 bits.
            let is_last = filled_ns >= sample_ns || turn == replicas;
            let end = if is_last { parts } else { nearest(costs, filled_ns) };
            if end > first {
                let is_whole = first == 0 && end == parts;
                let range = (!is_whole).then_some(PartRange { first, count: end - first });
                shares[replica].push((at, range));
                let run_ns = before(costs, end) - before(costs, first);
                load_ns[replica] = load_ns[replica].saturating_add(run_ns);
                first = end;
            }
            if first == parts {
                break;
            }
        }
    }
    // In the order of the samples, as they would be packed whole.
    for share in &mut shares {
        share.sort_unstable_by_key(|&(at, _)| at);
    }
    shares
}

/// Time of the fullest replica.
fn fullest_ns(costs: &[&PartCosts], shares: &Shares) -> u64 {
    let run_ns = |&(at, range): &(usize, Option<PartRange>)| match range {
        None => total(costs[at]),
        Some(r) => before(costs[at], r.first + r.count) - before(costs[at], r.first),
    };
    let load_ns = |share: &Vec<_>| share.iter().map(run_ns).fold(0, u64::saturating_add);
    shares.iter().map(load_ns).max().unwrap_or(0)
}

/// The replica of each share such that much of what it sends stays on its node: `sent[share][node]` are its tokens, and
/// `node_of` the node of each replica. The largest amounts choose first.
fn near(sent: &[Vec<u64>], node_of: &[usize]) -> Vec<usize> {
    let mut wishes: Vec<(u64, usize, usize)> = Vec::new();
    for (share, by_node) in sent.iter().enumerate() {
        wishes
            .extend(by_node.iter().enumerate().filter(|w| *w.1 > 0).map(|(node, &sent)| (sent, share, node)));
    }
    wishes.sort_unstable_by_key(|&(sent, share, node)| (Reverse(sent), share, node));
    let mut replica_of: Vec<Option<usize>> = vec![None; sent.len()];
    let mut is_free = vec![true; node_of.len()];
    for (_, share, node) in wishes {
        let at_home = (node_of[share] == node && is_free[share]).then_some(share);
        let free = || (0..node_of.len()).find(|&r| is_free[r] && node_of[r] == node);
        if replica_of[share].is_none()
            && let Some(replica) = at_home.or_else(free)
        {
            replica_of[share] = Some(replica);
            is_free[replica] = false;
        }
    }
    for (share, chosen) in replica_of.iter_mut().enumerate() {
        if chosen.is_none() {
            let replica = if is_free[share] { Some(share) } else { is_free.iter().position(|&free| free) };
            let replica = replica.expect("there are as many replicas as shares");
            *chosen = Some(replica);
            is_free[replica] = false;
        }
    }
    replica_of.into_iter().flatten().collect()
}

impl StepScheduler {
    /// The same scheduler for a cluster with so many ranks in a node: among placements that are as even, encoder
    /// replicas send to LLM replicas of their own node.
    #[must_use]
    pub fn with_ranks_per_node(mut self, ranks_per_node: u32) -> Self {
        self.ranks_per_node = Some(ranks_per_node.max(1));
        self
    }

    /// What crosses the boundary under a schedule.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn traffic(&self, schedule: &Schedule) -> Result<Traffic, PlanError> {
        self.check_is_ours(schedule)?;
        let mut traffic = Traffic::default();
        for (llm, encoder) in schedule.llm.iter().zip(&schedule.encoder) {
            let feeds = predict::feeds(llm, encoder);
            traffic.num_messages += feeds.iter().flatten().filter(|&&feeds| feeds).count() as u64;
            let mut cut: Vec<SampleIndex> = encoder
                .iter()
                .flatten()
                .filter(|share| share.parts.is_some())
                .map(|share| share.sample)
                .collect();
            cut.sort_unstable();
            cut.dedup();
            traffic.num_cut_samples += cut.len() as u64;
            for (replica, by_node) in self.sent(llm, encoder).iter().enumerate() {
                let sent: u64 = by_node.iter().sum();
                traffic.feature_tokens += sent;
                traffic.feature_tokens_across += sent - by_node[self.node(Rank(replica as u32))];
            }
        }
        Ok(traffic)
    }

    /// Node of a rank; 0 where the ranks of a node are not known.
    fn node(&self, rank: Rank) -> usize {
        self.ranks_per_node.map_or(0, |ranks| rank.index() / ranks as usize)
    }

    /// Feature tokens that each encoder replica sends, by node of the LLM replica.
    fn sent(&self, llm: &[Vec<SampleIndex>], encoder: &[Vec<EncoderShare>]) -> Vec<Vec<u64>> {
        let layout = self.settings.layout;
        let first_ranks = (0..layout.llm.dp).map(|replica| self.node(layout.rank(replica, StageIndex(1))));
        let node_of: Vec<usize> = first_ranks.collect();
        let num_nodes = 1 + self.node(Rank(layout.num_ranks() - 1));
        let holders = predict::holders(llm);
        let of_replica = |shares: &Vec<EncoderShare>| {
            let mut by_node = vec![0; num_nodes];
            for share in shares {
                if let Some(holder) = predict::holder(&holders, share.sample) {
                    by_node[node_of[holder]] += self.feature_tokens(share);
                }
            }
            by_node
        };
        encoder.iter().map(of_replica).collect()
    }

    pub(crate) fn feature_tokens(&self, share: &EncoderShare) -> u64 {
        let sample = self.shape(share.sample);
        share.parts.map_or_else(
            || u64::from(sample.feature_tokens),
            |parts| u64::from(sample.share(parts).feature_tokens),
        )
    }

    /// The shares on replicas near those they send to; as they are where no node is known, or there is one.
    pub(crate) fn near(
        &self,
        llm: &[Vec<SampleIndex>],
        encoder: Vec<Vec<EncoderShare>>,
    ) -> Vec<Vec<EncoderShare>> {
        let layout = self.settings.layout;
        if self.node(Rank(layout.num_ranks() - 1)) == 0 {
            return encoder;
        }
        let node_of: Vec<usize> = (0..layout.encoder.dp).map(|replica| self.node(Rank(replica))).collect();
        let mut placed = vec![Vec::new(); encoder.len()];
        for (share, replica) in encoder.iter().zip(near(&self.sent(llm, &encoder), &node_of)) {
            placed[replica].clone_from(share);
        }
        placed
    }

    /// Time of the parts of a sample; one part where it cannot be cut.
    pub(crate) fn part_costs(
        &self,
        shape: &SampleShape,
        sample_ns: u64,
        typical: dflop_cost::Typical,
    ) -> PartCosts {
        if shape.num_parts() < 2 {
            return vec![(1, sample_ns)];
        }
        let mut first = 0;
        let groups = shape.encoder_parts.iter().map(|group| {
            // Alike in segments and features, so in time: but for segments of other sizes, which average out.
            let run = shape.share(PartRange { first, count: group.count });
            first += group.count;
            (group.count, self.model.sample_encoder_ns(&run, typical) / u64::from(group.count))
        });
        groups.collect()
    }

    /// Shares of a microbatch: whole samples by LPT where that is even enough, else cut where that is more even. What a
    /// search can afford.
    pub(crate) fn share_quickly(&self, costs: &BatchCosts, column: &[usize]) -> Shares {
        let replicas = self.settings.layout.encoder.dp;
        let part_ns: Vec<&PartCosts> = column.iter().map(|&position| &costs.part_ns[position]).collect();
        let cost_ns: Vec<u64> = part_ns.iter().map(|costs| total(costs)).collect();
        let kept = whole(&baseline::single_cost_lpt(&cost_ns, replicas), replicas);
        let even_ns =
            cost_ns.iter().fold(0, |sum: u64, &ns| sum.saturating_add(ns)) / u64::from(replicas.max(1));
        let kept_ns = fullest_ns(&part_ns, &kept);
        if kept_ns <= even_ns.saturating_add(even_ns / EVEN_ENOUGH)
            || part_ns.iter().all(|c| num_parts(c) < 2)
        {
            return kept;
        }
        let cut = spread(&part_ns, replicas);
        if fullest_ns(&part_ns, &cut) < kept_ns { cut } else { kept }
    }

    /// The samples in the places of `bucket`: of the ways to share out the encoder's part the one with the shortest step
    /// under `order` within the memory budget; samples are cut only where that wins.
    pub(crate) fn place_best(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        bucket: &[u32],
        order: PipelineOrder,
    ) -> Result<Placement, PlanError> {
        let replicas = self.settings.layout.encoder.dp;
        let part_ns = |column: &[usize]| -> Vec<&PartCosts> {
            column.iter().map(|&position| &costs.part_ns[position]).collect()
        };
        let cost_ns = |column: &[usize]| -> Vec<u64> {
            column.iter().map(|&position| costs.encoder_ns[position]).collect()
        };
        let ways: [Way<'_>; 4] = [
            &|column| whole(&baseline::single_cost_lpt(&cost_ns(column), replicas), replicas),
            &|column| whole(&divide(&cost_ns(column), replicas), replicas),
            &|column| self.share_quickly(costs, column),
            &|column| spread(&part_ns(column), replicas),
        ];
        let mut best: Option<(bool, u64, Placement)> = None;
        for way in ways {
            let placement = self.place(batch, bucket, way);
            if best.as_ref().is_some_and(|b| b.2 == placement) {
                continue;
            }
            let input = predict::predict(self, &placement.llm, &placement.encoder, order).input;
            let makespan_ns = Simulator::new(&input)?.makespan_ns();
            let is_over = self.settings.memory_budget_bytes.is_some_and(|budget| {
                let peaks = predict::memory(self, &self.as_schedule(0, batch, placement.clone()));
                peaks.iter().any(|memory| memory.total_bytes() > budget)
            });
            if best.as_ref().is_none_or(|b| (is_over, makespan_ns) < (b.0, b.1)) {
                best = Some((is_over, makespan_ns, placement));
            }
        }
        let (_, _, placement) = best.expect("the first way is better than none");
        Ok(placement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads(costs: &[&PartCosts], shares: &Shares) -> Vec<u64> {
        shares.iter().map(|share| fullest_ns(costs, &vec![share.clone()])).collect()
    }

    #[test]
    fn a_run_ends_where_its_parts_are_nearest() {
        // Three parts of 10, then one of 4.
        let costs = [(3, 10), (1, 4)];
        assert_eq!(
            [0, 4, 5, 14, 15, 30, 31, 32, 34, 99].map(|ns| nearest(&costs, ns)),
            [0, 0, 1, 1, 2, 3, 3, 4, 4, 4]
        );
        assert_eq!([0, 1, 3, 4, 9].map(|parts| before(&costs, parts)), [0, 10, 30, 34, 34]);
        assert_eq!(nearest(&[(5, 0), (2, 3)], 0), 5);
    }

    /// By hand: 64 frames of 10 beside an image of 100 on 4 replicas, 185 each. The image first; then rooms of 185, 185,
    /// 185 and 85 end at frames 18.5, 37 and 55.5.
    #[test]
    fn a_giant_fills_the_rooms_of_all_replicas() {
        let (image, video) = (vec![(1, 100)], vec![(64, 10)]);
        let costs = [&image, &video];
        let shares = spread(&costs, 4);
        let run = |first, count| vec![(1, Some(PartRange { first, count }))];
        assert_eq!(
            shares,
            [
                vec![(0, None), (1, Some(PartRange { first: 56, count: 8 }))],
                run(0, 19),
                run(19, 18),
                run(37, 19)
            ]
        );
        assert_eq!(loads(&costs, &shares), [180, 190, 180, 190]);
    }

    #[test]
    fn what_is_even_stays_whole() {
        let video = vec![(8, 10)];
        let shares = spread(&[&video, &video, &video, &video], 2);
        assert_eq!(shares, [vec![(0, None), (2, None)], vec![(1, None), (3, None)]]);
        assert_eq!(spread(&[], 3), vec![Vec::new(); 3]);
        assert_eq!(spread(&[&video], 1), [[(0, None)]]);
    }

    #[test]
    fn the_largest_amounts_choose_their_node_first() {
        // Replicas 0 and 1 on node 0, 2 on node 1. Share 0 sends most to node 1, share 2 a little.
        let sent = [vec![0, 90], vec![5, 0], vec![10, 20]];
        assert_eq!(near(&sent, &[0, 0, 1]), [2, 1, 0]);
        // Nothing to win: all stay.
        assert_eq!(near(&[vec![0, 0], vec![0, 0]], &[0, 1]), [0, 1]);
        assert_eq!(near(&[vec![3, 0], vec![0, 3]], &[0, 1]), [0, 1]);
    }

    proptest! {
        /// Each part once; the fullest replica has at most the even share and one part, where samples of one part alone
        /// do not pass that; a giant reaches every replica.
        #[test]
        fn shares_are_even_and_cover_each_part_once(
            samples in prop::collection::vec(prop::collection::vec((1u32..40, 0u64..30), 1..4), 0..12),
            giant in prop::option::of(100u32..4_000),
            replicas in 1u32..9
        ) {
            let mut samples = samples;
            samples.extend(giant.map(|frames| vec![(frames, 1_000)]));
            let costs: Vec<&PartCosts> = samples.iter().collect();
            let shares = spread(&costs, replicas);
            prop_assert_eq!(shares.len(), replicas as usize);
            for (at, costs) in costs.iter().enumerate() {
                let of_sample = shares.iter().flatten().filter(|(sample, _)| *sample == at);
                let all = PartRange { first: 0, count: num_parts(costs) };
                let mut runs: Vec<PartRange> = of_sample.map(|(_, range)| range.unwrap_or(all)).collect();
                runs.sort_unstable();
                let mut next = 0;
                for run in runs {
                    prop_assert_eq!(run.first, next);
                    prop_assert!(run.count > 0);
                    next += run.count;
                }
                prop_assert_eq!(next, num_parts(costs));
            }
            let sum: u64 = costs.iter().map(|costs| total(costs)).sum();
            let even_ns = sum.div_ceil(u64::from(replicas));
            let part_ns = samples.iter().flatten().map(|&(_, ns)| ns).max().unwrap_or(0);
            let single: Vec<&PartCosts> = costs.iter().copied().filter(|c| num_parts(c) < 2).collect();
            let single_ns = fullest_ns(&single, &spread(&single, replicas));
            prop_assert!(fullest_ns(&costs, &shares) <= (even_ns + part_ns).max(single_ns));
            if giant.is_some_and(|frames| frames >= 40 * replicas) {
                let at = costs.len() - 1;
                prop_assert!(shares.iter().all(|share| share.iter().any(|(sample, _)| *sample == at)));
            }
        }

        #[test]
        fn every_share_has_a_replica_of_its_own(
            sent in prop::collection::vec(prop::collection::vec(0u64..9, 3), 1..9), nodes in prop::collection::vec(0usize..3, 9)
        ) {
            let mut chosen = near(&sent, &nodes[..sent.len()]);
            chosen.sort_unstable();
            prop_assert_eq!(chosen, (0..sent.len()).collect::<Vec<_>>());
        }
    }
}
