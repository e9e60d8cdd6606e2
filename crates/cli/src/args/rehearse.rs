//! What a rehearsal is asked for: how fast, and what goes wrong in it.

// These comments are shown in a terminal as they stand, where backticks are noise.
#![allow(clippy::doc_markdown)]

use super::PlanFiles;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::str::FromStr;

const REHEARSE_EXAMPLE: &str = r"Examples:
  dflop rehearse --steps 20                        the plan's ranks, each action as long as predicted
  dflop rehearse --speed 10 --slow-rank 3:1.3      ten times faster; rank 3 takes 1.3 times as long
  dflop rehearse --slow-shapes 3%:1                3 % of the samples take a stage's time longer
  dflop rehearse --kill 5:4                        what happens when rank 5 dies in step 4
  dflop rehearse --kill 5:4 --max-restarts 1       the same, and all ranks are started again
  dflop rehearse --steps 40 --resume auto          go on from the newest checkpoint, to 40 steps";

/// Run a plan's real ranks, schedules and messages without computing: each action takes its predicted time.
///
/// A rehearsal needs no GPU: ranks sleep instead of computing, so 32 of them run on two cores. Torchrun, the process
/// groups, the scheduler, the action lists, the order of all messages and the files of the run are real. A message carries
/// a time stamp instead of features, and is used when its predicted transfer time has passed.
///
/// So you see before you pay for a GPU whether a list cannot end, a rank cannot be reached, or a schedule comes too late.
/// The command writes the files that `dflop train` writes, marked as rehearsed; `dflop report` reads them. It saves
/// checkpoints when `dflop train` would: every `checkpoint.every` steps, at the end, and when a signal ends it. They have no
/// weights, so `dflop train` and `dflop export` refuse them.
#[derive(Debug, Args)]
#[command(after_long_help = REHEARSE_EXAMPLE)]
pub(crate) struct Rehearse {
    #[command(flatten)]
    pub(crate) files: PlanFiles,
    /// Directory of metrics and traces [default: rehearsal beside the configuration]
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Global batches to rehearse
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: u64,
    /// How many times faster than predicted to run, for example 10; before times are written, they are multiplied by it
    ///
    /// At a higher speed the machine's own delays count more: each action is late by a fraction of a millisecond.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(crate) speed: f64,
    /// A rank that takes longer than predicted, for example 3:1.3; may be given several times
    ///
    /// The simulation does not know of it: error_median and error_p95 count what the slow rank costs as an error.
    #[arg(long, value_name = "RANK:FACTOR")]
    pub(crate) slow_rank: Vec<SlowRank>,
    /// Samples that take longer than predicted, for example 3%:1
    ///
    /// In the example, about 3 % of the samples, of neighbouring sizes, each add 1 times the mean time of the slowest stage to every LLM
    /// action that holds them. The run's seed draws the sizes. Watch what correction wins back: train.correction off against auto.
    #[arg(long, value_name = "PERCENT%:TIMES")]
    pub(crate) slow_shapes: Option<SlowShapes>,
    /// Milliseconds that each message takes beyond its predicted time
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    pub(crate) network_latency: f64,
    /// End a rank with SIGKILL in the middle of a step, for example 5:4 (rank 5, step 4)
    ///
    /// This happens once: ranks that are started again are not killed.
    #[arg(long, value_name = "RANK:STEP")]
    pub(crate) kill: Option<KilledRank>,
    /// Go on from a checkpoint: `auto` is the newest one in OUT (or the first step if there is none); or name a directory
    ///
    /// --steps counts from the beginning. Data, seed and global batch size must be those of the checkpoint; the plan may be
    /// another. Steps after the checkpoint are rehearsed again; their lines move to OUT/*.undone.jsonl.
    #[arg(long, value_name = "auto|DIR")]
    pub(crate) resume: Option<PathBuf>,
    /// If a rank dies or hangs, start all ranks again from the newest checkpoint, at most N times in a row
    ///
    /// [default: 3 where checkpoint.every is set, else 0]. After a new checkpoint the count begins again at 0. Under an
    /// external torchrun use torchrun's own --max-restarts, and `--resume auto` here.
    #[arg(long, value_name = "N")]
    pub(crate) max_restarts: Option<u32>,
    /// Print JSON: ranks, steps, step_ms_median, simulated_ms_median, error_median, error_p95
    #[arg(long)]
    pub(crate) json: bool,
    /// Overwrite an earlier rehearsal in the same directory
    #[arg(long)]
    pub(crate) force: bool,
}

/// A rank and how many times longer than predicted it takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct SlowRank {
    pub(crate) rank: u32,
    pub(crate) factor: f64,
}

impl FromStr for SlowRank {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rank, factor) = pair(text, "RANK:FACTOR, as in 3:1.3")?;
        match factor.parse::<f64>() {
            Ok(factor) if factor > 0.0 && factor <= 1e6 => Ok(Self { rank, factor }),
            _ => Err(format!("the factor is `{factor}`, must be above 0 and at most 1000000")),
        }
    }
}

/// How many samples take longer than predicted, and how many mean times of the slowest stage they take longer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct SlowShapes {
    /// Above 0, at most 1.
    pub(crate) share: f64,
    pub(crate) times: f64,
}

impl FromStr for SlowShapes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(share, times)| Some((share.strip_suffix('%')?, times)));
        let (percent, times) = parts.ok_or("must be PERCENT%:TIMES, as in 3%:1")?;
        let number = |what: &str, text: &str, most: f64| match text.parse::<f64>() {
            Ok(number) if number > 0.0 && number <= most => Ok(number),
            _ => Err(format!("{what} `{text}`, must be above 0 and at most {most}")),
        };
        let percent = number("the part of the samples is", percent, 100.0)?;
        Ok(Self { share: percent / 100.0, times: number("the time that they add is", times, 1e3)? })
    }
}

/// A rank and the step in which it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct KilledRank {
    pub(crate) rank: u32,
    pub(crate) step: u64,
}

impl FromStr for KilledRank {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rank, step) = pair(text, "RANK:STEP, as in 5:4")?;
        let step = step.parse().map_err(|_| format!("the step is `{step}`, must be a number from 0"))?;
        Ok(Self { rank, step })
    }
}

/// The rank before the colon, and what stands behind it.
fn pair<'a>(text: &'a str, form: &str) -> Result<(u32, &'a str), String> {
    let (rank, value) = text.split_once(':').ok_or_else(|| format!("must be {form}"))?;
    let rank = rank.parse().map_err(|_| format!("the rank is `{rank}`, must be a number from 0"))?;
    Ok((rank, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_shapes_are_a_part_of_the_samples_and_a_time() {
        assert_eq!("3%:1".parse(), Ok(SlowShapes { share: 0.03, times: 1.0 }));
        assert_eq!("0.5%:0.25".parse(), Ok(SlowShapes { share: 0.005, times: 0.25 }));
        let refused = |text: &str| text.parse::<SlowShapes>().unwrap_err();
        for text in ["3", "3:1", "3%", "%3:1"] {
            assert!(refused(text).contains("must be"), "{text}: {}", refused(text));
        }
        assert_eq!(refused("3:1"), "must be PERCENT%:TIMES, as in 3%:1");
        assert_eq!(refused("101%:1"), "the part of the samples is `101`, must be above 0 and at most 100");
        assert_eq!(refused("0%:1"), "the part of the samples is `0`, must be above 0 and at most 100");
        assert_eq!(refused("3%:x"), "the time that they add is `x`, must be above 0 and at most 1000");
        assert_eq!(refused("3%:NaN"), "the time that they add is `NaN`, must be above 0 and at most 1000");
    }
}
