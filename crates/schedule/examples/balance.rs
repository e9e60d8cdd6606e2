//! Samples of a global batch in balanced microbatches: `cargo run -p dflop-schedule --example balance`.
#![allow(clippy::print_stdout, reason = "an example talks")]

use dflop_schedule::{Assignment, BalanceError, Costs, Limits, baseline, schedule};

fn main() -> Result<(), BalanceError> {
    // Nanoseconds of eight samples: two videos, two images, four texts, which cost the encoder nothing.
    let costs = Costs {
        encoder_ns: vec![9_000, 7_000, 2_000, 1_000, 0, 0, 0, 0],
        llm_ns: vec![8_000, 6_000, 3_000, 2_000, 3_000, 2_000, 4_000, 1_000],
        ..Costs::default()
    };
    let limits = Limits::new(8, 4);
    let arrival = Assignment::judge(&costs, &limits, baseline::arrival_order(8, 4))?;
    let balanced = schedule(&costs, &limits)?;
    for (name, answer) in [("arrival order", &arrival), ("balanced", &balanced)] {
        println!("{name}: the fullest bucket takes {} ns", answer.max_load_ns);
    }
    println!("no answer is below {} ns", balanced.lower_bound_ns);
    assert!(balanced.max_load_ns < arrival.max_load_ns);
    assert!(balanced.lower_bound_ns <= balanced.max_load_ns);
    Ok(())
}
