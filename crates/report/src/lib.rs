//! Render: plan, timelines and profiles in, one HTML file out.
//!
//! A run leaves numbers in many files. [`render`] puts the numbers that answer "is it faster, why, and can I trust
//! the prediction?" on one page. The page opens offline, prints, and can be read without scripts, without colour and
//! by a screen reader. [`Report`] holds what is known. Every part is optional: a plan alone gives a page too.
//! [`figure`] draws one global batch, trained by baselines and by ours, as an SVG file of its own.
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

pub use against::{Against, AgainstRow, Change, StepPair, Unit};
pub use figure::figure;
pub use loss::{GroupLoss, LossPoint};
pub use shapes::{RankBytes, ShapeError};

use dflop_types::{DataProfile, ModelProfile, Plan, Timeline};

/// What a page shows; each empty part is left out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Heading of the page.
    pub title: String,
    /// What the numbers belong to, as name and value: hardware, commit, command, date.
    pub facts: Vec<(String, String)>,
    /// Steps, in the order in which they ran. The steps of both arms over one global batch carry one number.
    pub steps: Vec<StepView>,
    /// The fastest baseline against the fastest of ours, where both were trained.
    pub comparison: Option<Comparison>,
    /// This run against another.
    pub against: Option<Against>,
    /// The steps of this run's second plan against those of its first.
    pub plans: Option<Against>,
    /// What the steps took, where something was trained.
    pub measured: Option<Measured>,
    /// The plan.
    pub plan: Option<Plan>,
    /// The data profile.
    pub data: Option<DataProfile>,
    /// What the heaviest samples do to a step, where there is a plan and a model profile.
    pub outliers: Option<Outliers>,
    /// Predicted and measured time by size of sample, where steps were measured.
    pub shapes: Vec<ShapeError>,
    /// Peak memory of each kind of rank.
    pub memory: Vec<RankBytes>,
    /// The model profile.
    pub model: Option<ModelProfile>,
    /// Training loss for each label token, by step.
    pub loss: Vec<(u64, f64)>,
    /// Loss of samples that are held out, by evaluation.
    pub held_out: Vec<LossPoint>,
    /// Both by the kind of the samples.
    pub loss_by_kind: Vec<GroupLoss>,
    /// Both by the source of the samples.
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
    /// Whether it is an alarm; else a decision about the correction.
    pub is_alarm: bool,
    /// What it was.
    pub words: String,
}

/// A step, and what made it slow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlowStep {
    /// Its number.
    pub step: u64,
    /// How it was scheduled.
    pub arm: String,
    /// What it took.
    pub makespan_ns: u64,
    /// Why, a sentence each.
    pub words: Vec<String>,
    /// Its critical path, the first action first.
    pub path: Vec<PathLink>,
}

/// One action of a critical path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathLink {
    /// Its name, as in `1F3`.
    pub action: String,
    /// Where it ran.
    pub rank: u32,
    /// Whether it is a forward.
    pub is_forward: bool,
    /// When it began, in nanoseconds since the start of the step.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// What it was predicted to take, in nanoseconds.
    pub predicted_ns: u64,
    /// From the end of the action before it to its start, in nanoseconds.
    pub gap_ns: u64,
    /// The largest of its samples, in words.
    pub samples: String,
}

/// What the heaviest samples do to a step of a plan. Times are forward and backward, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outliers {
    /// An even microbatch on an encoder replica.
    pub even_encoder_ms: f64,
    /// An even microbatch on the LLM stage that takes longest.
    pub even_llm_ms: f64,
    /// The heaviest samples, each alone in a microbatch.
    pub heaviest: Vec<OutlierView>,
    /// Samples that alone take longer than an even microbatch.
    pub num_longer: u64,
    /// Samples that fit on no rank, the largest first; perhaps not all.
    pub unfit: Vec<OutlierView>,
    /// All of those.
    pub num_unfit: u64,
    /// Bytes a rank may use, where that is limited.
    pub budget_bytes: Option<u64>,
}

/// One of the heaviest samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutlierView {
    /// The sample's id.
    pub id: String,
    /// On an encoder replica.
    pub encoder_ms: f64,
    /// On the LLM stage that takes longest.
    pub llm_ms: f64,
    /// What the fullest rank needs with this sample alone.
    pub needed_bytes: u64,
}

/// One step of one arm.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepView {
    /// Number of the step, or of its global batch where both arms ran it.
    pub step: u64,
    /// How the global batch was scheduled: `aware` or `blind`; other names are shown as they are.
    pub arm: String,
    /// What the simulator expected.
    pub predicted: Option<Timeline>,
    /// What was measured, or rehearsed.
    pub measured: Option<Timeline>,
    /// Whether nothing was computed in it: its actions slept for their predicted times.
    pub is_rehearsed: bool,
    /// Time until the last rank had its samples, in nanoseconds. It lies before the clock of the measured step
    /// starts, so it is not part of the makespan.
    pub data_wait_ns: u64,
}

impl StepView {
    /// What `measured` is, in a word.
    pub(crate) const fn how(&self) -> &'static str {
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
    /// Baseline over ours; above 1 ours is faster.
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
    /// 95th percentile of that, if it is known.
    pub corrected_error_p95: Option<f64>,
    /// Every arm that ran, these two among them.
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
    /// The fastest baseline over this arm; above 1 this arm is faster.
    pub ratio: f64,
    /// Lower end of its 95 % interval.
    pub ratio_low: f64,
    /// Upper end.
    pub ratio_high: f64,
    /// Idle time over ranks x makespan, from 0 to 1.
    pub idle_ratio: f64,
}

/// What a run without a comparison took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measured {
    /// Steps.
    pub num_steps: u64,
    /// Whether nothing was computed in them: actions slept for their predicted times.
    pub is_rehearsed: bool,
    /// Median of their times, in milliseconds.
    pub step_ms_median: f64,
    /// Median of measured over predicted time; above 1 steps took longer.
    pub over_predicted_median: f64,
    /// Idle time over ranks x makespan, from 0 to 1.
    pub idle_ratio: f64,
}

/// One self-contained HTML page: no external resource, light and dark, whole without scripts.
///
/// Equal reports give equal pages, byte by byte. Names from files are escaped, control characters in them are written out,
/// and passwords and signatures of URLs are left out.
/// *Complexity*: O(n log n) in samples and spans; the size of the page is bounded by caps on what is drawn, but
/// for the warnings and facts, which are shown in full.
pub fn render(report: &Report) -> String {
    dflop_types::shown_lines(&page::page(report).into_string())
}
