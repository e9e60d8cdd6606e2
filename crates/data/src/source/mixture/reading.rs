//! A mixture read from its YAML file, with every problem of the file by its line.

use super::{ENDINGS, FIELDS, Format, Mixture, Sampling, Source};
use crate::error::DataError;
use crate::source::location::Location;
use crate::yaml;
use dflop_types::regular;
use saphyr::{MarkedYaml, Scalar, YamlData};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Bytes of a mixture, at most.
const BYTES_MAX: u64 = 256 << 20;

/// The mixture at `path`; `media_root` stands in where a source names none, else the directory of its file does.
///
/// # Errors
/// [`DataError::Io`], and [`DataError::Mixture`] with every problem of the file.
pub fn read(path: &Path, media_root: Option<&Path>) -> Result<Mixture, DataError> {
    let location = Location::parse(&path.to_string_lossy());
    let is_remote = matches!(location, Location::Remote(_));
    let ending = location.extension();
    let is_file_of_records = !["", "yaml", "yml"].contains(&ending.as_str()) && path.is_file();
    if is_remote || ENDINGS.contains(&ending.as_str()) || is_file_of_records || path.is_dir() {
        let root = media_root.map(|root| Location::parse(&root.to_string_lossy()));
        let source = Source::new(location);
        let media_root = root.unwrap_or_else(|| source.media_root.clone());
        return Ok(Mixture { sources: vec![Source { media_root, ..source }] });
    }
    let text = regular::read_to_string(path, BYTES_MAX).map_err(|source| DataError::Io {
        act: "read",
        path: path.to_owned(),
        source,
    })?;
    parse(path, &text, media_root)
}

/// The mixture in `text`; `path` names it in errors, and its directory is where relative paths start.
///
/// # Errors
/// [`DataError::Mixture`] with every problem of the file.
pub fn parse(path: &Path, text: &str, media_root: Option<&Path>) -> Result<Mixture, DataError> {
    let unsound = |problems| DataError::Mixture { path: path.to_owned(), problems };
    let documents = yaml::load::<MarkedYaml<'_>>(text)
        .map_err(|cause| unsound(vec![format!("it is not YAML: {cause}")]))?;
    let directory = Location::parse(&path.to_string_lossy()).parent();
    let root = media_root.map(|root| Location::parse(&root.to_string_lossy()));
    let mut problems = Vec::new();
    let mut sources = Vec::new();
    match documents.first().map(|top| &top.data) {
        Some(YamlData::Mapping(top)) => {
            let mut datasets = None;
            for (key, value) in top {
                match text_of(key) {
                    Some("datasets") => datasets = Some(value),
                    other => problems.push(unknown(key, "", other, &["datasets"])),
                }
            }
            match datasets.map(|node| (&node.data, node.span.start.line())) {
                Some((YamlData::Sequence(entries), line)) => {
                    for (index, entry) in entries.iter().enumerate() {
                        let field = format!("datasets[{index}]");
                        sources.extend(source(&field, entry, &directory, root.as_ref(), &mut problems));
                    }
                    if entries.is_empty() {
                        problems
                            .push((line, "datasets: it is empty, at least one file is needed".to_owned()));
                    }
                }
                Some((_, line)) => problems.push((line, "datasets: it must be a list of files".to_owned())),
                None => problems.push((1, "datasets: it is missing".to_owned())),
            }
        }
        _ => problems.push((1, "it must be a mapping with the key `datasets`".to_owned())),
    }
    if problems.is_empty() {
        return Ok(Mixture { sources });
    }
    problems.sort_by_key(|(line, _)| *line);
    Err(unsound(problems.into_iter().map(|(line, text)| format!("line {line}: {text}")).collect()))
}

fn text_of<'y>(node: &'y MarkedYaml<'_>) -> Option<&'y str> {
    match &node.data {
        YamlData::Value(Scalar::String(text)) => Some(text),
        _ => None,
    }
}

fn unknown(key: &MarkedYaml<'_>, path: &str, name: Option<&str>, known: &[&str]) -> (usize, String) {
    let name = name.unwrap_or("(not text)");
    let text = format!("{path}{name}: unknown key, known are {}", known.join(", "));
    (key.span.start.line(), text)
}

/// One entry of `datasets`; what is wrong goes to `problems`, and reading goes on.
fn source(
    field: &str,
    entry: &MarkedYaml<'_>,
    directory: &Location,
    media_root: Option<&Location>,
    problems: &mut Vec<(usize, String)>,
) -> Option<Source> {
    let line = entry.span.start.line();
    let YamlData::Mapping(fields) = &entry.data else {
        problems.push((line, format!("{field}: it must be a mapping with `path` or `json_path`")));
        return None;
    };
    let mut read = Entry { field, sampling: Some(Sampling::All), ..Entry::default() };
    for (key, value) in fields {
        read.take(key, value, directory, problems);
    }
    let Some(name) = read.name else {
        if !fields.iter().any(|(key, _)| matches!(text_of(key), Some("path" | "json_path"))) {
            problems.push((line, format!("{field}: `path` or `json_path` is missing")));
        }
        return None;
    };
    if let Some(name) = read.columns.values().find(|theirs| read.ignore.contains(*theirs)) {
        problems.push((line, format!("{field}.ignore: `{name}` is named under `columns` too")));
    }
    let location = directory.join(name);
    let root = read.root.or_else(|| media_root.cloned());
    Some(Source {
        name: name.to_owned(),
        media_root: root.unwrap_or_else(|| super::media_root(&location, read.format)),
        location,
        sampling: read.sampling?,
        format: read.format,
        split: read.split,
        columns: read.columns,
        ignore: read.ignore,
    })
}

/// What was read of one entry.
#[derive(Default)]
struct Entry<'y> {
    field: &'y str,
    name: Option<&'y str>,
    sampling: Option<Sampling>,
    root: Option<Location>,
    format: Option<Format>,
    split: Option<String>,
    columns: BTreeMap<String, String>,
    ignore: BTreeSet<String>,
}

impl<'y> Entry<'y> {
    fn take(
        &mut self,
        key: &'y MarkedYaml<'_>,
        value: &'y MarkedYaml<'_>,
        directory: &Location,
        problems: &mut Vec<(usize, String)>,
    ) {
        const KNOWN: [&str; 9] = [
            "path",
            "json_path",
            "sampling_strategy",
            "media_root",
            "image_folder",
            "format",
            "split",
            "columns",
            "ignore",
        ];
        let field = self.field;
        let line = value.span.start.line();
        let Some(key_name) = text_of(key).filter(|k| KNOWN.contains(k)) else {
            problems.push(unknown(key, &format!("{field}."), text_of(key), &KNOWN));
            return;
        };
        if key_name == "columns" {
            self.columns = columns(field, value, problems);
            return;
        }
        if key_name == "ignore" {
            self.ignore = ignore(field, value, problems);
            return;
        }
        let mut problem = |text: String| problems.push((line, format!("{field}.{key_name}: {text}")));
        let Some(text) = text_of(value) else {
            return problem("it must be text".to_owned());
        };
        if text.is_empty() {
            return problem("it is empty".to_owned());
        }
        match key_name {
            "path" | "json_path" if self.name.is_some() => problem("the source is named twice".to_owned()),
            "path" | "json_path" => self.name = Some(text),
            "sampling_strategy" => {
                self.sampling = Sampling::parse(text);
                if self.sampling.is_none() {
                    let rule =
                        "must be all, first:N, end:N or random:N, N a count or a percentage up to 100%";
                    problem(format!("`{text}`, {rule}"));
                }
            }
            "format" => {
                self.format = Format::parse(text);
                if self.format.is_none() {
                    let known = Format::ALL.map(Format::name).join(", ");
                    problem(format!("`{text}`, must be one of {known}"));
                }
            }
            "split" => self.split = Some(text.to_owned()),
            _ if self.root.is_some() => problem("the root of media is named twice".to_owned()),
            _ => self.root = Some(directory.join(text)),
        }
    }
}

/// `columns`: our names of fields, and theirs, each once.
fn columns(
    field: &str,
    node: &MarkedYaml<'_>,
    problems: &mut Vec<(usize, String)>,
) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let YamlData::Mapping(pairs) = &node.data else {
        let rule = "it must be a mapping of our names to theirs, as in {image: img}";
        problems.push((node.span.start.line(), format!("{field}.columns: {rule}")));
        return found;
    };
    for (key, value) in pairs {
        let Some(ours) = text_of(key).filter(|ours| FIELDS.contains(ours)) else {
            problems.push(unknown(key, &format!("{field}.columns."), text_of(key), &FIELDS));
            continue;
        };
        let mut problem =
            |text: &str| problems.push((value.span.start.line(), format!("{field}.columns.{ours}: {text}")));
        match text_of(value).filter(|theirs| !theirs.is_empty()) {
            None => problem("it must be text"),
            Some(theirs) if found.values().any(|other| other == theirs) => {
                problem(&format!("`{theirs}` has another name already"));
            }
            Some(theirs) => {
                found.insert(ours.to_owned(), theirs.to_owned());
            }
        }
    }
    found
}

/// `ignore`: their names of fields.
fn ignore(field: &str, node: &MarkedYaml<'_>, problems: &mut Vec<(usize, String)>) -> BTreeSet<String> {
    let names = match &node.data {
        YamlData::Sequence(names) => names.iter().map(|name| text_of(name).map(str::to_owned)).collect(),
        _ => None,
    };
    names.unwrap_or_else(|| {
        let rule = "it must be a list of names, as in [thumbnail]";
        problems.push((node.span.start.line(), format!("{field}.ignore: {rule}")));
        BTreeSet::new()
    })
}
