//! Watch: what has changed since the run began, and whose fault it is.
//!
//! Each quantity has a sum of what it is above its usual value (CUSUM), which passes its limit where a change lasts and stays
//! below where single steps stand out:
//!
//! ```text
//! excess_t = x_t / usual - 1        a rank: its time against that of its peers; the clock: all ranks against the first steps
//! sum_t    = max(0, sum_{t-1} + min(excess_t - slack, limit / 5))      alarm: sum_t > limit
//! slack    = max(0.05, noise)       limit = max(0.3, 8 noise)          noise: from steps next to each other
//! ```

use crate::adapt::adjustment::rows_of;
use crate::adapt::bins::{ENCODER, LLM};
use crate::adapt::fit::BinExcess;
use crate::adapt::rows::{Sum, median};
use dflop_types::number::{self, whole_percent};
use dflop_types::{Layout, StageIndex, thousands};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Values of which the usual one is the median, where no peers say what is usual.
const LEARNED: usize = 12;
const SLACK_MIN: f64 = 0.05;
const LIMIT_MIN: f64 = 0.3;
/// A change counts from so many steps on.
const STEPS_MIN: f64 = 5.0;
/// Steps without an excess after which an alarm is over, and may be raised again.
const QUIET: u32 = 20;

/// What an alarm is about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cause {
    /// One rank takes longer than those that do the same; its row.
    Rank {
        /// The rank; of a colocated layout, of either component.
        rank: u32,
        /// Whether it is the encoder's work that takes longer.
        is_encoder: bool,
    },
    /// All ranks of a component take longer than in the first steps.
    Clock {
        /// Whether of the encoder's ranks.
        is_encoder: bool,
    },
    /// Samples of some sizes take longer, or less, than predicted.
    Data {
        /// Whether in the encoder.
        is_encoder: bool,
        /// The fewest tokens of such a sample.
        tokens_min: u64,
        /// The most.
        tokens_max: u64,
    },
    /// Ranks wait longer for their samples than in the first steps.
    Loader,
    /// Ranks wait longer for messages than in the first steps.
    Network,
}

/// A change that lasts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alarm {
    /// What is likely at fault.
    pub cause: Cause,
    /// Measured over usual time; of waits, what they add to a step as a part of it.
    pub times: f64,
}

impl Cause {
    /// Its name, for a log: `rank`, `clock`, `data`, `loader`, `network`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Rank { .. } => "rank",
            Self::Clock { .. } => "clock",
            Self::Data { .. } => "data",
            Self::Loader => "loader",
            Self::Network => "network",
        }
    }

    /// The command, or setting, that mends it.
    pub const fn mend(&self) -> &'static str {
        match self {
            Self::Rank { .. } => {
                "look at that device (of a GPU: `nvidia-smi -q -d CLOCK,PERFORMANCE,ECC`) and for other work on its machine; until it is \
                 mended it gets less work where it has replicas, unless `train.correction` is off"
            }
            Self::Clock { .. } => {
                "look at clocks and other work on the machines; if it stays so, `dflop profile model` and `dflop plan`"
            }
            Self::Data { .. } => "`dflop profile model` measures these sizes anew; then `dflop plan`",
            Self::Loader => "raise `data.cache_bytes`, or give each rank more cores",
            Self::Network => {
                "`dflop profile model` under torchrun measures the links anew; then `dflop plan`"
            }
        }
    }
}

impl fmt::Display for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let component = |is_encoder: bool| if is_encoder { "encoder" } else { "LLM" };
        let times = number::number(self.times);
        match self.cause {
            Cause::Rank { rank, is_encoder } => {
                write!(f, "rank {rank} takes {times} times as long as its peers ({})", component(is_encoder))
            }
            Cause::Clock { is_encoder } => {
                write!(f, "all {} ranks take {times} times as long as at first", component(is_encoder))
            }
            Cause::Data { is_encoder, tokens_min, tokens_max: u64::MAX } => {
                let component = component(is_encoder);
                write!(
                    f,
                    "samples of {} {component} tokens or more take {times} times the predicted time",
                    thousands(tokens_min)
                )
            }
            Cause::Data { is_encoder, tokens_min, tokens_max } => {
                let component = component(is_encoder);
                write!(
                    f,
                    "samples of {} to {} {component} tokens take {times} times the predicted time",
                    thousands(tokens_min),
                    thousands(tokens_max)
                )
            }
            Cause::Loader => {
                write!(
                    f,
                    "waiting for samples takes {} of a step more than at first",
                    whole_percent(self.times)
                )
            }
            Cause::Network => {
                write!(
                    f,
                    "waiting for messages takes {} of a step more than at first",
                    whole_percent(self.times)
                )
            }
        }
    }
}

/// One quantity.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    /// None until it is learned.
    usual: Option<f64>,
    first: Vec<f64>,
    last: Option<f64>,
    variance: f64,
    sum: f64,
    is_raised: bool,
    num_quiet: u32,
}

impl Change {
    fn against(usual: f64) -> Self {
        Self { usual: Some(usual), variance: 0.002, ..Self::default() }
    }

    /// Adds a value, as a part above `usual` that `excess` gives; how far above it is where that has just become sure.
    fn add(&mut self, value: f64, excess: impl Fn(f64, f64) -> f64) -> Option<f64> {
        if let Some(last) = self.last {
            let step = excess(value, last).abs().min(1.0);
            // A jump is a change, not noise.
            let squared = (step * step / 2.0).min(9.0 * self.variance.max(1e-4));
            self.variance += 0.05 * (squared - self.variance);
        }
        self.last = Some(value);
        let Some(usual) = self.usual else {
            self.first.push(value);
            if self.first.len() == LEARNED {
                self.usual = median(&mut self.first);
                self.variance = self.variance.max(0.002);
            }
            return None;
        };
        let noise = self.variance.sqrt();
        let (slack, limit) = (SLACK_MIN.max(noise), LIMIT_MIN.max(8.0 * noise));
        let above = excess(value, usual);
        self.sum = (self.sum + (above - slack).min(limit / STEPS_MIN)).max(0.0);
        self.num_quiet = if above <= slack { self.num_quiet + 1 } else { 0 };
        if self.is_raised && self.num_quiet >= QUIET {
            (self.is_raised, self.sum) = (false, 0.0);
        }
        if self.is_raised || self.sum <= limit {
            return None;
        }
        self.is_raised = true;
        Some(above)
    }
}

fn ratio(value: f64, usual: f64) -> f64 {
    if usual > 0.0 { value / usual - 1.0 } else { 0.0 }
}

fn difference(value: f64, usual: f64) -> f64 {
    value - usual
}

/// All quantities of a run. A checkpoint keeps it, so that a run that goes on neither learns anew what is usual nor raises an
/// alarm twice.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watch {
    rows: BTreeMap<usize, Change>,
    clocks: [Change; 2],
    loader: Change,
    network: Change,
    /// Bins that an alarm has named, by component and fewest tokens.
    named: BTreeSet<(bool, u64)>,
}

impl Watch {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What has become sure with this step.
    ///
    /// `sums` are those of the step by row and kind; `waits` what ranks waited on the mean for samples and for messages, as
    /// parts of the step; `shapes` what is known of the bins, empty where nothing was learned.
    pub(crate) fn step(
        &mut self,
        layout: &Layout,
        sums: &[Sum],
        (loader, network): (f64, f64),
        shapes: &[BinExcess],
    ) -> Vec<Alarm> {
        let mut alarms = Vec::new();
        let taken = by_row(sums);
        for component in [ENCODER, LLM] {
            let is_encoder = component == ENCODER;
            let mut all = Vec::new();
            for (stage, replicas) in peers(layout, component) {
                let of = |(replica, rows): (u32, &Vec<usize>)| {
                    let (predicted, taken) = rows
                        .iter()
                        .filter_map(|row| taken.get(row))
                        .fold((0.0, 0.0), |sum: (f64, f64), &(predicted, taken)| {
                            (sum.0 + predicted, sum.1 + taken)
                        });
                    (predicted > 0.0).then(|| (replica, rows[0], taken / predicted))
                };
                let present: Vec<(u32, usize, f64)> = (0..).zip(&replicas).filter_map(of).collect();
                all.extend(present.iter().map(|p| p.2));
                // Alone in its stage a rank has no peers; its change shows in the clock of the component.
                if present.len() < 2 {
                    continue;
                }
                let usual = median(&mut present.iter().map(|p| p.2).collect::<Vec<f64>>()).unwrap_or(1.0);
                for (replica, row, t) in present {
                    let change = self.rows.entry(row).or_insert_with(|| Change::against(1.0));
                    if let Some(above) = change.add(t / usual.max(1e-9), ratio) {
                        let rank = layout.rank(replica, stage).0;
                        alarms.push(Alarm { cause: Cause::Rank { rank, is_encoder }, times: 1.0 + above });
                    }
                }
            }
            if let Some(usual) = median(&mut all)
                && let Some(above) = self.clocks[component].add(usual, ratio)
            {
                alarms.push(Alarm { cause: Cause::Clock { is_encoder }, times: 1.0 + above });
            }
        }
        for (change, value, cause) in
            [(&mut self.loader, loader, Cause::Loader), (&mut self.network, network, Cause::Network)]
        {
            if let Some(above) = change.add(value, difference) {
                alarms.push(Alarm { cause, times: above });
            }
        }
        for bin in shapes {
            let key = (bin.is_encoder, bin.tokens_min);
            let used = bin.excess.used();
            if used == 0.0 {
                self.named.remove(&key);
            } else if used.abs() >= 0.1 && self.named.insert(key) {
                let &BinExcess { is_encoder, tokens_min, tokens_max, .. } = bin;
                alarms.push(Alarm {
                    cause: Cause::Data { is_encoder, tokens_min, tokens_max },
                    times: 1.0 + used,
                });
            }
        }
        alarms
    }
}

/// What each row was predicted to take and what it took: the sums over kinds, what was taken by the medians.
fn by_row(sums: &[Sum]) -> BTreeMap<usize, (f64, f64)> {
    let mut taken: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    for sum in sums.iter().filter(|sum| sum.predicted_ns > 0) {
        let entry = taken.entry(sum.row).or_default();
        let ns = sum.predicted_ns as f64;
        *entry = (entry.0 + ns, entry.1 + ns * sum.median);
    }
    taken
}

/// Ranks that do the same, by their first stage: of each replica the rows of its rank, all chunks together.
fn peers(layout: &Layout, component: usize) -> Vec<(StageIndex, Vec<Vec<usize>>)> {
    let stages = rows_of(layout, component);
    let (first, chunks) =
        if component == ENCODER { (0, 1) } else { (layout.encoder.pp, layout.llm_interleave) };
    let num_ranks = stages.len() / chunks.max(1) as usize;
    let of_rank = |at: usize| {
        let chunks = || stages.iter().skip(at).step_by(num_ranks);
        let num_replicas = stages[at].len();
        (0..num_replicas).map(|replica| chunks().map(|rows| rows[replica]).collect()).collect()
    };
    (0..num_ranks).map(|at| (StageIndex(first + at as u32), of_rank(at))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::below;
    use dflop_types::{ActionKind, ComponentLayout};
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::SeedableRng;

    fn layout() -> Layout {
        let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
        Layout::disaggregated(degrees(1, 8), degrees(4, 14))
    }

    fn alarms(noise: f64, num_steps: u64, seed: u64, slow: impl Fn(u64, usize) -> f64) -> Vec<(u64, Alarm)> {
        alarms_of(layout(), noise, num_steps, seed, slow)
    }

    /// Steps of 64 ranks whose actions take `1 + noise` of their time; `slow` says how much longer each row takes at a step.
    fn alarms_of(
        layout: Layout,
        noise: f64,
        num_steps: u64,
        seed: u64,
        slow: impl Fn(u64, usize) -> f64,
    ) -> Vec<(u64, Alarm)> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // The sum of four draws is near to a normal one: its deviation is `noise`.
        let mut draw = |deviation: f64| {
            let sum: f64 = (0..4).map(|_| below(&mut random, 1_000_001) as f64 / 1e6 - 0.5).sum();
            deviation * sum * 3f64.sqrt()
        };
        let mut watch = Watch::new();
        let mut found = Vec::new();
        for step in 0..num_steps {
            let machine = 1.0 + draw(noise);
            let sums: Vec<Sum> = (0..layout.num_rows() as usize)
                .map(|row| {
                    let median = slow(step, row) * machine * (1.0 + draw(noise));
                    Sum { row, kind: ActionKind::F, predicted_ns: 1_000, measured_ns: 0, median }
                })
                .collect();
            let waits = (0.02 + draw(0.01).abs(), 0.05 + draw(0.02));
            let raised = watch.step(&layout, &sums, waits, &[]);
            found.extend(raised.into_iter().map(|alarm| (step, alarm)));
        }
        found
    }

    #[test]
    fn a_thousand_quiet_steps_of_64_ranks_raise_no_alarm() {
        for (noise, seed) in [(0.01, 1), (0.03, 2), (0.06, 3), (0.1, 4)] {
            assert_eq!(alarms(noise, 1_000, seed, |_, _| 1.0), [], "noise {noise}");
        }
    }

    #[test]
    fn single_slow_steps_raise_none() {
        assert_eq!(alarms(0.02, 400, 5, |step, row| if step % 25 == 7 && row == 9 { 4.0 } else { 1.0 }), []);
    }

    #[test]
    fn a_slow_rank_is_named_within_twenty_steps() {
        for (noise, times) in [(0.02, 1.15), (0.05, 1.2), (0.1, 1.5)] {
            let found = alarms(noise, 160, 6, |step, row| if step >= 100 && row == 21 { times } else { 1.0 });
            assert_eq!(found.len(), 1, "{found:?}");
            let (step, Alarm { cause, times: named }) = found[0];
            assert_eq!(cause, Cause::Rank { rank: 21, is_encoder: false });
            assert!((100..120).contains(&step) && (named - times).abs() < 4.0 * noise, "{found:?}");
        }
    }

    /// Its chunks are one device: one alarm, not one a chunk.
    #[test]
    fn a_slow_rank_of_several_chunks_is_named_once() {
        let layout = Layout { llm_interleave: 3, ..layout() };
        let slow = |layout: &Layout, row: usize| {
            layout.stages(dflop_types::Rank(21)).any(|stage| layout.row(3, stage) == row)
        };
        assert_eq!(layout.coordinates(dflop_types::Rank(21)).unwrap().replica, 3);
        let found =
            alarms_of(
                layout,
                0.02,
                160,
                6,
                |step, row| {
                    if step >= 100 && slow(&layout, row) { 1.3 } else { 1.0 }
                },
            );
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].1.cause, Cause::Rank { rank: 21, is_encoder: false });
    }

    /// A watch that was kept and read again goes on as the one that was not: the same alarms at the same steps, none twice.
    #[test]
    fn a_kept_watch_goes_on_where_it_was() {
        let layout = layout();
        let sums = |step: u64| -> Vec<Sum> {
            let noise = |row: usize| 1.0 + 0.01 * ((step * 7 + row as u64 * 13) % 5) as f64;
            let slow = |row: usize| if row == 21 && step >= 30 { 1.4 } else { 1.0 };
            let of_row = |row| Sum {
                row,
                kind: ActionKind::F,
                predicted_ns: 1_000,
                measured_ns: 0,
                median: noise(row) * slow(row),
            };
            (0..layout.num_rows() as usize).map(of_row).collect()
        };
        let waits = |step: u64| (if step >= 60 { 0.4 } else { 0.02 }, 0.05);
        let run = |kept_at: &[u64]| {
            let mut watch = Watch::new();
            let mut found = Vec::new();
            for step in 0..100 {
                if kept_at.contains(&step) {
                    let text = serde_json::to_string(&watch).unwrap();
                    let read: Watch = serde_json::from_str(&text).unwrap();
                    assert_eq!(read, watch);
                    watch = read;
                }
                let raised = watch.step(&layout, &sums(step), waits(step), &[]);
                found.extend(raised.into_iter().map(|alarm| (step, alarm)));
            }
            found
        };
        let whole = run(&[]);
        let causes: Vec<&str> = whole.iter().map(|(_, alarm)| alarm.cause.name()).collect();
        assert_eq!(causes, ["rank", "loader"]);
        assert_eq!(run(&[5, 33, 40, 62, 90]), whole);
        assert!(serde_json::from_str::<Watch>("{\"rows\": 3}").is_err());
    }

    #[test]
    fn a_slow_machine_is_no_slow_rank() {
        let found = alarms(0.02, 160, 7, |step, row| if step >= 60 && row >= 8 { 1.3 } else { 1.0 });
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].1.cause, Cause::Clock { is_encoder: false });
    }
}
