//! `dflop models --write NAME DIR`: the configuration files of a model of the catalogue, as its page publishes them.

use crate::Failure;
use dflop_analytic::{CatalogueModel, catalogue_model};
use dflop_data::family::NamedModel;
use dflop_types::{FAMILIES, artifact};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a family's models have beside their sizes, or one of them.
#[derive(Deserialize)]
struct FamilyFiles {
    /// Fields of `config.json` that decide no size.
    config: Map<String, Value>,
    /// `preprocessor_config.json`.
    preprocessor: Value,
}

#[derive(Deserialize)]
struct Processors {
    families: BTreeMap<String, FamilyFiles>,
    /// By name of the model, where it has other files than its family.
    models: BTreeMap<String, FamilyFiles>,
}

/// The files of the model, by name: `config.json`, and `preprocessor_config.json` where its family is known to have one.
fn files(model: &CatalogueModel) -> Vec<(&'static str, Value)> {
    let processors: Processors = serde_json::from_str(include_str!("processors.json"))
        .expect("the file is part of the program and tested");
    let mut config = model.config.clone();
    config["dflop_catalogue"] = json!(model.name);
    let Some(of_family) = processors.families.get(&model.family) else {
        return vec![("config.json", config)];
    };
    let of_model = processors.models.get(&model.name);
    let vocabulary = {
        let trained = trained(&mut config);
        ["text_config", "llm_config"].iter().find_map(|text| trained[*text]["vocab_size"].as_u64())
    };
    let mut reserved = vocabulary.unwrap_or(u64::MAX);
    for (name, of_family) in &of_family.config {
        let value = of_model.and_then(|files| files.config.get(name)).unwrap_or(of_family);
        let section = if name == "architectures" { &mut config } else { trained(&mut config) };
        // The catalogue has it where the model differs from its family.
        if section.get(name).is_some() {
            continue;
        }
        section[name.as_str()] = value.clone();
        // A pairing's backbone may have another vocabulary than the family's own: the marks of media then take its last
        // tokens, which are reserved (Llama-3 has 250 of them).
        let is_token = name.ends_with("_token_id") || name.ends_with("_token_index");
        if is_token && value.as_u64().zip(vocabulary).is_some_and(|(id, size)| id >= size) {
            reserved -= 1;
            section[name.as_str()] = json!(reserved);
        }
    }
    let mut preprocessor = of_model.unwrap_or(of_family).preprocessor.clone();
    if let (Some(_), Some(side)) =
        (preprocessor.get("max_image_size"), config["vision_config"]["image_size"].as_u64())
    {
        // Tiles are as large as the model's encoder reads them, and four of them the longest edge of a picture.
        preprocessor["max_image_size"] = json!({"longest_edge": side});
        preprocessor["size"] = json!({"longest_edge": 4 * side});
    }
    vec![("config.json", config), ("preprocessor_config.json", preprocessor)]
}

/// The section of `config.json` that describes the model that trains: all of it, or the thinker.
fn trained(config: &mut Value) -> &mut Value {
    if config.get("thinker_config").is_some() { &mut config["thinker_config"] } else { config }
}

/// The model `name` of the catalogue as its files would have it, with the tokenizer of a directory.
///
/// # Errors
/// Where there is no such model.
pub(crate) fn named_model(name: &str, tokenizer_dir: Option<PathBuf>) -> Result<NamedModel, Failure> {
    let model = catalogue_model(name)?;
    let mut files: BTreeMap<&str, String> =
        files(model).into_iter().map(|(name, value)| (name, value.to_string())).collect();
    let mut take = |name| files.remove(name).unwrap_or_default();
    Ok(NamedModel {
        name: model.name.clone(),
        config: take("config.json"),
        preprocessor: take("preprocessor_config.json"),
        tokenizer_dir,
    })
}

/// Writes the configuration files of the model `name` into `dir`, which is made if it is missing.
pub(super) fn run(name: &str, dir: &Path) -> Result<(), Failure> {
    let model = catalogue_model(name)?;
    let files = files(model);
    // None is written where one is in the way.
    if let Some((file, _)) = files.iter().find(|(file, _)| dir.join(file).exists()) {
        return Err(Failure::new(
            format!("`{}` exists, it would be overwritten", dir.join(file).display()),
            Some("name another directory, as in `--write NAME DIR`".to_owned()),
        ));
    }
    for (file, value) in &files {
        let path = dir.join(file);
        let text = format!("{value:#}\n");
        artifact::write_text(&path, "model configuration", &text)
            .map_err(|error| Failure::of_flag(error, "--write NAME DIR"))?;
        talk!("wrote {}", path.display());
    }
    outln!("{}: {} from {}", model.name, model.family, model.source);
    let has_shapes = FAMILIES.iter().any(|family| family.model_type == model.family && family.has_shapes);
    if has_shapes {
        outln!(
            "the numbers that decide sizes and times, without weights and tokenizer: for `dflop profile data` put \
             tokenizer.json, tokenizer_config.json and the chat template of the same page beside them"
        );
    } else {
        outln!(
            "the numbers that decide times: enough for `dflop profile model --estimate`, not for `dflop profile data`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_analytic::{Architecture, catalogue};
    use dflop_data::family;

    /// The tokens that stand for media are apart, and in the vocabulary of the backbone.
    fn marks_are_tokens_of_the_backbone(name: &str, config: &Value) {
        let vocabulary = config["text_config"]["vocab_size"].as_u64().unwrap();
        let fields = config.as_object().unwrap().iter();
        let mut ids: Vec<u64> = fields
            .filter(|(field, _)| field.ends_with("_token_id") || field.ends_with("_token_index"))
            .map(|(_, id)| id.as_u64().unwrap())
            .collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert!(
            count > 0 && ids.len() == count && ids[count - 1] < vocabulary,
            "{name}: {ids:?} {vocabulary}"
        );
    }

    /// Every model: its files are read by the shape rule and by the analytic model as the catalogue's own.
    #[test]
    fn the_files_are_those_of_the_model() {
        for model in catalogue() {
            let files: BTreeMap<_, _> = files(model).into_iter().collect();
            let written = Architecture::from_config(&files["config.json"]).unwrap();
            assert_eq!(written, model.architecture().unwrap(), "{}", model.name);
            let record = FAMILIES.iter().find(|family| family.model_type == model.family).unwrap();
            assert!(record.has_estimate, "{}", model.name);
            assert_eq!(files.contains_key("preprocessor_config.json"), record.has_shapes, "{}", model.name);
            if record.has_shapes {
                let files = family::FamilyFiles {
                    config: files["config.json"].clone(),
                    preprocessor: files["preprocessor_config.json"].clone(),
                    ..family::FamilyFiles::default()
                };
                let rule = family::open(&files).unwrap().unwrap();
                assert_eq!(rule.name(), model.family);
                let config = files.config.get("thinker_config").unwrap_or(&files.config);
                marks_are_tokens_of_the_backbone(&model.name, config);
            }
        }
    }
}
