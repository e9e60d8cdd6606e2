//! What correction wins back on a made-up cluster whose truth is known; a line of JSON to stdout.
//!
//! `cargo run --release -p dflop-plan --example adapt [-- PERCENT...]`: with percents only their slow shapes. What is done is said on stderr.
//!
//! LLaVA-OneVision 7B on 32 H100, estimated and not measured, on the mixed set of `fixtures/mixes`, 128 samples a step; each
//! action takes up to 3 % more or less than it should. Anomalies: 1, 3 and 5 % of the samples, of neighbouring sizes that a seed draws, add 25, 50, 100
//! and 200 % of the largest stage's mean time to each action that holds one (DFLOP's own table; `SlowShapes`). `recovered` is the part of the time lost that
//! correction wins back; `recovered_of_waits` the same without the work that the anomaly adds, which somebody has to do; `recovered_knowing` what
//! schedules win back that know the slow sizes and what they take from the first step on: no correction can be expected to win more.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

mod mixes;

use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_cost::CostModel;
use dflop_sim::{StepInput, simulate_lists, simulate_step};
use dflop_step::{
    Adjustment, Arm, Cause, Correction, ShapeFactor, SlowShapes, StepScheduler, StepSettings, Watch,
};
use dflop_types::{
    ComponentLayout, Layout, MadeFrom, PipelineOrder, SampleIndex, SampleShape, Schedule, StageIndex,
    Timeline, Zero,
};
use serde_json::{Value, json};
use std::error::Error;
use std::time::{Duration, Instant};

const BATCH: usize = 128;
const NOISE: f64 = 0.03;
/// It draws the sizes that are slow.
const SEED: u64 = 0;

/// What the made-up cluster does to predicted times.
#[derive(Clone, Default)]
struct Machine {
    slow_rank: Option<(usize, f64)>,
    slow_shapes: Option<SlowShapes>,
    is_quiet: bool,
}

impl Machine {
    fn is_slow(&self, scheduler: &StepScheduler, sample: SampleIndex) -> bool {
        self.slow_shapes.is_some_and(|slow| slow.holds(&scheduler.shapes()[sample.index()]))
    }

    fn input(&self, scheduler: &StepScheduler, schedule: &Schedule) -> Result<StepInput, Box<dyn Error>> {
        let mut input = scheduler.step_input(schedule)?;
        let layout = input.layout;
        if let Some(slow) = self.slow_shapes {
            slow.add_to(&mut input, scheduler, schedule);
        }
        for (kind, rows) in [&mut input.forward_ns, &mut input.backward_ns].into_iter().enumerate() {
            for (row, times) in rows.iter_mut().enumerate() {
                let rank = if layout.is_colocated() { row % layout.llm.dp as usize } else { row };
                let slow = self.slow_rank.filter(|slow| slow.0 == rank).map_or(1.0, |slow| slow.1);
                for (at, ns) in times.iter_mut().enumerate() {
                    let place = [schedule.step, row as u64, at as u64, kind as u64, *ns];
                    let noise = if self.is_quiet { 0.0 } else { NOISE * draw(&place) };
                    *ns = (*ns as f64 * slow * (1.0 + noise)) as u64;
                }
            }
        }
        Ok(input)
    }

    fn run(&self, scheduler: &StepScheduler, schedule: &Schedule) -> Result<Timeline, Box<dyn Error>> {
        let input = self.input(scheduler, schedule)?;
        let has_lists = !schedule.actions.is_empty();
        Ok(if has_lists { simulate_lists(&input, &schedule.actions) } else { simulate_step(&input) }?)
    }
}

/// A number from -1 to 1 that depends on the place alone.
fn draw(place: &[u64]) -> f64 {
    let mixed = place.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |z, part| {
        let z = (z ^ part).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z ^ (z >> 29)
    });
    (mixed >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

struct Bench {
    scheduler: StepScheduler,
    arm: Arm,
}

/// Sums over the steps that count, in nanoseconds.
#[derive(Default)]
struct Sums {
    ideal: f64,
    plain: f64,
    corrected: f64,
    /// By schedules that know the slow sizes.
    knowing: f64,
    /// What slow shapes add on the mean rank.
    work: f64,
    /// Learning: processor time of this thread.
    learning: Duration,
    steps: u64,
    /// |corrected prediction - measured| / measured, and the same of who knows the machine, but for its noise.
    errors: Vec<(f64, f64)>,
    named_after: Option<u64>,
}

impl Bench {
    fn batch(&self, step: u64) -> Vec<SampleIndex> {
        let count = self.scheduler.shapes().len();
        (0..BATCH).map(|at| SampleIndex(((step as usize * BATCH + at) % count) as u32)).collect()
    }

    /// `num_steps` steps, of which those from `counted` on count; the anomaly is there from `from` on.
    fn run(
        &self,
        machine: &Machine,
        num_steps: u64,
        counted: u64,
        from: u64,
    ) -> Result<Sums, Box<dyn Error>> {
        let scheduler = &self.scheduler;
        let layout = scheduler.settings().layout;
        let (normal, truth) = (Machine::default(), Machine { is_quiet: true, ..machine.clone() });
        let (mut correction, mut watch, mut sums) =
            (Correction::new(scheduler), Watch::new(), Sums::default());
        let knowing = scheduler.adjusted(self.known(&truth)?)?;
        for step in 0..num_steps {
            let now = if step < from { &normal } else { machine };
            let samples = self.batch(step);
            let usual = scheduler.schedule(step, &samples, self.arm)?;
            let adjusted = scheduler.adjusted(correction.adjustment(scheduler))?;
            let schedule = adjusted.schedule(step, &samples, self.arm)?;
            let run = now.run(scheduler, &schedule)?;
            let start = Instant::now();
            let predicted = scheduler.simulate_corrected(&schedule, &correction)?.makespan_ns;
            scheduler.observe(&mut correction, &schedule, &run.spans, run.makespan_ns, true)?;
            for alarm in correction.alarms(&mut watch, &layout, (0.0, 0.0)) {
                let is_rank = |rank: u32| machine.slow_rank.is_some_and(|slow| slow.0 == rank as usize);
                if matches!(alarm.cause, Cause::Rank { rank, .. } if is_rank(rank)) {
                    sums.named_after.get_or_insert(step + 1 - from);
                }
            }
            sums.learning += start.elapsed();
            if step >= counted {
                let error = |ns: u64| (ns as f64 - run.makespan_ns as f64).abs() / run.makespan_ns as f64;
                sums.errors.push((error(predicted), error(truth.run(scheduler, &schedule)?.makespan_ns)));
                sums.ideal += normal.run(scheduler, &usual)?.makespan_ns as f64;
                sums.plain += now.run(scheduler, &usual)?.makespan_ns as f64;
                sums.corrected += run.makespan_ns as f64;
                let known = knowing.schedule(step, &samples, self.arm)?;
                sums.knowing += now.run(scheduler, &known)?.makespan_ns as f64;
                let num_slow = samples.iter().filter(|&&s| now.is_slow(scheduler, s)).count() as f64;
                let of_sample = now.slow_shapes.map_or(0, |slow| slow.forward_ns + slow.backward_ns) as f64;
                sums.work += num_slow * of_sample / f64::from(layout.llm.dp);
                sums.steps += 1;
            }
        }
        Ok(sums)
    }

    /// The slow sizes with what they take of their predicted time on the mean rank: what a correction can know at best.
    fn known(&self, truth: &Machine) -> Result<Adjustment, Box<dyn Error>> {
        let Some(slow) = truth.slow_shapes else { return Ok(Adjustment::default()) };
        let layout = self.scheduler.settings().layout;
        let (mut predicted_ns, mut added_ns) = (0.0, 0.0);
        for step in 0..8 {
            let schedule = self.scheduler.schedule(step, &self.batch(step), self.arm)?;
            let (normal, slow) =
                (self.scheduler.step_input(&schedule)?, truth.input(&self.scheduler, &schedule)?);
            for (microbatch, column) in schedule.llm.iter().enumerate() {
                for (replica, samples) in (0..).zip(column) {
                    let tokens = |s: &SampleIndex| f64::from(self.scheduler.shapes()[s.index()].llm_tokens);
                    let its = samples.iter().filter(|&&s| truth.is_slow(&self.scheduler, s));
                    let part =
                        its.map(tokens).sum::<f64>() / samples.iter().map(tokens).sum::<f64>().max(1.0);
                    for stage in layout.encoder.pp..layout.num_stages() {
                        let row = layout.row(replica, StageIndex(stage));
                        let of = |input: &StepInput| {
                            (input.forward_ns[row][microbatch] + input.backward_ns[row][microbatch]) as f64
                        };
                        predicted_ns += part * of(&normal);
                        added_ns += of(&slow) - of(&normal);
                    }
                }
            }
        }
        let factor = ShapeFactor {
            tokens_min: u64::from(slow.tokens_min),
            tokens_max: u64::from(slow.tokens_max),
            factor: if predicted_ns > 0.0 { 1.0 + added_ns / predicted_ns } else { 1.0 },
        };
        Ok(Adjustment { llm: vec![factor], ..Adjustment::default() })
    }

    /// Slow shapes as `dflop rehearse --slow-shapes` draws them.
    fn slow_shapes(&self, percent: usize, times: f64) -> Result<SlowShapes, Box<dyn Error>> {
        let usual = self.scheduler.schedule(0, &self.batch(0), self.arm)?;
        Ok(SlowShapes::drawn(&self.scheduler, &usual, percent as f64 / 100.0, times, SEED)?)
    }
}

fn quantile(mut numbers: Vec<f64>, hundredths: usize) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() * hundredths / 100).copied().unwrap_or(0.0)
}

fn bench(layout: Layout, num_microbatches: u32, arm: Arm) -> Result<Bench, Box<dyn Error>> {
    let model = catalogue_model("llava-onevision-qwen2-7b")?;
    let settings = EstimateSettings {
        model: model.name.clone(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
        lora_rank: 0,
    };
    let profile = estimate(&model.architecture()?, Hardware::named("h100")?, &settings)?;
    let shapes: Vec<SampleShape> =
        mixes::shapes(include_str!("../../../fixtures/mixes/llava_onevision.csv"))?;
    let pipeline_order = PipelineOrder::OneFOneB;
    let settings = StepSettings { layout, num_microbatches, pipeline_order, memory_budget_bytes: None };
    Ok(Bench { scheduler: StepScheduler::new(settings, CostModel::new(&profile)?, shapes, 0)?, arm })
}

fn main() -> Result<(), Box<dyn Error>> {
    let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
    let benches = [
        ("colocated dp 32, zero 1", bench(Layout::colocated(32, Zero::States), 4, Arm::AWARE)?),
        (
            "encoder dp 8, llm pp 4 dp 6",
            bench(Layout::disaggregated(degrees(1, 8), degrees(4, 6)), 8, "ordered".parse()?)?,
        ),
    ];
    let asked: Result<Vec<usize>, _> = std::env::args().skip(1).map(|percent| percent.parse()).collect();
    let asked = asked?;
    let (start, mut num_done) = (Instant::now(), 0);
    let num_rows = if asked.is_empty() { 2 * (3 * 4 + 3 + 1) } else { 2 * 4 * asked.len() };
    let mut say = |name: &str, row: &Value| {
        num_done += 1;
        eprintln!("{num_done} of {num_rows}, {:.0} s: {name}: {row}", start.elapsed().as_secs_f64());
    };
    let percents = if asked.is_empty() { vec![1, 3, 5] } else { asked.clone() };
    let (mut anomalies, mut slow_ranks, mut quiet) = (Vec::new(), Vec::new(), Vec::new());
    for (name, bench) in &benches {
        for &percent in &percents {
            for slower in [0.25, 0.5, 1.0, 2.0] {
                let slow_shapes = Some(bench.slow_shapes(percent, slower)?);
                let sums = bench.run(&Machine { slow_shapes, ..Machine::default() }, 48, 24, 0)?;
                let row = shown(name, &sums, json!({"percent": percent, "slower": slower}));
                say("slow shapes", &row);
                anomalies.push(row);
            }
        }
        if !asked.is_empty() {
            continue;
        }
        for times in [1.15, 1.3, 2.0] {
            let rank = bench.scheduler.settings().layout.num_ranks() as usize - 2;
            let machine = Machine { slow_rank: Some((rank, times)), ..Machine::default() };
            let sums = bench.run(&machine, 48, 32, 16)?;
            let row = shown(name, &sums, json!({"times": times, "named_after_steps": sums.named_after}));
            say("slow rank", &row);
            slow_ranks.push(row);
        }
        let row = quiet_steps(name, bench)?;
        say("quiet steps", &row);
        quiet.push(row);
    }
    println!("{}", json!({"anomalies": anomalies, "slow_ranks": slow_ranks, "quiet": quiet}));
    Ok(())
}

fn shown(name: &str, sums: &Sums, mut about: Value) -> Value {
    let lost = sums.plain - sums.ideal;
    let recovered =
        |lost: f64, ns: f64| if lost / sums.ideal > 1e-3 { Some((sums.plain - ns) / lost) } else { None };
    let of = |lost: f64| recovered(lost, sums.corrected);
    let is_slow_shapes = about.get("percent").is_some();
    let corrected = |hundredths| quantile(sums.errors.iter().map(|e| e.0).collect(), hundredths);
    let noise = |hundredths| quantile(sums.errors.iter().map(|e| e.1).collect(), hundredths);
    let more = json!({
        "layout": name,
        "lost": lost / sums.ideal,
        "lost_corrected": (sums.corrected - sums.ideal) / sums.ideal,
        "recovered": of(lost),
        "recovered_of_waits": of(lost - sums.work),
        "recovered_knowing": if is_slow_shapes { recovered(lost, sums.knowing) } else { None },
        "corrected_error": corrected(50),
        "noise_error": noise(50),
        "corrected_error_p95": corrected(95),
        "noise_error_p95": noise(95),
    });
    if let (Some(about), Value::Object(more)) = (about.as_object_mut(), more) {
        about.extend(more);
    }
    about
}

/// A thousand steps without an anomaly: alarms, and what learning costs. Sixteen batches come again and again.
fn quiet_steps(name: &str, bench: &Bench) -> Result<Value, Box<dyn Error>> {
    let scheduler = &bench.scheduler;
    let layout = scheduler.settings().layout;
    let machine = Machine::default();
    let batches: Result<Vec<Schedule>, _> =
        (0..16).map(|step| scheduler.schedule(step, &bench.batch(step), bench.arm)).collect();
    let batches = batches?;
    let (mut correction, mut watch) = (Correction::new(scheduler), Watch::new());
    let (mut num_alarms, mut num_corrected, mut learning, mut steps_ns) = (0, 0, Duration::ZERO, 0.0);
    for step in 0..1_000 {
        let schedule = Schedule { step, ..batches[step as usize % batches.len()].clone() };
        let run = machine.run(scheduler, &schedule)?;
        let start = Instant::now();
        scheduler.simulate_corrected(&schedule, &correction)?;
        scheduler.observe(&mut correction, &schedule, &run.spans, run.makespan_ns, true)?;
        num_alarms += correction.alarms(&mut watch, &layout, (0.01, 0.05)).len();
        num_corrected += usize::from(!correction.adjustment(scheduler).is_nothing());
        learning += start.elapsed();
        steps_ns += run.makespan_ns as f64;
    }
    Ok(json!({
        "layout": name,
        "steps": 1_000,
        "false_alarms": num_alarms,
        "steps_corrected": num_corrected,
        "learning_ms": learning.as_secs_f64() * 1e3 / 1_000.0,
        "monitoring": learning.as_secs_f64() * 1e9 / steps_ns,
    }))
}
