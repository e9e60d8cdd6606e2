//! A page and a figure over made-up numbers, to look at: `cargo run -p dflop-report --example sample_page [DIR]`.
//!
//! Nothing here was measured. Sizes are drawn from a fixed seed, times follow from sizes, and a small 1F1B
//! walk turns times into timelines, so that the page has the looks of a real one.

use dflop_report::{ArmView, Comparison, GroupLoss, LossPoint, Report, StepView, figure, render};
use dflop_types::{
    Action, ActionKind, Collective, Component, ComponentLayout, DataProfile, Device, EncoderSegments, Idle,
    Layout, LinkProfile, LinkSpan, MadeFrom, MeasuredCurve, MeasuredPoint, MessagePoint, ModelProfile,
    ModuleProfile, Network, PipelineOrder, Plan, PlanPrediction, Problem, ProfiledSample, Rank, RankedPlan,
    Recomputation, Recompute, RecomputePoint, Refusal, Rejection, RejectionCount, SampleKind, SampleShape,
    Span, StageIndex, Timeline, Trained, WayPrediction,
};
use std::path::PathBuf;

const MICROBATCHES: usize = 16;
const STAGES: usize = 3;
const PAIRS: u64 = 32;

/// A small generator with a fixed seed: the same page on every machine.
struct Dice(u64);

impl Dice {
    /// Uniform from 0 to 1 (splitmix64).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller).
    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    fn lognormal(&mut self, median: f64, spread: f64) -> f64 {
        median * (self.normal() * spread).exp()
    }
}

fn main() -> std::io::Result<()> {
    let dir = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let report = report();
    std::fs::write(dir.join("sample_report.html"), render(&report))?;
    let step = |arm: &str| {
        report.steps.iter().find(|s| s.arm == arm && s.step == 4).and_then(|s| s.measured.clone())
    };
    let (blind, aware) = (step("blind").unwrap_or_default(), step("aware").unwrap_or_default());
    let caption = "One global batch of 64 samples, 16 microbatches, 1F1B, 3 ranks. Made-up numbers.";
    let drawn = figure(&[("blind", &blind), ("aware", &aware)], Some(&layout(1, 2, 1)), caption);
    std::fs::write(dir.join("sample_figure.svg"), drawn)
}

/// An encoder, and replicas of an LLM of `pp` stages.
fn layout(encoder_dp: u32, pp: u32, llm_dp: u32) -> Layout {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    Layout::disaggregated(degrees(1, encoder_dp), degrees(pp, llm_dp))
}

fn report() -> Report {
    let mut dice = Dice(7);
    let data = data(&mut dice);
    let steps = steps(&mut dice);
    let makespan = |arm: &str| -> Vec<f64> {
        let measured = steps.iter().filter(|s| s.arm == arm).filter_map(|s| s.measured.as_ref());
        measured.map(|t| t.makespan_ns as f64 / 1e6).collect()
    };
    let (blind, aware) = (makespan("blind"), makespan("aware"));
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let idle = |arm: &str| -> f64 {
        mean(
            &steps
                .iter()
                .filter(|s| s.arm == arm)
                .filter_map(|s| s.measured.as_ref())
                .map(Timeline::bubble_ratio)
                .collect::<Vec<_>>(),
        )
    };
    let ratio = mean(&blind) / mean(&aware);
    let comparison = Comparison {
        baseline: "blind".to_owned(),
        ours: "aware".to_owned(),
        step_ms_baseline: mean(&blind),
        step_ms_ours: mean(&aware),
        ratio,
        ratio_low: ratio - 0.016,
        ratio_high: ratio + 0.017,
        pairs: blind.iter().copied().zip(aware.iter().copied()).collect(),
        idle_ratio_baseline: idle("blind"),
        idle_ratio_ours: idle("aware"),
        prediction_error_median: 0.0112,
        prediction_error_p95: 0.0307,
        corrected_error_median: Some(0.0094),
        corrected_error_p95: Some(0.0251),
        arms: vec![
            arm("blind", true, mean(&blind), 1.0),
            arm("tokens", true, 1.02 * mean(&blind), 1.0 / 1.02),
            arm("aware", false, mean(&aware), ratio),
        ],
    };
    let loss = (0..64)
        .map(|step| (step, 6.2 * (-(step as f64) / 40.0).exp() + 2.1 + 0.05 * dice.normal()))
        .collect();
    let facts = [
        ("hardware", "2 cores, Intel Xeon @ 2.20 GHz, no GPU"),
        ("command", "dflop train --compare --steps 64"),
        ("commit", "0123abcd (made up)"),
        ("date", "2026-11-20"),
        ("dflop", "0.1.0"),
        ("seed", "0"),
    ];
    Report {
        title: "Demo: LLaVA-OneVision, tiny, on two cores".to_owned(),
        facts: facts.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        steps,
        comparison: Some(comparison),
        plan: Some(plan()),
        data: Some(data),
        model: Some(model(&mut dice)),
        loss,
        held_out: falling(&mut dice, 16, 2.3, 9),
        loss_by_kind: ["text", "image", "video"].map(|name| group(&mut dice, name)).into(),
        loss_by_source: ["captions", "questions"].map(|name| group(&mut dice, name)).into(),
        warnings: vec![
            "3 of 1,024 predictions were outside the measured range of llm_layer and follow the last slope"
                .to_owned(),
            "1 sample was left out: its JPEG is cut short (policy: skip)".to_owned(),
        ],
        ..Report::default()
    }
}

/// A falling loss every `every` steps of 64.
fn falling(dice: &mut Dice, every: usize, floor: f64, label_tokens: u64) -> Vec<LossPoint> {
    let loss = |step: u64, dice: &mut Dice| 6.0 * (-(step as f64) / 40.0).exp() + floor + 0.2 * dice.normal();
    (0..64).step_by(every).map(|step| LossPoint { step, loss: loss(step, dice), label_tokens }).collect()
}

fn group(dice: &mut Dice, name: &str) -> GroupLoss {
    let floor = 1.8 + 0.2 * name.len() as f64;
    GroupLoss {
        name: name.to_owned(),
        trained: falling(dice, 1, floor, 40_000 / name.len() as u64),
        held_out: falling(dice, 16, floor + 0.2, 9_000),
    }
}

/// Sixteen microbatches for each of three stages: uneven in arrival order, nearly even when scheduled.
fn durations(dice: &mut Dice, spread: f64) -> (Vec<[f64; STAGES]>, f64) {
    let loads: Vec<[f64; STAGES]> = (0..MICROBATCHES)
        .map(|_| {
            let (encoder, llm) = (dice.lognormal(6.5, spread), dice.lognormal(6.8, spread * 0.7));
            [encoder, llm, llm * 1.06]
        })
        .collect();
    let sum = loads.iter().map(|l| l[0]).sum();
    (loads, sum)
}

fn steps(dice: &mut Dice) -> Vec<StepView> {
    let mut steps = Vec::new();
    for step in 0..PAIRS {
        let (mut blind, sum) = durations(dice, 0.65);
        let (mut aware, aware_sum) = durations(dice, 0.07);
        // Both arms hold the same samples: the same work in all.
        for load in &mut aware {
            for time in load.iter_mut() {
                *time *= 104.0 / aware_sum;
            }
        }
        for load in &mut blind {
            for time in load.iter_mut() {
                *time *= 104.0 / sum;
            }
        }
        for (arm, loads) in [("blind", blind), ("aware", aware)] {
            let predicted = walk(&loads, 0.25);
            let noisy =
                loads.iter().map(|l| l.map(|t| t * (1.008 + 0.02 * dice.normal()))).collect::<Vec<_>>();
            steps.push(StepView {
                step,
                arm: arm.to_owned(),
                layout: Some(layout(1, 2, 1)),
                predicted: Some(predicted),
                measured: Some(walk(&noisy, 0.3)),
                ..StepView::default()
            });
        }
    }
    steps
}

/// One step under 1F1B: each action starts when its rank is free and its input has arrived.
fn walk(loads: &[[f64; STAGES]], transfer_ms: f64) -> Timeline {
    let orders: Vec<Vec<(bool, usize)>> = (0..STAGES).map(order).collect();
    let mut ends = vec![[[None::<f64>; 2]; STAGES]; MICROBATCHES];
    let mut free = [0.0f64; STAGES];
    let mut next = [0usize; STAGES];
    let mut spans = Vec::new();
    while (0..STAGES).any(|s| next[s] < orders[s].len()) {
        for stage in 0..STAGES {
            while let Some(&(is_forward, j)) = orders[stage].get(next[stage]) {
                let input = match (is_forward, stage) {
                    (true, 0) => Some(0.0),
                    (true, s) => ends[j][s - 1][0].map(|t| t + transfer_ms),
                    (false, s) if s + 1 == STAGES => ends[j][s][0],
                    (false, s) => ends[j][s + 1][1].map(|t| t + transfer_ms),
                };
                let Some(input) = input else { break };
                let start = input.max(free[stage]);
                let end = start + loads[j][stage] * if is_forward { 1.0 } else { 2.0 };
                ends[j][stage][usize::from(!is_forward)] = Some(end);
                free[stage] = end;
                next[stage] += 1;
                let kind = if is_forward { ActionKind::F } else { ActionKind::B };
                let action = Action { stage: StageIndex(stage as u32), kind, microbatch: j as u32 };
                let ns = |ms: f64| (ms * 1e6) as u64;
                spans.push(Span { rank: Rank(stage as u32), action, start_ns: ns(start), end_ns: ns(end) });
            }
        }
    }
    spans.sort_by_key(|s| (s.rank, s.start_ns));
    let last = spans.iter().map(|s| s.end_ns).max().unwrap_or(0);
    let makespan_ns = last + 9_000_000;
    let busy: u64 = spans.iter().map(Span::duration_ns).sum();
    let whole = STAGES as u64 * last - busy;
    let ramp = (whole * 2 / 5).min(62_000_000);
    let transfer = (whole - ramp) / 12;
    let idle_ns = Idle { ramp, imbalance: whole - ramp - transfer, transfer, data_wait: 0 };
    Timeline { num_ranks: STAGES as u32, makespan_ns, idle_ns, spans }
}

fn order(stage: usize) -> Vec<(bool, usize)> {
    let warm_up = (STAGES - 1 - stage).min(MICROBATCHES);
    let mut order: Vec<(bool, usize)> = (0..warm_up).map(|j| (true, j)).collect();
    for j in warm_up..MICROBATCHES {
        order.extend([(true, j), (false, j - warm_up)]);
    }
    order.extend((MICROBATCHES - warm_up..MICROBATCHES).map(|j| (false, j)));
    order
}

fn data(dice: &mut Dice) -> DataProfile {
    let samples = (0..512).map(|index| sample(dice, index)).collect();
    DataProfile {
        made_from: hashes(&["dataset", "tokenizer", "processor"]),
        family: "llava_onevision".to_owned(),
        sources: vec![
            "coco_captions.json".to_owned(),
            "textvqa.json".to_owned(),
            "activitynet.jsonl".to_owned(),
        ],
        problems: vec![Problem {
            file: "images/0417.jpg".to_owned(),
            position: Some(417),
            id: Some("textvqa_0417".to_owned()),
            cause: "JPEG ends after 1,024 bytes, before its frame header".to_owned(),
            ..Default::default()
        }],
        samples,
        ..Default::default()
    }
}

fn sample(dice: &mut Dice, index: u64) -> ProfiledSample {
    let draw = dice.uniform();
    let text = dice.lognormal(90.0, 0.9).clamp(8.0, 4000.0) as u32;
    let (kind, source, tiles, features_each) = match draw {
        d if d < 0.15 => (SampleKind::Text, 0, 0, 0),
        d if d < 0.65 => (SampleKind::Image, 0, 2 + (dice.lognormal(2.6, 0.55) as u32).min(8), 700),
        d if d < 0.80 => (SampleKind::MultiImage, 1, 2 + (dice.lognormal(2.0, 0.6) as u32).min(10), 729),
        _ => (SampleKind::Video, 2, (dice.lognormal(14.0, 0.6) as u32).clamp(2, 32), 196),
    };
    let features: u32 =
        (0..tiles).map(|_| features_each - (dice.uniform() * f64::from(features_each) * 0.2) as u32).sum();
    let segments = (tiles > 0).then_some(EncoderSegments::of(tiles, 729));
    ProfiledSample {
        id: format!("{}_{index:04}", ["coco", "textvqa", "activitynet"][source as usize]),
        source,
        position: index,
        kind,
        shape: SampleShape {
            encoder_segments: segments.into_iter().collect(),
            feature_tokens: features,
            llm_tokens: features + text,
            label_tokens: (f64::from(text) * (0.2 + 0.5 * dice.uniform())) as u32,
            ..SampleShape::default()
        },
        media_bytes: u64::from(tiles) * 41_000,
        media_ms: 0,
        ..Default::default()
    }
}

fn curve(dice: &mut Dice, sizes: &[u64], fixed_ms: f64, ms_each: f64, ms_square: f64) -> MeasuredCurve {
    let points = sizes
        .iter()
        .map(|&size| {
            let s = size as f64;
            let forward = (fixed_ms + ms_each * s + ms_square * s * s) * (1.0 + 0.02 * dice.normal());
            MeasuredPoint {
                size,
                forward_ns: (forward * 1e6) as u64,
                backward_ns: (forward * (1.9 + 0.1 * dice.uniform()) * 1e6) as u64,
                input_ns: (forward * 1.0e6) as u64,
                weight_ns: (forward * 0.95e6) as u64,
                spread_ns: (forward * 0.04e6) as u64,
                activation_bytes: size * 5_800,
                workspace_bytes: size * 900,
                split: None,
                repeats: 9,
            }
        })
        .collect();
    MeasuredCurve { points, ..MeasuredCurve::default() }
}

/// Recomputation of a `share` of the forward, which keeps so many bytes a token.
fn recomputed(linear: &MeasuredCurve, share: f64, kept: u64) -> Vec<RecomputePoint> {
    let of = |p: &MeasuredPoint| RecomputePoint {
        size: p.size,
        extra_ns: (p.forward_ns as f64 * share) as u64,
        activation_bytes: kept * p.size,
    };
    linear.points.iter().map(of).collect()
}

/// Links of four ranks, by message size.
fn network() -> Network {
    let kinds = [
        (Collective::PointToPoint, 2, 250_000, 1.0),
        (Collective::AllReduce, 2, 410_000, 1.0),
        (Collective::AllGather, 2, 330_000, 0.5),
        (Collective::ReduceScatter, 2, 360_000, 0.5),
        (Collective::AllReduce, 4, 790_000, 1.5),
        (Collective::AllGather, 4, 640_000, 0.75),
        (Collective::ReduceScatter, 4, 690_000, 0.75),
    ];
    let link = |(collective, num_ranks, latency_ns, wire): (Collective, u32, u64, f64)| LinkProfile {
        collective,
        span: LinkSpan::Node,
        num_ranks,
        latency_ns,
        bandwidth_bytes_per_s: 1_900_000_000,
        points: (5..13)
            .map(|power| 1 << (2 * power))
            .map(|bytes: u64| MessagePoint { bytes, ns: latency_ns + (bytes as f64 * wire / 1.9) as u64 })
            .collect(),
    };
    Network { backend: "gloo".to_owned(), is_assumed: false, links: kinds.map(link).into() }
}

fn model(dice: &mut Dice) -> ModelProfile {
    let sizes: Vec<u64> = (4..15).map(|power| 1 << power).collect();
    let tiles: Vec<u64> = [1, 2, 4, 6, 9, 16, 24, 32].map(|tiles| tiles * 729).into();
    let mut module = |name: &str, sizes: &[u64], each: f64, square: f64, num_parameters: u64| {
        let linear = curve(dice, sizes, 0.3, each, 0.0);
        let attention =
            if square > 0.0 { curve(dice, sizes, 0.08, 0.0, square) } else { MeasuredCurve::default() };
        let is_layer = name.ends_with("layer");
        let recompute = [(Recompute::Selective, 0.2, 1_900), (Recompute::Full, 1.0, 512)]
            .into_iter()
            .filter(|_| is_layer)
            .map(|(mode, share, kept)| (mode, recomputed(&linear, share, kept)))
            .collect();
        (
            name.to_owned(),
            ModuleProfile {
                count: if is_layer { 24 } else { 1 },
                linear,
                attention,
                recompute,
                num_parameters,
                parameter_bytes: 4 * num_parameters,
                ..ModuleProfile::default()
            },
        )
    };
    let modules = [
        module("encoder_embedding", &tiles, 0.000_2, 0.0, 412_992),
        module("encoder_layer", &tiles, 0.0042, 0.0, 2_412_992),
        module("projector", &tiles, 0.000_4, 0.0, 612_992),
        module("llm_embedding", &sizes, 0.000_02, 0.0, 4_194_304),
        module("llm_layer", &sizes, 0.000_9, 0.000_000_5, 655_872),
        module("llm_head", &sizes, 0.011, 0.0, 4_194_432),
    ];
    ModelProfile {
        made_from: hashes(&["model_config"]),
        family: "llava_onevision".to_owned(),
        device: Device {
            kind: "cpu".to_owned(),
            name: "Intel Xeon @ 2.20 GHz".to_owned(),
            num_threads: 1,
            num_neighbours: 1,
            dtype: "float32".to_owned(),
            torch: "2.15.0".to_owned(),
            ..Device::default()
        },
        hidden_bytes: 1024,
        network: network(),
        modules: modules.into(),
        optimizer_ns_per_million: 4_100_000,
        ..ModelProfile::default()
    }
}

fn arm(name: &str, is_baseline: bool, step_ms: f64, ratio: f64) -> ArmView {
    ArmView {
        name: name.to_owned(),
        is_baseline,
        step_ms,
        ratio,
        ratio_low: ratio - 0.016,
        ratio_high: ratio + 0.017,
        idle_ratio: 0.15,
    }
}

fn way(name: &str, is_baseline: bool, step: Result<f64, u64>) -> WayPrediction {
    WayPrediction {
        way: name.to_owned(),
        is_baseline,
        num_microbatches: 16,
        step_ns_mean: step.ok().map(|ms| (ms * 1e6) as u64),
        refusal: step.err().map(|needed_bytes| Refusal::Memory { needed_bytes, budget_bytes: 76 << 30 }),
    }
}

fn plan() -> Plan {
    let ranked = |encoder_dp, pp, llm_dp, num_microbatches, step_ms: f64, bubble_ratio| RankedPlan {
        layout: layout(encoder_dp, pp, llm_dp),
        num_microbatches,
        pipeline_order: PipelineOrder::OneFOneB,
        recompute: Recomputation::NONE,
        is_eased: false,
        prediction: PlanPrediction {
            step_ns_mean: (step_ms * 1e6) as u64,
            step_ns_half_width: (step_ms * 8e3) as u64,
            bubble_ratio,
            encoder_memory_bytes_peak: 412 << 20,
            llm_memory_bytes_peak: 655 << 20,
            extrapolated_ratio: 0.003,
            num_predictions: 4_000,
            num_extrapolated: 12,
        },
    };
    Plan {
        made_from: hashes(&["data_profile", "model_profile", "model_config"]),
        global_batch_size: 64,
        seed: 0,
        num_sampled_batches: 16,
        trained: Trained::default(),
        best: ranked(1, 2, 1, 16, 373.0, 0.101),
        ways: vec![
            way("blind", true, Ok(473.0)),
            way("blind-ahead", true, Ok(405.5)),
            way("data-parallel", true, Err(131 << 30)),
            way("data-parallel-sharded", true, Ok(391.2)),
            way("aware", false, Ok(373.0)),
            way("aware-ahead", false, Ok(362.1)),
        ],
        rivals: Vec::new(),
        runners_up: vec![
            ranked(1, 2, 1, 8, 401.4, 0.162),
            ranked(2, 1, 1, 16, 418.9, 0.214),
            ranked(1, 1, 2, 8, 422.0, 0.22),
        ],
        rejections: vec![
            RejectionCount { rejection: Rejection::Bound, count: 9 },
            RejectionCount {
                rejection: Rejection::Memory {
                    component: Component::Llm,
                    needed_bytes: 3 << 30,
                    budget_bytes: 2 << 30,
                },
                count: 4,
            },
            RejectionCount {
                rejection: Rejection::TooFewSamples { global_batch_size: 64, buckets: 128 },
                count: 3,
            },
        ],
        searched: None,
    }
}

fn hashes(names: &[&str]) -> MadeFrom {
    let of = |name: &str| {
        format!("sha256:{:0<64}", name.bytes().fold(String::new(), |text, b| text + &format!("{b:02x}")))
    };
    names.iter().map(|name| ((*name).to_owned(), of(name))).collect()
}
