//! Public models by name, from their own configurations: nothing is downloaded.
//!
//! `catalogue/*.json` holds encoders, backbones and the models made of them, each with its source. Where the source
//! publishes the number of parameters, or others have read it from the checkpoint (the note says who), the test below holds
//! ours to it; the other entries are marked as not verified.

use crate::architecture::Architecture;
use crate::error::AnalyticError;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// A model of the catalogue.
#[derive(Debug, Clone, PartialEq)]
pub struct CatalogueModel {
    /// Its name, for example `qwen2.5-vl-7b`.
    pub name: String,
    /// Its family, for example `qwen2_5_vl`.
    pub family: String,
    /// Name of its encoder in the catalogue.
    pub encoder: String,
    /// Name of its backbone in the catalogue.
    pub backbone: String,
    /// Where its configuration is published: the model's page; for a pairing those of encoder and backbone.
    pub source: String,
    /// When the catalogue was made.
    pub date: String,
    /// Parameters as published, which our count equals; `None` where we could not compare.
    pub published_parameters: Option<u64>,
    /// What is to be said of it; empty for nothing.
    pub note: String,
    /// Its configuration, as far as it decides the size: in the form of `config.json`.
    pub config: Value,
}

impl CatalogueModel {
    /// Its architecture.
    ///
    /// # Errors
    /// [`AnalyticError::Config`], if its configuration has a fault.
    pub fn architecture(&self) -> Result<Architecture, AnalyticError> {
        Architecture::from_config(&self.config)
    }
}

#[derive(Deserialize)]
struct File<T> {
    date: String,
    entries: Vec<T>,
}

#[derive(Deserialize)]
struct Part {
    name: String,
    source: String,
    /// As published; for the test.
    #[cfg(test)]
    #[serde(default)]
    num_parameters: Option<u64>,
    config: Value,
}

#[derive(Deserialize)]
struct Pairing {
    name: String,
    family: String,
    encoder: String,
    backbone: String,
    /// The encoder of sounds beside one of pictures.
    #[serde(default)]
    second_encoder: Option<String>,
    #[serde(default)]
    vocab_size: Option<u64>,
    #[serde(default)]
    tie_word_embeddings: Option<bool>,
    #[serde(default)]
    source: Option<String>,
    #[serde(default)]
    num_parameters: Option<u64>,
    #[serde(default)]
    note: String,
    /// Fields at the top of its `config.json` in which it differs from its family.
    #[serde(default)]
    config: Map<String, Value>,
}

fn file<T: for<'de> Deserialize<'de>>(text: &str) -> File<T> {
    serde_json::from_str(text).expect("the catalogue's files are part of the program and tested")
}

static MODELS: LazyLock<Vec<CatalogueModel>> = LazyLock::new(|| {
    let encoders: File<Part> = file(include_str!("../catalogue/encoders.json"));
    let backbones: File<Part> = file(include_str!("../catalogue/backbones.json"));
    let models: File<Pairing> = file(include_str!("../catalogue/models.json"));
    let date = models.date;
    models
        .entries
        .into_iter()
        .map(|pairing| model(pairing, &date, &encoders.entries, &backbones.entries))
        .collect()
});

/// The models of the catalogue, in the order of its file.
pub fn catalogue() -> &'static [CatalogueModel] {
    &MODELS
}

/// The model of that name.
///
/// # Errors
/// [`AnalyticError::UnknownModel`], with names like it.
pub fn catalogue_model(name: &str) -> Result<&'static CatalogueModel, AnalyticError> {
    let wanted = name.to_ascii_lowercase();
    catalogue().iter().find(|model| model.name == wanted).ok_or_else(|| {
        let stem = wanted.split(['-', '_', '.']).next().unwrap_or("");
        let alike = |model: &&CatalogueModel| !stem.is_empty() && model.name.starts_with(stem);
        let mut near: Vec<&str> = catalogue().iter().filter(alike).map(|model| model.name.as_str()).collect();
        // Those that begin most alike first.
        let alike_until = |name: &str| name.bytes().zip(wanted.bytes()).take_while(|(a, b)| a == b).count();
        near.sort_by_key(|name| std::cmp::Reverse(alike_until(name)));
        if near.is_empty() {
            near = catalogue().iter().map(|model| model.name.as_str()).collect();
        }
        near.truncate(6);
        AnalyticError::UnknownModel { name: name.to_owned(), near: near.join(", ") }
    })
}

fn model(pairing: Pairing, date: &str, encoders: &[Part], backbones: &[Part]) -> CatalogueModel {
    let part = |parts: &[Part], name: &str| {
        let found = parts.iter().position(|part| part.name == name);
        found.expect("the catalogue names parts that it has")
    };
    let encoder = &encoders[part(encoders, &pairing.encoder)];
    let backbone = &backbones[part(backbones, &pairing.backbone)];
    let mut text = backbone.config.clone();
    if let Some(vocabulary) = pairing.vocab_size {
        text["vocab_size"] = json!(vocabulary);
    }
    if let Some(is_tied) = pairing.tie_word_embeddings {
        text["tie_word_embeddings"] = json!(is_tied);
    }
    let mut vision = encoder.config.clone();
    let mut config = pairing.config;
    config.insert("model_type".to_owned(), json!(pairing.family));
    config.insert("tie_word_embeddings".to_owned(), text["tie_word_embeddings"].clone());
    let (tower, llm) = match pairing.family.as_str() {
        "internvl_chat" => ("vision_config", "llm_config"),
        "internvl" => {
            // The encoder's file is of the public form, whose names for these two are others than transformers'.
            if let Some(vision) = vision.as_object_mut() {
                for (name, ours) in [("attention_bias", "qkv_bias"), ("use_qk_norm", "qk_normalization")] {
                    vision.remove(ours).map(|value| vision.insert(name.to_owned(), value));
                }
                vision.insert("model_type".to_owned(), json!("internvl_vision"));
            }
            ("vision_config", "text_config")
        }
        "idefics3" | "smolvlm" => {
            vision["model_type"] = json!(format!("{}_vision", pairing.family));
            ("vision_config", "text_config")
        }
        "qwen2_5_omni" | "qwen3_omni_moe" => {
            for (section, name) in [(&mut vision, "vision_encoder"), (&mut text, "text")] {
                section["model_type"] = json!(format!("{}_{name}", pairing.family));
            }
            vision["out_hidden_size"] = text["hidden_size"].clone();
            ("vision_config", "text_config")
        }
        "qwen2_audio" | "audioflamingo3" | "voxtral" => ("audio_config", "text_config"),
        "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe" => {
            // These files name the width of the features in the encoder's section, and know one kind of backbone.
            let field = if pairing.family == "qwen2_vl" { "hidden_size" } else { "out_hidden_size" };
            vision[field] = text["hidden_size"].clone();
            text.as_object_mut().and_then(|text| text.remove("model_type"));
            ("vision_config", "text_config")
        }
        _ => ("vision_config", "text_config"),
    };
    config.insert(tower.to_owned(), vision);
    if let Some(name) = &pairing.second_encoder {
        let mut audio = encoders[part(encoders, name)].config.clone();
        audio["output_dim"] = text["hidden_size"].clone();
        config.insert("audio_config".to_owned(), audio);
    }
    config.insert(llm.to_owned(), text);
    if ["qwen2_5_omni", "qwen3_omni_moe"].contains(&pairing.family.as_str()) {
        // The file is of the whole model, of which the thinker is a section.
        config.insert("model_type".to_owned(), json!(format!("{}_thinker", pairing.family)));
        let family = json!(pairing.family);
        config =
            Map::from_iter([("model_type".to_owned(), family), ("thinker_config".to_owned(), config.into())]);
    }
    CatalogueModel {
        source: pairing.source.unwrap_or_else(|| format!("{} and {}", encoder.source, backbone.source)),
        name: pairing.name,
        family: pairing.family,
        encoder: pairing.encoder,
        backbone: pairing.backbone,
        date: date.to_owned(),
        published_parameters: pairing.num_parameters,
        note: pairing.note,
        config: Value::Object(config),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ours equals what the models' pages publish, to the last parameter.
    #[test]
    fn parameters_are_as_published() {
        let mut verified = 0;
        let mut faults = Vec::new();
        for model in catalogue() {
            let ours = model.architecture().unwrap().num_parameters();
            if let Some(published) = model.published_parameters {
                if ours != published {
                    faults.push((model.name.clone(), ours, published));
                }
                verified += 1;
            }
        }
        assert!(faults.is_empty(), "{faults:?}");
        assert!(verified >= 27, "{verified}");
    }

    /// The backbones alone: embedding, layers, norm, and a head where it is not the embedding.
    #[test]
    fn backbones_are_as_published() {
        let backbones: File<Part> = file(include_str!("../catalogue/backbones.json"));
        for backbone in backbones.entries {
            let Some(published) = backbone.num_parameters else { continue };
            let vision = json!({"vision_use_head": false});
            let whole = json!({
                "model_type": "llava_onevision", "vision_config": vision, "text_config": backbone.config,
            });
            let architecture = Architecture::from_config(&whole).unwrap();
            let llm = |module: &crate::Module| module.name.starts_with("llm_");
            let modules = architecture.modules();
            let all: u64 = modules.iter().filter(|m| llm(m)).map(|m| m.count * m.num_parameters()).sum();
            let tied = architecture.llm.vocabulary * architecture.llm.width;
            assert_eq!(all - if architecture.llm.is_tied { tied } else { 0 }, published, "{}", backbone.name);
        }
    }

    #[test]
    fn names_are_unique_and_a_wrong_one_says_which_are_near() {
        let mut names: Vec<&str> = catalogue().iter().map(|model| model.name.as_str()).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        let error = catalogue_model("qwen2.5-vl-8b").unwrap_err();
        assert_eq!(error.to_string(), "no model named `qwen2.5-vl-8b` in the catalogue");
        assert!(catalogue_model("Qwen2.5-VL-7B").is_ok());
    }
}
