//! Idefics3 and SmolVLM: SigLIP without a CLS, a norm, patches side by side, one product without a bias.

use super::{TIED, section, text, tiles};
use crate::architecture::{Architecture, Llm, NormKind, Projector};
use crate::defaults::IDEFICS3_VISION;
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes.
pub(super) fn read(config: &Value, family: &str) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", IDEFICS3_VISION)?;
    let encoder = tiles(&vision, 0, true)?;
    let whole = Section { path: "", object: config, defaults: &[("scale_factor", 2)] };
    let scale = whole.count("scale_factor")?;
    whole.divides("scale_factor", scale * scale, encoder.unit_tokens)?;
    // Not asked of the backbone here.
    let llm = Llm { is_tied: whole.flag(TIED, false)?, ..text(config, "text_config", "llama")? };
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: scale * scale,
        pooled_tokens: 1,
        pooled_norm: None,
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: None,
        gated_width: None,
        has_bias: false,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}
