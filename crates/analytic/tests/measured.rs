//! The analytic model beside a profile that was measured.

#![allow(clippy::unwrap_used)]

use dflop_analytic::{EstimateSettings, Hardware, catalogue_model, estimate};
use dflop_types::{MadeFrom, MeasuredPoint, ModelProfile};

/// Holds the estimate for an H100 against the profile that was measured on one. It looks at sizes that keep the device busy, so
/// that the host does not decide. `packed_ratio` was fitted to the attention measured there; nothing else was fitted.
#[test]
fn an_estimate_is_near_the_measured_profile() {
    let text = include_str!("../../../fixtures/profiles/h100_internvl3-8b.json");
    let measured: ModelProfile = serde_json::from_str(text).unwrap();
    let architecture = catalogue_model("internvl3-8b-hf").unwrap().architecture().unwrap();
    let settings = EstimateSettings {
        model: "internvl3-8b-hf".to_owned(),
        dtype: "bfloat16".to_owned(),
        made_from: MadeFrom::new(),
        lora_rank: 0,
    };
    let estimated = estimate(&architecture, Hardware::named("h100").unwrap(), &settings).unwrap();
    let at = |points: &[MeasuredPoint], size: u64| -> [f64; 2] {
        let after = points.iter().position(|p| p.size >= size).unwrap();
        let (a, b) = (&points[after.saturating_sub(1)], &points[after]);
        let share = if b.size == a.size { 1.0 } else { (size - a.size) as f64 / (b.size - a.size) as f64 };
        let of = |x: u64, y: u64| x as f64 + share * (y as f64 - x as f64);
        [of(a.forward_ns, b.forward_ns), of(a.backward_ns, b.backward_ns)]
    };
    let check = |name: &str, is_attention: bool, from: u64, within: [std::ops::Range<f64>; 2]| {
        let of = |profile: &ModelProfile| {
            let module = &profile.modules[name];
            if is_attention { module.attention.points.clone() } else { module.linear.points.clone() }
        };
        let (measured, estimated) = (of(&measured), of(&estimated));
        for point in measured.iter().filter(|point| point.size >= from) {
            let found = at(&estimated, point.size);
            let ratios = [point.forward_ns as f64 / found[0], point.backward_ns as f64 / found[1]];
            for (ratio, within) in ratios.iter().zip(&within) {
                assert!(within.contains(ratio), "{name} of {} tokens: {ratios:?}", point.size);
            }
        }
    };
    check("llm_layer", false, 8_192, [0.9..1.05, 0.95..1.1]);
    check("llm_layer", true, 2_048, [0.95..1.1, 0.95..1.15]);
    check("encoder_layer", false, 16_400, [1.0..1.2, 1.0..1.3]);
    check("llm_head", false, 1_024, [1.1..1.3, 1.1..1.35]);
    check("llm_embedding", false, 16_384, [1.0..5.0, 1.0..1.5]);
}
