//! The backbones of Qwen3: a norm over each head of queries and keys; some have experts in place of the MLP.

use super::llm;
use crate::architecture::{Experts, Llm, Router};
use crate::error::AnalyticError;
use crate::fields::Section;
use serde_json::Value;

/// The backbone that `text` describes; `may_have_experts` by its class. Its MLP has no bias, whatever the file says.
pub(super) fn backbone(config: &Value, text: &Section, may_have_experts: bool) -> Result<Llm, AnalyticError> {
    let llm = Llm { has_mlp_bias: false, has_head_norm: true, ..llm(config, text, false)? };
    Ok(Llm { experts: if may_have_experts { experts(text, llm.num_layers)? } else { None }, ..llm })
}

/// What all layers have in place of the MLP; `None` where all have the MLP.
///
/// The weights of a token's experts are taken to be scaled so that their sum is 1, as in all published models. In a model
/// that does not scale them (`norm_topk_prob: false`), a token keeps some bytes less than is counted.
///
/// A layer has experts if `mlp_only_layers` does not name it and its number, from 1, is a multiple of
/// `decoder_sparse_step`.
pub(super) fn experts(text: &Section, num_layers: u64) -> Result<Option<Experts>, AnalyticError> {
    let name = "mlp_only_layers";
    let dense: Vec<u64> = match text.get(name) {
        None => Vec::new(),
        Some(list) => {
            let layers = list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
            layers.ok_or_else(|| text.error(name, "must be a list of layers"))?
        }
    };
    let step = text.count("decoder_sparse_step")?;
    let has_experts = |layer: &u64| !dense.contains(layer) && (layer + 1).is_multiple_of(step);
    let count = (0..num_layers).filter(has_experts).count() as u64;
    if count == 0 {
        return Ok(None);
    }
    if count < num_layers {
        let rule = format!("must leave all {num_layers} layers with experts or none: now {count} have them");
        return Err(text.error(if step > 1 { "decoder_sparse_step" } else { name }, &rule));
    }
    // Files that transformers 5 wrote name it so.
    let other = "num_local_experts";
    let count = if text.get(other).is_some() { text.count(other)? } else { text.count("num_experts")? };
    let per_token = text.count("num_experts_per_tok")?;
    if per_token > count {
        return Err(text.error("num_experts_per_tok", &format!("must be at most the {count} experts")));
    }
    Ok(Some(Experts {
        count,
        per_token,
        width: text.count("moe_intermediate_size")?,
        shared_width: 0,
        has_shared_gate: true,
        router: Router::Softmax,
        num_dense_layers: 0,
    }))
}
