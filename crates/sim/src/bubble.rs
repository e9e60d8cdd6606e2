//! Idle time by cause, of simulated and of measured steps.
//!
//! Three totals over all ranks, each of the same order and the same feeds:
//!
//! ```text
//! uniform = idle if every F took the mean F, every B the mean B; no transfer, no tails
//! free    = idle with the real durations and tails; no transfer
//! actual  = idle as simulated or measured            = ranks x makespan - actions - tails
//!
//! ramp      = min(uniform, free, actual)
//! imbalance = min(free, actual) - ramp
//! transfer  = actual - min(free, actual)
//! ```
//!
//! The means are over all ranks and microbatches, rounded down. `free <= actual` always holds in a
//! simulation, since a transfer delays and never hastens; in a measurement it may fail where clocks disagree.
//! `uniform` may exceed `free` where uneven work happens to fill and drain faster: then all of it is ramp.

use crate::error::{Problem, SimError};
use crate::simulator::Simulator;
use crate::step::StepInput;
use dflop_types::{Idle, Rank, Span, Timeline};

/// Idle time of the step in `simulator`, whose simulated makespan is `makespan_ns`.
pub(crate) fn split(simulator: &mut Simulator, makespan_ns: u64) -> Idle {
    let ranks = simulator.graph.places.len() as u64;
    let busy_ns = simulator.durations_ns.iter().chain(&simulator.tails_ns).sum::<u64>();
    by_cause(simulator, ranks * makespan_ns - busy_ns)
}

/// `actual_ns` of idle time split by cause.
fn by_cause(simulator: &mut Simulator, actual_ns: u64) -> Idle {
    let free_ns = simulator.free_idle_ns().min(u128::from(actual_ns)) as u64;
    let ramp = simulator.uniform_idle_ns().min(u128::from(free_ns)) as u64;
    Idle { ramp, imbalance: free_ns - ramp, transfer: actual_ns - free_ns }
}

impl Simulator {
    /// Idle time of all ranks with the real durations and tails, and no transfer, in nanoseconds.
    fn free_idle_ns(&mut self) -> u128 {
        self.graph.run(&self.durations_ns, &self.feeds, &self.as_given, 0, &mut self.clock);
        let busy_ns: u128 = self.durations_ns.iter().chain(&self.tails_ns).map(|&ns| u128::from(ns)).sum();
        u128::from(self.end_ns(true)) * self.graph.places.len() as u128 - busy_ns
    }

    /// Idle time of all ranks if each kind of action took its mean time, without transfers and tails, in
    /// nanoseconds.
    fn uniform_idle_ns(&mut self) -> u128 {
        let m = self.graph.num_microbatches;
        let ranks = self.graph.places.len();
        if m == 0 {
            return 0;
        }
        let rows = self.durations_ns.chunks_exact(m);
        let (mut forward_ns, mut backward_ns) = (0, 0);
        for (row, list) in rows.enumerate() {
            *(if row % 2 == 0 { &mut forward_ns } else { &mut backward_ns }) += list.iter().sum::<u64>();
        }
        let (forward_ns, backward_ns) = (forward_ns / (ranks * m) as u64, backward_ns / (ranks * m) as u64);
        let uniform = &mut self.tried.0;
        uniform.clear();
        for _ in 0..ranks {
            uniform.resize(uniform.len() + m, forward_ns);
            uniform.resize(uniform.len() + m, backward_ns);
        }
        self.graph.run(uniform, &self.feeds, &self.as_given, 0, &mut self.clock);
        let busy_ns = u128::from(forward_ns + backward_ns) * (ranks * m) as u128;
        u128::from(self.end_ns(false)) * ranks as u128 - busy_ns
    }
}

/// Idle time by cause of a measured step, over the span from its first start to its last end.
///
/// The causes are those of a simulated step, from the measured durations put into `input`'s layout, order and
/// feeds. What they do not explain is counted as transfer: data under way, and whatever else kept a rank from
/// starting in time. The tails of `input` take no part, since spans do not show them.
///
/// # Errors
/// As [`measured_timeline`].
pub fn idle_of(input: &StepInput, measured: &[Span]) -> Result<Idle, SimError> {
    measured_timeline(input, measured).map(|timeline| timeline.idle_ns)
}

/// The timeline of a measured step: spans by rank and start, makespan from the first start to the last end,
/// and idle time by cause as [`idle_of`] splits it.
///
/// *Complexity*: O(n log n) in the spans.
///
/// # Errors
/// [`SimError::Unsound`] if `input` is not sound or `measured` is not one span for each of its actions, none
/// overlapping another of its rank; [`SimError::Overflow`].
pub fn measured_timeline(input: &StepInput, measured: &[Span]) -> Result<Timeline, SimError> {
    let mut input = durations_of(measured, input)?;
    input.tail_ns.fill(0);
    let mut simulator = Simulator::new(&input)?;
    let mut spans = measured.to_vec();
    spans.sort_unstable_by_key(|span| (span.rank, span.start_ns, span.end_ns));
    let overlaps =
        spans.windows(2).filter(|pair| pair[0].rank == pair[1].rank && pair[1].start_ns < pair[0].end_ns);
    let problems: Vec<_> = overlaps
        .map(|pair| Problem::Overlap { rank: pair[0].rank, first: pair[0].action, second: pair[1].action })
        .collect();
    if !problems.is_empty() {
        return Err(SimError::Unsound { subject: "the measured step", problems });
    }
    let first_ns = spans.iter().map(|span| span.start_ns).min().unwrap_or(0);
    let makespan_ns = spans.iter().map(|span| span.end_ns).max().unwrap_or(0) - first_ns;
    let num_ranks = simulator.graph.places.len();
    let whole_ns = makespan_ns.checked_mul(num_ranks as u64).ok_or(SimError::Overflow { num_ranks })?;
    // Spans of a rank do not overlap and lie within the makespan, so that busy time fits the whole.
    let busy_ns: u64 = spans.iter().map(Span::duration_ns).sum();
    let idle_ns = by_cause(&mut simulator, whole_ns - busy_ns);
    Ok(Timeline { num_ranks: num_ranks as u32, makespan_ns, idle_ns, spans })
}

/// `input` with the measured duration of each action in place of its own: what the simulator needs to be
/// judged apart from the cost model.
///
/// # Errors
/// [`SimError::Unsound`] if `input` is not sound, if an action of it was not measured or measured twice, if a
/// span ends before it starts, or belongs to no action of its rank.
pub fn durations_of(measured: &[Span], input: &StepInput) -> Result<StepInput, SimError> {
    input.check()?;
    let m = input.num_microbatches as usize;
    let mut counts = vec![0_usize; input.layout.num_ranks() as usize * 2 * m];
    let mut problems = Vec::new();
    let mut output = input.clone();
    for &Span { rank, action, start_ns, end_ns } in measured {
        let Some(local) = input.local_slot(rank, action) else {
            problems.push(Problem::Foreign { path: "spans".to_owned(), rank, action });
            continue;
        };
        counts[rank.index() * 2 * m + local] += 1;
        match end_ns.checked_sub(start_ns) {
            Some(duration_ns) if local < m => output.forward_ns[rank.index()][local] = duration_ns,
            Some(duration_ns) => output.backward_ns[rank.index()][local - m] = duration_ns,
            None => problems.push(Problem::Backwards { rank, action }),
        }
    }
    let at = |slot: usize| {
        let rank = Rank((slot / (2 * m)) as u32);
        (rank, input.local_action(rank, slot % (2 * m)))
    };
    let missing = counts.iter().filter(|&&count| count == 0).count();
    if let Some(first) = counts.iter().position(|&count| count == 0) {
        let (rank, action) = at(first);
        problems.push(Problem::Unmeasured { missing, total: counts.len(), rank, action });
    }
    for (slot, &count) in counts.iter().enumerate().filter(|&(_, &count)| count > 1) {
        let (rank, action) = at(slot);
        problems.push(Problem::NotOnce { path: format!("spans of rank {rank}"), action, count });
    }
    if problems.is_empty() {
        Ok(output)
    } else {
        Err(SimError::Unsound { subject: "the measured step", problems })
    }
}
