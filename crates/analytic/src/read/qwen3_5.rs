//! Qwen3.5: the encoder of Qwen3-VL without `DeepStack`; most layers of the backbone have linear attention.

use super::{TIED, llm, qwen3, qwen3_vl, rotated_size, section};
use crate::architecture::{Architecture, Experts, LinearAttention, Llm, NormKind};
use crate::defaults::{QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_VL_VISION};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// What the configuration describes; `has_experts` by the family.
pub(super) fn read(config: &Value, has_experts: bool) -> Result<Architecture, AnalyticError> {
    let vision = section(config, "vision_config", QWEN3_VL_VISION)?;
    let llm = backbone(config, has_experts)?;
    let (encoder, projector) = qwen3_vl::tower(&vision, &llm, 0)?;
    let family = if has_experts { "qwen3_5_moe" } else { "qwen3_5" };
    Ok(Architecture { family: family.to_owned(), encoder, projector, sound: None, llm })
}

/// The backbone alone.
pub(super) fn backbone(config: &Value, has_experts: bool) -> Result<Llm, AnalyticError> {
    let text = section(config, "text_config", if has_experts { QWEN3_5_MOE_TEXT } else { QWEN3_5_TEXT })?;
    let whole = Section { path: "", object: config, defaults: &[] };
    let plain = llm(config, &text, false)?;
    let experts = if has_experts {
        let shared_width = text.count("shared_expert_intermediate_size")?;
        qwen3::experts(&text, plain.num_layers)?.map(|experts| Experts { shared_width, ..experts })
    } else {
        None
    };
    Ok(Llm {
        // Hugging Face's class asks only the whole configuration.
        is_tied: whole.flag(TIED, false)?,
        has_mlp_bias: false,
        has_head_norm: true,
        norm: NormKind::RmsCentred,
        rotated_size: rotated_size(&text, plain.head_size, 0.25)?,
        has_output_gate: true,
        linear: linear(&text, plain.num_layers)?,
        experts,
        ..plain
    })
}

/// The layers with linear attention; `None` where all have full attention. Each layer is of the kind that `layer_types`
/// says; if that is absent, every `full_attention_interval`th (4) has full attention.
fn linear(text: &Section, num_layers: u64) -> Result<Option<LinearAttention>, AnalyticError> {
    let name = "layer_types";
    let count = match text.get(name) {
        None => num_layers - num_layers / text.given("full_attention_interval")?.unwrap_or(4),
        Some(kinds) => {
            let kinds = kinds.as_array().filter(|kinds| kinds.len() as u64 == num_layers);
            let kinds = kinds.ok_or_else(|| text.error(name, "must name a kind for each layer"))?;
            if kinds.iter().any(|kind| kind != "linear_attention" && kind != "full_attention") {
                return Err(text.error(name, "must be of \"linear_attention\" and \"full_attention\""));
            }
            kinds.iter().filter(|kind| *kind == "linear_attention").count() as u64
        }
    };
    if count == num_layers {
        let field = if text.get(name).is_some() { name } else { "full_attention_interval" };
        return Err(text.error(field, "must leave at least one layer with full attention"));
    }
    let num_key_heads = text.count("linear_num_key_heads")?;
    let num_value_heads = text.count("linear_num_value_heads")?;
    text.divides("linear_num_key_heads", num_key_heads, num_value_heads)?;
    Ok((count > 0).then_some(LinearAttention {
        num_layers: count,
        num_key_heads,
        num_value_heads,
        key_size: text.count("linear_key_head_dim")?,
        value_size: text.count("linear_value_head_dim")?,
        kernel: text.count("linear_conv_kernel_dim")?,
    }))
}
