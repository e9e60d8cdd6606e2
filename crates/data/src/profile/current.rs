//! Whether a data profile is of the configuration and the data that are there now. Planning and training both ask here.

use super::ProfileSettings;
use crate::error::DataError;
use crate::family::Family;
use crate::source::location::Location;
use crate::source::mixture::{self, Mixture, Source};
use crate::source::readers;
use crate::source::store::Stores;
use dflop_types::artifact::hash_parts;
use dflop_types::{DataProfile, MadeFrom, counted};
use serde_json::json;
use std::path::Path;

/// What decides shapes beside the settings: the model's files, and the rule that reads them.
pub(super) struct Basis<'a> {
    pub(super) hashes: MadeFrom,
    /// Of the chat template in place of the model's.
    pub(super) template_hash: Option<String>,
    pub(super) family: &'a str,
}

/// `Ok` if `profile` was made with `settings`, the model's files and the data that are there now; what could not be compared,
/// in one sentence, where there is something.
///
/// `family` is the function that gives shapes, as `model.family` names it: its name is compared, as only Python knows its
/// version. Local files of the sources are compared by name and size. No remote store is asked: of its sources the names are
/// compared, as of those that are not on this machine.
///
/// # Errors
/// [`DataError::Stale`] with what differs; and the errors of reading the model's files and the mixture.
pub fn check_current(
    settings: &ProfileSettings,
    family: Option<&str>,
    profile: &DataProfile,
) -> Result<Option<String>, DataError> {
    let files = settings.model_files()?;
    let own = if family.is_none() { Some(files.family()?) } else { None };
    let name = family.or_else(|| own.as_deref().map(Family::name)).unwrap_or_default();
    let basis = Basis { hashes: files.hashes(), template_hash: files.own_template_hash(), family: name };
    check_settings(settings, &basis, profile)?;
    check_data(settings, profile)
}

/// `Ok` if `profile` was made with these settings and files of the model.
pub(super) fn check_settings(
    settings: &ProfileSettings,
    basis: &Basis<'_>,
    profile: &DataProfile,
) -> Result<(), DataError> {
    for name in ["tokenizer", "processor"] {
        same(name, profile.made_from.get(name), basis.hashes[name].clone())?;
    }
    same("family", Some(&profile.family), basis.family.to_owned())?;
    let template = profile.made_from.get("chat_template");
    if template.is_some() || basis.template_hash.is_some() {
        let now = basis.template_hash.clone().unwrap_or_else(|| "that of the model".to_owned());
        same("chat_template", template, now)?;
    }
    settings.facts().into_iter().try_for_each(|(name, now)| same(name, profile.settings.get(name), now))
}

/// The setting of a data profile that says what its mixture took of the sources.
pub(super) const MIXTURE: &str = "mixture";

/// Hash of what a mixture takes of its sources and how it reads them. Their files are compared by themselves.
pub(super) fn mixture_hash(mixture: &Mixture) -> String {
    // As JSON: how Rust prints a value for debugging may change with the compiler.
    let of = |source: &Source| {
        let Source { sampling, format, split, columns, ignore, .. } = source;
        json!([sampling, format, split, columns, ignore]).to_string()
    };
    let sources: Vec<String> = mixture.sources.iter().map(of).collect();
    hash_parts(sources.iter().map(String::as_bytes))
}

/// `Ok` if `profile` was made from so many sources, and takes of them what the mixture takes now.
pub(super) fn check_mixture(mixture: &Mixture, profile: &DataProfile) -> Result<(), DataError> {
    let words = |count: usize| counted(count as u64, "source");
    same("dataset", Some(&words(profile.sources.len())), words(mixture.sources.len()))?;
    match profile.settings.get(MIXTURE) {
        Some(then) => same(MIXTURE, Some(then), mixture_hash(mixture)),
        // A profile of an earlier version does not say it.
        None => Ok(()),
    }
}

/// `Ok` if the source at `index` of `profile` was made from these files, as far as names, and sizes of local ones, tell.
pub(super) fn check_files(
    index: usize,
    files: &[Location],
    stores: &Stores,
    profile: &DataProfile,
) -> Result<(), DataError> {
    let before: Vec<_> = profile.files.iter().filter(|file| file.source as usize == index).collect();
    let words = |files: usize| counted(files as u64, "file");
    same("dataset", Some(&words(before.len())), words(files.len()))?;
    for (then, now) in before.into_iter().zip(files) {
        // Only a file of this machine is looked at: a look at each remote one costs a request.
        if matches!(now, Location::Local(_)) {
            let (bytes, _) = stores.about(now)?;
            // Compared by file name alone: a dataset may have moved, or be named from another directory.
            let facts = |location: &Location, bytes| format!("`{}` of {bytes} bytes", location.name());
            let then = facts(&Location::parse(&then.path), then.bytes);
            same("dataset", Some(&then), facts(now, bytes))?;
        }
    }
    Ok(())
}

/// `Ok` if `profile` was made from the data of `settings`, as far as they are on this machine; and what was not compared.
fn check_data(settings: &ProfileSettings, profile: &DataProfile) -> Result<Option<String>, DataError> {
    let mixture = match mixture::read(&settings.mixture, settings.media_root.as_deref()) {
        Err(DataError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            let path = settings.mixture.display();
            return Ok(Some(format!(
                "the data profile was not compared with its data: `{path}` is not on this machine"
            )));
        }
        mixture => mixture?,
    };
    check_mixture(&mixture, profile)?;
    let stores = Stores::new(settings.store_options.iter().cloned());
    let mut absent = Vec::new();
    for (index, source) in mixture.sources.iter().enumerate() {
        if !is_here(source) {
            let last = |name: &str| format!("`{}`", Location::parse(name).name());
            same("dataset", profile.sources.get(index).map(|name| last(name)).as_ref(), last(&source.name))?;
            absent.push(source);
            continue;
        }
        check_files(index, readers::open(source, &stores)?.files(), &stores, profile)?;
    }
    let first = absent.first().map(|source| &source.location);
    Ok(first.map(|first| {
        let of = counted(mixture.sources.len() as u64, "source");
        format!(
            "the data profile was not compared with the files of {} of {of}, as they are not on this machine: `{first}` is the first",
            absent.len()
        )
    }))
}

/// Whether the source is on this machine; a brace pattern is looked for by the directory that it begins with.
fn is_here(source: &Source) -> bool {
    let Location::Local(path) = &source.location else { return false };
    let is_pattern = |path: &Path| path.to_string_lossy().contains('{');
    let directory = path.ancestors().find(|part| !is_pattern(part));
    path.exists()
        || is_pattern(path) && directory.is_some_and(|part| part.as_os_str().is_empty() || part.exists())
}

/// `Ok` if what the profile has of `name` is what there is now.
fn same(name: &'static str, found: Option<&String>, expected: String) -> Result<(), DataError> {
    if found == Some(&expected) {
        return Ok(());
    }
    let found = found.cloned().unwrap_or_else(|| "nothing".to_owned());
    Err(DataError::Stale { name, found, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text that is hashed is written here: a profile stays current whatever the compiler.
    #[test]
    fn the_hash_of_a_mixture_is_of_this_text() {
        let text = "datasets:\n- {path: a, sampling_strategy: 'first:10%', format: jsonl, split: train, columns: {id: key}, \
                    ignore: [url]}\n- path: b.json\n";
        let mixture = mixture::parse(Path::new("m.yaml"), text, None).unwrap();
        let hashed = [
            r#"[{"First":{"Percent":10.0}},"Jsonl","train",{"id":"key"},["url"]]"#,
            r#"["All",null,null,{},[]]"#,
        ];
        assert_eq!(mixture_hash(&mixture), hash_parts(hashed.iter().map(|text| text.as_bytes())));
    }
}
