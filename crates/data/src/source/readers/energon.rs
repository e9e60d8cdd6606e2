//! Megatron-Energon: a folder of tar shards that `.nv-meta` describes.
//!
//! Of `.nv-meta` are read: `.info.json` or `.info.yaml` (samples of each shard), `split.yaml` or `split.json` (shards of
//! each split, what is excluded), and `dataset.yaml` (the field map; a crude dataset is read as plain `WebDataset`).
//! `index.sqlite` is not needed: shards are counted by `.info.json` and sought in by their `.tar.idx`.

mod field_map;

use super::Reader;
use super::webdataset::{Declared, Layout, Plain, Shards, braces};
use crate::error::DataError;
use crate::source::location::Location;
use crate::source::mixture::Source;
use crate::source::store::Stores;
use crate::yaml;
use field_map::FieldMap;
use saphyr::{Scalar, Yaml};
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap};
use std::io::Read as _;

const FOLDER: &str = ".nv-meta";
const INFO: [&str; 2] = [".info.json", ".info.yaml"];
const SPLIT: [&str; 2] = ["split.yaml", "split.json"];
const DATASET: [&str; 2] = ["dataset.yaml", "dataset.json"];
/// Bytes of one file in the folder, at most.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// The split that is read where none is asked for.
const SPLIT_DEFAULT: &str = "train";

/// Whether the directory is a prepared dataset.
pub(super) fn is_dataset(directory: &Location, stores: &Stores) -> bool {
    let folder = directory.join(FOLDER);
    [INFO, SPLIT].into_iter().flatten().any(|name| stores.about(&folder.join(name)).is_ok())
}

/// The error for a metadataset, which is a mixture of its own.
pub(super) fn metadataset(location: &Location) -> DataError {
    DataError::Record(format!(
        "`{location}`: a metadataset is a mixture, no source: name each of its datasets as one in `datasets`"
    ))
}

/// The reader for a split of the dataset in a directory.
///
/// # Errors
/// [`DataError::Io`], and [`DataError::Record`] where a file of `.nv-meta` is not what it must be, there is no such
/// split, or the dataset's samples cannot be told without its Python code.
pub(super) fn open(
    source: &Source,
    split: Option<&str>,
    stores: &Stores,
) -> Result<Box<dyn Reader>, DataError> {
    let directory = &source.location;
    let folder = directory.join(FOLDER);
    let info = file(&folder, INFO, stores)?;
    let counts = match &info {
        Some((location, info)) => counts(info).map_err(|cause| unsound(location, &cause))?,
        None => HashMap::new(),
    };
    let Some((location, splits)) = file(&folder, SPLIT, stores)? else {
        return Err(unsound(&folder, "`split.yaml` is missing: prepare the dataset with `energon prepare`"));
    };
    let shards = shards(&splits, split.unwrap_or(SPLIT_DEFAULT), &counts, info.is_some())
        .map_err(|cause| unsound(&location, &cause))?;
    let layout: Box<dyn Layout> = match file(&folder, DATASET, stores)? {
        Some((location, dataset)) => layout(&dataset).map_err(|cause| unsound(&location, &cause))?,
        None => Box::new(Plain),
    };
    let (names, declared): (Vec<_>, Vec<_>) = shards.into_iter().unzip();
    let files = names.iter().map(|name| directory.join(name)).collect();
    let declared_by = info.map_or(location, |(location, _)| location);
    Ok(Box::new(Shards::new(files, declared, Some(declared_by), layout)))
}

fn unsound(location: &Location, cause: &str) -> DataError {
    DataError::Record(format!("`{location}`: {cause}"))
}

/// Samples of each shard by its name.
fn counts(info: &Value) -> Result<HashMap<String, u64>, String> {
    let counts =
        info["shard_counts"].as_object().ok_or("`shard_counts` must be a mapping of shards to counts")?;
    let count = |(name, count): (&String, &Value)| match count.as_u64() {
        Some(count) => Ok((name.clone(), count)),
        None => Err(format!("`shard_counts`: `{name}` is {count}, must be a count")),
    };
    counts.iter().map(count).collect()
}

/// The shards of a split, less those excluded, and what is declared of each.
fn shards(
    splits: &Value,
    split: &str,
    counts: &HashMap<String, u64>,
    is_counted: bool,
) -> Result<Vec<(String, Declared)>, String> {
    let parts =
        splits["split_parts"].as_object().ok_or("`split_parts` must be a mapping of splits to shards")?;
    let part = parts.get(split).ok_or_else(|| {
        let known: Vec<&str> = parts.keys().map(String::as_str).collect();
        format!("there is no split `{split}`, known are {}", known.join(", "))
    })?;
    let names = names(part).map_err(|cause| format!("`split_parts.{split}`: {cause}"))?;
    let excluded = self::names(&splits["exclude"]).map_err(|cause| format!("`exclude`: {cause}"))?;
    let whole: BTreeSet<&str> = excluded.iter().map(String::as_str).collect();
    let mut shards = Vec::new();
    for name in names.into_iter().filter(|name| !whole.contains(name.as_str())) {
        let count = counts.get(&name).copied();
        if is_counted && count.is_none() {
            return Err(format!("`split_parts.{split}`: `{name}` is not in `shard_counts`"));
        }
        let inside = format!("{name}/");
        let excluded = whole.range(inside.as_str()..).take_while(|entry| entry.starts_with(&inside));
        let excluded = excluded.map(|entry| entry[inside.len()..].to_owned()).collect();
        shards.push((name, Declared { count, excluded }));
    }
    if shards.is_empty() {
        return Err(format!("split `{split}` has no shard"));
    }
    Ok(shards)
}

/// Names in a list of names and brace patterns; none where the list is not there.
fn names(list: &Value) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    match list {
        Value::Null => {}
        Value::Array(list) => {
            for entry in list {
                let text = entry.as_str().ok_or_else(|| format!("{entry} must be text"))?;
                names.extend(braces::expand(text)?);
                if names.len() > braces::NAMES_MAX {
                    return Err(format!("it names more than {} shards or samples", braces::NAMES_MAX));
                }
            }
        }
        other => return Err(format!("{other} must be a list")),
    }
    Ok(names)
}

/// What `dataset.yaml` says of the members of a sample.
fn layout(dataset: &Value) -> Result<Box<dyn Layout>, String> {
    // How these become text is decided by the task encoder of the training code.
    const REFUSED: [&str; 7] = [
        "Image",
        "ImageClassification",
        "Interleaved",
        "SimilarityInterleaved",
        "MultiChoiceVQA",
        "OCR",
        "VQAOCR",
    ];
    let class =
        [&dataset["sample_type"]["__class__"], &dataset["__class__"]].into_iter().find_map(Value::as_str);
    let class = class.unwrap_or("CrudeWebdataset");
    let stem = ["Webdataset", "Sample"].into_iter().find_map(|end| class.strip_suffix(end)).unwrap_or(class);
    if !dataset["sample_loader"].is_null() {
        return Err("`sample_loader` is Python code, must be a `field_map` or a crude dataset".to_owned());
    }
    if REFUSED.contains(&stem) || stem.starts_with("Metadataset") || stem.starts_with("Join") {
        return Err(format!(
            "`__class__` is `{class}`, must be CaptioningSample, VQASample, VidQASample, TextSample, ChatMLSample or \
             CrudeWebdataset"
        ));
    }
    match &dataset["field_map"] {
        Value::Null if stem == "Crude" => Ok(Box::new(Plain)),
        Value::Null => Err(format!("`field_map` is missing, a `{class}` needs it")),
        map => FieldMap::parse(map).map(|map| Box::new(map) as Box<dyn Layout>),
    }
}

/// The first of two files that is there, as JSON.
fn file(
    folder: &Location,
    names: [&str; 2],
    stores: &Stores,
) -> Result<Option<(Location, Value)>, DataError> {
    for name in names {
        let location = folder.join(name);
        let mut opened = match stores.open(&location) {
            Ok(opened) => opened,
            Err(DataError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        if opened.len > FILE_BYTES_MAX {
            let cause = format!("it has {} bytes, must have at most {FILE_BYTES_MAX}", opened.len);
            return Err(unsound(&location, &cause));
        }
        let mut text = String::new();
        opened
            .reader
            .by_ref()
            .take(FILE_BYTES_MAX)
            .read_to_string(&mut text)
            .map_err(|source| DataError::Io { act: "read", path: location.path(), source })?;
        let value = if location.extension() == "json" {
            serde_json::from_str(&text).map_err(|error| format!("it is not JSON: {error}"))
        } else {
            yaml::load::<Yaml<'_>>(&text)
                .map_err(|cause| format!("it is not YAML: {cause}"))
                .and_then(|documents| documents.first().map_or(Ok(Value::Null), json))
        };
        let value = value.map_err(|cause| unsound(&location, &cause))?;
        return Ok(Some((location, value)));
    }
    Ok(None)
}

/// YAML as JSON; keys must be text.
fn json(yaml: &Yaml<'_>) -> Result<Value, String> {
    match yaml {
        Yaml::Value(Scalar::Null) => Ok(Value::Null),
        Yaml::Value(Scalar::Boolean(value)) => Ok(Value::from(*value)),
        Yaml::Value(Scalar::Integer(value)) => Ok(Value::from(*value)),
        Yaml::Value(Scalar::FloatingPoint(value)) => Ok(Value::from(value.into_inner())),
        Yaml::Value(Scalar::String(value)) => Ok(Value::from(value.as_ref())),
        Yaml::Sequence(list) => list.iter().map(json).collect::<Result<Vec<_>, _>>().map(Value::from),
        Yaml::Mapping(fields) => {
            let field = |(key, value): (&Yaml<'_>, &Yaml<'_>)| match key {
                Yaml::Value(Scalar::String(key)) => Ok((key.to_string(), json(value)?)),
                _ => Err("a key is not text".to_owned()),
            };
            fields.iter().map(field).collect::<Result<Map<_, _>, _>>().map(Value::Object)
        }
        Yaml::Tagged(_, value) => json(value),
        _ => Err("it has a value that is no text, number, list or mapping".to_owned()),
    }
}

#[cfg(test)]
mod tests;
