//! The step scheduler on colocated ranks: sound schedules in every arm and degree of sharding, their times by sums, the
//! best by brute force at tiny size, and memory.

use crate::fixture;
use crate::scheduling::{all_arms, batch};
use dflop_cost::{CostModel, RankMemory, RankMicrobatch, Sharding};
use dflop_step::{Arm, Correction, Method, StepError, StepScheduler, StepSettings};
use dflop_types::{
    Component, EncoderShare, Layout, MicrobatchShape, ModelProfile, PipelineOrder, SampleIndex, SampleShape,
    Schedule, Zero,
};
use proptest::prelude::*;

fn scheduler_of(
    profile: &ModelProfile,
    layout: Layout,
    num_microbatches: u32,
    shapes: &[SampleShape],
    memory_budget_bytes: Option<u64>,
) -> StepScheduler {
    let pipeline_order = PipelineOrder::OneFOneB;
    let settings = StepSettings { layout, num_microbatches, pipeline_order, memory_budget_bytes };
    StepScheduler::new(settings, CostModel::new(profile).unwrap(), shapes.to_vec(), 3).unwrap()
}

fn scheduler(layout: Layout, num_microbatches: u32, shapes: &[SampleShape]) -> StepScheduler {
    scheduler_of(&fixture::model_profile(), layout, num_microbatches, shapes, None)
}

fn plain(method: Method) -> Arm {
    Arm { method, is_ahead: false }
}

fn shape_of(samples: &[SampleIndex], shapes: &[SampleShape]) -> MicrobatchShape {
    MicrobatchShape::pack(samples.iter().map(|s| &shapes[s.index()]))
}

/// Makespan of a schedule whose ranks encode their own samples: the longest sum of a rank, or the sum of the longest of
/// each action.
fn makespan_ns(scheduler: &StepScheduler, schedule: &Schedule, shapes: &[SampleShape]) -> u64 {
    let (layout, model) = (scheduler.settings().layout, scheduler.model());
    let sharding = Sharding::of(&layout, Component::Both);
    let ranks = layout.llm.dp as usize;
    let actions = |rank: usize| -> Vec<u64> {
        let of_microbatch = |column: &Vec<Vec<SampleIndex>>| {
            if column.iter().all(Vec::is_empty) {
                return [0; 4];
            }
            let shape = shape_of(&column[rank], shapes);
            let encoder = model.sharded_encoder(&shape, sharding);
            let llm = model.sharded_stage(&shape, model.whole_stage(), sharding);
            [encoder.forward_ns, llm.forward_ns, llm.backward_ns, encoder.backward_ns]
        };
        schedule.llm.iter().flat_map(of_microbatch).collect()
    };
    let by_rank: Vec<Vec<u64>> = (0..ranks).map(actions).collect();
    let tail_ns = model.colocated_tail(sharding).ns;
    let work_ns: u64 = if layout.zero == Zero::Parameters {
        (0..by_rank[0].len()).map(|at| by_rank.iter().map(|rank| rank[at]).max().unwrap()).sum()
    } else {
        by_rank.iter().map(|rank| rank.iter().sum()).max().unwrap()
    };
    work_ns + tail_ns
}

/// Whether a rank encodes samples of others.
fn is_shared_out(schedule: &Schedule) -> bool {
    let columns = schedule.llm.iter().zip(&schedule.encoder);
    let mut ranks = columns.flat_map(|(llm, encoder)| llm.iter().zip(encoder));
    ranks.any(|(samples, shares)| shares.iter().any(|s| s.parts.is_some() || !samples.contains(&s.sample)))
}

fn check(scheduler: &StepScheduler, schedule: &Schedule, shapes: &[SampleShape]) {
    if is_shared_out(schedule) {
        assert_eq!(scheduler.settings().layout.zero, Zero::Parameters, "only where ranks meet in each phase");
        schedule.check(&batch(shapes), |s| shapes[s.index()].num_parts()).unwrap();
        assert!(schedule.lower_bound_ns <= schedule.max_load_ns);
        assert_eq!(scheduler.simulate(schedule).unwrap().makespan_ns, schedule.predicted_makespan_ns);
        assert!(scheduler.traffic(schedule).unwrap().num_messages > 0);
        return;
    }
    schedule.check(&batch(shapes), |s| shapes[s.index()].num_parts()).unwrap();
    let settings = scheduler.settings();
    assert_eq!(schedule.num_microbatches(), settings.num_microbatches);
    assert!(schedule.actions.is_empty() && schedule.giants.is_empty());
    for (llm, encoder) in schedule.llm.iter().zip(&schedule.encoder) {
        for (samples, shares) in llm.iter().zip(encoder) {
            let own: Vec<EncoderShare> = samples
                .iter()
                .filter(|s| !shapes[s.index()].encoder_segments.is_empty())
                .map(|&s| EncoderShare::whole(s))
                .collect();
            assert_eq!(shares, &own, "each rank encodes its own samples");
        }
    }
    // Empty microbatches of a rank stand behind its others.
    for rank in 0..settings.layout.llm.dp as usize {
        let is_empty: Vec<bool> = schedule.llm.iter().map(|column| column[rank].is_empty()).collect();
        let used = schedule.llm.iter().filter(|column| !column.iter().all(Vec::is_empty)).count();
        if settings.layout.zero < Zero::Parameters && schedule.llm.iter().flatten().flatten().count() > 20 {
            assert!(is_empty.is_sorted(), "{is_empty:?} of {used}");
        }
    }
    assert!(schedule.lower_bound_ns <= schedule.max_load_ns);
    let timeline = scheduler.simulate(schedule).unwrap();
    assert_eq!(timeline.makespan_ns, schedule.predicted_makespan_ns);
    assert_eq!(timeline.makespan_ns, makespan_ns(scheduler, schedule, shapes));
    let traffic = scheduler.traffic(schedule).unwrap();
    assert_eq!((traffic.num_messages, traffic.feature_tokens), (0, 0));
}

#[test]
fn every_arm_and_degree_gives_a_sound_schedule() {
    let texts: Vec<SampleShape> = (1..20).map(|i| fixture::sample(0, 0, 30 * i)).collect();
    let batches = [
        ("mixed", fixture::shapes(37, 1)),
        ("text only", texts),
        ("fewer samples than ranks", fixture::shapes(3, 2)),
        ("one sample", fixture::shapes(1, 3)),
        ("empty", vec![]),
    ];
    for (ranks, zero) in [1, 2, 4].into_iter().flat_map(|ranks| Zero::ALL.map(|zero| (ranks, zero))) {
        for (name, shapes) in &batches {
            let scheduler = scheduler(Layout::colocated(ranks, zero), 4, shapes);
            let of = |arm| scheduler.schedule(5, &batch(shapes), arm).unwrap();
            for arm in all_arms() {
                let schedule = of(arm);
                check(&scheduler, &schedule, shapes);
                assert_eq!(schedule, of(plain(arm.method)), "nothing runs ahead");
            }
            let aware_ns = of(Arm::AWARE).predicted_makespan_ns;
            for method in [Method::Blind, Method::Tokens] {
                assert!(aware_ns <= of(plain(method)).predicted_makespan_ns, "{name}, {ranks}, {zero:?}");
            }
        }
    }
}

/// One sample on two ranks. If parameters are gathered, the rank without a sample takes part in the collectives of both
/// components: four predictions, and never fewer than those that stand on transfers. Else it does nothing.
#[test]
fn collectives_of_a_rank_without_samples_are_predictions() {
    let shapes = fixture::shapes(1, 3);
    let coverage = |zero| {
        let scheduler = scheduler(Layout::colocated(2, zero), 4, &shapes);
        let schedule = scheduler.schedule(0, &batch(&shapes), Arm::BLIND).unwrap();
        scheduler.coverage(&schedule).unwrap()
    };
    assert_eq!(coverage(Zero::Nothing).num_predictions, 2);
    let gathered = coverage(Zero::Parameters);
    assert_eq!(gathered.num_predictions, 4);
    assert!(gathered.num_assumed <= gathered.num_predictions);
}

/// Every way to put the samples on the ranks: once a step by their sums, in each phase by both components.
#[test]
fn few_samples_come_near_the_best_of_all_assignments() {
    for seed in 0..6 {
        let shapes = fixture::shapes(7, seed);
        for zero in [Zero::Nothing, Zero::Parameters] {
            let scheduler = scheduler(Layout::colocated(2, zero), 1, &shapes);
            let found = scheduler.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
            let of_bits = |bits: u32| {
                let rank = |rank: u32| -> Vec<SampleIndex> {
                    batch(&shapes).into_iter().filter(|s| (bits >> s.0) & 1 == rank).collect()
                };
                let placed = Schedule { llm: vec![vec![rank(0), rank(1)]], ..found.clone() };
                makespan_ns(&scheduler, &placed, &shapes)
            };
            let best_ns = (0..1 << 7).map(of_bits).min().unwrap();
            // A sample's cost is read off the curves at a typical size: within 1.5 %.
            assert!(
                found.predicted_makespan_ns <= best_ns + best_ns * 3 / 200,
                "seed {seed}, {zero:?}: {} {best_ns}",
                found.predicted_makespan_ns
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Within the budget every rank fits, and microbatches are as few as that takes; nothing fits less than a sample alone.
    #[test]
    fn memory_decides_over_the_number_of_microbatches(
        seed in 0u64..50, ranks in 1u32..4, zero in 0usize..4, percent in 5u64..95
    ) {
        let shapes = fixture::shapes(16, seed);
        let layout = Layout::colocated(ranks, Zero::ALL[zero]);
        let free = scheduler(layout, 16, &shapes);
        let peak = |scheduler: &StepScheduler, schedule: &Schedule| {
            scheduler.memory(schedule).unwrap().iter().map(RankMemory::total_bytes).max().unwrap()
        };
        let whole = free.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
        let largest = shapes.iter().map(|shape| free.alone(shape)).max_by_key(|(_, bytes)| *bytes).unwrap();
        prop_assert_eq!(largest.0, Component::Both);
        let once = scheduler(Layout::colocated(ranks, Zero::Gradients), 16, &shapes);
        let added = |scheduler: &StepScheduler, shape| scheduler.alone(shape).1 - scheduler.alone(&fixture::sample(0, 0, 1)).1;
        // What a rank needs that encodes the largest sample itself.
        let own = free.alone(&fixture::sample(0, 0, 1)).1 + shapes.iter().map(|shape| added(&once, shape)).max().unwrap();
        // From what the largest sample needs to what one microbatch a rank needs.
        let (low, high) = (largest.1, peak(&free, &whole));
        let budget = low + high.saturating_sub(low) * percent / 100;
        let tight = scheduler_of(&fixture::model_profile(), layout, 16, &shapes, Some(budget));
        for arm in all_arms().filter(|arm| !arm.is_ahead) {
            match tight.schedule(0, &batch(&shapes), arm) {
                Ok(schedule) => {
                    check(&tight, &schedule, &shapes);
                    prop_assert!(peak(&tight, &schedule) <= budget);
                }
                Err(StepError::Memory { component, needed_bytes, budget_bytes, .. }) => {
                    prop_assert_eq!((component, budget_bytes), (Component::Both, budget));
                    prop_assert!(needed_bytes > budget);
                    // Where ranks share the largest sample's encoder work out, shares may be a part larger than even ones.
                    let is_shared = budget < own;
                    prop_assert!(is_shared || arm.method < Method::Balanced, "{} of {:?} {}", arm, largest, budget);
                }
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
        let over = scheduler_of(&fixture::model_profile(), layout, 16, &shapes, Some(largest.1 - 1));
        let error = over.schedule(0, &batch(&shapes), Arm::AWARE).unwrap_err();
        prop_assert!(matches!(error, StepError::SampleTooLarge { component: Component::Both, .. }), "{error}");
    }

    /// A cap on the tokens of a microbatch is kept by every arm that looks at it.
    #[test]
    fn the_cap_on_tokens_is_kept(seed in 0u64..50, zero in 0usize..4, cap in 1_500u64..3_000) {
        let shapes = fixture::shapes(20, seed);
        let layout = Layout::colocated(2, Zero::ALL[zero]);
        let capped = scheduler(layout, 20, &shapes).with_bucket_tokens_max(Some(cap));
        prop_assume!(capped.is_ok());
        let capped = capped.unwrap();
        for method in [Method::Blind, Method::Tokens, Method::Balanced, Method::Aware] {
            let schedule = capped.schedule(0, &batch(&shapes), plain(method)).unwrap();
            check(&capped, &schedule, &shapes);
            let tokens = |bucket: &Vec<SampleIndex>| shape_of(bucket, &shapes).total_llm_tokens();
            prop_assert!(schedule.llm.iter().flatten().map(tokens).max().unwrap() <= cap);
        }
    }
}

/// Two ranks, one video that is longer than all else: its rank takes nothing beside it, and each rank has as many
/// microbatches as its own memory wants.
#[test]
fn ranks_have_different_numbers_of_microbatches() {
    let mut shapes = vec![fixture::sample(24, 1_176, 60)];
    shapes.extend(vec![fixture::sample(0, 0, 300); 24]);
    let layout = Layout::colocated(2, Zero::Nothing);
    let free = scheduler(layout, 8, &shapes);
    let text = free.alone(&shapes[1]).1;
    let budget = free.alone(&shapes[0]).1.max(text);
    let tight = scheduler_of(&fixture::model_profile(), layout, 8, &shapes, Some(budget));
    let schedule = tight.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
    check(&tight, &schedule, &shapes);
    let used = |rank: usize| schedule.llm.iter().filter(|column| !column[rank].is_empty()).count();
    let mut counts = [used(0), used(1)];
    counts.sort_unstable();
    assert!(counts[0] < counts[1], "{counts:?}");
    // By hand: the whole step is one microbatch a rank where nothing limits it.
    let one = free.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
    assert!(one.llm[1..].iter().flatten().all(Vec::is_empty));
}

/// What a microbatch of one rank takes, the encoder's and the LLM's parts held at once and the states once.
#[test]
fn a_rank_holds_its_largest_microbatch() {
    let shapes = fixture::shapes(12, 4);
    let scheduler = scheduler(Layout::colocated(2, Zero::Nothing), 3, &shapes);
    let schedule = scheduler.schedule(0, &batch(&shapes), plain(Method::Blind)).unwrap();
    for (rank, memory) in scheduler.memory(&schedule).unwrap().into_iter().enumerate() {
        let of = |column: &Vec<Vec<SampleIndex>>| {
            let features = column[rank].iter().map(|s| u64::from(shapes[s.index()].feature_tokens)).sum();
            let shape = shape_of(&column[rank], &shapes);
            scheduler.model().whole_peak(&RankMicrobatch { shape, feature_tokens: features }, 1).total_bytes()
        };
        assert_eq!(memory.total_bytes(), schedule.llm.iter().map(of).max().unwrap());
    }
    let with_lists = Schedule { actions: vec![vec!["0F0".parse().unwrap()]; 2], ..schedule };
    let error = scheduler.simulate(&with_lists).unwrap_err().to_string();
    assert_eq!(
        error,
        "the schedule of step 0 has action lists, but components are colocated in `colocated tp 1 dp 2`"
    );
}

/// A rank whose encoder is slow is predicted by the next step; its LLM is as it was.
#[test]
fn a_slow_component_of_a_rank_is_corrected_alone() {
    let shapes = fixture::shapes(24, 5);
    let scheduler = scheduler(Layout::colocated(2, Zero::States), 2, &shapes);
    let schedule = scheduler.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
    let mut input = scheduler.step_input(&schedule).unwrap();
    for ns in &mut input.forward_ns[1] {
        *ns *= 2;
    }
    let measured = dflop_sim::simulate_step(&input).unwrap();
    let mut correction = Correction::new(&scheduler);
    scheduler.observe(&mut correction, &schedule, &measured.spans, measured.makespan_ns, true).unwrap();
    let corrected = scheduler.simulate_corrected(&schedule, &correction).unwrap();
    assert!(corrected.makespan_ns.abs_diff(measured.makespan_ns) < 50);
    let idle = scheduler.measured(&schedule, &measured.spans, measured.makespan_ns).unwrap().idle_ns;
    assert_eq!((idle.ramp, idle.transfer, idle.data_wait), (0, 0, 0));
}

/// One rank has two videos, the other one and much text: their sums are even, their phases are not. With the frames shared
/// out the encoder's phase is even too, and the features travel; where that takes longer than it saves, nothing travels.
#[test]
fn the_encoder_is_shared_out_where_that_pays() {
    let mut shapes = vec![fixture::video(24, 49, 200); 3];
    shapes.push(fixture::sample(0, 0, 1_400));
    let with_link = |bytes_per_s: u64| {
        let network = dflop_types::Network::of_pair(50_000, bytes_per_s);
        let profile = ModelProfile { network, ..fixture::model_profile() };
        let scheduler = scheduler_of(&profile, Layout::colocated(2, Zero::Parameters), 1, &shapes, None);
        let schedule = scheduler.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
        check(&scheduler, &schedule, &shapes);
        (scheduler, schedule)
    };
    let (scheduler, shared) = with_link(2_000_000_000);
    assert!(is_shared_out(&shared));
    let cut: Vec<&EncoderShare> =
        shared.encoder.iter().flatten().flatten().filter(|s| s.parts.is_some()).collect();
    assert!(cut.len() >= 2, "a video is cut: {cut:?}");
    let input = scheduler.step_input(&shared).unwrap();
    let [first, second] = [0, 1].map(|rank| input.forward_ns[rank][0]);
    assert!(first.abs_diff(second) * 10 < first, "even encoders: {first} {second}");
    assert!(input.transfer_ns > 0);
    let timeline = scheduler.simulate(&shared).unwrap();
    assert!(timeline.idle_ns.transfer > 0);
    // A link on which the features of one video take longer than its encoder.
    let (_, own) = with_link(1_000);
    assert!(!is_shared_out(&own));
}

/// A video whose frames no rank can encode beside what its LLM reads: all ranks encode some of them where they meet in each
/// phase. Elsewhere, and where one rank is all there is, the sample is too large.
#[test]
fn a_sample_that_no_rank_can_encode_alone_is_encoded_by_all() {
    let mut shapes = vec![fixture::sample(0, 0, 300); 7];
    shapes.push(fixture::video(24, 49, 200));
    let profile = fixture::model_profile();
    let of = |ranks, zero, budget| scheduler_of(&profile, Layout::colocated(ranks, zero), 4, &shapes, budget);
    let video = &shapes[7];
    let fixed = |zero| of(4, zero, None).alone(&fixture::sample(0, 0, 1)).1;
    let needed =
        [Zero::Gradients, Zero::Parameters].map(|zero| of(4, zero, None).alone(video).1 - fixed(zero));
    assert!(needed[1] * 3 < needed[0] * 2, "{needed:?}: a rank encodes 6 of 24 frames");
    let budget = |zero| Some(fixed(zero) + needed[1] + (needed[0] - needed[1]) / 2);
    let shared = of(4, Zero::Parameters, budget(Zero::Parameters));
    for arm in [plain(Method::Balanced), Arm::AWARE] {
        let schedule = shared.schedule(0, &batch(&shapes), arm).unwrap();
        check(&shared, &schedule, &shapes);
        assert!(is_shared_out(&schedule), "{arm}");
        let peaks = shared.memory(&schedule).unwrap();
        assert!(peaks.iter().all(|memory| Some(memory.total_bytes()) <= budget(Zero::Parameters)), "{arm}");
    }
    let of_tokens = shared.schedule(0, &batch(&shapes), plain(Method::Tokens)).unwrap_err();
    assert!(matches!(of_tokens, StepError::Memory { .. }), "others share nothing: {of_tokens}");
    let once = of(4, Zero::Gradients, budget(Zero::Gradients));
    let error = once.schedule(0, &batch(&shapes), Arm::AWARE).unwrap_err();
    assert!(matches!(error, StepError::SampleTooLarge { component: Component::Both, .. }), "{error}");
}

/// The planner compares layouts by answers that are stopped at once. Such an answer used to be arrival order, up to half as
/// long again as what the whole search gives; so layouts that the search makes even were passed over.
#[test]
fn an_answer_that_is_stopped_at_once_is_near_that_of_the_whole_search() {
    let mut worst = 0.0_f64;
    for seed in 0..12 {
        for (ranks, num_samples) in [(8, 32), (16, 64), (16, 160)] {
            let shapes = fixture::shapes(num_samples, seed);
            let scheduler = scheduler(Layout::colocated(ranks, Zero::Parameters), 4, &shapes);
            let step_ns = |schedule: &Schedule| schedule.predicted_makespan_ns as f64;
            let first = scheduler.schedule_until(0, &batch(&shapes), Arm::AWARE, &|| true).unwrap();
            let whole = scheduler.schedule(0, &batch(&shapes), Arm::AWARE).unwrap();
            check(&scheduler, &first, &shapes);
            assert!(first.was_stopped && !whole.was_stopped);
            worst = worst.max(step_ns(&first) / step_ns(&whole));
        }
    }
    assert!(worst < 1.04, "{worst}");
}
