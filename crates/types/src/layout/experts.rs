//! Expert groups: the ranks among which the experts of a layer are dealt out.

use crate::component::Zero;
use crate::index::Rank;
use crate::layout::Layout;

impl Layout {
    /// Whether the experts of a layer are dealt out among several ranks (expert parallelism).
    pub const fn has_expert_groups(&self) -> bool {
        self.expert_parallel_degree > 1
    }

    /// The expert group of a rank: with 4 ranks a group, ranks 0 to 3 form group 0. Each rank is one of its own where experts
    /// are not dealt out; `None` past the last rank.
    pub fn expert_group(&self, rank: Rank) -> Option<u32> {
        (rank.0 < self.num_ranks()).then(|| rank.0 / self.expert_parallel_degree.max(1))
    }

    /// Whether ranks wait for each other within the layers, in forward and backward: where they gather parameters (`zero` 3)
    /// and where they exchange rows with the experts of other ranks. All of them then run as many microbatches.
    pub const fn meets_in_layers(&self) -> bool {
        self.is_colocated() && (matches!(self.zero, Zero::Parameters) || self.has_expert_groups())
    }

    /// Adds what is wrong with the ranks among which experts are dealt out, as far as the layout alone tells: that the model has
    /// experts, and as many as these ranks divide, is asked where the model is known.
    pub(super) fn check_experts(&self, name: &str, problems: &mut Vec<String>) {
        let (ep, dp) = (self.expert_parallel_degree, self.llm.dp);
        let mut wrong = |rule: String| problems.push(format!("{name}.expert_parallel_degree: {ep}, {rule}"));
        if ep == 0 {
            wrong("must not be 0".to_owned());
        } else if ep > 1 && !self.is_colocated() {
            wrong("must be 1 where encoder and llm have ranks of their own".to_owned());
        } else if ep > 1 && self.cuts_layers() {
            let (encoder, llm) = (self.encoder.tp, self.llm.tp);
            wrong(format!("must be 1 where layers are cut over ranks: encoder tp {encoder}, llm tp {llm}"));
        } else if ep > 1 && !dp.is_multiple_of(ep) {
            wrong(format!("must divide the {dp} replicas"));
        } else if let Some(ranks) = self.shard_ranks.filter(|_| ep > 1) {
            wrong(format!(
                "must be 1 where shards are cut over groups of replicas: `shard_ranks` is {ranks}"
            ));
        }
    }
}
