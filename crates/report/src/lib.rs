//! Render: plan, timelines and profiles in, one HTML file out.
//!
//! A run leaves numbers in many files. [`render`] puts the numbers that answer "is it faster, why, and can I trust
//! the prediction?" on one page. The page opens offline, prints, and can be read without scripts, without colour and
//! by a screen reader. [`Report`] holds what is known. Every part is optional: a plan alone gives a page too.
//! [`figure`] draws one global batch, trained by baselines and by ours, as an SVG file of its own; [`sweep()`] draws plans
//! under other conditions.
//!
//! ```
//! let report = dflop_report::Report { title: "a run".to_owned(), ..Default::default() };
//! let page = dflop_report::render(&report);
//! assert!(page.starts_with("<!DOCTYPE html>"));
//! ```
//!
//! *Not modelled*: this crate computes only what a drawing needs (bins, pairs, medians of what is shown). Large
//! inputs are drawn in part, and the page says which part.

mod against;
mod arm;
mod chart;
mod figure;
mod loss;
mod page;
mod shapes;
mod sweep;

pub use against::{Against, AgainstRow, Change, StepPair, Unit};
pub use figure::figure;
pub use loss::{GroupLoss, LossPoint};
pub use shapes::{RankBytes, ShapeError};
pub use sweep::{Sweep, SweepLine, sweep};

use dflop_types::{DataProfile, Layout, ModelProfile, Plan, Timeline};

/// What a page shows. Empty parts are left out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Heading of the page.
    pub title: String,
    /// What the numbers belong to, as name and value: hardware, commit, command, date.
    pub facts: Vec<(String, String)>,
    /// Steps, in the order in which they ran. The steps of both arms over one global batch carry one number.
    pub steps: Vec<StepView>,
    /// The fastest baseline against the fastest of ours, if both were trained.
    pub comparison: Option<Comparison>,
    /// This run against another.
    pub against: Option<Against>,
    /// The steps of this run's second plan against those of its first.
    pub plans: Option<Against>,
    /// The measured step times, if something was trained.
    pub measured: Option<Measured>,
    /// The plan.
    pub plan: Option<Plan>,
    /// The data profile.
    pub data: Option<DataProfile>,
    /// How much the heaviest samples lengthen a step, if there is a plan and a model profile.
    pub outliers: Option<Outliers>,
    /// Predicted and measured time by size of sample, if steps were measured.
    pub shapes: Vec<ShapeError>,
    /// Peak memory of each kind of rank.
    pub memory: Vec<RankBytes>,
    /// The model profile.
    pub model: Option<ModelProfile>,
    /// Training loss: (step, mean over label tokens).
    pub loss: Vec<(u64, f64)>,
    /// Whether the steps of `loss` and of all losses below are updates of the model, counted from 1: several arms trained
    /// each global batch, so a step has several.
    pub is_loss_by_update: bool,
    /// Loss of held-out samples, one point for each evaluation.
    pub held_out: Vec<LossPoint>,
    /// Both losses for each kind of sample.
    pub loss_by_kind: Vec<GroupLoss>,
    /// Both losses for each source of samples.
    pub loss_by_source: Vec<GroupLoss>,
    /// Alarms and decisions, in the order in which they came.
    pub events: Vec<EventView>,
    /// The slowest steps, the worst first, with what made them slow.
    pub slow_steps: Vec<SlowStep>,
    /// One sentence with a count for everything that would otherwise be done in silence (extrapolations, skipped
    /// samples).
    pub warnings: Vec<String>,
}

/// Something that happened during a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventView {
    /// After which step.
    pub step: u64,
    /// Whether it is an alarm; otherwise it is a decision about the correction.
    pub is_alarm: bool,
    /// What happened, in words.
    pub words: String,
}

/// A step, and what made it slow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlowStep {
    /// The number of the step.
    pub step: u64,
    /// The arm that scheduled it.
    pub arm: String,
    /// Its makespan, in nanoseconds.
    pub makespan_ns: u64,
    /// Why it was slow, a sentence for each cause.
    pub words: Vec<String>,
    /// Its critical path, the first action first.
    pub path: Vec<PathLink>,
}

/// One action of a critical path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathLink {
    /// The name of the action, as in `1F3`.
    pub action: String,
    /// The rank that ran it.
    pub rank: u32,
    /// Whether it is a forward.
    pub is_forward: bool,
    /// When it began, in nanoseconds since the start of the step.
    pub start_ns: u64,
    /// When it ended, in nanoseconds since the start of the step.
    pub end_ns: u64,
    /// Its predicted time, in nanoseconds.
    pub predicted_ns: u64,
    /// From the end of the action before it to its start, in nanoseconds.
    pub gap_ns: u64,
    /// The largest of its samples, in words.
    pub samples: String,
}

/// How the heaviest samples compare with an even microbatch of a plan. Times are forward and backward, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outliers {
    /// Time of an even microbatch on an encoder replica.
    pub even_encoder_ms: f64,
    /// Time of an even microbatch on the LLM stage that takes longest.
    pub even_llm_ms: f64,
    /// The heaviest samples, each alone in a microbatch.
    pub heaviest: Vec<OutlierView>,
    /// Samples that alone take longer than an even microbatch.
    pub num_longer: u64,
    /// Samples that fit on no rank, the largest first; the list may be cut short.
    pub unfit: Vec<OutlierView>,
    /// Number of all samples that fit on no rank.
    pub num_unfit: u64,
    /// Bytes a rank may use; `None` if that is not limited.
    pub budget_bytes: Option<u64>,
}

/// One of the heaviest samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutlierView {
    /// The sample's id.
    pub id: String,
    /// Time on an encoder replica.
    pub encoder_ms: f64,
    /// Time on the LLM stage that takes longest.
    pub llm_ms: f64,
    /// What the fullest rank needs with this sample alone, in bytes.
    pub needed_bytes: u64,
}

/// One step of one arm.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepView {
    /// Number of the step. If both arms trained one global batch, both steps have the same number.
    pub step: u64,
    /// How the global batch was scheduled: `aware` or `blind`; other names are shown as they are.
    pub arm: String,
    /// The layout that it ran in, which names the lanes of its timelines; `None`: not known.
    pub layout: Option<Layout>,
    /// The timeline that the simulator predicted.
    pub predicted: Option<Timeline>,
    /// The timeline that was measured, or rehearsed.
    pub measured: Option<Timeline>,
    /// Whether the step was rehearsed: nothing was computed, and its actions slept for their predicted times.
    pub is_rehearsed: bool,
    /// Time until the last rank had its samples, in nanoseconds. It lies before the clock of the measured step
    /// starts, so it is not part of the makespan.
    pub data_wait_ns: u64,
}

impl StepView {
    /// What `measured` is, in a word: rehearsed or measured.
    #[must_use]
    pub const fn how(&self) -> &'static str {
        if self.is_rehearsed { "rehearsed" } else { "measured" }
    }
}

/// The fastest baseline against the fastest of ours, over the same global batches.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Comparison {
    /// Name of the baseline: the arm of [`StepView::arm`] that does not look at predicted times.
    pub baseline: String,
    /// Name of ours.
    pub ours: String,
    /// Typical step time of the baseline, in milliseconds.
    pub step_ms_baseline: f64,
    /// Typical step time of ours, in milliseconds.
    pub step_ms_ours: f64,
    /// Step time of the baseline divided by ours; above 1 ours is faster.
    pub ratio: f64,
    /// Lower end of the 95 % interval of the ratio.
    pub ratio_low: f64,
    /// Upper end of the 95 % interval of the ratio.
    pub ratio_high: f64,
    /// Step times of each pair, baseline then ours, in milliseconds, in the order in which they ran.
    pub pairs: Vec<(f64, f64)>,
    /// Idle time over ranks x makespan of the baseline, from 0 to 1.
    pub idle_ratio_baseline: f64,
    /// Idle time over ranks x makespan of ours, from 0 to 1.
    pub idle_ratio_ours: f64,
    /// Median of |predicted - measured| / measured over steps.
    pub prediction_error_median: f64,
    /// 95th percentile of |predicted - measured| / measured over steps.
    pub prediction_error_p95: f64,
    /// Median of the same error where each prediction is corrected by how the steps before it went, if it is known.
    pub corrected_error_median: Option<f64>,
    /// 95th percentile of the corrected error, if it is known.
    pub corrected_error_p95: Option<f64>,
    /// Every arm that ran, including these two.
    pub arms: Vec<ArmView>,
}

/// One arm of a comparison.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArmView {
    /// Its name.
    pub name: String,
    /// Whether it is a baseline.
    pub is_baseline: bool,
    /// Typical step time, in milliseconds.
    pub step_ms: f64,
    /// Step time of the fastest baseline divided by that of this arm; above 1 this arm is faster.
    pub ratio: f64,
    /// Lower end of the 95 % interval of the ratio.
    pub ratio_low: f64,
    /// Upper end of the 95 % interval of the ratio.
    pub ratio_high: f64,
    /// Idle time over ranks x makespan, from 0 to 1.
    pub idle_ratio: f64,
}

/// The step times of a run without a comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measured {
    /// Number of steps.
    pub num_steps: u64,
    /// Whether the steps were rehearsed: nothing was computed, and actions slept for their predicted times.
    pub is_rehearsed: bool,
    /// Median of the step times, in milliseconds.
    pub step_ms_median: f64,
    /// Median of measured time divided by predicted time; above 1 steps took longer than predicted.
    pub over_predicted_median: f64,
    /// Idle time over ranks x makespan, from 0 to 1.
    pub idle_ratio: f64,
}

/// One self-contained HTML page. It needs no external resource, has colours for light and dark, and is complete without
/// scripts.
///
/// Equal reports give equal pages, byte by byte. Names from files are escaped, control characters in them are written out,
/// and passwords and signatures of URLs are left out.
/// *Complexity*: O(n log n) in samples and spans. What is drawn is limited, and so is the size of the page; only warnings
/// and facts are always shown in full.
pub fn render(report: &Report) -> String {
    dflop_types::shown_lines(&page::page(report).into_string())
}
