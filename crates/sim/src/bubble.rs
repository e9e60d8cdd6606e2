//! Idle time by cause, of simulated and of measured steps.
//!
//! The step is simulated several times, each time with one cause of waiting taken away. The order of actions stays the
//! same, and so do the replicas that feed each other. Each line is a total over all ranks:
//!
//! ```text
//! uniform = idle if every F took the mean F, and so for B, I and W; no transfer, no tails, no wait for data
//! free    = idle with the real durations and tails; no transfer, no wait for data
//! waits   = idle that is added if ranks can start only when their data is there
//! actual  = idle as simulated or measured            = ranks x makespan - actions - tails
//!
//! ramp      = min(uniform, free, actual)
//! imbalance = min(free, actual) - ramp
//! data wait = min(waits, actual - min(free, actual))
//! transfer  = what is left
//! ```
//!
//! The means are over all ranks and microbatches, rounded down. In a simulation `free <= actual` always holds, because a
//! transfer can only delay an action. In a measurement it may fail if the clocks of two machines disagree.
//! `uniform` may exceed `free` if uneven work happens to fill and drain the pipeline faster: then all of `free` is ramp.

use crate::engine::Times;
use crate::error::{SimError, Violation};
use crate::simulator::Simulator;
use crate::step::{Counts, StepInput};
use dflop_types::{Action, ActionKind, Idle, Rank, Span, Timeline};

/// Idle time of the step in `simulator`, whose simulated makespan is `makespan_ns`.
pub(crate) fn split(simulator: &mut Simulator, makespan_ns: u64) -> Idle {
    let ranks = simulator.graph.num_ranks() as u64;
    let busy_ns = simulator.durations_ns.iter().chain(&simulator.tails_ns).sum::<u64>();
    by_cause(simulator, ranks * makespan_ns - busy_ns)
}

/// The idle time `actual_ns` of all ranks, split by cause.
fn by_cause(simulator: &mut Simulator, actual_ns: u64) -> Idle {
    let free_ns = simulator.free_idle_ns().min(u128::from(actual_ns)) as u64;
    let ramp = simulator.uniform_idle_ns().min(u128::from(free_ns)) as u64;
    let rest_ns = actual_ns - free_ns;
    let data_wait = simulator.data_wait_ns().min(u128::from(rest_ns)) as u64;
    Idle { ramp, imbalance: free_ns - ramp, transfer: rest_ns - data_wait, data_wait }
}

impl Simulator {
    /// The timeline of the step as it stands, with its idle time by cause.
    ///
    /// *Complexity*: three passes of O(actions + boundary edges), two more where ranks wait for their data.
    pub fn timeline(&mut self) -> Timeline {
        let makespan_ns = self.makespan_ns();
        let mut spans = Vec::with_capacity(self.graph.lists.num_actions());
        for rank in 0..self.graph.num_ranks() {
            spans.extend(self.graph.lists.of(rank).iter().map(|&slot| {
                let end_ns = self.clock.end_ns[slot as usize];
                let start_ns = end_ns - self.durations_ns[slot as usize];
                Span { rank: Rank(rank as u32), action: self.graph.action(slot), start_ns, end_ns }
            }));
        }
        let idle_ns = split(self, makespan_ns);
        Timeline { num_ranks: self.graph.num_ranks() as u32, makespan_ns, idle_ns, spans }
    }

    /// Makespan with the real durations and tails, in nanoseconds.
    fn makespan_with(&mut self, transfer_ns: u64, ready_ns: &[u64]) -> u128 {
        let (durations_ns, feeds, order) =
            (self.durations_ns.as_slice(), &self.feeds, self.standing.as_slice());
        let times = Times { durations_ns, feeds, order, transfer_ns };
        self.graph.run(&times, ready_ns, &mut self.clock);
        self.swaps.is_timed = false;
        u128::from(self.end_ns(true))
    }

    /// Idle time of all ranks with the real durations and tails, without transfers and waits for data, in nanoseconds.
    fn free_idle_ns(&mut self) -> u128 {
        let busy_ns: u128 = self.durations_ns.iter().chain(&self.tails_ns).map(|&ns| u128::from(ns)).sum();
        self.makespan_with(0, &[]) * self.graph.num_ranks() as u128 - busy_ns
    }

    /// What waiting for data adds to the idle time of all ranks, in nanoseconds.
    fn data_wait_ns(&mut self) -> u128 {
        if self.ready_ns.is_empty() {
            return 0;
        }
        let (transfer_ns, ready_ns) = (self.transfer_ns, std::mem::take(&mut self.ready_ns));
        let waiting_ns = self.makespan_with(transfer_ns, &ready_ns);
        let at_once_ns = self.makespan_with(transfer_ns, &[]);
        self.ready_ns = ready_ns;
        (waiting_ns - at_once_ns) * self.graph.num_ranks() as u128
    }

    /// Idle time of all ranks if each kind of action took its mean time, without transfers and tails, in
    /// nanoseconds.
    fn uniform_idle_ns(&mut self) -> u128 {
        let (m, width) = (self.graph.lists.num_microbatches, self.graph.lists.width);
        let ranks = self.graph.num_ranks();
        if m == 0 {
            return 0;
        }
        // Count and time of F, B, I and W.
        let mut sums = [(0_u64, 0_u64); 4];
        let mut add = |kind: ActionKind, ns: &[u64]| {
            let sum = &mut sums[kind as usize];
            *sum = (sum.0 + ns.len() as u64, sum.1 + ns.iter().sum::<u64>());
        };
        let is_split = |row: usize, j: usize| self.graph.lists.is_split(row, j);
        for (row, durations_ns) in self.durations_ns.chunks_exact(width).enumerate() {
            let (forward_ns, backward_ns) = durations_ns.split_at(m);
            add(ActionKind::F, forward_ns);
            let (backward_ns, weight_ns) = backward_ns.split_at(m);
            if weight_ns.is_empty() {
                add(ActionKind::B, backward_ns);
                continue;
            }
            for j in 0..m {
                if is_split(row, j) {
                    add(ActionKind::I, &backward_ns[j..=j]);
                    add(ActionKind::W, &weight_ns[j..=j]);
                } else {
                    add(ActionKind::B, &backward_ns[j..=j]);
                }
            }
        }
        let [forward_ns, whole_ns, input_ns, weight_ns] =
            sums.map(|(count, ns)| ns.checked_div(count).unwrap_or(0));
        let mut uniform = std::mem::take(&mut self.tried.0);
        uniform.clear();
        for row in 0..self.graph.rows.len() {
            uniform.resize(uniform.len() + m, forward_ns);
            if width == 2 * m {
                uniform.resize(uniform.len() + m, whole_ns);
                continue;
            }
            uniform.extend((0..m).map(|j| if is_split(row, j) { input_ns } else { whole_ns }));
            uniform.extend((0..m).map(|j| if is_split(row, j) { weight_ns } else { 0 }));
        }
        let busy_ns: u128 = uniform.iter().map(|&ns| u128::from(ns)).sum();
        let (feeds, order) = (&self.feeds, self.standing.as_slice());
        let times = Times { durations_ns: &uniform, feeds, order, transfer_ns: 0 };
        self.graph.run(&times, &[], &mut self.clock);
        self.tried.0 = uniform;
        self.swaps.is_timed = false;
        u128::from(self.end_ns(false)) * ranks as u128 - busy_ns
    }
}

/// Idle time by cause of a measured step, over the span from its first start to its last end.
///
/// The measured durations are put into `input`, which gives layout, order and feeds. Simulating that gives the causes.
/// Idle time that they do not explain counts as transfer: data under way, and whatever else kept a rank from starting in
/// time. The tails of `input` are not used, because spans do not show them.
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
    measured_by(input, measured, Simulator::new)
}

/// As [`measured_timeline`], for a step whose ranks ran `lists` in place of the pipeline order.
///
/// # Errors
/// As [`measured_timeline`], and those of [`Simulator::with_lists`].
pub fn measured_lists(
    input: &StepInput,
    lists: &[Vec<Action>],
    measured: &[Span],
) -> Result<Timeline, SimError> {
    measured_by(input, measured, |input| Simulator::with_lists(input, lists))
}

fn measured_by(
    input: &StepInput,
    measured: &[Span],
    simulator: impl FnOnce(&StepInput) -> Result<Simulator, SimError>,
) -> Result<Timeline, SimError> {
    let unsound = |violations| SimError::Unsound { subject: "the measured step", violations };
    let mut input = durations_of(measured, input)?;
    input.tail_ns.fill(0);
    let first_ns = measured.iter().map(|span| span.start_ns).min().unwrap_or(0);
    // The makespan counts from the first start, and so does the wait for data.
    for ns in &mut input.ready_ns {
        *ns = ns.saturating_sub(first_ns);
    }
    let mut simulator = simulator(&input)?;
    let mut spans = measured.to_vec();
    spans.sort_unstable_by_key(|span| (span.rank, span.start_ns, span.end_ns));
    let m = input.num_microbatches as usize;
    let mut is_split = vec![false; simulator.graph.rows.len() * m];
    for (at, is_split) in is_split.iter_mut().enumerate() {
        *is_split = simulator.graph.lists.is_split(at / m, at % m);
    }
    let is_other_half = |span: &&Span| {
        let row = input.row(span.rank, span.action.stage);
        let is_split = is_split[row * m + span.action.microbatch as usize];
        span.action.kind != ActionKind::F && (span.action.kind != ActionKind::B) != is_split
    };
    let mut violations: Vec<_> = spans
        .iter()
        .filter(is_other_half)
        .map(|span| Violation::Foreign { path: "spans".to_owned(), rank: span.rank, action: span.action })
        .collect();
    let overlaps =
        spans.windows(2).filter(|pair| pair[0].rank == pair[1].rank && pair[1].start_ns < pair[0].end_ns);
    violations.extend(overlaps.map(|pair| Violation::Overlap {
        rank: pair[0].rank,
        first: pair[0].action,
        second: pair[1].action,
    }));
    if !violations.is_empty() {
        return Err(unsound(violations));
    }
    let makespan_ns = spans.iter().map(|span| span.end_ns).max().unwrap_or(0) - first_ns;
    let num_ranks = simulator.graph.num_ranks();
    let whole_ns = makespan_ns.checked_mul(num_ranks as u64).ok_or(SimError::Overflow { num_ranks })?;
    // The spans of a rank do not overlap and lie within the makespan. So busy time is at most ranks x makespan.
    let busy_ns: u64 = spans.iter().map(Span::duration_ns).sum();
    let idle_ns = by_cause(&mut simulator, whole_ns - busy_ns);
    Ok(Timeline { num_ranks: num_ranks as u32, makespan_ns, idle_ns, spans })
}

/// `input` with the measured duration of each action in place of its own. With that the simulator can be judged apart
/// from the cost model.
///
/// # Errors
/// [`SimError::Unsound`] if `input` is not sound, if an action of it was not measured or measured twice, if a
/// span ends before it starts, or belongs to no action of its rank.
pub fn durations_of(measured: &[Span], input: &StepInput) -> Result<StepInput, SimError> {
    input.check()?;
    let m = input.num_microbatches as usize;
    let wired = input.wired_rows();
    let mut counts = vec![Counts::new(m); wired.len()];
    let mut violations = Vec::new();
    let mut output = input.clone();
    for &Span { rank, action, start_ns, end_ns } in measured {
        if !input.is_of(rank, action) {
            violations.push(Violation::Foreign { path: "spans".to_owned(), rank, action });
            continue;
        }
        let row = input.row(rank, action.stage);
        counts[row].add(action);
        let rows = match action.kind {
            ActionKind::F => &mut output.forward_ns,
            ActionKind::B => &mut output.backward_ns,
            ActionKind::I => &mut output.input_ns,
            ActionKind::W => &mut output.weight_ns,
        };
        match end_ns.checked_sub(start_ns) {
            Some(duration_ns) => rows[row][action.microbatch as usize] = duration_ns,
            None => violations.push(Violation::Backwards { rank, action }),
        }
    }
    let not_once: Vec<(Rank, Action, usize)> = wired
        .iter()
        .zip(&counts)
        .flat_map(|(row, counts)| {
            counts.not_once(row.stage).map(move |(action, count)| (Rank(row.rank), action, count))
        })
        .collect();
    let missing = not_once.iter().filter(|&&(_, _, count)| count == 0).count();
    if let Some(&(rank, action, _)) = not_once.iter().find(|&&(_, _, count)| count == 0) {
        // A backward counts as one action, and as two if it is split.
        let is_split = |counts: &[usize; 4]| counts[2] + counts[3] > 0;
        let actions = |counts: &Counts| 2 * m + counts.0.iter().filter(|counts| is_split(counts)).count();
        let total = counts.iter().map(actions).sum();
        violations.push(Violation::Unmeasured { missing, total, rank, action });
    }
    for &(rank, action, count) in not_once.iter().filter(|&&(_, _, count)| count > 1) {
        violations.push(Violation::NotOnce { path: format!("spans of rank {rank}"), action, count });
    }
    for (row, counts) in wired.iter().zip(&counts) {
        let path = || format!("spans of rank {}", row.rank);
        violations.extend(counts.both(row.stage).map(|action| Violation::Both { path: path(), action }));
    }
    if violations.is_empty() {
        Ok(output)
    } else {
        Err(SimError::Unsound { subject: "the measured step", violations })
    }
}
