//! Timelines: what ran, or would run, when, and why ranks were idle.

use crate::index::{Rank, StageIndex};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use thiserror::Error;

/// The letter of an action, as PyTorch writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActionKind {
    /// Forward.
    F,
    /// Backward: gradients of inputs and weights together.
    B,
    /// Gradients of the inputs alone.
    I,
    /// Gradients of the weights alone.
    W,
}

/// One cell of the step: a stage, a letter and a microbatch, written `2F0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage, counted over both components.
    pub stage: StageIndex,
    /// What is done.
    pub kind: ActionKind,
    /// The microbatch, from 0, in the order of the schedule.
    pub microbatch: u32,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}{}", self.stage, self.kind, self.microbatch)
    }
}

/// A text that is not an action.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is not an action, expected stage, one of F B I W, microbatch, as in `2F0`")]
pub struct ParseActionError(pub String);

impl FromStr for Action {
    type Err = ParseActionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseActionError(text.to_owned());
        let letter = text.find(|c: char| c.is_ascii_uppercase()).ok_or_else(error)?;
        let kind = match &text[letter..=letter] {
            "F" => ActionKind::F,
            "B" => ActionKind::B,
            "I" => ActionKind::I,
            "W" => ActionKind::W,
            _ => return Err(error()),
        };
        let number = |digits: &str| digits.parse::<u32>().map_err(|_| error());
        Ok(Self {
            stage: StageIndex(number(&text[..letter])?),
            kind,
            microbatch: number(&text[letter + 1..])?,
        })
    }
}

impl Serialize for Action {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Action {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// An action with its start and end on one rank, in nanoseconds since the start of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The rank that ran it.
    pub rank: Rank,
    /// What it ran.
    pub action: Action,
    /// Start, in nanoseconds since the start of the step.
    pub start_ns: u64,
    /// End, in nanoseconds since the start of the step; not before the start.
    pub end_ns: u64,
}

impl Span {
    /// How long the action took, in nanoseconds.
    pub const fn duration_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

/// Idle time of all ranks within the makespan, split by cause; the parts add up to ranks x makespan - busy.
///
/// *Ramp* is what the same order idles when every action of a kind takes its mean time: fill and drain of the
/// pipeline. *Imbalance* is what the real durations add with free transfers. *Data wait* is what ranks add that
/// start later because their data is not there. *Transfer* is the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Idle {
    /// Fill and drain, in nanoseconds.
    pub ramp: u64,
    /// Uneven work between microbatches and stages, in nanoseconds.
    pub imbalance: u64,
    /// Waiting for data under way between ranks, in nanoseconds.
    pub transfer: u64,
    /// Waiting for the data of the step, in nanoseconds.
    #[serde(default)]
    pub data_wait: u64,
}

impl Idle {
    /// Idle time of all causes, in nanoseconds.
    pub const fn total_ns(&self) -> u64 {
        self.ramp + self.imbalance + self.transfer + self.data_wait
    }
}

/// All spans of a step, simulated or measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Ranks that took part, those without a span included.
    pub num_ranks: u32,
    /// First start to last end, in nanoseconds.
    pub makespan_ns: u64,
    /// Why ranks were idle.
    pub idle_ns: Idle,
    /// By rank, then by start.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// Idle time over ranks x makespan, from 0 to 1; 0 for an empty step.
    pub fn bubble_ratio(&self) -> f64 {
        // In floating point, where the numbers of a broken file do not overflow.
        let whole = f64::from(self.num_ranks) * self.makespan_ns as f64;
        let Idle { ramp, imbalance, transfer, data_wait } = self.idle_ns;
        let idle: f64 = [ramp, imbalance, transfer, data_wait].map(|ns| ns as f64).iter().sum();
        if whole == 0.0 { 0.0 } else { idle / whole }
    }

    /// Time the busiest rank worked, in nanoseconds: no order of the same actions is faster.
    pub fn ideal_ns(&self) -> u64 {
        let mut loads_ns = vec![0; self.num_ranks as usize];
        for span in &self.spans {
            if let Some(load_ns) = loads_ns.get_mut(span.rank.index()) {
                *load_ns += span.duration_ns();
            }
        }
        loads_ns.into_iter().max().unwrap_or(0)
    }

    /// Time the ranks worked, in nanoseconds, over all ranks.
    pub fn busy_ns(&self) -> u64 {
        self.spans.iter().map(Span::duration_ns).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn actions_round_trip(stage in 0u32..200, microbatch in 0u32..10_000, kind in 0usize..4) {
            let kind = [ActionKind::F, ActionKind::B, ActionKind::I, ActionKind::W][kind];
            let action = Action { stage: StageIndex(stage), kind, microbatch };
            prop_assert_eq!(action.to_string().parse::<Action>().unwrap(), action);
        }
    }

    #[test]
    fn what_is_no_action_is_refused() {
        for text in ["", "F", "2X0", "2F", "F0", "2F-1", "a2F0", "2F0 "] {
            assert_eq!(text.parse::<Action>(), Err(ParseActionError(text.to_owned())), "{text}");
        }
    }
}
