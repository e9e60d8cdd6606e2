//! Correction on a made-up machine whose truth is known: what slow shapes and slow ranks cost, and what of it comes back.

use crate::fixture;
use dflop_cost::{CostModel, CostSettings};
use dflop_sim::{StepInput, simulate_lists, simulate_step};
use dflop_step::{Arm, Correction, ShapeFactor, StepScheduler, StepSettings};
use dflop_types::{
    ComponentLayout, Layout, PipelineOrder, SampleIndex, SampleShape, Schedule, Timeline, Zero,
};

const BATCH: u32 = 64;
const NUM_SAMPLES: u32 = 1_024;

fn scheduler(layout: Layout, num_microbatches: u32, shapes: &[SampleShape]) -> StepScheduler {
    let pipeline_order = PipelineOrder::OneFOneB;
    let settings = StepSettings { layout, num_microbatches, pipeline_order, memory_budget_bytes: None };
    let profile = if layout.cuts_layers() { fixture::cuttable() } else { fixture::model_profile() };
    let model = CostModel::with(&profile, &CostSettings::default().in_layout(&layout)).unwrap();
    StepScheduler::new(settings, model, shapes.to_vec(), 3).unwrap()
}

fn apart(encoder_dp: u32, pp: u32, dp: u32) -> Layout {
    Layout::disaggregated(ComponentLayout { tp: 1, pp: 1, dp: encoder_dp }, ComponentLayout { tp: 1, pp, dp })
}

/// Four groups of two ranks.
fn whole_encoders(zero: Zero) -> Layout {
    let degrees = |tp, dp| ComponentLayout { tp, pp: 1, dp };
    Layout { encoder: degrees(1, 8), llm: degrees(2, 4), ..Layout::colocated(1, zero) }
}

fn batch(step: u64) -> Vec<SampleIndex> {
    (0..BATCH)
        .map(|at| SampleIndex((at + BATCH * (step as u32 % (NUM_SAMPLES / BATCH))) % NUM_SAMPLES))
        .collect()
}

/// What the made-up machine does to predicted times.
#[derive(Clone, Default)]
struct Machine {
    slow_rank: Option<(usize, f64)>,
    /// Samples of these LLM tokens add so many nanoseconds to a forward, and twice that to a backward, on each stage.
    slow_shapes: Option<(u32, u32, f64)>,
    /// Each action takes up to this part more or less, drawn by its place.
    noise: f64,
}

impl Machine {
    fn input(&self, scheduler: &StepScheduler, schedule: &Schedule) -> StepInput {
        let mut input = scheduler.step_input(schedule).unwrap();
        let layout = input.layout;
        if let Some((first, last, ns)) = self.slow_shapes {
            let is_slow =
                |s: &&SampleIndex| (first..=last).contains(&scheduler.shapes()[s.index()].llm_tokens);
            for (microbatch, column) in schedule.llm.iter().enumerate() {
                for (replica, samples) in column.iter().enumerate() {
                    let more = ns * samples.iter().filter(is_slow).count() as f64;
                    for stage in layout.encoder.pp..layout.num_stages() {
                        let row = layout.row(replica as u32, dflop_types::StageIndex(stage));
                        input.forward_ns[row][microbatch] += more as u64;
                        input.backward_ns[row][microbatch] += 2 * more as u64;
                    }
                }
            }
        }
        for rows in [&mut input.forward_ns, &mut input.backward_ns] {
            for (row, times) in rows.iter_mut().enumerate() {
                let rank = if layout.is_colocated() { row % layout.llm.dp as usize } else { row };
                let slow = self.slow_rank.filter(|slow| slow.0 == rank).map_or(1.0, |slow| slow.1);
                for (at, ns) in times.iter_mut().enumerate() {
                    let mut z = (schedule.step ^ (row as u64) << 20 ^ (at as u64) << 40 ^ *ns)
                        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    z ^= z >> 29;
                    let draw =
                        (z.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f64 / f64::from(1 << 23) - 1.0;
                    *ns = (*ns as f64 * slow * (1.0 + self.noise * draw)) as u64;
                }
            }
        }
        input
    }

    fn run(&self, scheduler: &StepScheduler, schedule: &Schedule) -> Timeline {
        let input = self.input(scheduler, schedule);
        if schedule.actions.is_empty() {
            simulate_step(&input)
        } else {
            simulate_lists(&input, &schedule.actions)
        }
        .unwrap()
    }
}

/// Mean makespans over the last half of `num_steps`: as predicted without anomaly, with it uncorrected, corrected, and
/// scheduled by who knows the truth of ranks.
fn means(scheduler: &StepScheduler, machine: &Machine, num_steps: u64) -> (f64, f64, f64, Correction) {
    let quiet = Machine { slow_rank: None, slow_shapes: None, ..machine.clone() };
    let mut correction = Correction::new(scheduler);
    let (mut ideal, mut plain, mut corrected) = (0.0, 0.0, 0.0);
    for step in 0..num_steps {
        let samples = batch(step);
        let usual = scheduler.schedule(step, &samples, Arm::AWARE).unwrap();
        let adjusted = scheduler.adjusted(correction.adjustment(scheduler)).unwrap();
        let schedule = adjusted.schedule(step, &samples, Arm::AWARE).unwrap();
        let run = machine.run(scheduler, &schedule);
        scheduler.observe(&mut correction, &schedule, &run.spans, run.makespan_ns, true).unwrap();
        if step >= num_steps / 2 {
            ideal += quiet.run(scheduler, &usual).makespan_ns as f64;
            plain += machine.run(scheduler, &usual).makespan_ns as f64;
            corrected += run.makespan_ns as f64;
        }
    }
    (ideal, plain, corrected, correction)
}

/// The loss of a slow rank is halved at least, in each layout with replicas.
#[test]
fn a_slow_rank_gets_less_work() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let cases = [
        (Layout::colocated(4, Zero::Nothing), 4, 2),
        (Layout::colocated(4, Zero::Parameters), 4, 2),
        // The slow one is a tensor group, whose ranks each hold an encoder.
        (whole_encoders(Zero::Nothing), 4, 2),
        (whole_encoders(Zero::Parameters), 4, 2),
        (apart(4, 1, 2), 4, 1),
        (apart(8, 1, 4), 4, 9),
        (apart(8, 2, 4), 4, 11),
    ];
    for (layout, num_microbatches, rank) in cases {
        let scheduler = scheduler(layout, num_microbatches, &shapes);
        let machine = Machine { slow_rank: Some((rank, 1.5)), noise: 0.02, ..Machine::default() };
        let (ideal, plain, corrected, _) = means(&scheduler, &machine, 14);
        let recovered = (plain - corrected) / (plain - ideal);
        assert!(recovered > 0.5, "{layout}: {:.3} {:.3}", plain / ideal, corrected / ideal);
    }
}

/// Shapes that take longer than predicted are found, and scheduled by what they take: one in twenty samples, and one in a
/// hundred, which lie in a bin with few others.
#[test]
fn slow_shapes_are_scheduled_by_what_they_take() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let mut sizes: Vec<u32> = shapes.iter().map(|shape| shape.llm_tokens).collect();
    sizes.sort_unstable();
    let scheduler = scheduler(apart(8, 1, 2), 4, &shapes);
    let first = sizes.len() * 80 / 100;
    for (percent, ns) in [(5, 6e6), (1, 20e6)] {
        let (least, most) = (sizes[first], sizes[first + sizes.len() * percent / 100]);
        let machine = Machine { slow_shapes: Some((least, most, ns)), noise: 0.02, ..Machine::default() };
        let (ideal, plain, corrected, correction) = means(&scheduler, &machine, 40);
        let adjustment = correction.adjustment(&scheduler);
        // The time that slow samples add is work, shared by two replicas at best; what comes back is what is lost beyond it.
        let is_slow = |s: &SampleIndex| (least..=most).contains(&shapes[s.index()].llm_tokens);
        let num_slow: usize = (20..40).map(|step| batch(step).iter().filter(|&s| is_slow(s)).count()).sum();
        let work = num_slow as f64 * 3.0 * ns / 2.0;
        let (lost, left) = (plain - ideal - work, corrected - ideal - work);
        assert!(lost / ideal > 0.005 && left < 0.7 * lost, "{ideal:.3e} {work:.3e} {lost:.3e} {left:.3e}");
        assert!(adjustment.encoder.is_empty() && !adjustment.llm.is_empty(), "{adjustment:?}");
        let is_slow =
            |shape: &ShapeFactor| shape.tokens_max >= u64::from(least) && shape.tokens_min <= u64::from(most);
        let slow = adjustment.llm.iter().filter(|shape| is_slow(shape)).map(|shape| shape.factor);
        let slowest = slow.fold(1.0, f64::max);
        // The same 1,024 samples come in like packs again and again: a little is laid to what was packed with slow ones.
        for shape in adjustment.llm.iter().filter(|shape| !is_slow(shape)) {
            let excess = (shape.factor - 1.0).max(0.0);
            assert!(excess < 0.4 * (slowest - 1.0), "{shape:?}: slow are {least} to {most}, {slowest}");
        }
    }
}

/// The table of shapes names the slow ones: it counts each sample once a step, and all time of all actions.
#[test]
fn slow_shapes_stand_out_in_the_table() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let mut sizes: Vec<u32> = shapes.iter().map(|shape| shape.llm_tokens).collect();
    sizes.sort_unstable();
    let scheduler = scheduler(apart(8, 1, 2), 4, &shapes);
    let (least, most) = (sizes[sizes.len() * 80 / 100], sizes[sizes.len() * 85 / 100]);
    let machine = Machine { slow_shapes: Some((least, most, 6e6)), noise: 0.02, ..Machine::default() };
    let mut times = dflop_step::ShapeTimes::new(&scheduler);
    let (mut predicted_ns, mut measured_ns) = (0.0, 0.0);
    for step in 0..30 {
        let schedule = scheduler.schedule(step, &batch(step), Arm::AWARE).unwrap();
        let run = machine.run(&scheduler, &schedule);
        predicted_ns +=
            scheduler.simulate(&schedule).unwrap().spans.iter().map(|s| s.duration_ns() as f64).sum::<f64>();
        measured_ns += run.spans.iter().map(|s| s.duration_ns() as f64).sum::<f64>();
        scheduler.add_shape_times(&mut times, &schedule, &run.spans, run.makespan_ns).unwrap();
    }
    let rows = times.rows();
    let near = |found: f64, truth: f64| (found / truth - 1.0).abs() < 1e-9;
    let sum = |of: fn(&dflop_step::ShapeTime) -> f64| rows.iter().map(of).sum::<f64>();
    assert!(near(sum(|row| row.predicted_ns), predicted_ns) && near(sum(|row| row.measured_ns), measured_ns));
    let llm = || rows.iter().filter(|row| !row.is_encoder);
    assert_eq!(llm().map(|row| row.num_samples).sum::<u64>(), 30 * u64::from(BATCH));
    let tokens: u64 = (0..30).flat_map(batch).map(|s| u64::from(shapes[s.index()].llm_tokens)).sum();
    assert_eq!(llm().map(|row| row.num_tokens).sum::<u64>(), tokens);
    let worst = rows.iter().max_by(|a, b| a.excess.excess.total_cmp(&b.excess.excess)).unwrap();
    let is_slow = worst.tokens_max >= u64::from(least) && worst.tokens_min <= u64::from(most);
    assert!(!worst.is_encoder && is_slow && worst.excess.excess > 3.5 * worst.excess.error, "{worst:?}");
    assert!(worst.measured_ns / worst.predicted_ns > 1.02, "{worst:?}");
}

/// On a machine that does what the profile says, up to noise, nothing is corrected and schedules stay as they are.
#[test]
fn a_quiet_machine_is_left_alone() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let scheduler = scheduler(apart(1, 2, 2), 6, &shapes);
    let (_, plain, corrected, correction) =
        means(&scheduler, &Machine { noise: 0.05, ..Machine::default() }, 40);
    assert!(correction.adjustment(&scheduler).is_nothing());
    assert!((plain - corrected).abs() < 0.5);
}

/// What a log keeps of the correction gives the same schedule again.
#[test]
fn a_schedule_is_made_again_from_its_adjustment() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let scheduler = scheduler(Layout::colocated(4, Zero::Nothing), 4, &shapes);
    let machine = Machine { slow_rank: Some((1, 1.7)), noise: 0.05, ..Machine::default() };
    let (_, _, _, correction) = means(&scheduler, &machine, 8);
    let adjustment = correction.adjustment(&scheduler);
    let made = scheduler.adjusted(adjustment.clone()).unwrap().schedule(9, &batch(9), Arm::AWARE).unwrap();
    let line = serde_json::to_string(&adjustment).unwrap();
    let read: dflop_step::Adjustment = serde_json::from_str(&line).unwrap();
    assert_eq!(read, adjustment);
    assert_eq!(scheduler.adjusted(read).unwrap().schedule(9, &batch(9), Arm::AWARE).unwrap(), made);
    assert_ne!(scheduler.schedule(9, &batch(9), Arm::AWARE).unwrap().llm, made.llm);
    let foreign = dflop_step::Adjustment { rows: vec![dflop_step::RowFactor::ONE; 3], ..adjustment };
    assert!(matches!(scheduler.adjusted(foreign), Err(dflop_step::StepError::Adjustment { .. })));
}

/// A machine that is slower as a whole, with one rank slower still: a renewed profile and an adjustment of the layout predict it,
/// and a layout that puts the slow rank elsewhere has it there.
#[test]
fn live_times_are_those_of_the_machine() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let layout = apart(4, 2, 3);
    let scheduler = scheduler(layout, 4, &shapes);
    let num_encoder = layout.encoder.num_ranks() as usize;
    let slow_rank = num_encoder + 3;
    let machine = Machine { slow_rank: Some((slow_rank, 1.4)), noise: 0.01, ..Machine::default() };
    let measured = |schedule: &Schedule| {
        let mut input = machine.input(&scheduler, schedule);
        for rows in [&mut input.forward_ns, &mut input.backward_ns] {
            for ns in rows[num_encoder..].iter_mut().flatten() {
                *ns = *ns * 5 / 4;
            }
        }
        let is_listed = !schedule.actions.is_empty();
        if is_listed { simulate_lists(&input, &schedule.actions) } else { simulate_step(&input) }.unwrap()
    };
    let mut correction = Correction::new(&scheduler);
    for step in 0..12 {
        let schedule = scheduler.schedule(step, &batch(step), Arm::AWARE).unwrap();
        let run = measured(&schedule);
        scheduler.observe(&mut correction, &schedule, &run.spans, run.makespan_ns, true).unwrap();
    }
    let live = scheduler.live(&correction);
    let near = |found: f64, truth: f64| (found / truth - 1.0).abs() < 0.02;
    assert!(near(live.encoder.forward, 1.0) && near(live.encoder.backward, 1.0), "{live:?}");
    assert!(near(live.llm.forward, 1.25) && near(live.llm.backward, 1.25), "{live:?}");
    for (rank, &slowness) in live.slowness.iter().enumerate() {
        assert!(near(slowness, if rank == slow_rank { 1.4 } else { 1.0 }), "rank {rank}: {slowness}");
    }
    let renewed = live.renewed(&fixture::model_profile(), 12, 11);
    assert_eq!(renewed.renewed.map(|r| (r.num_steps, r.last_step)), Some((12, 11)));
    assert_eq!(renewed.optimizer_ns_per_million, fixture::model_profile().optimizer_ns_per_million);
    let model = CostModel::new(&renewed).unwrap();
    let settings = *scheduler.settings();
    let of_run = StepScheduler::new(settings, model, shapes.clone(), 3).unwrap();
    let of_run = of_run.adjusted(live.adjustment(&layout)).unwrap();
    let schedule = scheduler.schedule(20, &batch(20), Arm::AWARE).unwrap();
    let predicted = |by: &StepScheduler| by.simulate(&schedule).unwrap().makespan_ns as f64;
    let truth = measured(&schedule).makespan_ns as f64;
    assert!(near(predicted(&of_run), truth), "{} {truth}", predicted(&of_run));
    assert!(truth > 1.1 * predicted(&scheduler), "{truth} {}", predicted(&scheduler));
    // Rank 7 alone is slow: of four tensor groups of two it is in the last, of one stage and replica.
    let cut = Layout::disaggregated(
        ComponentLayout { tp: 2, pp: 1, dp: 1 },
        ComponentLayout { tp: 2, pp: 1, dp: 4 },
    );
    let rows: Vec<f64> = live.adjustment(&cut).rows.iter().map(|row| row.forward).collect();
    assert_eq!(slow_rank, 7);
    let slow: Vec<usize> = (0..rows.len()).filter(|&row| rows[row] > 1.3).collect();
    assert_eq!((rows.len(), slow), (5, vec![3]));
}

/// Of two ranks the faster is the usual one, whatever kind of action each is faster at.
#[test]
fn of_two_ranks_the_faster_is_usual() {
    let shapes = fixture::shapes(NUM_SAMPLES as usize, 5);
    let scheduler = scheduler(Layout::colocated(2, Zero::Nothing), 4, &shapes);
    let machine = Machine { slow_rank: Some((1, 1.3)), noise: 0.04, ..Machine::default() };
    let (_, _, _, correction) = means(&scheduler, &machine, 12);
    let slowness = scheduler.live(&correction).slowness;
    assert!(slowness[0].total_cmp(&1.0).is_eq() && (slowness[1] - 1.3).abs() < 0.05, "{slowness:?}");
}
