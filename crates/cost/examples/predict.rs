//! From a measured grid to the time of a microbatch: `cargo run -p dflop-cost --example predict`.
#![allow(clippy::print_stdout, reason = "an example talks")]

use dflop_cost::{CostError, CostModel};
use dflop_types::{MeasuredCurve, MeasuredPoint, MicrobatchShape, ModelProfile, ModuleProfile};

fn main() -> Result<(), CostError> {
    // What `dflop profile model` would write: each module took 10 ns a token, at 100 and at 1,000 tokens.
    let point = |size: u64| MeasuredPoint {
        size,
        forward_ns: 10 * size,
        backward_ns: 20 * size,
        input_ns: 10 * size,
        weight_ns: 10 * size,
        repeats: 5,
        ..MeasuredPoint::default()
    };
    let linear = MeasuredCurve { points: vec![point(100), point(1_000)], ..MeasuredCurve::default() };
    let module = ModuleProfile { count: 2, linear, ..ModuleProfile::default() };
    let mut profile = ModelProfile::default();
    "float32".clone_into(&mut profile.device.dtype);
    for name in ModelProfile::MODULES {
        profile.modules.insert(name.to_owned(), module.clone());
    }
    let model = CostModel::new(&profile)?;
    for llm_tokens in [vec![90, 60], vec![400, 500], vec![4_000]] {
        let microbatch = MicrobatchShape { llm_tokens: llm_tokens.clone(), ..MicrobatchShape::default() };
        // A stage of two layers, without embedding and head.
        let stage = model.llm_stage(&microbatch, 2, false, false);
        let mark = if stage.extrapolated { ", beyond what was measured" } else { "" };
        println!("{llm_tokens:?}: forward {} ns, backward {} ns{mark}", stage.forward_ns, stage.backward_ns);
        assert_eq!(stage.extrapolated, llm_tokens.iter().sum::<u32>() > 1_000);
    }
    Ok(())
}
