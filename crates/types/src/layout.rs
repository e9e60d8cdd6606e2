//! Layouts: how many ways each component is split, and which rank holds which piece.

use crate::component::{Component, ComponentLayout, Placement, Zero};
use crate::cut::{LayerCut, cut_layers};
use crate::index::{Rank, StageIndex};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether a field says nothing that a file without it would not say.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// How many ways each component is split, and where the pieces sit.
///
/// *Disaggregated*: the encoder's ranks come first, then the LLM's, replica by replica; within a replica the pipeline
/// stages follow each other, and the ranks of a stage that share its layers (tensor parallelism) lie side by side: its
/// *tensor group*.
///
/// *Colocated*: the degrees of both components are equal, `pp` is 1, and group r holds replica r of both: stage 0, the
/// encoder, and stage 1, the LLM backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Layout {
    /// Degrees of the encoder.
    pub encoder: ComponentLayout,
    /// Degrees of the LLM backbone.
    pub llm: ComponentLayout,
    /// Whether the components share ranks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub placement: Placement,
    /// What the replicas of each component keep only a part of.
    #[serde(default, skip_serializing_if = "is_default")]
    pub zero: Zero,
    /// Replicas over which that is cut, those that follow each other; groups of them hold copies. `None`: all replicas
    /// of a component.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_ranks: Option<u32>,
    /// Layers of each encoder stage; `None`: as even as can be, the longer runs first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_cut: Option<LayerCut>,
    /// Layers of each stage of the LLM backbone, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub llm_cut: Option<LayerCut>,
}

/// Where a rank stands: its component, replica and stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// What the rank holds a piece of.
    pub component: Component,
    /// Replica of that component, from 0.
    pub replica: u32,
    /// Stage in the whole step: the encoder's are first. The first of the rank's stages in a colocated layout.
    pub stage: StageIndex,
    /// Position in its tensor group, from 0.
    pub tensor: u32,
}

impl Layout {
    /// Encoder and LLM on ranks of their own, nothing of a replica sharded.
    pub const fn disaggregated(encoder: ComponentLayout, llm: ComponentLayout) -> Self {
        Self {
            encoder,
            llm,
            placement: Placement::Disaggregated,
            zero: Zero::Nothing,
            shard_ranks: None,
            encoder_cut: None,
            llm_cut: None,
        }
    }

    /// Both components on each of `dp` ranks, sharded over all of them as `zero` says.
    pub const fn colocated(dp: u32, zero: Zero) -> Self {
        let degrees = ComponentLayout { tp: 1, pp: 1, dp };
        Self { placement: Placement::Colocated, zero, ..Self::disaggregated(degrees, degrees) }
    }

    /// Whether every rank holds both components.
    pub const fn is_colocated(&self) -> bool {
        matches!(self.placement, Placement::Colocated)
    }

    /// Ranks of the whole layout.
    pub const fn num_ranks(&self) -> u32 {
        match self.placement {
            Placement::Disaggregated => self.encoder.num_ranks() + self.llm.num_ranks(),
            Placement::Colocated => self.llm.num_ranks(),
        }
    }

    /// Number of stages a microbatch passes: the encoder's stages, then the LLM backbone's.
    pub const fn num_stages(&self) -> u32 {
        self.encoder.pp + self.llm.pp
    }

    /// Layers that each stage of `component` holds when it has `num_layers`: those of the layout's cut, which must have as
    /// many stages and layers, else as even as can be.
    ///
    /// # Panics
    /// If the component has no stages.
    pub fn stage_layers(&self, component: Component, num_layers: u32) -> Vec<u32> {
        let (cut, degrees) = match component {
            Component::Encoder => (self.encoder_cut, self.encoder),
            Component::Llm | Component::Both => (self.llm_cut, self.llm),
        };
        cut.map_or_else(|| cut_layers(num_layers, degrees.pp), Vec::from)
    }

    /// The first layer of a stage of the whole step among the `num_layers` of its component, and how many it has.
    ///
    /// # Errors
    /// The stage is none of the component's, there are fewer layers than stages, or the cut is of other layers.
    pub fn layers_of_stage(
        &self,
        component: Component,
        stage: StageIndex,
        num_layers: u32,
    ) -> Result<(u32, u32), String> {
        let (first, degrees, cut) = match component {
            Component::Encoder => (0, self.encoder, self.encoder_cut),
            Component::Llm | Component::Both => (self.encoder.pp, self.llm, self.llm_cut),
        };
        let stages = first..first + degrees.pp;
        if !stages.contains(&stage.0) {
            let last = stages.end.saturating_sub(1);
            return Err(format!("stage {} is none of the {component}, they are {first} to {last}", stage.0));
        }
        if degrees.pp > num_layers {
            return Err(format!(
                "{component} pp {} exceeds the {num_layers} layers of the {component}",
                degrees.pp
            ));
        }
        if let Some(cut) = cut.filter(|cut| cut.num_layers() != num_layers) {
            let found = cut.num_layers();
            return Err(format!("{component} layers {cut} are {found}, the model has {num_layers}"));
        }
        let cut = self.stage_layers(component, num_layers);
        let position = (stage.0 - first) as usize;
        Ok((cut[..position].iter().sum(), cut[position]))
    }

    /// Replicas over which states, gradients and parameters of `component` are cut as far as `zero` says; 1: over none.
    pub fn shard_degree(&self, component: Component) -> u32 {
        let replicas = if component == Component::Encoder { self.encoder.dp } else { self.llm.dp };
        match self.zero {
            Zero::Nothing => 1,
            _ => self.shard_ranks.map_or(replicas, |ranks| ranks.min(replicas)).max(1),
        }
    }

    /// The first rank of the tensor group that holds `stage` of `replica`; its others follow.
    pub const fn rank(&self, replica: u32, stage: StageIndex) -> Rank {
        if self.is_colocated() {
            Rank(replica * self.llm.tp)
        } else if stage.0 < self.encoder.pp {
            Rank((replica * self.encoder.pp + stage.0) * self.encoder.tp)
        } else {
            let group = replica * self.llm.pp + (stage.0 - self.encoder.pp);
            Rank(self.encoder.num_ranks() + group * self.llm.tp)
        }
    }

    /// Ranks of the tensor groups of a stage: 1 without tensor parallelism.
    pub const fn tensor_degree(&self, stage: StageIndex) -> u32 {
        if !self.is_colocated() && stage.0 < self.encoder.pp { self.encoder.tp } else { self.llm.tp }
    }

    /// Whether layers of a component are cut over several ranks (tensor parallelism).
    pub const fn cuts_layers(&self) -> bool {
        self.encoder.tp > 1 || self.llm.tp > 1
    }

    /// The same layout with each tensor group as one rank. Its ranks run the same actions at the same time, so this is
    /// the layout of schedules, action lists and timelines.
    #[must_use]
    pub const fn by_group(&self) -> Self {
        Self {
            encoder: ComponentLayout { tp: 1, ..self.encoder },
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
            let first = self.rank(at.replica, at.stage).0;
            first..first + self.tensor_degree(at.stage)
        });
        ranks.map(Rank)
    }

    /// Stages of all replicas: as many as tensor groups, and twice as many where each rank holds both components.
    pub const fn num_rows(&self) -> u32 {
        self.encoder.pp * self.encoder.dp + self.llm.pp * self.llm.dp
    }

    /// The number of a stage of a replica among those of all replicas, the encoder's first: its tensor group, but where
    /// components are colocated.
    pub const fn row(&self, replica: u32, stage: StageIndex) -> usize {
        let apart = Self { placement: Placement::Disaggregated, ..self.by_group() };
        apart.rank(replica, stage).index()
    }

    /// The stages that `rank` holds, in the order in which a microbatch passes them; none past the last rank.
    pub fn stages(&self, rank: Rank) -> impl DoubleEndedIterator<Item = StageIndex> + use<> {
        let held = match self.coordinates(rank) {
            None => 0..0,
            Some(_) if self.is_colocated() => 0..self.num_stages(),
            Some(at) => at.stage.0..at.stage.0 + 1,
        };
        held.map(StageIndex)
    }

    /// Where `rank` stands; `None` past the last rank.
    pub fn coordinates(&self, rank: Rank) -> Option<Coordinates> {
        let encoder_ranks = self.encoder.num_ranks();
        if rank.0 >= self.num_ranks() {
            return None;
        }
        let (component, degrees, first_stage, position) = if self.is_colocated() {
            (Component::Both, self.llm, 0, rank.0)
        } else if rank.0 < encoder_ranks {
            (Component::Encoder, self.encoder, 0, rank.0)
        } else {
            (Component::Llm, self.llm, self.encoder.pp, rank.0 - encoder_ranks)
        };
        let group = position / degrees.tp;
        Some(Coordinates {
            component,
            replica: group / degrees.pp,
            stage: StageIndex(first_stage + group % degrees.pp),
            tensor: position % degrees.tp,
        })
    }

    /// Adds what is wrong with the layout beyond degrees of 0, each with its field.
    pub(crate) fn check(&self, name: &str, problems: &mut Vec<String>) {
        if self.is_colocated() {
            if self.encoder != self.llm {
                let degrees = format!("encoder {}, llm {}", self.encoder, self.llm);
                problems.push(format!("{name}: {degrees}, both must be equal where they are colocated"));
            }
            if self.llm.pp > 1 {
                let pp = self.llm.pp;
                let field = "llm.pipeline_parallel_degree";
                problems.push(format!("{name}.{field}: {pp}, must be 1 where the components are colocated"));
            }
        }
        let cuts = [("encoder", self.encoder_cut, self.encoder), ("llm", self.llm_cut, self.llm)];
        for (component, cut, degrees) in cuts {
            if let Some(cut) = cut.filter(|cut| cut.num_stages() != degrees.pp) {
                let (found, stages) = (cut.num_stages(), degrees.pp);
                let rule = format!("{component}.pipeline_parallel_degree is {stages}, must be equal");
                problems.push(format!("{name}.{component}_cut: {cut} has {found} stages, {rule}"));
            }
        }
        match self.shard_ranks {
            Some(_) if self.zero == Zero::Nothing => {
                problems.push(format!("{name}.shard_ranks: only where `zero` is above 0"));
            }
            Some(0) => problems.push(format!("{name}.shard_ranks: must not be 0")),
            Some(ranks) => {
                for (component, dp) in [("encoder", self.encoder.dp), ("llm", self.llm.dp)] {
                    if !dp.is_multiple_of(ranks) {
                        let rule = format!("must divide the {dp} replicas of the {component}");
                        problems.push(format!("{name}.shard_ranks: {ranks}, {rule}"));
                    }
                }
            }
            None => {}
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.placement {
            Placement::Disaggregated => {
                write!(f, "encoder {}", self.encoder)?;
                if let Some(cut) = self.encoder_cut {
                    write!(f, " layers {cut}")?;
                }
                write!(f, ", llm {}", self.llm)?;
                if let Some(cut) = self.llm_cut {
                    write!(f, " layers {cut}")?;
                }
            }
            Placement::Colocated if self.encoder == self.llm => {
                write!(f, "colocated tp {} dp {}", self.llm.tp, self.llm.dp)?;
            }
            Placement::Colocated => write!(f, "colocated encoder {}, llm {}", self.encoder, self.llm)?,
        }
        if self.zero != Zero::Nothing {
            write!(f, ", zero {}", u8::from(self.zero))?;
        }
        self.shard_ranks.map_or(Ok(()), |ranks| write!(f, " over {ranks} ranks"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_and_coordinates_are_inverse(
            e_dp in 1u32..5, l_dp in 1u32..5, e_pp in 1u32..4, l_pp in 1u32..5, e_tp in 1u32..5, l_tp in 1u32..5
        ) {
            let apart = Layout::disaggregated(
                ComponentLayout { tp: e_tp, pp: e_pp, dp: e_dp },
                ComponentLayout { tp: l_tp, pp: l_pp, dp: l_dp },
            );
            let one = ComponentLayout { tp: l_tp, pp: 1, dp: e_dp };
            let colocated = Layout { encoder: one, llm: one, ..Layout::colocated(e_dp, Zero::Parameters) };
            for layout in [apart, colocated] {
                let (mut held, mut rows) = (0, std::collections::BTreeSet::new());
                let mut groups = Vec::new();
                for rank in (0..layout.num_ranks()).map(Rank) {
                    let at = layout.coordinates(rank).unwrap();
                    prop_assert_eq!(layout.stages(rank).next(), Some(at.stage));
                    let group = layout.group(rank).unwrap();
                    prop_assert_eq!(layout.ranks_of_group(group).nth(at.tensor as usize), Some(rank));
                    prop_assert_eq!(layout.by_group().coordinates(group).unwrap(), Coordinates { tensor: 0, ..at });
                    groups.push(group.0);
                    for stage in layout.stages(rank) {
                        prop_assert_eq!(layout.rank(at.replica, stage).0 + at.tensor, rank.0);
                        prop_assert!(at.tensor < layout.tensor_degree(stage));
                        rows.insert(layout.row(at.replica, stage));
                        held += u32::from(at.tensor == 0);
                    }
                }
                // Groups lie side by side, and each is there.
                prop_assert!(groups.is_sorted());
                groups.dedup();
                prop_assert!(groups.into_iter().eq(0..layout.by_group().num_ranks()));
                // Each stage of each replica stands on one rank.
                prop_assert_eq!(held, layout.encoder.pp * layout.encoder.dp + layout.llm.pp * layout.llm.dp);
                prop_assert_eq!(held, layout.num_rows());
                prop_assert!(rows.into_iter().eq(0..held as usize));
                prop_assert_eq!(layout.coordinates(Rank(layout.num_ranks())), None);
                prop_assert_eq!(layout.stages(Rank(layout.num_ranks())).count(), 0);
            }
        }
    }

    /// What older files hold is read as before, and the fields that say nothing new are left out.
    #[test]
    fn only_what_differs_from_a_plain_pipeline_is_written() {
        let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
        let plain = Layout::disaggregated(degrees(2), degrees(3));
        let text = serde_json::to_string(&plain).unwrap();
        assert!(
            !text.contains("placement")
                && !text.contains("zero")
                && !text.contains("shard_ranks")
                && !text.contains("cut"),
            "{text}"
        );
        let hybrid = Layout { shard_ranks: Some(4), ..Layout::colocated(8, Zero::Parameters) };
        let text = serde_json::to_string(&hybrid).unwrap();
        assert!(text.ends_with(r#""placement":"colocated","zero":3,"shard_ranks":4}"#), "{text}");
        assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), hybrid);
        assert_eq!(hybrid.to_string(), "colocated tp 1 dp 8, zero 3 over 4 ranks");
        let error = serde_json::from_str::<Layout>(&text.replace("\"zero\":3", "\"zero\":4")).unwrap_err();
        assert!(error.to_string().starts_with("4, must be 0, 1, 2 or 3"), "{error}");
    }

    #[test]
    fn an_uneven_cut_is_the_layouts_own() {
        let degrees = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
        let even = Layout::disaggregated(degrees(2), degrees(3));
        assert_eq!(even.stage_layers(Component::Llm, 20), [7, 7, 6]);
        let cut = |layers: &[u32]| Some(LayerCut::new(layers).unwrap());
        let uneven = Layout { encoder_cut: cut(&[5, 3]), llm_cut: cut(&[7, 8, 5]), ..even };
        assert_eq!(uneven.stage_layers(Component::Llm, 20), [7, 8, 5]);
        assert_eq!(uneven.stage_layers(Component::Encoder, 8), [5, 3]);
        assert_eq!(uneven.to_string(), "encoder tp 1 pp 2 dp 1 layers 5+3, llm tp 1 pp 3 dp 1 layers 7+8+5");
        let text = serde_json::to_string(&uneven).unwrap();
        assert!(text.ends_with(r#""encoder_cut":[5,3],"llm_cut":[7,8,5]}"#), "{text}");
        assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), uneven);
        let mut problems = Vec::new();
        Layout { llm_cut: cut(&[10, 10]), ..even }.check("layout", &mut problems);
        let rule = "llm.pipeline_parallel_degree is 3, must be equal";
        assert_eq!(problems, [format!("layout.llm_cut: 10+10 has 2 stages, {rule}")]);
    }

    #[test]
    fn states_are_cut_over_all_replicas_or_over_groups_of_them() {
        let degrees = |dp| ComponentLayout { tp: 1, pp: 1, dp };
        let apart = Layout { zero: Zero::States, ..Layout::disaggregated(degrees(2), degrees(6)) };
        let degree = |layout: Layout| {
            [Component::Encoder, Component::Llm].map(|component| layout.shard_degree(component))
        };
        assert_eq!(degree(Layout { zero: Zero::Nothing, ..apart }), [1, 1]);
        assert_eq!(degree(apart), [2, 6]);
        assert_eq!(degree(Layout { shard_ranks: Some(2), ..apart }), [2, 2]);
        assert_eq!(degree(Layout::colocated(8, Zero::Gradients)), [8, 8]);
    }
}
