//! Sharding: what replicas exchange that keep only a part each of states, gradients or parameters.

use crate::cost::CostModel;
use crate::mode::Runs;
use crate::module::Module;
use crate::network::{Basis, Transfer};
use crate::prediction::Prediction;
use crate::stage::{StageLayers, samples_of, segments_of};
use dflop_types::{Collective, Component, Layout, LinkSpan, MicrobatchShape, Zero};

/// How the states, gradients and parameters of a component are cut over its replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharding {
    /// What is cut.
    pub zero: Zero,
    /// Replicas of the component, at least 1.
    pub replicas: u32,
    /// Replicas over which it is cut, at least 1; groups of them hold copies.
    pub degree: u32,
}

impl Sharding {
    /// One replica, which holds all.
    pub const NONE: Self = Self::replicated(1);

    /// Replicas that each hold all.
    pub const fn replicated(replicas: u32) -> Self {
        Self { zero: Zero::Nothing, replicas, degree: 1 }
    }

    /// How `layout` cuts a component.
    pub fn of(layout: &Layout, component: Component) -> Self {
        let replicas = if component == Component::Encoder { layout.encoder.dp } else { layout.llm.dp };
        Self { zero: layout.zero, replicas, degree: layout.shard_degree(component) }
    }

    /// Whether layers are gathered where they run, so that ranks meet in every layer.
    pub const fn gathers_layers(&self) -> bool {
        matches!(self.zero, Zero::Parameters) && self.degree > 1
    }
}

/// What replicas hold of a component, or of a stage of it: numbers and bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub(crate) num_trained: u64,
    pub(crate) trained_bytes: u64,
    pub(crate) parameter_bytes: u64,
}

/// Equal layers of one module in one microbatch, in nanoseconds of one layer.
#[derive(Debug, Clone, Copy)]
struct Unit {
    count: u64,
    forward_ns: u64,
    backward_ns: u64,
    gather_ns: u64,
    /// The reduction of its gradients to their owners; 0 where it is frozen.
    reduce_ns: u64,
    /// Whether a backward passes it.
    runs_back: bool,
}

impl CostModel {
    /// As [`CostModel::encoder`], on a replica of `sharding`: with the time for which collectives of its layers keep it
    /// from computing.
    ///
    /// Where parameters are cut, each layer is gathered before its forward and before its backward, and its gradients
    /// are reduced to their owners. On a GPU the next layer is gathered while one runs:
    ///
    /// ```text
    /// forward  = g_1 + sum over k of max(f_k, g_(k+1))
    /// backward = g_n + sum over k, from the last, of max(b_k, g_(k-1) + r_(k+1)) + r_1
    /// ```
    ///
    /// for layers k of f forward, b backward, g gather and r reduction. A CPU that sends does not compute: all of it
    /// adds up there. A replica without samples takes part in the collectives all the same.
    pub fn sharded_encoder(&self, microbatch: &MicrobatchShape, sharding: Sharding) -> Prediction {
        let mut sum = self.encoder(microbatch);
        if sharding.gathers_layers() {
            let total = microbatch.encoder_tokens();
            let mut units = Vec::with_capacity(self.encoder.len());
            for (module, count) in self.encoder_modules() {
                let mut one = module.linear(total);
                one.add(&module.segments(segments_of(&microbatch.encoder_segments)), 1);
                units.push(self.unit(module, count, &one, sharding, &mut sum));
            }
            self.meet(&mut sum, &units);
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
            let mut layer = self.layer.linear(total);
            layer.add(&self.layer.segments(samples_of(&microbatch.llm_tokens)), 1);
            let modules = [
                (&self.embedding, u64::from(stage.is_first), self.embedding.linear(total)),
                (&self.layer, u64::from(stage.num_layers), layer),
                (&self.head, u64::from(stage.is_last), self.head.linear(microbatch.label_tokens)),
            ];
            let held = modules.iter().filter(|(_, count, _)| *count > 0);
            let units: Vec<Unit> =
                held.map(|(module, count, one)| self.unit(module, *count, one, sharding, &mut sum)).collect();
            self.meet(&mut sum, &units);
        }
        sum
    }

    fn unit(
        &self,
        module: &Module,
        count: u64,
        one: &Prediction,
        sharding: Sharding,
        marks: &mut Prediction,
    ) -> Unit {
        let span = self.shard_span(sharding);
        let mut ns = |collective, bytes| {
            let transfer = self.transfer(collective, span, sharding.degree, bytes);
            marks.assumed |= transfer.basis == Basis::Assumed;
            marks.extrapolated |= transfer.basis == Basis::Extrapolated;
            transfer.ns
        };
        Unit {
            count,
            forward_ns: one.forward_ns,
            backward_ns: one.backward_ns,
            gather_ns: ns(Collective::AllGather, module.parameter_bytes),
            reduce_ns: ns(Collective::ReduceScatter, module.trained_bytes),
            runs_back: module.runs() != Runs::Forward,
        }
    }

    /// Makes both passes as long as they are with the collectives of their layers.
    fn meet(&self, sum: &mut Prediction, units: &[Unit]) {
        let forward = units.iter().map(|unit| (unit.count, unit.forward_ns, unit.gather_ns, 0));
        sum.forward_ns = self.with_collectives(sum.forward_ns, forward);
        let backward = units.iter().rev().filter(|unit| unit.runs_back);
        let backward = backward.map(|unit| (unit.count, unit.backward_ns, unit.gather_ns, unit.reduce_ns));
        let longer_ns = self.with_collectives(sum.backward_ns, backward) - sum.backward_ns;
        sum.lengthen(longer_ns, false);
    }

    /// One pass of `work_ns` over runs of equal layers (count, work, gather, reduction), in the order of the pass.
    fn with_collectives(
        &self,
        work_ns: u64,
        runs: impl DoubleEndedIterator<Item = (u64, u64, u64, u64)> + Clone,
    ) -> u64 {
        let mut exposed_ns = 0_u64;
        let mut add = |ns: u64, times: u64| exposed_ns = exposed_ns.saturating_add(ns.saturating_mul(times));
        if !self.holding.sends_beside_work {
            for (count, _, gather_ns, reduce_ns) in runs {
                add(gather_ns.saturating_add(reduce_ns), count);
            }
            return work_ns.saturating_add(exposed_ns);
        }
        let gathers = runs.clone().map(|run| run.2).skip(1).chain(std::iter::once(0));
        let mut reduced_ns = 0;
        for (at, ((count, layer_ns, gather_ns, reduce_ns), next_ns)) in runs.zip(gathers).enumerate() {
            if at == 0 {
                add(gather_ns, 1);
            }
            // What of the neighbours' collectives outlasts the layer that they run beside.
            let beside =
                |gather_ns: u64, reduce_ns: u64| gather_ns.saturating_add(reduce_ns).saturating_sub(layer_ns);
            if count == 1 {
                add(beside(next_ns, reduced_ns), 1);
            } else {
                add(beside(gather_ns, reduced_ns), 1);
                add(beside(gather_ns, reduce_ns), count - 2);
                add(beside(next_ns, reduce_ns), 1);
            }
            reduced_ns = reduce_ns;
        }
        add(reduced_ns, 1);
        work_ns.saturating_add(exposed_ns)
    }

    /// Hybrid groups lie within a node, which is what they are for; all replicas lie as far apart as is known.
    fn shard_span(&self, sharding: Sharding) -> LinkSpan {
        if sharding.degree < sharding.replicas { LinkSpan::Node } else { self.links.widest() }
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
    /// Groups of n replicas with copies of each other also reduce their parts of G over the groups.
    pub fn sharded_encoder_tail(&self, sharding: Sharding) -> Transfer {
        self.sharded_tail(self.held_by_encoder(), sharding)
    }

    /// As [`CostModel::sharded_encoder_tail`], of a rank of one stage of the LLM backbone.
    pub fn sharded_stage_tail(&self, stage: StageLayers, sharding: Sharding) -> Transfer {
        self.sharded_tail(self.held_by_stage(stage), sharding)
    }

    /// As [`CostModel::sharded_encoder_tail`], of a rank that holds the whole model.
    pub fn colocated_tail(&self, sharding: Sharding) -> Transfer {
        let (encoder, llm) = (self.held_by_encoder(), self.held_by_stage(self.whole_stage()));
        let held = Held {
            num_trained: encoder.num_trained.saturating_add(llm.num_trained),
            trained_bytes: encoder.trained_bytes.saturating_add(llm.trained_bytes),
            parameter_bytes: encoder.parameter_bytes.saturating_add(llm.parameter_bytes),
        };
        self.sharded_tail(held, sharding)
    }

    fn held_by_encoder(&self) -> Held {
        Held {
            num_trained: self.over_encoder(|module| module.num_trained_parameters),
            trained_bytes: self.over_encoder(|module| module.trained_bytes),
            parameter_bytes: self.over_encoder(|module| module.parameter_bytes),
        }
    }

    fn held_by_stage(&self, stage: StageLayers) -> Held {
        Held {
            num_trained: self.over_stage(stage, |module| module.num_trained_parameters),
            trained_bytes: self.over_stage(stage, |module| module.trained_bytes),
            parameter_bytes: self.over_stage(stage, |module| module.parameter_bytes),
        }
    }

    fn sharded_tail(&self, held: Held, sharding: Sharding) -> Transfer {
        let Sharding { zero, replicas, degree } = sharding;
        let degree = degree.max(1);
        if zero == Zero::Nothing || degree == 1 {
            return self.tail(held.num_trained, held.trained_bytes, replicas);
        }
        let span = self.shard_span(sharding);
        let part = |value: u64| value.div_ceil(u64::from(degree));
        // Copies of each part, and the optimizer of one part.
        let mut tail = self.tail(part(held.num_trained), part(held.trained_bytes), replicas / degree);
        if zero < Zero::Parameters {
            let within = [
                self.transfer(Collective::ReduceScatter, span, degree, held.trained_bytes),
                self.transfer(Collective::AllGather, span, degree, held.parameter_bytes),
            ];
            for transfer in within {
                tail.ns = tail.ns.saturating_add(transfer.ns);
                tail.basis = tail.basis.max(transfer.basis);
            }
        }
        tail
    }
}
