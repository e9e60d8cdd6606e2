//! One pipeline under each order of its actions, even and uneven: `cargo run -p dflop-sim --example orders`.
#![allow(clippy::print_stdout, reason = "an example talks")]

use dflop_sim::{Durations, SimError, simulate};
use dflop_types::PipelineOrder;

fn main() -> Result<(), SimError> {
    let (stages, microbatches) = (4, 8);
    // A video among texts: every fourth microbatch takes five times as long.
    let uneven = |index: usize| if index.is_multiple_of(4) { 5_000 } else { 1_000 };
    let mean = (0..microbatches).map(uneven).sum::<u64>() / microbatches as u64;
    for (name, work) in
        [("even", vec![mean; microbatches]), ("uneven", (0..microbatches).map(uneven).collect())]
    {
        let durations = Durations {
            forward_ns: vec![work.clone(); stages],
            backward_ns: vec![work.iter().map(|ns| 2 * ns).collect(); stages],
            transfer_ns: 0,
            ..Durations::default()
        };
        for order in [PipelineOrder::GPipe, PipelineOrder::OneFOneB] {
            let timeline = simulate(&durations, order)?;
            let idle = timeline.idle_ns;
            println!(
                "{name:>6}, {order}: {} ns; idle: ramp {}, imbalance {}",
                timeline.makespan_ns, idle.ramp, idle.imbalance
            );
            // The work is the same; only what is uneven makes ranks wait beyond the ramp.
            assert_eq!(idle.imbalance > 0, name == "uneven");
        }
    }
    Ok(())
}
