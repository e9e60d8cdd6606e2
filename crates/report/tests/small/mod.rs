//! A small report, of which the tests know every number.

use dflop_report::{ArmView, Comparison, OutlierView, Outliers, Report, StepView};
use dflop_types::{
    Component, ComponentLayout, DataProfile, EncoderSegments, Idle, Layout, MadeFrom, MeasuredCurve,
    MeasuredPoint, ModelProfile, ModuleProfile, PipelineOrder, Plan, PlanPrediction, Problem, ProfiledSample,
    Rank, RankedPlan, Recomputation, Refusal, Rejection, RejectionCount, SampleKind, SampleShape, Span,
    Timeline, Trained, WayPrediction,
};

pub(crate) fn span(rank: u32, action: &str, start_ns: u64, end_ns: u64) -> Span {
    Span { rank: Rank(rank), action: action.parse().unwrap(), start_ns, end_ns }
}

/// Two ranks, two microbatches: 20 and 18 ms of work, 5 ms of reduction and optimizer at the end.
pub(crate) fn timeline(late_ms: u64) -> Timeline {
    let ms = 1_000_000;
    let late = late_ms * ms;
    let spans = vec![
        span(0, "0F0", 0, 4 * ms),
        span(0, "0F1", 4 * ms, 8 * ms),
        span(0, "0B0", 14 * ms + late, 20 * ms + late),
        span(0, "0B1", 24 * ms + late, 30 * ms + late),
        span(1, "1F0", 5 * ms, 9 * ms),
        span(1, "1B0", 9 * ms, 13 * ms + late),
        span(1, "1F1", 13 * ms + late, 17 * ms + late),
        span(1, "1B1", 17 * ms + late, 23 * ms + late),
    ];
    let idle_ns = Idle { ramp: 9 * ms, imbalance: 10 * ms + late, transfer: 3 * ms, data_wait: 0 };
    Timeline { num_ranks: 2, makespan_ns: 35 * ms + late, idle_ns, spans }
}

pub(crate) fn sample(id: &str, kind: SampleKind, tiles: u32, llm_tokens: u32) -> ProfiledSample {
    let encoder_segments = (tiles > 0).then_some(EncoderSegments::of(tiles, 729)).into_iter().collect();
    let shape = SampleShape {
        encoder_segments,
        feature_tokens: tiles * 196,
        llm_tokens,
        label_tokens: llm_tokens / 4,
        ..SampleShape::default()
    };
    ProfiledSample {
        id: id.to_owned(),
        source: 0,
        position: 0,
        kind,
        shape,
        media_bytes: 1 << 20,
        media_ms: 0,
        ..Default::default()
    }
}

pub(crate) fn hashes(name: &str) -> MadeFrom {
    [(name.to_owned(), "sha256:00ff".to_owned())].into()
}

pub(crate) fn ranked(num_microbatches: u32, step_ms: u64) -> RankedPlan {
    let layout = Layout::disaggregated(
        ComponentLayout { tp: 1, pp: 1, dp: 1 },
        ComponentLayout { tp: 1, pp: 1, dp: 1 },
    );
    let prediction = PlanPrediction {
        step_ns_mean: step_ms * 1_000_000,
        step_ns_half_width: 400_000,
        bubble_ratio: 0.2,
        encoder_memory_bytes_peak: 1 << 29,
        llm_memory_bytes_peak: 3 << 28,
        extrapolated_ratio: 0.0,
        ..PlanPrediction::default()
    };
    RankedPlan {
        layout,
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        recompute: Recomputation::NONE,
        is_eased: false,
        prediction,
    }
}

/// Three samples, one of them too long and too large.
pub(crate) fn outliers() -> Outliers {
    Outliers {
        even_encoder_ms: 4.0,
        even_llm_ms: 5.0,
        heaviest: vec![
            OutlierView { id: "v1".to_owned(), encoder_ms: 12.0, llm_ms: 7.5, needed_bytes: 3 << 30 },
            OutlierView { id: "i1".to_owned(), encoder_ms: 2.0, llm_ms: 1.0, needed_bytes: 1 << 30 },
        ],
        num_longer: 1,
        unfit: vec![OutlierView {
            id: "v1".to_owned(),
            encoder_ms: 12.0,
            llm_ms: 7.5,
            needed_bytes: 3 << 30,
        }],
        num_unfit: 1,
        budget_bytes: Some(2 << 30),
    }
}

pub(crate) fn arm(name: &str, is_baseline: bool, step_ms: f64, ratio: f64) -> ArmView {
    let (ratio_low, ratio_high) = (ratio - 0.02, ratio + 0.02);
    ArmView { name: name.to_owned(), is_baseline, step_ms, ratio, ratio_low, ratio_high, idle_ratio: 0.3 }
}

pub(crate) fn way(name: &str, is_baseline: bool, step: Result<u64, u64>) -> WayPrediction {
    WayPrediction {
        way: name.to_owned(),
        is_baseline,
        num_microbatches: 2,
        step_ns_mean: step.ok().map(|ms| ms * 1_000_000),
        refusal: step.err().map(|needed_bytes| Refusal::Memory { needed_bytes, budget_bytes: 76 << 30 }),
    }
}

#[allow(clippy::too_many_lines, reason = "one report, part by part")]
pub(crate) fn small() -> Report {
    let step = |step, arm: &str, predicted, measured| StepView {
        step,
        arm: arm.to_owned(),
        layout: Some(ranked(2, 35).layout),
        predicted: Some(timeline(predicted)),
        measured: Some(timeline(measured)),
        data_wait_ns: 0,
        is_rehearsed: false,
    };
    let point = |size, forward_ns| MeasuredPoint {
        size,
        forward_ns,
        backward_ns: 2 * forward_ns,
        spread_ns: 1_000,
        activation_bytes: size * 64,
        repeats: 5,
        ..MeasuredPoint::default()
    };
    let module = ModuleProfile {
        count: 2,
        linear: MeasuredCurve {
            points: vec![point(729, 3_000_000), point(1458, 6_100_000)],
            ..MeasuredCurve::default()
        },
        num_parameters: 1_234_567,
        parameter_bytes: 4_938_268,
        ..ModuleProfile::default()
    };
    Report {
        title: "A small run".to_owned(),
        facts: vec![("hardware".to_owned(), "2 cores".to_owned()), ("commit".to_owned(), "abc".to_owned())],
        steps: vec![
            step(0, "blind", 9, 10),
            step(0, "aware", 0, 0),
            step(1, "blind", 10, 11),
            step(1, "aware", 0, 0),
        ],
        comparison: Some(Comparison {
            baseline: "blind".to_owned(),
            ours: "aware".to_owned(),
            step_ms_baseline: 45.5,
            step_ms_ours: 35.0,
            ratio: 1.3,
            ratio_low: 1.28,
            ratio_high: 1.32,
            pairs: vec![(45.0, 35.0), (46.0, 35.0)],
            idle_ratio_baseline: 0.35,
            idle_ratio_ours: 0.31,
            prediction_error_median: 0.011,
            prediction_error_p95: 0.022,
            corrected_error_median: Some(0.008),
            corrected_error_p95: Some(0.019),
            arms: vec![
                arm("blind", true, 45.5, 1.0),
                arm("aware", false, 35.0, 1.3),
                arm("tokens", true, 47.0, 0.97),
            ],
        }),
        measured: None,
        plan: Some(Plan {
            made_from: hashes("data_profile"),
            global_batch_size: 8,
            seed: 0,
            num_sampled_batches: 4,
            trained: Trained::default(),
            best: ranked(2, 36),
            ways: vec![
                way("blind", true, Ok(45)),
                way("blind-ahead", true, Ok(37)),
                way("data-parallel", true, Err(131 << 30)),
                way("aware", false, Ok(36)),
            ],
            rivals: Vec::new(),
            runners_up: vec![ranked(4, 40)],
            rejections: vec![RejectionCount {
                rejection: Rejection::Memory {
                    component: Component::Llm,
                    needed_bytes: 3 << 30,
                    budget_bytes: 2 << 30,
                },
                count: 3,
            }],
            searched: None,
        }),
        data: Some(DataProfile {
            made_from: hashes("dataset"),
            family: "llava_onevision".to_owned(),
            sources: vec!["chat.json".to_owned()],
            problems: vec![Problem {
                file: "a.jpg".to_owned(),
                position: Some(3),
                id: None,
                cause: "no frame header".to_owned(),
                ..Default::default()
            }],
            samples: vec![
                sample("t1", SampleKind::Text, 0, 40),
                sample("i1", SampleKind::Image, 2, 500),
                sample("v1", SampleKind::Video, 16, 3_200),
            ],
            ..Default::default()
        }),
        outliers: Some(outliers()),
        model: Some(ModelProfile {
            made_from: hashes("model_config"),
            family: "llava_onevision".to_owned(),
            modules: [("encoder_layer".to_owned(), module)].into(),
            ..ModelProfile::default()
        }),
        loss: vec![(0, 6.0), (1, 5.5), (2, 5.25)],
        is_loss_by_update: false,
        held_out: Vec::new(),
        loss_by_kind: Vec::new(),
        loss_by_source: Vec::new(),
        against: None,
        shapes: Vec::new(),
        memory: Vec::new(),
        plans: None,
        events: Vec::new(),
        slow_steps: Vec::new(),
        warnings: vec!["2 of 90 predictions were outside the measured range".to_owned()],
    }
}
