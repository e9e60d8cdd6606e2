//! What the ranks of a plan send in a step: bytes, the time of it, and how much of that time no computing hides.
//!
//! The cost model adds collectives to the times of layers, and what is sent beside work only where it outlasts the work. So the
//! predictions have no time of communication by itself. It is found by predicting one schedule over several networks:
//!
//! ```text
//! exposed of a kind   step with its links - step without them, the kinds before it being free already
//! D(k)                work of the ranks if every message takes k times as long
//! time                (D(2 k) - D(k)) / k         k so large that every message outlasts the work beside it
//! bytes               the same, over links of one byte a nanosecond
//! ```

use crate::baseline::refusal;
use crate::error::PlanError;
use crate::input::SearchInput;
use crate::models::Models;
use crate::search::sampled_batches;
use crate::space::Candidate;
use dflop_sim::StepInput;
use dflop_sim::wiring::Source;
use dflop_step::{Arm, StepScheduler};
use dflop_types::number::{self, percent};
use dflop_types::{
    Collective, Layout, LinkProfile, LinkSpan, ModelProfile, Network, RankedPlan, Schedule, memory_size,
};
use rayon::prelude::*;

/// The most global batches that the times are a mean of.
const BATCHES: usize = 2;

/// Samples in one batch beyond which one batch is enough.
const LARGE_SAMPLES: usize = 1_024;

/// How many times as long messages take when their time is looked for. A gather of a microsecond then outlasts a layer of 100 ms.
const SLOWER: u64 = 100_000;

/// The kinds, in the order in which they become free.
const KINDS: [(Collective, &str); 5] = [
    // Where it was not measured it takes as long as an all-gather. So it becomes free before that one.
    (Collective::AllToAll, "all-to-all"),
    (Collective::AllGather, "all-gather"),
    (Collective::ReduceScatter, "reduce-scatter"),
    (Collective::AllReduce, "all-reduce"),
    (Collective::PointToPoint, "point to point"),
];

/// The kinds that ranks of this layout may use.
const fn kinds_of(layout: &Layout) -> &'static [(Collective, &'static str)] {
    if layout.has_expert_groups() { &KINDS } else { KINDS.split_at(1).1 }
}

/// Communication of one kind in a step, as the mean over two sampled global batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes over the link of a rank, the mean over ranks: what a ring sends, `2 (n - 1) / n` of the bytes of an all-reduce.
    pub bytes: u64,
    /// How long a rank sends, the mean over ranks, in nanoseconds.
    pub ns: u64,
    /// By how much the step is longer for it, in nanoseconds.
    pub exposed_ns: u64,
}

impl Sent {
    /// What is sent beside computing, in nanoseconds.
    pub const fn overlapped_ns(&self) -> u64 {
        self.ns.saturating_sub(self.exposed_ns)
    }

    fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.ns += other.ns;
        self.exposed_ns += other.exposed_ns;
    }
}

/// Communication of a step by kind: all-to-all where experts are dealt out, all-gather, reduce-scatter, all-reduce, and messages from rank to rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Communication {
    /// Kinds by name; one that is not used has zeros.
    pub kinds: Vec<(&'static str, Sent)>,
}

impl Communication {
    /// All kinds together.
    pub fn total(&self) -> Sent {
        let mut sum = Sent::default();
        self.kinds.iter().for_each(|(_, sent)| sum.add(*sent));
        sum
    }

    /// Two lines for people, of a step of `step_ns`.
    pub fn words(&self, step_ns: u64) -> String {
        let total = self.total();
        let kinds: Vec<String> = self
            .kinds
            .iter()
            .filter(|(_, sent)| sent.ns > 0)
            .map(|(name, sent)| format!("{name} {}", number::ns(sent.ns)))
            .collect();
        let by_kind = if kinds.len() > 1 { format!(" ({})", kinds.join(", ")) } else { String::new() };
        format!(
            "communication: a rank sends {} in {} of the step{by_kind}, {} of it beside computing\nexposed communication: {} of the step, {}: what computing does not hide\n",
            memory_size(total.bytes),
            number::ns(total.ns),
            number::ns(total.overlapped_ns()),
            number::ns(total.exposed_ns),
            percent(total.exposed_ns as f64 / step_ns.max(1) as f64),
        )
    }
}

/// What the ranks of `plan` send in a step; `None` where nothing is sent or nothing is known of links.
///
/// The schedules are the scheduler's first answers, each timed over networks of which ever more is free. A batch whose first
/// answer is over the memory is searched whole, as in training; one that fits by no schedule is left out.
///
/// *Not modelled*: collectives of tensor groups in a profile that measured them as a part of their layers.
///
/// # Errors
/// As [`crate::search()`].
pub fn communication(input: &SearchInput<'_>, plan: &RankedPlan) -> Result<Option<Communication>, PlanError> {
    let network = &input.model_profile.network;
    if plan.layout.num_ranks() < 2 || network.links.is_empty() {
        return Ok(None);
    }
    let over = |network: Network| over(input, plan, network);
    let scheduler = over(network.clone())?;
    let mut batches = sampled_batches(input)?;
    batches.truncate(if batches[0].len() > LARGE_SAMPLES { 1 } else { BATCHES });
    let mut steps = Vec::with_capacity(batches.len());
    for (step, batch) in (0..).zip(&batches) {
        let first = scheduler.schedule_until(step, batch, Arm::AWARE, &|| true);
        let whole = |_| scheduler.schedule(step, batch, Arm::AWARE);
        match first.or_else(whole) {
            Ok(schedule) => steps.push(schedule),
            Err(error) if refusal(&error).is_some() => {}
            Err(error) => return Err(error.into()),
        }
    }
    if steps.is_empty() {
        return Ok(None);
    }
    let (bytes, kinds) = (byte_network(), kinds_of(&plan.layout));
    let of_free = |num_free: usize| -> Result<Sent, PlanError> {
        let free = |network: &Network, slower| without(&scaled(network, slower), &kinds[..num_free]);
        let step_ns = makespan_ns(&over(free(network, 1))?, &steps)?;
        let of = |network: &Network| -> Result<u64, PlanError> {
            let [once, twice] = [SLOWER, 2 * SLOWER].map(|slower| over(free(network, slower)));
            let more = work_ns(&twice?, &steps)?.saturating_sub(work_ns(&once?, &steps)?);
            Ok(u64::try_from(more / u128::from(SLOWER)).unwrap_or(u64::MAX))
        };
        let (ns, bytes) = if num_free == kinds.len() { (0, 0) } else { (of(network)?, of(&bytes)?) };
        Ok(Sent { bytes, ns, exposed_ns: step_ns })
    };
    // What is left where the first kinds are free; of the step, all that it takes.
    let left: Vec<Sent> = (0..=kinds.len()).into_par_iter().map(of_free).collect::<Result<_, PlanError>>()?;
    let less = |pair: &[Sent]| Sent {
        bytes: pair[0].bytes.saturating_sub(pair[1].bytes),
        ns: pair[0].ns.saturating_sub(pair[1].ns),
        exposed_ns: pair[0].exposed_ns.saturating_sub(pair[1].exposed_ns),
    };
    let kinds = kinds.iter().zip(left.windows(2)).map(|((_, name), pair)| (*name, less(pair))).collect();
    Ok(Some(Communication { kinds }))
}

/// The scheduler of the plan over another network.
fn over(input: &SearchInput<'_>, plan: &RankedPlan, network: Network) -> Result<StepScheduler, PlanError> {
    let profile = ModelProfile { network, ..input.model_profile.clone() };
    let other = SearchInput { model_profile: &profile, ..input.clone() };
    let degrees = [Some(plan.layout.encoder.tp), Some(plan.layout.llm.tp)];
    Candidate::from(plan).scheduler(&other, &Models::cut_over(&other, degrees)?)
}

/// A network in which each message takes `slower` times as long.
fn scaled(network: &Network, slower: u64) -> Network {
    let mut network = network.clone();
    for link in &mut network.links {
        link.latency_ns = link.latency_ns.saturating_mul(slower);
        link.bandwidth_bytes_per_s = (link.bandwidth_bytes_per_s / slower).max(1);
        link.points.iter_mut().for_each(|point| point.ns = point.ns.saturating_mul(slower));
    }
    network
}

/// A network in which these kinds take no time.
fn without(network: &Network, free: &[(Collective, &str)]) -> Network {
    let mut network = network.clone();
    for &(collective, _) in free {
        network.links.retain(|link| link.collective != collective);
        let spans = [LinkSpan::Node, LinkSpan::Cluster];
        network.links.extend(spans.map(|span| link(collective, span, u64::MAX)));
    }
    network
}

/// A network in which a byte takes a nanosecond, and nothing else does.
fn byte_network() -> Network {
    let links = KINDS.map(|(collective, _)| link(collective, LinkSpan::Node, 1_000_000_000));
    Network { backend: String::new(), is_assumed: false, links: links.into() }
}

const fn link(collective: Collective, span: LinkSpan, bandwidth_bytes_per_s: u64) -> LinkProfile {
    LinkProfile { collective, span, num_ranks: 2, latency_ns: 0, bandwidth_bytes_per_s, points: Vec::new() }
}

/// The mean step of the steps, in nanoseconds.
fn makespan_ns(scheduler: &StepScheduler, steps: &[Schedule]) -> Result<u64, PlanError> {
    let mut sum = 0;
    for schedule in steps {
        sum += scheduler.simulate(schedule)?.makespan_ns;
    }
    Ok(sum / steps.len().max(1) as u64)
}

/// What a rank computes and sends in a step, whether beside each other or not, in nanoseconds: the mean over ranks and steps.
fn work_ns(scheduler: &StepScheduler, steps: &[Schedule]) -> Result<u128, PlanError> {
    let (mut sum, mut num_ranks) = (0, 0);
    for schedule in steps {
        let step = scheduler.step_input(schedule)?;
        let rows = step.forward_ns.iter().chain(&step.backward_ns).flatten();
        sum += rows.chain(&step.tail_ns).map(|&ns| u128::from(ns)).sum::<u128>();
        sum += u128::from(step.transfer_ns) * u128::from(num_messages(&step));
        num_ranks += u128::from(step.layout.num_ranks());
    }
    Ok(sum / num_ranks.max(1))
}

/// Messages of a step, there and back. Colocated ranks exchange features all at once: that is one message of each rank.
fn num_messages(step: &StepInput) -> u64 {
    let feeds = step.boundary();
    if step.layout.is_colocated() {
        let exchanges = feeds.exchanges.iter().filter(|&&is_exchanged| is_exchanged).count() as u64;
        return 2 * exchanges * u64::from(step.layout.num_ranks());
    }
    let mut there = 0;
    for (row, forward_ns) in step.wired_rows().iter().zip(&step.forward_ns) {
        for (j, _) in forward_ns.iter().enumerate().filter(|(_, ns)| **ns > 0) {
            there += match row.forward {
                Source::Nothing => 0,
                Source::Row(_) => 1,
                Source::Boundary { replica } => feeds.forward.row(j, replica).len() as u64,
            };
        }
    }
    2 * there
}
