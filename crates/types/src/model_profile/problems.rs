//! The model profile as a file: what is wrong with its numbers.

use super::{ModelProfile, ModuleProfile};
use crate::artifact::{Artifact, MadeFrom};
use crate::recomputation::Recompute;

impl Artifact for ModelProfile {
    const KIND: &'static str = "model_profile";
    const FORMAT_VERSION: u32 = 2;
    const MEND: &'static str = "dflop profile model";

    fn made_from(&self) -> &MadeFrom {
        &self.made_from
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for name in Self::MODULES {
            match self.modules.get(name) {
                None => problems.push(format!("modules.{name}: is missing")),
                Some(module) if module.linear.points.is_empty() => {
                    problems.push(format!("modules.{name}.linear: has no points"));
                }
                Some(_) => {}
            }
        }
        let second = Self::SECOND_TOWER.map(|name| self.modules.contains_key(name));
        if second.contains(&true) && second.contains(&false) {
            problems.push(format!("modules: must have all of {} or none", Self::SECOND_TOWER.join(", ")));
        }
        for (name, module) in &self.modules {
            module_problems(&format!("modules.{name}"), module, &mut problems);
        }
        for (index, variant) in self.variants.iter().enumerate() {
            if variant.tensor_parallel_degree == 0 {
                problems.push(format!("variants[{index}].tensor_parallel_degree: must not be 0"));
            }
            for (name, module) in &variant.modules {
                module_problems(&format!("variants[{index}].modules.{name}"), module, &mut problems);
            }
        }
        for (index, link) in self.network.links.iter().enumerate() {
            if link.bandwidth_bytes_per_s == 0 {
                problems.push(format!("network.links[{index}].bandwidth_bytes_per_s: must not be 0"));
            }
            if link.num_ranks < 2 {
                problems.push(format!("network.links[{index}].num_ranks: {} is below 2", link.num_ranks));
            }
            let place = format!("network.links[{index}]");
            within(&place, &[("latency_ns", link.latency_ns)], limits::NS, &mut problems);
            let speed = [("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s)];
            within(&place, &speed, limits::BYTES, &mut problems);
            for (number, point) in link.points.iter().enumerate() {
                let place = format!("{place}.points[{number}]");
                within(&place, &[("ns", point.ns)], limits::NS, &mut problems);
                within(&place, &[("bytes", point.bytes)], limits::BYTES, &mut problems);
            }
        }
        let optimizer = [("optimizer_ns_per_million", self.optimizer_ns_per_million)];
        within("", &optimizer, limits::NS, &mut problems);
        let bytes = [
            ("hidden_bytes", self.hidden_bytes),
            ("feature_bytes", self.feature_bytes),
            ("device.memory_bytes", self.device.memory_bytes),
            ("memory.context_bytes", self.memory.context_bytes),
        ];
        within("", &bytes, limits::BYTES, &mut problems);
        let overhead =
            [("memory.allocator_overhead_permille", self.memory.allocator_overhead_permille.into())];
        within("", &overhead, limits::PERMILLE, &mut problems);
        problems
    }
}

/// The largest numbers that a model profile may hold: far above every machine, and small enough that sums over a cluster
/// and a training run fit their integers.
mod limits {
    /// One run of one module, in nanoseconds: 2 h 46 min.
    pub(super) const NS: u64 = 10_000_000_000_000;
    /// Bytes, or bytes a second: 1 PiB.
    pub(super) const BYTES: u64 = 1 << 50;
    /// Tokens of one microbatch.
    pub(super) const TOKENS: u64 = 1 << 40;
    /// Layers of one kind.
    pub(super) const COUNT: u64 = 1 << 16;
    /// Parameters of one module.
    pub(super) const PARAMETERS: u64 = 1 << 50;
    /// What the allocator holds above the tensors: a hundred times as much.
    pub(super) const PERMILLE: u64 = 100_000;
}

/// Adds each of the numbers that is above `limit`, by its name behind `place`.
fn within(place: &str, numbers: &[(&str, u64)], limit: u64, problems: &mut Vec<String>) {
    let dot = if place.is_empty() { "" } else { "." };
    let above = numbers.iter().filter(|(_, number)| *number > limit);
    problems
        .extend(above.map(|(name, number)| format!("{place}{dot}{name}: {number}, must be at most {limit}")));
}

/// What is wrong with one module's numbers, each with its place.
fn module_problems(place: &str, module: &ModuleProfile, problems: &mut Vec<String>) {
    if module.count == 0 {
        problems.push(format!("{place}.count: must not be 0"));
    }
    let mut ascend = |place: String, sizes: Vec<u64>| {
        for (index, pair) in sizes.windows(2).enumerate() {
            if pair[1] <= pair[0] {
                problems.push(format!(
                    "{place}[{}].size: {} does not exceed {}",
                    index + 1,
                    pair[1],
                    pair[0]
                ));
            }
        }
    };
    for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
        ascend(format!("{place}.{part}.points"), curve.points.iter().map(|point| point.size).collect());
    }
    for (mode, points) in &module.recompute {
        ascend(format!("{place}.recompute.{mode}"), points.iter().map(|point| point.size).collect());
    }
    if let Some(experts) = &module.experts {
        experts.check(place, [module.num_parameters, module.parameter_bytes], problems);
    }
    for mode in module.recompute.keys().filter(|mode| !Recompute::ALL.contains(mode)) {
        problems.push(format!("{place}.recompute.{mode}: must be of one layer, `selective` or `full`"));
    }
    for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
        for (index, point) in curve.points.iter().enumerate() {
            if point.forward_ns == 0 {
                problems.push(format!("{place}.{part}.points[{index}].forward_ns: must not be 0"));
            }
        }
    }
    range_problems(place, module, problems);
}

/// The numbers of one module that are too large to be true.
fn range_problems(place: &str, module: &ModuleProfile, problems: &mut Vec<String>) {
    within(place, &[("count", module.count.into())], limits::COUNT, problems);
    within(place, &[("num_parameters", module.num_parameters)], limits::PARAMETERS, problems);
    within(place, &[("parameter_bytes", module.parameter_bytes)], limits::BYTES, problems);
    for (part, curve) in [("linear", &module.linear), ("attention", &module.attention)] {
        if let Some(size) = curve.out_of_memory_at {
            within(&format!("{place}.{part}"), &[("out_of_memory_at", size)], limits::TOKENS, problems);
        }
        for (index, point) in curve.points.iter().enumerate() {
            let place = format!("{place}.{part}.points[{index}]");
            within(&place, &[("size", point.size)], limits::TOKENS, problems);
            let times = [
                ("forward_ns", point.forward_ns),
                ("backward_ns", point.backward_ns),
                ("input_ns", point.input_ns),
                ("weight_ns", point.weight_ns),
                ("spread_ns", point.spread_ns),
            ];
            within(&place, &times, limits::NS, problems);
            let split = point.split.unwrap_or_default();
            let bytes = [
                ("activation_bytes", point.activation_bytes),
                ("workspace_bytes", point.workspace_bytes),
                ("split.queued_bytes", split.queued_bytes),
                ("split.input_workspace_bytes", split.input_workspace_bytes),
                ("split.weight_workspace_bytes", split.weight_workspace_bytes),
            ];
            within(&place, &bytes, limits::BYTES, problems);
        }
    }
    for (mode, points) in &module.recompute {
        for (index, point) in points.iter().enumerate() {
            let place = format!("{place}.recompute.{mode}[{index}]");
            within(&place, &[("size", point.size)], limits::TOKENS, problems);
            within(&place, &[("extra_ns", point.extra_ns)], limits::NS, problems);
            within(&place, &[("activation_bytes", point.activation_bytes)], limits::BYTES, problems);
        }
    }
}
