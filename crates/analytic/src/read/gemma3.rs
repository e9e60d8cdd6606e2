//! Gemma 3: SigLIP over one large square, the means of whose patches are features; a backbone with norms before and after, most
//! of whose layers see a window.

use super::{TIED, llm, section, siglip_head, tiles};
use crate::architecture::{Architecture, Encoder, Llm, NormKind, Projector, SlidingAttention};
use crate::defaults::{GEMMA3_TEXT, SIGLIP};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes.
///
/// Not counted: that the tokens of a picture see the rest of it too.
pub(super) fn read(config: &Value) -> Result<Architecture, AnalyticError> {
    let whole = Section { path: "", object: config, defaults: &[] };
    let vision = section(config, "vision_config", SIGLIP)?;
    vision.must_be("model_type", &["siglip_vision_model"])?;
    let siglip = tiles(&vision, 0, true)?;
    let encoder = Encoder { num_unread_parameters: siglip_head(config, &siglip)?, ..siglip };
    let field = "mm_tokens_per_image";
    let features = whole.given(field)?.unwrap_or(256);
    let (per_side, side) = (encoder.unit_tokens.isqrt(), features.isqrt());
    if side * side != features || !per_side.is_multiple_of(side) {
        let rule = format!("must be the square of a number that divides {per_side} patches of a side");
        return Err(whole.error(field, &rule));
    }
    let llm = backbone(config)?;
    let projector = Projector {
        norm: Some((NormKind::Layer, false)),
        has_second_norm: false,
        has_merged_norm: false,
        merged_tokens: 1,
        pooled_tokens: encoder.unit_tokens / features,
        pooled_norm: Some(NormKind::RmsCentred),
        num_dropped_tokens: 0,
        reduced_width: None,
        inner_width: None,
        gated_width: None,
        has_bias: false,
        num_table_parameters: 0,
        num_deep_layers: 0,
    };
    Ok(Architecture { family: "gemma3".to_owned(), encoder, sound: None, projector, llm })
}

fn backbone(config: &Value) -> Result<Llm, AnalyticError> {
    let whole = Section { path: "", object: config, defaults: &[] };
    let text = section(config, "text_config", GEMMA3_TEXT)?;
    text.must_be("model_type", &["gemma3_text"])?;
    text.must_be("hidden_activation", &["gelu_pytorch_tanh"])?;
    for field in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if text.get(field).is_some() {
            return Err(text.error(field, "must be null"));
        }
    }
    if text.flag("use_bidirectional_attention", false)? {
        return Err(text.error("use_bidirectional_attention", "must be false"));
    }
    let plain = llm(config, &text, false)?;
    Ok(Llm {
        // Hugging Face's class asks only the whole configuration.
        is_tied: whole.flag(TIED, true)?,
        has_mlp_bias: false,
        has_head_norm: true,
        norm: NormKind::RmsCentred,
        has_norm_after: true,
        has_scaled_embedding: true,
        sliding: sliding(&text, plain.num_layers)?,
        ..plain
    })
}

/// The layers that see a window; `None` where all have full attention. Each layer is of the kind that `layer_types` says; if
/// that is absent, every `sliding_window_pattern`th (6) has full attention.
fn sliding(text: &Section, num_layers: u64) -> Result<Option<SlidingAttention>, AnalyticError> {
    let name = "layer_types";
    let count = match text.get(name) {
        None => num_layers - num_layers / text.given("sliding_window_pattern")?.unwrap_or(6),
        Some(kinds) => {
            let kinds = kinds.as_array().filter(|kinds| kinds.len() as u64 == num_layers);
            let kinds = kinds.ok_or_else(|| text.error(name, "must name a kind for each layer"))?;
            if kinds.iter().any(|kind| kind != "sliding_attention" && kind != "full_attention") {
                return Err(text.error(name, "must be of \"sliding_attention\" and \"full_attention\""));
            }
            kinds.iter().filter(|kind| *kind == "sliding_attention").count() as u64
        }
    };
    if count == num_layers {
        let field = if text.get(name).is_some() { name } else { "sliding_window_pattern" };
        return Err(text.error(field, "must leave at least one layer with full attention"));
    }
    Ok(if count > 0 {
        Some(SlidingAttention { num_layers: count, window: text.count("sliding_window")? })
    } else {
        None
    })
}
