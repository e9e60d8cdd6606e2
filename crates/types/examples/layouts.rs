//! Which ranks a layout has, and what each of them holds: `cargo run -p dflop-types --example layouts`.
#![allow(clippy::print_stdout, reason = "an example talks")]

use dflop_types::{Component, ComponentLayout, Layout, Zero};

fn main() {
    // Two replicas of the encoder on ranks of their own, feeding an LLM of two stages in two replicas.
    let encoder = ComponentLayout { tp: 1, pp: 1, dp: 2 };
    let llm = ComponentLayout { tp: 1, pp: 2, dp: 2 };
    let pipeline = Layout::disaggregated(encoder, llm);
    // The same ranks, each with both components: data parallelism, states sharded.
    let colocated = Layout::colocated(6, Zero::Parameters);
    for layout in [pipeline, colocated] {
        println!("{layout}: {} ranks, {} stages", layout.num_ranks(), layout.num_stages());
        let layers = layout.stage_layers(Component::Llm, 28);
        println!("  28 layers of the LLM, by stage: {layers:?}");
    }
    assert_eq!(pipeline.num_ranks(), colocated.num_ranks());
    assert_eq!(pipeline.stage_layers(Component::Llm, 28).iter().sum::<u32>(), 28);
}
