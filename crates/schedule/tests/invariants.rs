//! What holds for every assignment, whatever the costs.
//!
//! Proptest prints the failing input, and `PROPTEST_RNG_SEED` sets its seed; the budgets here are small, so that bad luck of a short
//! search shows as well as its good luck.

use dflop_schedule::{Assignment, BalanceError, Costs, Limits, baseline, divide, schedule, schedule_until};
use proptest::prelude::*;

/// Costs of every kind of batch: plain, text without encoder, heavy tails, ties, nothing at all.
fn any_costs(max_samples: usize) -> impl Strategy<Value = Costs> {
    let cost = prop_oneof![
        3 => 1_u64..1_000,
        1 => Just(0_u64),
        1 => Just(7_u64),
        1 => (0_u32..40).prop_map(|power| 1 << power),
    ];
    let encoder = prop_oneof![1 => Just(0_u64), 3 => cost.clone()];
    let sample = (encoder, cost, 0_u64..100, 0_u64..5_000);
    prop::collection::vec(sample, 0..max_samples).prop_map(|samples| Costs {
        encoder_ns: samples.iter().map(|s| s.0).collect(),
        llm_ns: samples.iter().map(|s| s.1).collect(),
        bytes: Some(samples.iter().map(|s| s.2).collect()),
        tokens: Some(samples.iter().map(|s| s.3).collect()),
    })
}

fn any_limits() -> impl Strategy<Value = Limits> {
    let exact = prop_oneof![3 => Just(0_u64), 1 => Just(200_000)];
    (1_u32..20, prop_oneof![Just(0_u64), Just(50), Just(5_000)], 0_u64..4, exact).prop_map(
        |(num_buckets, max_moves, seed, max_exact_work)| Limits {
            max_moves,
            seed,
            max_exact_work,
            ..Limits::new(0, num_buckets)
        },
    )
}

/// Sums by the definition, with no code of the crate.
fn loads(values: &[u64], bucket: &[u32], num_buckets: u32) -> Vec<u64> {
    (0..num_buckets)
        .map(|j| values.iter().zip(bucket).filter(|&(_, &b)| b == j).map(|(value, _)| value).sum())
        .collect()
}

fn worst_first(assignment: &Assignment) -> Vec<u64> {
    let both = assignment.encoder_load_ns.iter().zip(&assignment.llm_load_ns);
    let mut values: Vec<u64> = both.map(|(e, l)| *e.max(l)).collect();
    values.sort_unstable_by(|a, b| b.cmp(a));
    values
}

proptest! {
    // A failing case is printed whole; the tree is no place for tests to write to.
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_sample_stands_once_and_loads_add_up(costs in any_costs(60), limits in any_limits()) {
        let found = schedule(&costs, &limits).unwrap();
        // One entry a sample is "exactly once"; each entry must name a bucket.
        prop_assert_eq!(found.bucket.len(), costs.num_samples());
        prop_assert!(found.bucket.iter().all(|&b| b < limits.num_buckets));
        prop_assert_eq!(&found.encoder_load_ns, &loads(&costs.encoder_ns, &found.bucket, limits.num_buckets));
        prop_assert_eq!(&found.llm_load_ns, &loads(&costs.llm_ns, &found.bucket, limits.num_buckets));
        prop_assert_eq!(found.max_load_ns, worst_first(&found)[0]);
        prop_assert!(found.num_moves <= limits.max_moves + limits.max_exact_work / 2);
    }

    #[test]
    fn the_bound_is_below_and_the_proof_means_equality(costs in any_costs(60), limits in any_limits()) {
        let found = schedule(&costs, &limits).unwrap();
        prop_assert!(found.lower_bound_ns <= found.max_load_ns);
        prop_assert_eq!(found.proven_optimal, found.lower_bound_ns == found.max_load_ns);
        prop_assert_eq!(found.gap() == 0.0, found.proven_optimal);
        // No assignment beats the bound, those of others among them.
        for bucket in [
            baseline::arrival_order(costs.num_samples(), limits.num_buckets),
            baseline::random(costs.num_samples(), limits.num_buckets, limits.seed),
            baseline::single_cost_lpt(&costs.llm_ns, limits.num_buckets),
            baseline::sorted_by_length(&costs.llm_ns, limits.num_buckets),
        ] {
            let other = Assignment::judge(&costs, &limits, bucket).unwrap();
            prop_assert!(found.lower_bound_ns <= other.max_load_ns);
        }
    }

    #[test]
    fn never_worse_than_arrival_order_in_the_whole_order_of_the_objective(
        costs in any_costs(60), limits in any_limits()
    ) {
        let bucket = baseline::arrival_order(costs.num_samples(), limits.num_buckets);
        let arrival = Assignment::judge(&costs, &limits, bucket).unwrap();
        let found = schedule(&costs, &limits).unwrap();
        prop_assert!(worst_first(&found) <= worst_first(&arrival));
    }

    #[test]
    fn the_search_is_never_worse_than_what_it_began_with(costs in any_costs(60), limits in any_limits()) {
        let start = schedule(&costs, &Limits { max_moves: 0, max_exact_work: 0, ..limits }).unwrap();
        prop_assert!(worst_first(&schedule(&costs, &limits).unwrap()) <= worst_first(&start));
    }

    #[test]
    fn the_same_seed_gives_the_same_answer(costs in any_costs(60), limits in any_limits()) {
        prop_assert_eq!(schedule(&costs, &limits).unwrap(), schedule(&costs, &limits).unwrap());
    }

    #[test]
    fn the_order_of_arrival_changes_no_load(costs in any_costs(40), limits in any_limits(), turn in 0_usize..40) {
        let turned = |values: &[u64]| {
            let mut values = values.to_vec();
            let by = turn % values.len().max(1);
            values.rotate_left(by);
            values
        };
        let other = Costs {
            encoder_ns: turned(&costs.encoder_ns), llm_ns: turned(&costs.llm_ns), ..Costs::default()
        };
        let (one, two) = (schedule(&costs, &limits).unwrap(), schedule(&other, &limits).unwrap());
        prop_assert_eq!(one.lower_bound_ns, two.lower_bound_ns);
        // Arrival order, where it beats greedy, is where the search begins: then answers may differ.
        let none = Limits { max_moves: 0, ..limits };
        let starts = [schedule(&costs, &none).unwrap(), schedule(&other, &none).unwrap()];
        if worst_first(&starts[0]) == worst_first(&starts[1]) && starts.iter().all(|s| !is_arrival(s)) {
            prop_assert_eq!(worst_first(&one), worst_first(&two));
        }
    }

    #[test]
    fn caps_hold_or_the_error_is_true(
        costs in any_costs(40), limits in any_limits(),
        bytes_max in prop::option::of(60_u64..400), tokens_max in prop::option::of(3_000_u64..20_000)
    ) {
        let free = limits;
        let limits = Limits { bucket_bytes_max: bytes_max, bucket_tokens_max: tokens_max, ..limits };
        let column = |unit: &str| match unit {
            "bytes" => (costs.bytes.clone().unwrap(), bytes_max),
            _ => (costs.tokens.clone().unwrap(), tokens_max),
        };
        match schedule(&costs, &limits) {
            Ok(found) => {
                for unit in ["bytes", "tokens"] {
                    let (sizes, cap) = column(unit);
                    let fullest = loads(&sizes, &found.bucket, limits.num_buckets).into_iter().max().unwrap();
                    prop_assert!(cap.is_none_or(|cap| fullest <= cap), "{fullest} {unit} over {cap:?}");
                }
            }
            Err(BalanceError::SampleOverCap { sample, unit, size, cap }) => {
                prop_assert!(column(unit).0[sample] == size && size > cap && column(unit).1 == Some(cap));
            }
            Err(BalanceError::CapsInfeasible { needed, unit, cap, .. }) => {
                // The bound is certain: so the search for the least fullest bucket cannot come below it.
                let encoder_ns = column(unit).0;
                let sizes = Costs { llm_ns: vec![0; encoder_ns.len()], encoder_ns, ..Costs::default() };
                prop_assert!(needed > cap && schedule(&sizes, &free).unwrap().max_load_ns >= needed);
            }
            Err(BalanceError::NoPacking { best, cap, unit, .. }) => {
                prop_assert!(best > cap && column(unit).1 == Some(cap));
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn a_stop_at_any_moment_gives_a_sound_assignment(
        costs in any_costs(60), limits in any_limits(), strikes_at in 0_u32..40, cap in prop::option::of(90_u64..400)
    ) {
        let limits = Limits { bucket_bytes_max: cap.filter(|&cap| cap >= 100), ..limits };
        let asked = std::cell::Cell::new(0);
        let found = schedule_until(&costs, &limits, &|| {
            asked.set(asked.get() + 1);
            asked.get() > strikes_at
        });
        let Ok(found) = found else {
            prop_assert!(limits.bucket_bytes_max.is_some());
            return Ok(());
        };
        prop_assert_eq!(found.was_stopped, asked.get() > strikes_at);
        // Our own judge finds the same loads, and no cap broken.
        let judged = Assignment::judge(&costs, &limits, found.bucket.clone()).unwrap();
        prop_assert_eq!(&judged.llm_load_ns, &found.llm_load_ns);
        prop_assert!(found.lower_bound_ns <= found.max_load_ns);
        // Where the first assignments break the cap, a packing is searched for before, with moves of its own.
        let packing = Limits::default_moves(costs.num_samples()).max(limits.max_moves);
        let packing = limits.bucket_bytes_max.map_or(0, |_| packing);
        prop_assert!(found.num_moves <= limits.max_moves + limits.max_exact_work / 2 + packing);
        if limits.bucket_bytes_max.is_none() {
            let bucket = baseline::arrival_order(costs.num_samples(), limits.num_buckets);
            let arrival = Assignment::judge(&costs, &limits, bucket).unwrap();
            prop_assert!(worst_first(&found) <= worst_first(&arrival));
        }
    }

    #[test]
    fn division_loses_nothing_and_is_no_worse_than_lpt(
        costs in prop::collection::vec(0_u64..1_000, 0..50), parts in 1_u32..9
    ) {
        let worst = |bucket: &[u32]| loads(&costs, bucket, parts).into_iter().max().unwrap();
        let found = divide(&costs, parts);
        prop_assert!(found.len() == costs.len() && found.iter().all(|&part| part < parts));
        prop_assert!(worst(&found) <= worst(&baseline::single_cost_lpt(&costs, parts)));
    }
}

/// Whether an assignment looks like arrival order (or cannot be told from it).
fn is_arrival(assignment: &Assignment) -> bool {
    assignment.bucket.is_sorted()
}
