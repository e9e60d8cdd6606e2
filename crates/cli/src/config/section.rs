//! The fields of one mapping of `dflop.yaml`, each with its rule.

use super::error::ConfigProblem;
use saphyr::{MarkedYaml, Scalar, YamlData};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use strsim::levenshtein;

/// What people write where a field has another name.
pub(super) const OTHER_WORDS: [(&[&str], &str); 6] = [
    (&["path", "file", "files", "jsonl", "json", "dataset", "source", "sources", "data"], "mixture"),
    (&["path", "model", "name_or_path", "pretrained_model_name_or_path"], "dir"),
    (&["lr"], "learning_rate"),
    (&["batch_size", "train_batch_size"], "global_batch_size"),
    (&["max_steps", "num_steps"], "steps"),
    (&["world_size", "num_gpus", "gpus"], "num_ranks"),
];

/// Integers up to this, 2^53, are told apart by a 64-bit floating-point number.
const INTEGERS_MAX: f64 = 9_007_199_254_740_992.0;

/// One mapping of the file, read key by key. What is wrong is added to `problems`, and reading goes on.
pub(super) struct Section<'p, 'y> {
    name: &'static str,
    line: usize,
    /// The whole file: numbers are shown as they were written.
    text: &'y str,
    entries: Vec<(String, &'y MarkedYaml<'y>, usize)>,
    known: Vec<&'static str>,
    /// Whether it has keys, or could have them: it is a mapping, empty, or not there.
    is_mapping: bool,
    pub(super) problems: &'p mut Vec<ConfigProblem>,
}

impl<'p, 'y> Section<'p, 'y> {
    pub(super) fn new(
        name: &'static str,
        text: &'y str,
        node: Option<&'y MarkedYaml<'y>>,
        problems: &'p mut Vec<ConfigProblem>,
    ) -> Self {
        let mut section = Self {
            name,
            line: node.map_or(0, |n| n.span.start.line()),
            text,
            entries: vec![],
            known: vec![],
            is_mapping: true,
            problems,
        };
        match node.map(|n| &n.data) {
            Some(YamlData::Mapping(mapping)) => {
                for (key, value) in mapping {
                    let line = key.span.start.line();
                    match &key.data {
                        YamlData::Value(Scalar::String(text)) => {
                            section.entries.push((text.to_string(), value, line));
                        }
                        _ => section.problem(line, "", "a key is not text".to_owned()),
                    }
                }
            }
            None | Some(YamlData::Value(Scalar::Null)) => {}
            Some(_) => {
                section.is_mapping = false;
                section.problem(
                    section.line,
                    "",
                    "must be a mapping of fields, as `{field: value}`".to_owned(),
                );
            }
        }
        section
    }

    fn problem(&mut self, line: usize, key: &str, message: String) {
        let field = match (self.name, key) {
            ("", "") => "file".to_owned(),
            ("", key) => key.to_owned(),
            (name, "") => name.to_owned(),
            (name, key) => format!("{name}.{key}"),
        };
        self.problems.push(ConfigProblem { line, field, message, is_missing: false });
    }

    /// A problem of a key that the file has, beyond its own rule.
    pub(super) fn problem_at(&mut self, key: &'static str, message: String) {
        let line = self.scalar(key).map_or(self.line, |(_, line)| line);
        self.problem(line, key, message);
    }

    pub(super) fn child(&mut self, key: &'static str) -> Option<&'y MarkedYaml<'y>> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        self.entries.iter().find(|(name, ..)| name == key).map(|(_, node, _)| *node)
    }

    fn scalar(&mut self, key: &'static str) -> Option<(&'y MarkedYaml<'y>, usize)> {
        self.child(key).and_then(|node| match &node.data {
            YamlData::Value(Scalar::Null) => None,
            _ => Some((node, node.span.start.line())),
        })
    }

    fn missing(&mut self, key: &'static str) {
        // Where the section is something else, that is the problem.
        if !self.is_mapping {
            return;
        }
        let line = self.line;
        self.problem(line, key, "is missing".to_owned());
        if let Some(problem) = self.problems.last_mut() {
            problem.is_missing = true;
        }
    }

    pub(super) fn text(&mut self, key: &'static str, default: Option<&str>) -> String {
        match (self.optional_text(key), default) {
            (Some(text), _) => text,
            (None, Some(default)) => default.to_owned(),
            (None, None) => {
                if self.scalar(key).is_none() {
                    self.missing(key);
                }
                String::new()
            }
        }
    }

    pub(super) fn optional_text(&mut self, key: &'static str) -> Option<String> {
        let (node, line) = self.scalar(key)?;
        match &node.data {
            YamlData::Value(Scalar::String(text)) if !text.is_empty() => Some(text.to_string()),
            _ => {
                self.problem(line, key, format!("{}, must be text", self.shown(node)));
                None
            }
        }
    }

    /// A value as the file has it; a list or a mapping by its name.
    fn shown(&self, node: &MarkedYaml<'_>) -> String {
        match &node.data {
            YamlData::Value(Scalar::String(text)) => format!("`{text}`"),
            YamlData::Value(Scalar::Integer(_) | Scalar::FloatingPoint(_) | Scalar::Boolean(_)) => {
                let (start, end) = (node.span.start.index(), node.span.end.index());
                let written: String = self.text.chars().skip(start).take(end - start).collect();
                written.trim().to_owned()
            }
            YamlData::Sequence(_) => "a list".to_owned(),
            YamlData::Mapping(_) => "a mapping".to_owned(),
            _ => "this value".to_owned(),
        }
    }

    /// The name of a function of Python, for example `package.module:function`, or `word`.
    pub(super) fn function(&mut self, key: &'static str, word: &str) -> Option<String> {
        let text = self.optional_text(key)?;
        if text == word {
            return Some(text);
        }
        let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c == '_' || c.is_alphanumeric());
        let is_path = |path: &str| path.split('.').all(is_name);
        if text.split_once(':').is_some_and(|(module, function)| is_path(module) && is_path(function)) {
            return Some(text);
        }
        let line = self.scalar(key).map_or(0, |(_, line)| line);
        self.problem(
            line,
            key,
            format!("`{text}`, must be `{word}` or name a function of Python, for example `module:function`"),
        );
        None
    }

    pub(super) fn choice(&mut self, key: &'static str, choices: &[&str], default: &str) -> String {
        let Some(text) = self.optional_text(key) else { return default.to_owned() };
        if !choices.contains(&text.as_str()) {
            let line = self.scalar(key).map_or(0, |(_, line)| line);
            self.problem(line, key, format!("`{text}`, must be one of: {}", choices.join(", ")));
        }
        text
    }

    /// A text that its type parses; the type's error says the rule.
    pub(super) fn parsed<T: FromStr<Err: Display>>(&mut self, key: &'static str, default: T) -> T {
        let Some(text) = self.optional_text(key) else { return default };
        text.parse().unwrap_or_else(|error: T::Err| {
            let line = self.scalar(key).map_or(0, |(_, line)| line);
            self.problem(line, key, error.to_string());
            default
        })
    }

    pub(super) fn optional_count(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let (node, line) = self.scalar(key)?;
        let value = match &node.data {
            YamlData::Value(Scalar::Integer(value)) => u64::try_from(*value).ok(),
            // People write 8e9 bytes. Up to this a number with a point or an exponent is the integer it says.
            YamlData::Value(Scalar::FloatingPoint(value)) => {
                let value = value.into_inner();
                let is_whole = value.fract() == 0.0 && (0.0..=INTEGERS_MAX).contains(&value);
                is_whole.then_some(value as u64)
            }
            _ => None,
        };
        if let Some(value) = value.filter(|value| range.contains(value)) {
            return Some(value);
        }
        let is_quoted =
            matches!(&node.data, YamlData::Value(Scalar::String(text)) if text.parse::<u64>().is_ok());
        let quotes = if is_quoted { ", without quotes" } else { "" };
        self.problem(
            line,
            key,
            format!(
                "{}, must be an integer from {} to {}{quotes}",
                self.shown(node),
                range.start(),
                range.end()
            ),
        );
        None
    }

    pub(super) fn count(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        default: Option<u64>,
    ) -> u64 {
        let smallest = *range.start();
        match (self.optional_count(key, range), default) {
            (Some(value), _) => value,
            (None, Some(default)) => default,
            (None, None) => {
                if self.scalar(key).is_none() {
                    self.missing(key);
                }
                smallest
            }
        }
    }

    pub(super) fn optional_number(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let (node, line) = self.scalar(key)?;
        let value = match &node.data {
            YamlData::Value(Scalar::FloatingPoint(value)) => Some(value.into_inner()),
            YamlData::Value(Scalar::Integer(value)) => Some(*value as f64),
            // YAML 1.2 reads 1e-4 as a number, YAML 1.1 (PyYAML) as text: people write both.
            YamlData::Value(Scalar::String(text)) => text.parse().ok(),
            _ => None,
        };
        let written = self.shown(node);
        let digits = written.split(['e', 'E']).next().unwrap_or_default();
        match value {
            // `1e-400`, which no number of the machine holds.
            Some(0.0) if digits.contains(|digit| matches!(digit, '1'..='9')) => {
                self.problem(
                    line,
                    key,
                    format!("{written}, is too small for a number: it would be read as 0"),
                );
                None
            }
            Some(value) if range.contains(&value) => Some(value),
            _ => {
                let rule = if *range.start() > 0.0 {
                    format!("above 0, at most {}", range.end())
                } else {
                    format!("from {} to {}", range.start(), range.end())
                };
                self.problem(line, key, format!("{written}, must be a number {rule}"));
                None
            }
        }
    }

    pub(super) fn number(&mut self, key: &'static str, range: RangeInclusive<f64>, default: f64) -> f64 {
        self.optional_number(key, range).unwrap_or(default)
    }

    pub(super) fn finish(mut self) {
        for (name, _, line) in self.entries.clone() {
            if !self.known.contains(&name.as_str()) {
                let meant = OTHER_WORDS
                    .iter()
                    .find(|(words, known)| words.contains(&name.as_str()) && self.known.contains(known))
                    .map(|(_, known)| *known);
                let is_near = |known: &str| levenshtein(known, &name) <= 1 + name.len() / 4;
                let nearest = self.known.iter().min_by_key(|known| levenshtein(known, &name)).copied();
                let message = match meant.or(nearest.filter(|known| is_near(known))) {
                    Some("mixture") => {
                        "unknown key, did you mean `mixture`? It takes a file, a directory, shards or a URL too"
                            .to_owned()
                    }
                    Some(known) => format!("unknown key, did you mean `{known}`?"),
                    None => format!("unknown key, known are: {}", self.known.join(", ")),
                };
                self.problem(line, &name, message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;
    use crate::config::tests::GOOD;
    use std::path::Path;

    #[test]
    fn a_number_that_would_be_read_as_0_is_refused() {
        let rate = |written: &str| {
            parse(Path::new("dflop.yaml"), &GOOD.replace("1e-3", written))
                .map(|config| config.train.learning_rate)
                .map_err(|error| error.to_string())
        };
        for written in ["1e-400", "0.02e-400", "1.0E-400", "\"1e-400\""] {
            let expected = format!("learning_rate: {}, is too small for a number", written.replace('"', "`"));
            assert!(rate(written).is_err_and(|text| text.contains(&expected)), "{:?}", rate(written));
        }
        for written in ["0", "0.0", "0e-400", "0.000", "-0.0"] {
            assert_eq!(rate(written), Ok(0.0), "{written}");
        }
        assert_eq!(rate("1e-300"), Ok(1e-300));
        assert!(rate("1e400").is_err_and(|text| text.contains("1e400, must be a number from 0 to 1000")));
    }
}
