//! Layouts: how many ways each component is split, and which rank holds which piece.

use crate::component::{Component, ComponentLayout, Placement, RankOrder, Zero};
use crate::cut::{LayerCut, cut_layers};
use crate::index::{Rank, StageIndex};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Chunks of a rank where stages are not interleaved, and ranks of an expert group where experts are not dealt out.
const fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref)] // As serde calls it.
const fn is_one(count: &u32) -> bool {
    *count == 1
}

/// Whether a field says nothing that a file without it would not say.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// How many ways each component is split, and where the pieces sit.
///
/// *Disaggregated*: the encoder's ranks come first, then the LLM's. Within a component either the pipeline stages of a
/// replica follow each other, or the replicas of a stage ([`RankOrder`]). The ranks of a stage that share its layers
/// (tensor parallelism) lie side by side: its *tensor group*.
///
/// *Interleaved*: each pipeline rank of the LLM backbone holds `llm_interleave` runs of layers, its *chunks*, each a stage
/// of its own. Chunk c of pipeline rank r is stage c x pp + r of the LLM backbone: a microbatch passes all ranks once for
/// each chunk.
///
/// *Colocated*: `pp` is 1, and tensor group r holds replica r of the LLM backbone. Either the degrees of both components are
/// equal, and the group holds replica r of the encoder, too. Or the encoder's layers are whole (`tp` 1) beside an LLM backbone
/// that is cut: each rank then holds a replica of the encoder ([`Layout::encoders_per_group`]). Each component is one stage: the
/// encoder stage 0, the LLM backbone stage 1.
///
/// *Expert parallel*: of colocated ranks without tensor groups, `expert_parallel_degree` that follow each other form an *expert
/// group* and deal out the experts of each layer among them ([`Layout::expert_group`]).
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
    /// Layers of each stage of the LLM backbone, likewise; by stage, whichever rank holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub llm_cut: Option<LayerCut>,
    /// Chunks of each pipeline rank of the LLM backbone, at least 1; 1: one run of layers a rank, not interleaved.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub llm_interleave: u32,
    /// Which tensor groups of a component stand next to each other.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rank_order: RankOrder,
    /// Ranks among which the experts of each layer are dealt out, at least 1; 1: every rank holds all of them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub expert_parallel_degree: u32,
}

/// Replicas of a component that [`Layout::borders_across_nodes`] looks at, at most.
const REPLICAS_LOOKED_AT: u32 = 8;

/// Of `count` numbers from 0 on, [`REPLICAS_LOOKED_AT`] that are evenly spread, or all where there are fewer.
fn spread(count: u32) -> impl Iterator<Item = u32> + Clone {
    let looked_at = count.min(REPLICAS_LOOKED_AT);
    (0..looked_at).map(move |at| (u64::from(at) * u64::from(count) / u64::from(looked_at)) as u32)
}

/// 0 of no numbers.
fn mean(numbers: impl Iterator<Item = u32>) -> f64 {
    let (sum, num) = numbers.fold((0_u32, 0_u32), |(sum, num), number| (sum + number, num + 1));
    f64::from(sum) / f64::from(num.max(1))
}

/// Where a rank stands: its component, replica and stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// What the rank holds a piece of.
    pub component: Component,
    /// Replica of that component, from 0.
    pub replica: u32,
    /// Stage in the whole step: the encoder's are first. The first of the rank's stages where it holds several.
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
            llm_interleave: 1,
            rank_order: RankOrder::TpPpDp,
            expert_parallel_degree: 1,
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

    /// Stages of the LLM backbone: one for each chunk of each pipeline rank.
    pub const fn num_llm_stages(&self) -> u32 {
        self.llm.pp * self.llm_interleave
    }

    /// Number of stages a microbatch passes: the encoder's stages, then the LLM backbone's.
    pub const fn num_stages(&self) -> u32 {
        self.encoder.pp + self.num_llm_stages()
    }

    /// Whether pipeline ranks hold several chunks each.
    pub const fn is_interleaved(&self) -> bool {
        self.llm_interleave > 1
    }

    /// Layers that each stage of `component` holds when it has `num_layers`: those of the layout's cut, which must have as
    /// many stages and layers, else as even as can be.
    ///
    /// # Panics
    /// If the component has no stages.
    pub fn stage_layers(&self, component: Component, num_layers: u32) -> Vec<u32> {
        let (cut, stages) = self.cut_of(component);
        cut.map_or_else(|| cut_layers(num_layers, stages), Vec::from)
    }

    /// The cut of a component, and its stages.
    const fn cut_of(&self, component: Component) -> (Option<LayerCut>, u32) {
        match component {
            Component::Encoder => (self.encoder_cut, self.encoder.pp),
            Component::Llm | Component::Both => (self.llm_cut, self.num_llm_stages()),
        }
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
        let (cut, num_stages) = self.cut_of(component);
        let first = if component == Component::Encoder { 0 } else { self.encoder.pp };
        let stages = first..first + num_stages;
        if !stages.contains(&stage.0) {
            let last = stages.end.saturating_sub(1);
            return Err(format!("stage {} is none of the {component}, they are {first} to {last}", stage.0));
        }
        if num_stages > num_layers {
            let stages = match (component, self.llm_interleave) {
                (Component::Encoder, _) | (_, 1) => format!("pp {num_stages}"),
                (_, chunks) => format!("pp {} x interleave {chunks}", self.llm.pp),
            };
            return Err(format!("{component} {stages} exceeds the {num_layers} layers of the {component}"));
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

    /// The first rank of the tensor group that holds `stage` of `replica`, a replica of the stage's component; its others
    /// follow.
    pub const fn rank(&self, replica: u32, stage: StageIndex) -> Rank {
        if self.is_colocated() {
            let is_encoder = stage.0 < self.encoder.pp;
            Rank(replica * if is_encoder { self.encoder.tp } else { self.llm.tp })
        } else if stage.0 < self.encoder.pp {
            Rank(self.position(self.encoder, replica, stage.0) * self.encoder.tp)
        } else {
            let group = self.position(self.llm, replica, (stage.0 - self.encoder.pp) % self.llm.pp);
            Rank(self.encoder.num_ranks() + group * self.llm.tp)
        }
    }

    /// The position of a pipeline rank of a replica among the tensor groups of its component.
    const fn position(&self, degrees: ComponentLayout, replica: u32, pipeline_rank: u32) -> u32 {
        match self.rank_order {
            RankOrder::TpPpDp => replica * degrees.pp + pipeline_rank,
            RankOrder::TpDpPp => pipeline_rank * degrees.dp + replica,
        }
    }

    /// Ranks from one replica of a component to the next.
    pub const fn replica_stride(&self, component: Component) -> u32 {
        let degrees = if matches!(component, Component::Encoder) { self.encoder } else { self.llm };
        match self.rank_order {
            RankOrder::TpPpDp => degrees.tp * degrees.pp,
            RankOrder::TpDpPp => degrees.tp,
        }
    }

    /// Whether the other [`RankOrder`] gives any rank another place: some component has several stages and several
    /// replicas.
    pub const fn has_rank_orders(&self) -> bool {
        !self.is_colocated()
            && (self.encoder.pp > 1 && self.encoder.dp > 1 || self.llm.pp > 1 && self.llm.dp > 1)
    }

    /// Of the borders between the stages of one component, how many lie between two nodes of `ranks_per_node` ranks: the
    /// mean over its replicas, of which 8 that are evenly spread are looked at.
    pub fn borders_across_nodes(&self, component: Component, ranks_per_node: u32) -> f64 {
        let (replicas, stages) = match component {
            Component::Encoder => (self.encoder.dp, 0..self.encoder.pp),
            Component::Llm | Component::Both => (self.llm.dp, self.encoder.pp..self.num_stages()),
        };
        let node_of = |replica, stage| self.node(replica, stage, ranks_per_node);
        let of_replica = |replica| {
            stages.clone().skip(1).filter(|&s| node_of(replica, s - 1) != node_of(replica, s)).count()
        };
        mean(spread(replicas).map(|replica| of_replica(replica) as u32))
    }

    /// Which part of the messages from stage to stage goes to another node of `ranks_per_node` ranks, 0 to 1.
    ///
    /// A microbatch makes one message at each border between two stages. Encoder replicas are taken to feed all LLM replicas
    /// alike. Colocated ranks exchange features with all others: 1 if there are several nodes.
    pub fn ratio_across_nodes(&self, ranks_per_node: u32) -> f64 {
        if self.num_ranks() <= ranks_per_node.max(1) {
            return 0.0;
        }
        if self.is_colocated() {
            return 1.0;
        }
        let first_llm = self.encoder.pp;
        let crosses = |(from, to)| {
            let ends = [(from, first_llm - 1), (to, first_llm)];
            let [from, to] = ends.map(|(replica, stage)| self.node(replica, stage, ranks_per_node));
            u32::from(from != to)
        };
        let pairs = spread(self.encoder.dp).flat_map(|from| spread(self.llm.dp).map(move |to| (from, to)));
        let within: f64 = [Component::Encoder, Component::Llm]
            .map(|component| self.borders_across_nodes(component, ranks_per_node))
            .into_iter()
            .sum();
        (within + mean(pairs.map(crosses))) / f64::from(self.num_stages() - 1)
    }

    const fn node(&self, replica: u32, stage: u32, ranks_per_node: u32) -> u32 {
        let ranks = if ranks_per_node == 0 { 1 } else { ranks_per_node };
        self.rank(replica, StageIndex(stage)).0 / ranks
    }

    /// Stages of all replicas: as many as tensor groups, and more where a group holds several.
    pub const fn num_rows(&self) -> u32 {
        self.encoder.pp * self.encoder_groups() + self.num_llm_stages() * self.llm.dp
    }

    /// The number of a replica's stage among the stages of all replicas; encoder replicas of one tensor group count as one. The
    /// encoder's stages come first, and those of a replica follow each other. The number is that of the stage's tensor group, except where components are colocated, stages are
    /// interleaved, or the replicas of a stage stand next to each other.
    pub const fn row(&self, replica: u32, stage: StageIndex) -> usize {
        let row = if stage.0 < self.encoder.pp {
            replica * self.encoder.pp + stage.0
        } else {
            let of_encoder = self.encoder.pp * self.encoder_groups();
            of_encoder + replica * self.num_llm_stages() + (stage.0 - self.encoder.pp)
        };
        row as usize
    }

    /// The stages that `rank` holds, in the order in which a microbatch passes them; none past the last rank.
    pub fn stages(&self, rank: Rank) -> impl DoubleEndedIterator<Item = StageIndex> + use<> {
        // The first stage, how many, and how far apart.
        let (first, count, apart) = match self.coordinates(rank) {
            None => (0, 0, 1),
            Some(_) if self.is_colocated() => (0, self.num_stages(), 1),
            Some(at) if at.component == Component::Encoder => (at.stage.0, 1, 1),
            Some(at) => (at.stage.0, self.llm_interleave, self.llm.pp),
        };
        (0..count).map(move |chunk| StageIndex(first + chunk * apart))
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
        let (replica, pipeline_rank) = match self.rank_order {
            RankOrder::TpPpDp => (group / degrees.pp, group % degrees.pp),
            RankOrder::TpDpPp => (group % degrees.dp, group / degrees.dp),
        };
        Some(Coordinates {
            component,
            replica,
            stage: StageIndex(first_stage + pipeline_rank),
            tensor: position % degrees.tp,
        })
    }

    /// Adds what is wrong with the number of chunks.
    fn check_interleave(&self, name: &str, problems: &mut Vec<String>) {
        let chunks = self.llm_interleave;
        if chunks == 0 {
            problems.push(format!("{name}.llm_interleave: must not be 0"));
        } else if self.is_colocated() && chunks > 1 {
            problems.push(format!(
                "{name}.llm_interleave: {chunks}, must be 1 where the components are colocated"
            ));
        } else if self.llm.pp == 1 && chunks > 1 {
            let rule = "must be 1 where llm.pipeline_parallel_degree is 1";
            problems.push(format!("{name}.llm_interleave: {chunks}, {rule}"));
        }
    }

    /// Adds what is wrong with the layout beyond degrees of 0, each with its field.
    pub(crate) fn check(&self, name: &str, problems: &mut Vec<String>) {
        if self.is_colocated() {
            if self.encoder != self.llm && !self.has_whole_encoders() {
                let degrees = format!("encoder {}, llm {}", self.encoder, self.llm);
                let rule = "both must be equal where they are colocated, or the encoder tp 1 with a replica on each rank";
                problems.push(format!("{name}: {degrees}, {rule}"));
            }
            if self.llm.pp > 1 {
                let pp = self.llm.pp;
                let field = "llm.pipeline_parallel_degree";
                problems.push(format!("{name}.{field}: {pp}, must be 1 where the components are colocated"));
            }
        }
        if self.is_colocated() && self.rank_order != RankOrder::default() {
            let rule = format!("must be {} where the components are colocated", RankOrder::default());
            problems.push(format!("{name}.rank_order: {}, {rule}", self.rank_order));
        }
        if !self.is_colocated() && self.zero == Zero::Parameters {
            let rule = "must be at most 2 where encoder and llm have ranks of their own: those keep whole parameters";
            problems.push(format!("{name}.zero: 3, {rule}"));
        }
        self.check_interleave(name, problems);
        self.check_experts(name, problems);
        let cuts = [("encoder", Component::Encoder), ("llm", Component::Llm)];
        for (component, of) in cuts {
            let (cut, stages) = self.cut_of(of);
            if let Some(cut) = cut.filter(|cut| cut.num_stages() != stages) {
                let found = cut.num_stages();
                let rule = if of == Component::Llm && self.is_interleaved() {
                    let (pp, chunks) = (self.llm.pp, self.llm_interleave);
                    format!("llm.pipeline_parallel_degree x llm_interleave is {pp} x {chunks}, must be equal")
                } else {
                    format!("{component}.pipeline_parallel_degree is {stages}, must be equal")
                };
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
                if self.is_interleaved() {
                    write!(f, " interleave {}", self.llm_interleave)?;
                }
                if let Some(cut) = self.llm_cut {
                    write!(f, " layers {cut}")?;
                }
            }
            Placement::Colocated if self.encoder == self.llm => {
                write!(f, "colocated tp {} dp {}", self.llm.tp, self.llm.dp)?;
            }
            Placement::Colocated => {
                let (encoder, llm) = (self.encoder, self.llm);
                write!(
                    f,
                    "colocated encoder tp {} dp {}, llm tp {} dp {}",
                    encoder.tp, encoder.dp, llm.tp, llm.dp
                )?;
            }
        }
        if self.has_expert_groups() {
            write!(f, ", ep {}", self.expert_parallel_degree)?;
        }
        if self.zero != Zero::Nothing {
            write!(f, ", zero {}", u8::from(self.zero))?;
        }
        if let Some(ranks) = self.shard_ranks {
            write!(f, " over {ranks} ranks")?;
        }
        if self.rank_order == RankOrder::default() {
            Ok(())
        } else {
            write!(f, ", order {}", self.rank_order)
        }
    }
}

mod experts;
mod groups;
#[cfg(test)]
mod tests;
