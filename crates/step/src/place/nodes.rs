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

/// Chooses a replica for each share, so that much of what the share sends stays on the replica's node. `sent[share][node]`
/// is the number of tokens that a share sends to a node, and `node_of` is the node of each replica. The shares with the
/// largest amounts choose first.
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
            let feeds = work::feeds(llm, encoder, groups);
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
                let sent: u64 = by_node.iter().sum();
                traffic.feature_tokens += sent;
                traffic.feature_tokens_across += sent - by_node[self.encoder_node(replica as u32)];
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

    /// `[encoder replica][node]`: the feature tokens that the replica sends to LLM replicas of the node.
    fn sent(&self, llm: &[Vec<SampleIndex>], encoder: &[Vec<EncoderShare>]) -> Vec<Vec<u64>> {
        let layout = self.settings.layout;
        let first = StageIndex(layout.encoder.pp);
        let first_ranks = (0..layout.llm.dp).map(|replica| self.node(layout.rank(replica, first)));
        let node_of: Vec<usize> = first_ranks.collect();
        let num_nodes = 1 + self.node(Rank(layout.num_ranks() - 1));
        let holders = work::holders(llm);
        let of_replica = |(replica, shares): (usize, &Vec<EncoderShare>)| {
            let mut by_node = vec![0; num_nodes];
            for share in shares {
                let held = work::holder(&holders, share.sample);
                // A colocated rank sends nothing to itself.
                if let Some(holder) = held.filter(|&holder| !layout.is_colocated() || holder != replica) {
                    by_node[node_of[holder]] += self.feature_tokens(share);
                }
            }
            by_node
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
        let of_rank = |shares: &Vec<EncoderShare>| {
            let mut by_rank = vec![0; llm.len()];
            for share in shares {
                if let Some(holder) = work::holder(&holders, share.sample) {
                    by_rank[holder] += self.feature_tokens(share);
                }
            }
            by_rank
        };
        let sent: Vec<Vec<u64>> = encoder.iter().map(of_rank).collect();
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

    #[test]
    fn the_largest_amounts_choose_their_node_first() {
        // Replicas 0 and 1 on node 0, 2 on node 1. Share 0 sends most to node 1, share 2 a little.
        let sent = [vec![0, 90], vec![5, 0], vec![10, 20]];
        assert_eq!(near(&sent, &[0, 0, 1]), [2, 1, 0]);
        // No move would gain anything, so all shares stay.
        assert_eq!(near(&[vec![0, 0], vec![0, 0]], &[0, 1]), [0, 1]);
        assert_eq!(near(&[vec![3, 0], vec![0, 3]], &[0, 1]), [0, 1]);
    }

    proptest! {
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
