//! Tensor groups: the ranks that share the layers of a stage, and the encoder replicas in a group.

use crate::component::ComponentLayout;
use crate::index::{Rank, StageIndex};
use crate::layout::Layout;

impl Layout {
    /// Ranks of the tensor groups of a stage: 1 without tensor parallelism.
    pub const fn tensor_degree(&self, stage: StageIndex) -> u32 {
        if stage.0 < self.encoder.pp { self.encoder.tp } else { self.llm.tp }
    }

    /// Whether layers of a component are cut over several ranks (tensor parallelism).
    pub const fn cuts_layers(&self) -> bool {
        self.encoder.tp > 1 || self.llm.tp > 1
    }

    /// Whether the ranks are colocated, the layers of the LLM backbone are cut over several of them, and each of them holds the
    /// whole encoder: a replica of its own.
    pub const fn has_whole_encoders(&self) -> bool {
        let (encoder, llm) = (self.encoder, self.llm);
        self.is_colocated()
            && llm.tp > 1
            && encoder.tp == 1
            && encoder.pp == 1
            && llm.pp == 1
            && encoder.dp == llm.tp * llm.dp
    }

    /// Encoder replicas of each tensor group of a colocated layout: as many as ranks where these hold whole encoders, else 1.
    /// The replicas of a group follow each other. They divide what the group encodes, and each of them sends its features to
    /// the others. 1 where components are not colocated.
    pub const fn encoders_per_group(&self) -> u32 {
        if self.has_whole_encoders() { self.llm.tp } else { 1 }
    }

    /// Encoder replicas, with all of a tensor group as one.
    pub(super) const fn encoder_groups(&self) -> u32 {
        self.encoder.dp / self.encoders_per_group()
    }

    /// The same layout with each tensor group as one rank. Its ranks run the same actions at the same time, so this is
    /// the layout of action lists and timelines, and of the LLM side of schedules. Their encoder side names every encoder
    /// replica.
    #[must_use]
    pub const fn by_group(&self) -> Self {
        Self {
            encoder: ComponentLayout { tp: 1, dp: self.encoder_groups(), ..self.encoder },
            llm: ComponentLayout { tp: 1, ..self.llm },
            ..*self
        }
    }

    /// The tensor group of a rank, which is its rank in [`Layout::by_group`]; `None` past the last rank.
    pub fn group(&self, rank: Rank) -> Option<Rank> {
        self.coordinates(rank).map(|at| self.by_group().rank(at.replica, at.stage))
    }

    /// The ranks of a tensor group, side by side; none past the last group.
    pub fn ranks_of_group(&self, group: Rank) -> impl Iterator<Item = Rank> + use<> {
        let at = self.by_group().coordinates(group);
        let ranks = at.map_or(0..0, |at| {
            // Colocated groups are those of the LLM backbone.
            let stage = if self.is_colocated() { StageIndex(self.encoder.pp) } else { at.stage };
            let first = self.rank(at.replica, stage).0;
            first..first + self.tensor_degree(stage)
        });
        ranks.map(Rank)
    }

    /// The encoder replica that `rank` holds, or holds a part of; `None` past the last rank and where it holds none.
    pub fn encoder_replica(&self, rank: Rank) -> Option<u32> {
        if self.is_colocated() {
            return (rank.0 < self.num_ranks()).then(|| rank.0 / self.encoder.tp.max(1));
        }
        self.coordinates(rank).filter(|_| rank.0 < self.encoder.num_ranks()).map(|at| at.replica)
    }
}
