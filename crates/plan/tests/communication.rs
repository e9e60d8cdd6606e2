//! Communication of a plan: bytes and time against closed forms, and what computing hides of it.

use crate::asked::input;
use crate::fixture;
use dflop_plan::{Communication, SearchEffort, SearchInput, Sent, communication, search};
use dflop_types::ModelProfile;

const RANKS: u32 = 4;

/// What the best plan of `only` sends in a step, for a device of some kind.
fn sent(kind: &str, only: &str) -> Communication {
    let mut profile: ModelProfile = fixture::model_profile();
    kind.clone_into(&mut profile.device.kind);
    let shapes = fixture::shapes(96, 5);
    let asked = input(&shapes, &profile, RANKS);
    let asked = SearchInput { only: only.parse().unwrap(), effort: SearchEffort::Quick, ..asked };
    let plan = search(&asked).unwrap().ranked[0];
    communication(&asked, &plan).unwrap().unwrap()
}

fn of(communication: &Communication, name: &str) -> Sent {
    communication.kinds.iter().find(|(kind, _)| *kind == name).unwrap().1
}

/// Without sharding all gradients are reduced once, at the end, where nothing is beside them: 2 (n - 1) / n of them cross the
/// link of a rank, in 2 (n - 1) steps of 50 us and at 2 GB/s, as the fixture's one pair of ranks does.
#[test]
fn one_reduction_of_all_gradients_is_its_closed_form() {
    let profile = fixture::model_profile();
    let modules = profile.modules.values();
    let gradients: u64 = modules.map(|module| 4 * module.num_parameters * u64::from(module.count)).sum();
    let found = of(&sent("cpu", "colocated=true,zero=0,encoder.tp=1"), "all-reduce");
    let bytes = 2 * 3 * gradients / 4;
    assert!(found.bytes.abs_diff(bytes) <= 4, "{} bytes, {bytes} expected", found.bytes);
    let ns = 6 * 50_000 + bytes / 2;
    assert!(found.ns.abs_diff(ns) <= 4 + ns / 100_000, "{} ns, {ns} expected", found.ns);
    assert!(found.exposed_ns.abs_diff(ns) <= 4 + ns / 100_000, "{} ns, {ns} expected", found.exposed_ns);
    assert_eq!(found.overlapped_ns(), found.ns.saturating_sub(found.exposed_ns));
}

/// A device that sends beside its work sends as many bytes in as much time as one that does not. It only hides some.
#[test]
fn what_is_hidden_is_sent_all_the_same() {
    let only = "colocated=true,zero=3,encoder.tp=1,recompute=none";
    let [serial, beside] = ["cpu", "cuda"].map(|kind| sent(kind, only));
    for name in ["all-gather", "reduce-scatter"] {
        let [serial, beside] = [&serial, &beside].map(|one| of(one, name));
        assert!(serial.bytes > 0);
        assert!(serial.bytes.abs_diff(beside.bytes) <= 4 + serial.bytes / 100_000, "{serial:?} {beside:?}");
        assert!(serial.ns.abs_diff(beside.ns) <= 4 + serial.ns / 100_000, "{serial:?} {beside:?}");
        assert!(beside.exposed_ns <= serial.exposed_ns);
    }
    assert!(beside.total().exposed_ns < serial.total().exposed_ns);
    assert!(beside.total().overlapped_ns() > 0);
}

/// The messages of a pipeline of two ranks: each microbatch's features there, and their gradient back.
#[test]
fn a_pipeline_sends_point_to_point() {
    let found = sent("cpu", "colocated=false,encoder.dp=1,llm.dp=1,llm.pp=3,zero=0");
    let message = of(&found, "point to point");
    assert!(message.bytes > 0 && message.ns > 0);
    assert_eq!(of(&found, "all-reduce"), Sent::default());
    let words = found.words(1_000_000_000);
    assert!(words.starts_with("communication: a rank sends ") && words.contains("\nexposed communication: "));
}

/// A budget that first answers are over, as they look at few schedules, and searched ones are not. The plan stands all the same.
#[test]
fn a_plan_in_tight_memory_has_its_communication() {
    let profile = fixture::model_profile();
    let shapes = fixture::shapes(96, 5);
    let only = "colocated=false,encoder.dp=1,llm.dp=1,llm.pp=3,zero=0";
    let asked = input(&shapes, &profile, RANKS);
    let asked = SearchInput { only: only.parse().unwrap(), effort: SearchEffort::Quick, ..asked };
    let plan = search(&asked).unwrap().ranked[0];
    let peak = plan.prediction.encoder_memory_bytes_peak.max(plan.prediction.llm_memory_bytes_peak);
    for budget in [peak, peak / 2, 1] {
        let tight = SearchInput { cluster: fixture::cluster(RANKS, Some(budget)), ..asked.clone() };
        let found = communication(&tight, &plan).unwrap();
        assert!(found.is_some() == (budget > 1), "{budget}: {found:?}");
    }
}
