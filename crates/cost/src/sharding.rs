//! Sharding: what replicas exchange that keep only a part each of states, gradients or parameters.

use crate::cost::CostModel;
use crate::dealt::Held;
use crate::mode::Runs;
use crate::module::{Module, in_forward, is_layer};
use crate::network::{Basis, Group, Route, Spread, Transfer};
use crate::prediction::Prediction;
use crate::stage::{EncoderLayers, StageLayers, samples_of, segments_of};
use dflop_types::{Collective, Component, Layout, MicrobatchShape, StageIndex, Zero};

/// How the states, gradients and parameters of a component are cut over its replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharding {
    /// What is cut.
    pub zero: Zero,
    /// Replicas of the component, at least 1.
    pub replicas: u32,
    /// Replicas over which it is cut, at least 1; groups of them hold copies.
    pub degree: u32,
    /// The rank of the first replica.
    pub first: u32,
    /// Ranks from one replica to the next, at least 1.
    pub stride: u32,
    /// Ranks from the first stage of a replica of the LLM backbone to its last one, at least 1.
    pub ends: u32,
}

impl Sharding {
    /// One replica, which holds all.
    pub const NONE: Self = Self::replicated(1);

    /// Replicas that each hold all.
    pub const fn replicated(replicas: u32) -> Self {
        Self { zero: Zero::Nothing, replicas, degree: 1, first: 0, stride: 1, ends: 1 }
    }

    /// Replicas that are cut as `zero` says over all of them, each on the rank after the one before.
    pub const fn whole(zero: Zero, replicas: u32) -> Self {
        Self { zero, degree: replicas, ..Self::replicated(replicas) }
    }

    /// How `layout` cuts a component.
    pub fn of(layout: &Layout, component: Component) -> Self {
        let is_encoder = component == Component::Encoder;
        let degrees = if is_encoder { layout.encoder } else { layout.llm };
        let is_pipeline = !is_encoder && !layout.is_colocated();
        let first = if is_pipeline { layout.encoder.num_ranks() } else { 0 };
        let last = layout.rank(0, StageIndex(layout.num_stages().saturating_sub(1))).0;
        Self {
            zero: layout.zero,
            replicas: degrees.dp,
            degree: layout.shard_degree(component),
            first,
            stride: layout.replica_stride(component),
            ends: if is_pipeline { last.saturating_sub(first).max(1) } else { 1 },
        }
    }

    /// The replicas over which it is cut.
    const fn shards(&self) -> Group {
        Group { first: self.first, num_ranks: self.degree, stride: self.stride }
    }

    /// The replicas that hold copies of each other's part.
    const fn copies(&self) -> Group {
        let degree = if self.degree == 0 { 1 } else { self.degree };
        Group { first: self.first, num_ranks: self.replicas / degree, stride: self.stride * degree }
    }

    /// Of the experts that each of `degree` ranks of a group holds: every `degree`-th replica has the same ones.
    fn of_experts(self, degree: u32) -> Self {
        let degree = degree.max(1);
        Self {
            replicas: (self.replicas / degree).max(1),
            degree: (self.degree / degree).max(1),
            stride: self.stride * degree,
            ..self
        }
    }

    /// Whether layers are gathered where they run, so that ranks meet in every layer.
    pub const fn gathers_layers(&self) -> bool {
        matches!(self.zero, Zero::Parameters) && self.degree > 1
    }
}

/// How both components of a colocated layout are cut. They differ where each rank holds the whole encoder and a part of the
/// LLM backbone's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColocatedSharding {
    /// Of the encoder.
    pub encoder: Sharding,
    /// Of the LLM backbone.
    pub llm: Sharding,
}

impl ColocatedSharding {
    /// How `layout` cuts both.
    pub fn of(layout: &Layout) -> Self {
        let [encoder, llm] = [Component::Encoder, Component::Llm].map(|of| Sharding::of(layout, of));
        Self { encoder, llm }
    }
}

impl From<Sharding> for ColocatedSharding {
    /// Both alike.
    fn from(both: Sharding) -> Self {
        Self { encoder: both, llm: both }
    }
}

/// Equal layers in one microbatch, or what stands before or behind them, in nanoseconds of one.
#[derive(Debug, Clone, Copy)]
struct Unit {
    count: u64,
    forward_ns: u64,
    backward_ns: u64,
    parameter_bytes: u64,
    gradient_bytes: u64,
    /// Of these, those of experts that are dealt out: fewer replicas have them.
    of_experts: Held,
    /// Whether a backward passes it.
    runs_back: bool,
    /// Whether it is gathered apart; if not, with the root.
    is_alone: bool,
    /// Whether a backward needs its parameters.
    gathers_back: bool,
}

impl Unit {
    fn new(module: &Module, count: u64, one: &Prediction) -> Self {
        Self {
            count,
            forward_ns: one.forward_ns,
            backward_ns: one.backward_ns,
            parameter_bytes: module.parameter_bytes,
            gradient_bytes: module.gradient_bytes,
            of_experts: module.dealt.held(),
            runs_back: module.runs() != Runs::Forward,
            is_alone: true,
            gathers_back: true,
        }
    }

    /// A module that is gathered with the root.
    const fn in_root(self) -> Self {
        Self { is_alone: false, ..self }
    }
}

/// One pass of a unit: its work, the gather before it and the reduction after it, in nanoseconds of one.
#[derive(Debug, Clone, Copy)]
struct Pass {
    count: u64,
    work_ns: u64,
    gather_ns: u64,
    reduce_ns: u64,
}

impl CostModel {
    /// As [`CostModel::encoder`], on a replica of `sharding`: with the time for which collectives of its layers keep it
    /// from computing.
    ///
    /// Where parameters are cut, each unit is gathered before it runs: a layer, the embedding, the head. All else is gathered
    /// before the first unit of a forward and of a backward. Gradients are reduced to their owners behind the backward of each
    /// unit; those of all else behind the last unit. On a GPU the next unit is gathered while one runs:
    ///
    /// ```text
    /// pass = g_1 + sum over k of max(t_k, g_(k+1) + r_(k-1)) + r_n
    /// ```
    ///
    /// for units k of t work, g gather and r reduction, in the order of the pass; r is 0 in a forward. A CPU that sends
    /// does not compute: all of it adds up there. A replica without samples takes part in the collectives all the same.
    pub fn sharded_encoder(&self, microbatch: &MicrobatchShape, sharding: Sharding) -> Prediction {
        let mut sum = self.encoder(microbatch);
        if sharding.gathers_layers() {
            let tokens = microbatch.tower_tokens();
            let unit = |(name, module, count): (&'static str, &Module, u64)| {
                let tower = module.tower;
                let mut one = module.linear(tokens[tower.index()]);
                one.add(&module.segments(segments_of(&microbatch.encoder_segments, tower)), 1);
                let unit = Unit::new(module, count, &one);
                if is_layer(name) { unit } else { unit.in_root() }
            };
            let mut modules: Vec<_> = self.encoder_modules_of(self.whole_encoder()).collect();
            if self.has_first_layers() {
                modules.sort_by_key(|(name, module, _)| in_forward(name, module));
            }
            let units: Vec<Unit> = modules.into_iter().map(unit).collect();
            self.meet(&mut sum, &units, sharding);
        }
        sum
    }

    /// As [`CostModel::llm_stage`], on a replica of `sharding`, as [`CostModel::sharded_encoder`].
    pub fn sharded_stage(
        &self,
        microbatch: &MicrobatchShape,
        stage: StageLayers,
        sharding: Sharding,
    ) -> Prediction {
        let mut sum = self.llm_stage(microbatch, stage.num_layers, stage.is_first, stage.is_last);
        if sharding.gathers_layers() {
            let total = microbatch.total_llm_tokens();
            let head = self.head.linear(microbatch.label_tokens);
            let mut units = Vec::with_capacity(4);
            if stage.is_first {
                // Its gradient is made without it.
                let embedding = Unit::new(&self.embedding, 1, &self.embedding.linear(total));
                units.push(Unit { gathers_back: false, ..embedding });
            }
            for (layer, count) in self.layers_of(stage.num_layers) {
                let mut one = layer.linear(total);
                one.add(&layer.segments(samples_of(&microbatch.llm_tokens)), 1);
                let mut unit = Unit::new(layer, count, &one);
                if layer.is_dealt_out() {
                    // Rows that travel to experts do so over the same links: nothing is gathered beside them.
                    let sent = layer.sent(total);
                    unit.forward_ns = unit.forward_ns.saturating_sub(sent.forward_ns);
                    unit.backward_ns = unit.backward_ns.saturating_sub(sent.backward_ns);
                }
                units.push(unit);
            }
            if stage.is_last {
                units.push(Unit::new(&self.head, 1, &head));
            }
            if self.is_tied && stage.is_first && stage.is_last {
                // What embedding and head share is one matrix, and gathered once, with the root.
                let (first, last) = (0, units.len() - 1);
                units[last] = units[last].in_root();
                units[first] = Unit { parameter_bytes: 0, gradient_bytes: 0, ..units[first].in_root() };
            } else if stage.is_last {
                units.push(self.final_norm());
            }
            self.meet(&mut sum, &units, sharding);
        }
        sum
    }

    /// The root where embedding and head are units of their own: of a message's width, and the head's work holds its own. What
    /// it costs is that ranks meet once more.
    fn final_norm(&self) -> Unit {
        let bytes = |of_head: u64| if of_head == 0 { 0 } else { self.hidden_bytes };
        Unit {
            parameter_bytes: bytes(self.head.parameter_bytes),
            gradient_bytes: bytes(self.head.gradient_bytes),
            ..Unit::new(&self.head, 1, &Prediction::default()).in_root()
        }
    }

    /// Makes both passes as long as they are with the collectives of their units.
    fn meet(&self, sum: &mut Prediction, units: &[Unit], sharding: Sharding) {
        let (shards, copies) =
            (self.shard_spread(sharding), self.links.spread(sharding.copies(), self.ranks_per_node));
        let mut marks = [false; 2];
        // The way is the same for all units, and takes longer to find than to time.
        let by = |collective, spread, ranks| self.route_at(collective, spread, ranks);
        let gathering = by(Collective::AllGather, shards, sharding.degree);
        let scattering = by(Collective::ReduceScatter, shards, sharding.degree);
        let copying = by(Collective::AllReduce, copies, sharding.copies().num_ranks);
        let of_experts = sharding.of_experts(self.settings.llm.expert_parallel_degree);
        let by_experts = |collective| {
            let is_dealt_out = units.iter().any(|unit| unit.of_experts != Held::default());
            let spread = self.shard_spread(of_experts);
            if is_dealt_out { self.route_at(collective, spread, of_experts.degree) } else { None }
        };
        let gathering_experts = by_experts(Collective::AllGather);
        let scattering_experts = by_experts(Collective::ReduceScatter);
        let mut collective = |route: &Option<Route>, bytes| {
            let transfer = route.as_ref().map_or_else(Transfer::default, |route| route.transfer(bytes));
            marks[0] |= transfer.basis == Basis::Assumed;
            marks[1] |= transfer.basis == Basis::Extrapolated;
            transfer.ns
        };
        // Of a layer whose experts are dealt out, these are gathered over their own replicas, and all else over all of them.
        let of_both = |all: u64, experts: u64| [all - experts, experts];
        let mut gather = |[rest, experts]: [u64; 2]| {
            collective(&gathering, rest).saturating_add(collective(&gathering_experts, experts))
        };
        let sum_of = |of: fn(&Unit) -> u64, runs_back: bool| -> u64 {
            let others = units.iter().filter(|unit| !unit.is_alone && (unit.runs_back || !runs_back));
            others.map(|unit| of(unit).saturating_mul(unit.count)).sum()
        };
        let around = gather([sum_of(|unit| unit.parameter_bytes, false), 0]);
        let around_back = gather([sum_of(|unit| unit.parameter_bytes, true), 0]);
        let parameters_of = |unit: &Unit| of_both(unit.parameter_bytes, unit.of_experts.parameter_bytes);
        let gathers: Vec<u64> =
            units.iter().map(|unit| if unit.is_alone { gather(parameters_of(unit)) } else { 0 }).collect();
        // The sums go to the owners of the shards, and then over the groups that hold copies of each other.
        let mut reduce = |[rest, experts]: [u64; 2]| {
            let part = rest.div_ceil(u64::from(sharding.degree.max(1)));
            let of_rest = collective(&scattering, rest).saturating_add(collective(&copying, part));
            of_rest.saturating_add(collective(&scattering_experts, experts))
        };
        let around_reduce = reduce([sum_of(|unit| unit.gradient_bytes, true), 0]);
        let gradients_of = |unit: &Unit| of_both(unit.gradient_bytes, unit.of_experts.gradient_bytes);
        let reduces: Vec<u64> =
            units.iter().map(|unit| if unit.is_alone { reduce(gradients_of(unit)) } else { 0 }).collect();
        let mut forward: Vec<Pass> = units
            .iter()
            .zip(&gathers)
            .map(|(unit, &gather_ns)| Pass {
                count: unit.count,
                work_ns: unit.forward_ns,
                gather_ns,
                reduce_ns: 0,
            })
            .collect();
        let mut backward: Vec<Pass> = units
            .iter()
            .zip(gathers.iter().zip(&reduces))
            .filter(|(unit, _)| unit.runs_back)
            .map(|(unit, (&gather_ns, &reduce_ns))| Pass {
                count: unit.count,
                work_ns: unit.backward_ns,
                gather_ns: if unit.gathers_back { gather_ns } else { 0 },
                reduce_ns,
            })
            .rev()
            .collect();
        // Before and behind the layers, with no work of its own.
        let bare = Pass { count: 1, work_ns: 0, gather_ns: 0, reduce_ns: 0 };
        forward.insert(0, Pass { gather_ns: around, ..bare });
        if !backward.is_empty() {
            backward.insert(0, Pass { gather_ns: around_back, ..bare });
            backward.push(Pass { reduce_ns: around_reduce, ..bare });
        }
        sum.forward_ns = sum.forward_ns.saturating_add(self.exposed_ns(&forward));
        sum.lengthen(self.exposed_ns(&backward), false);
        sum.assumed |= marks[0];
        sum.extrapolated |= marks[1];
    }

    /// How much longer a pass takes with its collectives.
    fn exposed_ns(&self, passes: &[Pass]) -> u64 {
        let mut exposed_ns = 0_u64;
        let mut add = |ns: u64, times: u64| exposed_ns = exposed_ns.saturating_add(ns.saturating_mul(times));
        if !self.holding.sends_beside_work {
            for pass in passes {
                add(pass.gather_ns.saturating_add(pass.reduce_ns), pass.count);
            }
            return exposed_ns;
        }
        let mut reduced_ns = 0;
        for (at, pass) in passes.iter().enumerate() {
            let next_ns = passes.get(at + 1).map_or(0, |next| next.gather_ns);
            if at == 0 {
                add(pass.gather_ns, 1);
            }
            // What of the neighbours' collectives outlasts the work that they run beside.
            let beside = |gather_ns: u64, reduce_ns: u64| {
                gather_ns.saturating_add(reduce_ns).saturating_sub(pass.work_ns)
            };
            if pass.count == 1 {
                add(beside(next_ns, reduced_ns), 1);
            } else if pass.count > 1 {
                add(beside(pass.gather_ns, reduced_ns), 1);
                add(beside(pass.gather_ns, pass.reduce_ns), pass.count - 2);
                add(beside(next_ns, pass.reduce_ns), 1);
            }
            reduced_ns = pass.reduce_ns;
        }
        add(reduced_ns, 1);
        exposed_ns
    }

    /// How far apart the ranks are over which it is cut. Where the size of a node is not known, hybrid groups are taken to
    /// lie within one, which is what they are for.
    fn shard_spread(&self, sharding: Sharding) -> Spread {
        if self.ranks_per_node.is_none() && sharding.degree < sharding.replicas {
            return Spread::within(sharding.degree);
        }
        self.links.spread(sharding.shards(), self.ranks_per_node)
    }

    /// What comes after the last action of a step on an encoder rank: gradients reduced, parameters updated, and
    /// parameters gathered for the next step where only states and gradients are cut.
    ///
    /// ```text
    /// zero 0     all-reduce of G over the replicas + optimizer of P
    /// zero 1, 2  reduce-scatter of G + optimizer of P / n + all-gather of P, over n replicas
    /// zero 3     optimizer of P / n: layers are gathered and reduced where they run
    /// ```
    ///
    /// Groups of n replicas with copies of each other also reduce their parts of G over the groups, under zero 3 where
    /// layers run.
    pub fn sharded_encoder_tail(&self, sharding: Sharding) -> Transfer {
        self.sharded_encoder_stage_tail(self.whole_encoder(), sharding)
    }

    /// As [`CostModel::sharded_encoder_tail`], of a rank of one stage of the encoder.
    pub fn sharded_encoder_stage_tail(&self, stage: EncoderLayers, sharding: Sharding) -> Transfer {
        self.sharded_tail(self.held_by_encoder(stage), sharding)
    }

    /// As [`CostModel::sharded_encoder_tail`], of a rank of one stage of the LLM backbone. The first and the last of several
    /// stages also sum the gradient of a matrix that embedding and head share: over the replicas of both, or, where each
    /// stage has cut it, each part of it over the two ranks that hold this part.
    pub fn sharded_stage_tail(&self, stage: StageLayers, sharding: Sharding) -> Transfer {
        let mut held = self.held_by_stage(stage);
        if !self.is_tied || stage.is_first == stage.is_last {
            return self.sharded_tail(held, sharding);
        }
        let mut shared_bytes = self.embedding.gradient_bytes;
        let both = if sharding.zero == Zero::Nothing {
            held.gradient_bytes -= shared_bytes.min(held.gradient_bytes);
            Group { first: sharding.first, num_ranks: 2 * sharding.replicas, stride: sharding.stride }
        } else {
            shared_bytes = shared_bytes.div_ceil(u64::from(sharding.degree.max(1)));
            Group { first: sharding.first, num_ranks: 2, stride: sharding.ends }
        };
        let mut tail = self.sharded_tail(held, sharding);
        if shared_bytes > 0 {
            let shared = self.meeting(Collective::AllReduce, both, shared_bytes);
            tail.ns = tail.ns.saturating_add(shared.ns);
            tail.basis = tail.basis.max(shared.basis);
        }
        tail
    }

    /// As [`CostModel::sharded_encoder_tail`], of a rank that holds the whole model. Components that are cut alike are reduced
    /// together, others one after the other.
    pub fn colocated_tail(&self, sharding: impl Into<ColocatedSharding>) -> Transfer {
        let sharding = sharding.into();
        let (encoder, llm) =
            (self.held_by_encoder(self.whole_encoder()), self.held_by_stage(self.whole_stage()));
        if sharding.encoder != sharding.llm {
            let (encoder, llm) =
                (self.sharded_tail(encoder, sharding.encoder), self.sharded_tail(llm, sharding.llm));
            return Transfer { ns: encoder.ns.saturating_add(llm.ns), basis: encoder.basis.max(llm.basis) };
        }
        let experts = self.held_by_experts(self.whole_stage());
        let held = Held {
            num_trained: encoder.num_trained.saturating_add(llm.num_trained),
            gradient_bytes: encoder.gradient_bytes.saturating_add(llm.gradient_bytes),
            parameter_bytes: encoder.parameter_bytes.saturating_add(llm.parameter_bytes),
        };
        if experts == Held::default() {
            return self.sharded_tail(held, sharding.llm);
        }
        // The replicas of an expert are fewer than those of all else.
        let of_experts = sharding.llm.of_experts(self.settings.llm.expert_parallel_degree);
        let rest = self.sharded_tail(held.without(&experts), sharding.llm);
        let own = self.sharded_tail(experts, of_experts);
        Transfer { ns: rest.ns.saturating_add(own.ns), basis: rest.basis.max(own.basis) }
    }

    fn sharded_tail(&self, held: Held, sharding: Sharding) -> Transfer {
        let Sharding { zero, degree, .. } = sharding;
        let degree = degree.max(1);
        if zero == Zero::Nothing || degree == 1 {
            return self.tail(
                held.num_trained,
                held.gradient_bytes,
                Sharding { degree: 1, ..sharding }.copies(),
            );
        }
        let spread = self.shard_spread(sharding);
        let part = |value: u64| value.div_ceil(u64::from(degree));
        // Copies of each part, and the optimizer of one part.
        let copies = if zero == Zero::Parameters { Group::of(1) } else { sharding.copies() };
        let mut tail = self.tail(part(held.num_trained), part(held.gradient_bytes), copies);
        if zero < Zero::Parameters {
            let within = [
                self.meeting_at(Collective::ReduceScatter, spread, degree, held.gradient_bytes),
                self.meeting_at(Collective::AllGather, spread, degree, held.parameter_bytes),
            ];
            for transfer in within {
                tail.ns = tail.ns.saturating_add(transfer.ns);
                tail.basis = tail.basis.max(transfer.basis);
            }
        }
        tail
    }
}
