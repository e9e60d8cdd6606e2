//! Nodes: how much data crosses the boundary between encoder and LLM replicas, and how much of it leaves a node.

use crate::error::StepError;
use crate::groups;
use crate::judge::work;
use crate::scheduler::StepScheduler;
use dflop_cost::CostModel;
use dflop_types::{EncoderShare, Rank, SampleIndex, Schedule, StageIndex};
use std::cmp::Reverse;
use std::sync::Arc;

/// What crosses the boundary from encoder to LLM replicas in the forward pass of a step. As much returns in the
/// backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages: pairs of an encoder and an LLM replica of which one feeds the other, summed over all microbatches. Colocated
    /// encoder replicas of one tensor group count as one; what they send each other is not counted here.
    pub num_messages: u64,
    /// Feature tokens sent.
    pub feature_tokens: u64,
    /// Feature tokens that are sent to a rank of another node; 0 if the number of ranks of a node is not known.
    pub feature_tokens_across: u64,
    /// Samples whose parts are encoded on several replicas.
    pub num_cut_samples: u64,
}

/// What a share sends: nodes in ascending order, each with the number of tokens. Those that get nothing are left out.
type Sent = Vec<(usize, u64)>;

/// Adds up what goes to the same node.
fn summed(mut sent: Sent) -> Sent {
    sent.retain(|&(_, tokens)| tokens > 0);
    sent.sort_unstable_by_key(|&(node, _)| node);
    sent.dedup_by(|next, sum| {
        let is_same = next.0 == sum.0;
        if is_same {
            sum.1 += next.1;
        }
        is_same
    });
    sent
}

/// Chooses a replica for each share, so that much of what the share sends stays on the replica's node. `sent` is what each
/// share sends, and `node_of` is the node of each replica. The shares with the largest amounts choose first.
///
/// *Complexity*: O(n log n) for n replicas and amounts.
fn near(sent: &[Sent], node_of: &[usize]) -> Vec<usize> {
    let mut wishes: Vec<(u64, usize, usize)> = Vec::with_capacity(sent.len());
    for (share, sent) in sent.iter().enumerate() {
        wishes.extend(sent.iter().map(|&(node, tokens)| (tokens, share, node)));
    }
    wishes.sort_unstable_by_key(|&(tokens, share, node)| (Reverse(tokens), share, node));
    // The first replica of each node, and the next one of the same node after each replica. Those that are taken are passed over
    // when they would be chosen.
    let mut first_of: Vec<Option<usize>> = vec![None; node_of.iter().max().map_or(0, |most| most + 1)];
    let mut next_of: Vec<Option<usize>> = vec![None; node_of.len()];
    for (replica, &node) in node_of.iter().enumerate().rev() {
        next_of[replica] = first_of[node].replace(replica);
    }
    let mut replica_of: Vec<Option<usize>> = vec![None; sent.len()];
    let mut is_free = vec![true; node_of.len()];
    for (_, share, node) in wishes {
        if replica_of[share].is_some() {
            continue;
        }
        let at_home = (node_of[share] == node && is_free[share]).then_some(share);
        let free = || {
            let first = first_of.get_mut(node)?;
            while let Some(replica) = first.filter(|&replica| !is_free[replica]) {
                *first = next_of[replica];
            }
            *first
        };
        if let Some(replica) = at_home.or_else(free) {
            replica_of[share] = Some(replica);
            is_free[replica] = false;
        }
    }
    let mut next = 0;
    for (share, chosen) in replica_of.iter_mut().enumerate() {
        if chosen.is_none() {
            while next < is_free.len() && !is_free[next] {
                next += 1;
            }
            let replica = if is_free[share] { share } else { next };
            *chosen = Some(replica);
            is_free[replica] = false;
        }
    }
    replica_of.into_iter().flatten().collect()
}

impl StepScheduler {
    /// The same scheduler for a cluster with this many ranks in a node. Of placements that are equally even it prefers those
    /// in which encoder replicas send to LLM replicas of their own node. Its predictions use the links within a node for
    /// replicas that share one.
    ///
    /// # Errors
    /// [`StepError::Zero`].
    pub fn with_ranks_per_node(mut self, ranks_per_node: u32) -> Result<Self, StepError> {
        if ranks_per_node == 0 {
            return Err(StepError::Zero { field: "ranks_per_node" });
        }
        self.ranks_per_node = Some(ranks_per_node);
        if self.model.ranks_per_node() != self.ranks_per_node {
            self.model = Arc::new(CostModel::clone(&self.model).with_ranks_per_node(ranks_per_node));
            self.eased = self.eased.with_ranks_per_node(ranks_per_node);
        }
        Ok(self)
    }

    /// The same scheduler for such a cluster, where it is known; else it is given back as it is.
    ///
    /// # Errors
    /// As [`StepScheduler::with_ranks_per_node`].
    pub fn on_nodes(self, ranks_per_node: Option<u32>) -> Result<Self, StepError> {
        match ranks_per_node {
            Some(ranks) => self.with_ranks_per_node(ranks),
            None => Ok(self),
        }
    }

    /// What crosses the boundary under a schedule.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn traffic(&self, schedule: &Schedule) -> Result<Traffic, StepError> {
        self.check_is_ours(schedule)?;
        let mut traffic = Traffic::default();
        let groups = self.settings.layout.encoder.dp;
        for (llm, encoder) in schedule.llm.iter().zip(&schedule.encoder) {
            let feeds = work::feeds(&work::holders(llm), encoder, groups);
            let is_message = |e: u32, r: u32| !self.settings.layout.is_colocated() || e != r;
            let messages =
                (0..).zip(&feeds).map(|(e, fed)| fed.iter().filter(|&&r| is_message(e, r)).count());
            traffic.num_messages += messages.sum::<usize>() as u64;
            let by_group = |encoder: &[Vec<EncoderShare>]| -> Vec<Vec<EncoderShare>> {
                groups::by_group(encoder, groups).map(<[_]>::concat).collect()
            };
            let mut cut: Vec<SampleIndex> = encoder
                .iter()
                .flatten()
                .filter(|share| share.parts.is_some())
                .map(|share| share.sample)
                .collect();
            cut.sort_unstable();
            cut.dedup();
            traffic.num_cut_samples += cut.len() as u64;
            for (replica, by_node) in self.sent(llm, &by_group(encoder)).iter().enumerate() {
                let own = self.encoder_node(replica as u32);
                for &(node, tokens) in by_node {
                    traffic.feature_tokens += tokens;
                    traffic.feature_tokens_across += if node == own { 0 } else { tokens };
                }
            }
        }
        Ok(traffic)
    }

    /// Node of the first rank of a tensor group; 0 if the number of ranks of a node is not known.
    pub(crate) fn node(&self, group: Rank) -> usize {
        let rank = self.settings().layout.ranks_of_group(group).next().unwrap_or(group);
        self.ranks_per_node.map_or(0, |ranks| rank.index() / ranks as usize)
    }

    /// Node of the rank that sends the features of an encoder replica: the rank of its last stage.
    pub(crate) fn encoder_node(&self, replica: u32) -> usize {
        let layout = self.settings.layout;
        self.node(layout.rank(replica, StageIndex(layout.encoder.pp - 1)))
    }

    /// The feature tokens that each encoder replica sends to LLM replicas, by their nodes.
    fn sent(&self, llm: &[Vec<SampleIndex>], encoder: &[Vec<EncoderShare>]) -> Vec<Sent> {
        let layout = self.settings.layout;
        let first = StageIndex(layout.encoder.pp);
        let first_ranks = (0..layout.llm.dp).map(|replica| self.node(layout.rank(replica, first)));
        let node_of: Vec<usize> = first_ranks.collect();
        let holders = work::holders(llm);
        let of_replica = |(replica, shares): (usize, &Vec<EncoderShare>)| {
            let of_share = |share: &EncoderShare| {
                // A colocated rank sends nothing to itself.
                let is_sent = |&holder: &usize| !layout.is_colocated() || holder != replica;
                let holder = work::holder(&holders, share.sample).filter(is_sent)?;
                Some((node_of[holder], self.feature_tokens(share)))
            };
            summed(shares.iter().filter_map(of_share).collect())
        };
        encoder.iter().enumerate().map(of_replica).collect()
    }

    pub(crate) fn feature_tokens(&self, share: &EncoderShare) -> u64 {
        let sample = self.shape(share.sample);
        share.parts.map_or_else(
            || u64::from(sample.feature_tokens),
            |parts| u64::from(sample.share(parts).feature_tokens),
        )
    }

    /// Moves the encoder shares between colocated ranks, so that many shares are on the rank that holds their samples.
    /// Features that stay on their rank are not sent.
    pub(crate) fn at_home(&self, llm: &[Vec<SampleIndex>], encoder: &mut [Vec<EncoderShare>]) {
        let holders = work::holders(llm);
        let of_share = |share: &EncoderShare| {
            work::holder(&holders, share.sample).map(|holder| (holder, self.feature_tokens(share)))
        };
        let of_rank = |shares: &Vec<EncoderShare>| summed(shares.iter().filter_map(of_share).collect());
        let sent: Vec<Sent> = encoder.iter().map(of_rank).collect();
        let per_group = (encoder.len() / llm.len().max(1)).max(1);
        let ranks: Vec<usize> = (0..encoder.len()).map(|replica| replica / per_group).collect();
        let mut placed = vec![Vec::new(); encoder.len()];
        for (share, rank) in encoder.iter_mut().zip(near(&sent, &ranks)) {
            placed[rank] = std::mem::take(share);
        }
        encoder.clone_from_slice(&placed);
    }

    /// Moves the encoder shares to replicas near the LLM replicas that they send to. Nothing is moved if the nodes are not
    /// known, or if there is only one.
    pub(crate) fn near(
        &self,
        llm: &[Vec<SampleIndex>],
        encoder: Vec<Vec<EncoderShare>>,
    ) -> Vec<Vec<EncoderShare>> {
        let layout = self.settings.layout;
        if layout.is_colocated() || self.node(Rank(layout.num_ranks() - 1)) == 0 {
            return encoder;
        }
        let node_of: Vec<usize> = (0..layout.encoder.dp).map(|replica| self.encoder_node(replica)).collect();
        let mut placed = vec![Vec::new(); encoder.len()];
        for (share, replica) in encoder.iter().zip(near(&self.sent(llm, &encoder), &node_of)) {
            placed[replica].clone_from(share);
        }
        placed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sparse(sent: &[Vec<u64>]) -> Vec<Sent> {
        sent.iter().map(|by_node| summed(by_node.iter().copied().enumerate().collect())).collect()
    }

    #[test]
    fn the_largest_amounts_choose_their_node_first() {
        let near = |sent: &[Vec<u64>], node_of: &[usize]| near(&sparse(sent), node_of);
        // Replicas 0 and 1 on node 0, 2 on node 1. Share 0 sends most to node 1, share 2 a little.
        let sent = [vec![0, 90], vec![5, 0], vec![10, 20]];
        assert_eq!(near(&sent, &[0, 0, 1]), [2, 1, 0]);
        // No move would gain anything, so all shares stay.
        assert_eq!(near(&[vec![0, 0], vec![0, 0]], &[0, 1]), [0, 1]);
        assert_eq!(near(&[vec![3, 0], vec![0, 3]], &[0, 1]), [0, 1]);
        assert_eq!(summed(vec![(2, 5), (0, 0), (1, 4), (2, 3)]), [(1, 4), (2, 8)]);
    }

    /// The rule, word by word: each wish in its turn looks at all replicas.
    fn by_the_rule(sent: &[Sent], node_of: &[usize]) -> Vec<usize> {
        let mut wishes: Vec<(Reverse<u64>, usize, usize)> = Vec::new();
        for (share, sent) in sent.iter().enumerate() {
            wishes.extend(sent.iter().map(|&(node, tokens)| (Reverse(tokens), share, node)));
        }
        wishes.sort_unstable();
        let (mut chosen, mut taken) = (vec![None; sent.len()], Vec::new());
        let mut take = |chosen: &mut Vec<Option<usize>>, share: usize, is_fit: &dyn Fn(usize) -> bool| {
            let own_first = std::iter::once(share).chain(0..node_of.len());
            let found = own_first.into_iter().find(|&r| is_fit(r) && !taken.contains(&r));
            if let (None, Some(replica)) = (chosen[share], found) {
                chosen[share] = Some(replica);
                taken.push(replica);
            }
        };
        for (_, share, node) in wishes {
            take(&mut chosen, share, &|replica| node_of[replica] == node);
        }
        (0..sent.len()).for_each(|share| take(&mut chosen, share, &|_| true));
        chosen.into_iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn every_share_has_a_replica_of_its_own(
            sent in prop::collection::vec(prop::collection::vec(0u64..9, 3), 1..9), nodes in prop::collection::vec(0usize..3, 9)
        ) {
            let (sent, node_of) = (sparse(&sent), &nodes[..sent.len()]);
            let mut chosen = near(&sent, node_of);
            prop_assert_eq!(&chosen, &by_the_rule(&sent, node_of));
            chosen.sort_unstable();
            prop_assert_eq!(chosen, (0..sent.len()).collect::<Vec<_>>());
        }
    }
}
