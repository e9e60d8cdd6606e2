//! The demo's model directory: LLaVA-OneVision in Hugging Face form, at a size that trains on a laptop.

use super::put;
use crate::error::DataError;
use serde_json::{Value, json};
use std::path::Path;

/// A byte-level BPE trained on the demo's words (`fixtures/README.md` says how).
pub(super) const TOKENIZER: &[u8] = include_bytes!("../../demo/tokenizer.json");

/// Side of a tile, in pixels. With the sizes of [`config`], encoder and LLM backbone take about as long as each other
/// on one core each: a pipeline of two ranks has work for both.
const IMAGE_SIZE: u32 = 126;

/// ChatML, as Qwen2 and LLaVA-OneVision use it, with media where the record has them. No default system turn.
const CHAT_TEMPLATE: &str = r"{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- else -%}
                {{- '<' + part.type + '>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
";

/// Writes `config.json`, `preprocessor_config.json`, `tokenizer_config.json` and `tokenizer.json`.
pub(crate) fn write(dir: &Path) -> Result<(), DataError> {
    let json = |name: &str, value: &Value| put(&dir.join(name), format!("{value:#}\n").as_bytes());
    json("config.json", &config())?;
    json("preprocessor_config.json", &preprocessor())?;
    json("processor_config.json", &processor())?;
    json("tokenizer_config.json", &tokenizer_config())?;
    put(&dir.join("tokenizer.json"), TOKENIZER)
}

/// (height, width) of each grid of tiles, in pixels: up to 2 x 2, and strips of 3.
fn pinpoints() -> Vec<[u32; 2]> {
    [[1, 1], [1, 2], [1, 3], [2, 1], [2, 2], [3, 1]]
        .into_iter()
        .map(|grid: [u32; 2]| grid.map(|n| n * IMAGE_SIZE))
        .collect()
}

/// Position of a special token in the tokenizer, and the number of all tokens.
fn token_ids() -> (impl Fn(&str) -> u64, u64) {
    let tokenizer: Value = serde_json::from_slice(TOKENIZER).expect("the fixture is checked by a test");
    let special = tokenizer["added_tokens"].as_array().cloned().unwrap_or_default();
    let vocabulary = tokenizer["model"]["vocab"].as_object().map_or(0, serde_json::Map::len) as u64;
    let id = move |token: &str| {
        special
            .iter()
            .find(|added| added["content"] == token)
            .and_then(|added| added["id"].as_u64())
            .expect("the fixture is checked by a test")
    };
    (id, vocabulary)
}

fn config() -> Value {
    let (id, num_tokens) = token_ids();
    json!({
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "model_type": "llava_onevision",
        "image_grid_pinpoints": pinpoints(),
        "image_token_index": id("<image>"),
        "video_token_index": id("<video>"),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": true,
        "tie_word_embeddings": false,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "dtype": "float32",
        "vision_config": {
            "model_type": "siglip_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": 14,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vision_use_head": false,
        },
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": num_tokens,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": { "rope_type": "default", "rope_theta": 1_000_000.0 },
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": false,
            "bos_token_id": id("<|endoftext|>"),
            "eos_token_id": id("<|im_end|>"),
            "pad_token_id": id("<|endoftext|>"),
        },
    })
}

fn preprocessor() -> Value {
    json!({
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "do_convert_rgb": true,
        "do_normalize": true,
        "do_pad": true,
        "do_rescale": true,
        "do_resize": true,
        "image_grid_pinpoints": pinpoints(),
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "rescale_factor": 1.0 / 255.0,
        "size": { "height": IMAGE_SIZE, "width": IMAGE_SIZE },
    })
}

fn processor() -> Value {
    json!({
        "processor_class": "LlavaOnevisionProcessor",
        "image_token": "<image>",
        "video_token": "<video>",
        "num_image_tokens": (IMAGE_SIZE / 14).pow(2),
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_select_strategy": "full",
    })
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_the_model_are_those_of_the_tokenizer() {
        let config = config();
        let num_tokens = config["text_config"]["vocab_size"].as_u64().unwrap();
        let tokenizer = tokenizers::Tokenizer::from_bytes(TOKENIZER).unwrap();
        assert_eq!(num_tokens, tokenizer.get_vocab_size(true) as u64);
        for (field, token) in [("image_token_index", "<image>"), ("video_token_index", "<video>")] {
            assert_eq!(config[field].as_u64(), tokenizer.token_to_id(token).map(u64::from), "{token}");
        }
    }
}
