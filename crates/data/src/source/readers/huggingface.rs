//! Directories of columnar files: what `datasets` saved, and files as the hub holds them.
//!
//! - `dataset_dict.json`: a directory a split, each saved by `save_to_disk`.
//! - `state.json` beside `data-*.arrow`: one dataset, saved by `save_to_disk`.
//! - else `.parquet` or `.arrow` files, in the directory itself, in its `data`, or in a directory a split; a file's split
//!   is recognised by its name, for example `train-00000-of-00003.parquet`.

use crate::error::DataError;
use crate::source::location::Location;
use crate::source::store::Stores;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;

/// Bytes of `state.json` or `dataset_dict.json`, at most.
const MAX_JSON_BYTES: u64 = 64 << 20;
/// Words that name a split in the name of a file.
const SPLIT_WORDS: [&str; 8] = ["train", "training", "test", "testing", "validation", "valid", "dev", "eval"];

/// The files that `directory` holds of the split asked for.
///
/// # Errors
/// [`DataError::Io`]; [`DataError::Record`] where there are several splits and none is named, where the one named or a
/// shard is missing, and where there is no columnar file.
pub(super) fn files(
    directory: &Location,
    split: Option<&str>,
    stores: &Stores,
) -> Result<Vec<Location>, DataError> {
    let entries = stores.list(directory)?;
    let has = |name: &str| entries.iter().any(|entry| entry.name() == name);
    if has("dataset_dict.json") {
        let file = directory.join("dataset_dict.json");
        let splits = json(&file, stores)?;
        let names = splits["splits"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let directories = names.map(|name| (name.to_owned(), directory.join(name))).collect();
        return saved(&chosen(directory, directories, split)?, None, stores);
    }
    if has("state.json") {
        return saved(directory, split, stores);
    }
    let splits = splits(directory, &entries, stores)?;
    if splits.is_empty() {
        return Err(DataError::Record(format!(
            "`{directory}` holds no dataset: there is no dataset_dict.json, no state.json, and no .parquet or .arrow \
             file in it, in its `data` or in the directories of its splits"
        )));
    }
    let shards = chosen(directory, splits, split)?;
    check_shards(&shards)?;
    Ok(shards)
}

/// What `name` stands for, or the only thing there is.
fn chosen<T>(
    directory: &Location,
    mut splits: BTreeMap<String, T>,
    name: Option<&str>,
) -> Result<T, DataError> {
    let names = splits.keys().map(|name| shown(name)).collect::<Vec<_>>().join(", ");
    match name {
        Some(name) => splits
            .remove(name)
            .ok_or_else(|| DataError::Record(format!("`{directory}` has no split `{name}`, it has {names}"))),
        None if splits.len() > 1 => Err(DataError::Record(format!(
            "`{directory}` has {} splits: {names}; name one in the mixture as `split`",
            splits.len()
        ))),
        None => splits
            .pop_first()
            .map(|(_, only)| only)
            .ok_or_else(|| DataError::Record(format!("`{directory}` has no split"))),
    }
}

fn shown(name: &str) -> String {
    if name.is_empty() { "files of no split".to_owned() } else { format!("`{name}`") }
}

/// A dataset that `save_to_disk` wrote: the files that `state.json` lists, whatever stands beside them.
fn saved(directory: &Location, split: Option<&str>, stores: &Stores) -> Result<Vec<Location>, DataError> {
    let file = directory.join("state.json");
    let state = json(&file, stores)?;
    let unsound = |cause: String| DataError::Record(format!("`{file}`: {cause}"));
    if let Some(split) = split {
        let own = state["_split"].as_str();
        if own != Some(split) {
            let own = own.map_or_else(|| "no split".to_owned(), |own| format!("split `{own}`"));
            return Err(unsound(format!("it is of {own}, `{split}` is asked for")));
        }
    }
    if ["_indices_data_files", "_indices_files"].iter().any(|key| !state[key].is_null()) {
        return Err(unsound(
            "it has indices beside its data, save it again with `flatten_indices`".to_owned(),
        ));
    }
    let mut files = Vec::new();
    for listed in state["_data_files"].as_array().into_iter().flatten() {
        let name = listed["filename"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| unsound("`_data_files` lists a file without name".to_owned()))?;
        files.push(directory.join(name));
    }
    if files.is_empty() {
        return Err(unsound("`_data_files` lists no file".to_owned()));
    }
    Ok(files)
}

/// The columnar files under `directory`, by split.
fn splits(
    directory: &Location,
    entries: &[Location],
    stores: &Stores,
) -> Result<BTreeMap<String, Vec<Location>>, DataError> {
    let here = columnar(directory, entries)?;
    if !here.is_empty() {
        return Ok(by_split(here));
    }
    let is_shown = |entry: &&Location| !entry.name().starts_with(['.', '_']);
    let mut splits = BTreeMap::new();
    for entry in entries.iter().filter(is_shown) {
        // What is no directory lists nothing; a prefix of a remote store may not be told from one.
        let Ok(inner) = stores.list(entry) else { continue };
        let files = columnar(entry, &inner)?;
        let name = entry.name();
        if name == "data" && !files.is_empty() {
            return Ok(by_split(files));
        }
        if !files.is_empty() {
            splits.insert(name, files);
        }
    }
    Ok(splits)
}

/// The columnar files among `entries`, of one kind.
fn columnar(directory: &Location, entries: &[Location]) -> Result<Vec<Location>, DataError> {
    let of = |ending: &str| {
        let is_of = |entry: &&Location| entry.extension() == ending && !entry.name().starts_with(['.', '_']);
        let mut files: Vec<_> = entries.iter().filter(is_of).cloned().collect();
        files.sort();
        files
    };
    match (of("parquet"), of("arrow")) {
        (parquet, arrow) if !parquet.is_empty() && !arrow.is_empty() => Err(DataError::Record(format!(
            "`{directory}` holds .parquet and .arrow files, must hold one kind: name a file, or move one kind away"
        ))),
        (parquet, arrow) => Ok(if parquet.is_empty() { arrow } else { parquet }),
    }
}

fn by_split(files: Vec<Location>) -> BTreeMap<String, Vec<Location>> {
    let mut splits = BTreeMap::<_, Vec<_>>::new();
    for file in files {
        splits.entry(split_of(&file.name())).or_default().push(file);
    }
    splits
}

/// Name of the split that a file's name tells; empty where it tells none.
fn split_of(file: &str) -> String {
    let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
    if let Some(shard) = Shard::parse(stem) {
        return shard.prefix.to_owned();
    }
    let words = stem.split(|c: char| !c.is_ascii_alphanumeric());
    let has_word = words
        .map(|word| word.trim_end_matches(|c: char| c.is_ascii_digit()))
        .any(|word| SPLIT_WORDS.contains(&word));
    let name = stem.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-' || c == '_');
    if has_word { name.to_owned() } else { String::new() }
}

/// A name as `train-00000-of-00003`.
struct Shard<'a> {
    prefix: &'a str,
    index: u64,
    count: u64,
}

impl<'a> Shard<'a> {
    fn parse(stem: &'a str) -> Option<Self> {
        let (prefix, rest) = stem.rsplit_once("-of-")?;
        // The hub puts a hash behind the count at times.
        let count = rest.split_once('-').map_or(rest, |(count, _)| count);
        let (prefix, index) = prefix.rsplit_once('-')?;
        let number = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        Some(Self { prefix, index: number(index)?, count: number(count)? })
    }
}

/// Whether every shard is there, where the names count them.
fn check_shards(files: &[Location]) -> Result<(), DataError> {
    let names: Vec<String> = files.iter().map(Location::name).collect();
    let mut there = BTreeMap::<u64, BTreeSet<u64>>::new();
    for name in &names {
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        if let Some(shard) = Shard::parse(stem) {
            there.entry(shard.count).or_default().insert(shard.index);
        }
    }
    for (count, indices) in there {
        if let Some(missing) = (0..count).find(|index| !indices.contains(index)) {
            let verb = if indices.len() == 1 { "is" } else { "are" };
            return Err(DataError::Damaged {
                cause: format!(
                    "`{}`: shard {missing} of {count} is missing, {} {verb} there",
                    files[0].parent(),
                    indices.len()
                ),
                mend: "copy or download the shards that are missing",
            });
        }
    }
    Ok(())
}

fn json(file: &Location, stores: &Stores) -> Result<Value, DataError> {
    let mut bytes = Vec::new();
    let reader = stores.open(file)?.reader;
    let io = |source| DataError::Io { act: "read", path: file.path(), source };
    reader.take(MAX_JSON_BYTES).read_to_end(&mut bytes).map_err(io)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| DataError::Record(format!("`{file}`: it is not JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(names: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for name in names {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, if name.ends_with("json") { "{}" } else { "" }).unwrap();
        }
        directory
    }

    /// Names of the files found, or the error, both without the directory.
    fn found(names: &[&str], split: Option<&str>) -> Result<String, String> {
        let directory = touched(names);
        let root = Location::Local(directory.path().to_owned());
        let without_root = |text: String| text.replace(&format!("{root}"), ".");
        files(&root, split, &Stores::default())
            .map(|files| {
                files.iter().map(|file| without_root(file.to_string())).collect::<Vec<_>>().join(" ")
            })
            .map_err(|error| without_root(error.to_string()))
    }

    #[test]
    fn splits_are_told_by_the_names_of_files() {
        for (name, split) in [
            ("train-00000-of-00003.parquet", "train"),
            ("test_sft-00001-of-00002-abcdef0123.parquet", "test_sft"),
            ("train.parquet", "train"),
            ("train_3.parquet", "train"),
            ("validation-0007.parquet", "validation"),
            ("imdb-test.arrow", "imdb-test"),
            ("part-00000.parquet", ""),
            ("trainer.parquet", ""),
            ("0000.parquet", ""),
        ] {
            assert_eq!(split_of(name), split, "{name}");
        }
    }

    #[test]
    fn the_files_of_a_split_are_found_in_order() {
        let hub = [
            "README.md",
            "data/test-00000-of-00001.parquet",
            "data/train-00001-of-00002.parquet",
            "data/train-00000-of-00002.parquet",
        ];
        let train = "./data/train-00000-of-00002.parquet ./data/train-00001-of-00002.parquet";
        assert_eq!(found(&hub, Some("train")), Ok(train.to_owned()));
        assert_eq!(
            found(&["b.parquet", "a.parquet", "notes.txt"], None),
            Ok("./a.parquet ./b.parquet".to_owned())
        );
        let converted = ["train/0001.parquet", "train/0000.parquet", "test/0000.parquet", ".cache/x.parquet"];
        assert_eq!(found(&converted, Some("test")), Ok("./test/0000.parquet".to_owned()));
        assert_eq!(found(&["only/0000.parquet"], None), Ok("./only/0000.parquet".to_owned()));
    }

    #[test]
    fn what_is_not_said_or_not_there_is_named() {
        let shards = ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet", "extra.parquet"];
        for (names, split, cause) in [
            (
                &["a/x.parquet", "b/x.parquet"][..],
                None,
                "has 2 splits: `a`, `b`; name one in the mixture as `split`",
            ),
            (&["a/x.parquet"], Some("train"), "has no split `train`, it has `a`"),
            (&shards, None, "has 2 splits: files of no split, `train`"),
            (&shards, Some("train"), "shard 1 of 3 is missing, 2 are there"),
            (&["x.parquet", "x.arrow"], None, "must hold one kind"),
            (&["x.csv"], None, "holds no dataset"),
            (&["state.json"], None, "`_data_files` lists no file"),
            (&["state.json"], Some("train"), "it is of no split, `train` is asked for"),
            (&["dataset_dict.json"], None, "has no split"),
        ] {
            let error = found(names, split).unwrap_err();
            assert!(error.contains(cause), "{names:?}: {error}");
        }
    }
}
