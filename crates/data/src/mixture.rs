//! The mixture: which files a dataset is made of, and how many samples of each.
//!
//! The form is that of LLaVA-NeXT and LLaVA-OneVision:
//!
//! ```yaml
//! datasets:
//!   - json_path: chat.json            # or .jsonl; relative to the mixture
//!     sampling_strategy: random:10%   # all, first:N, end:N, random:N; N a count or a percentage, rounded up
//!     media_root: images              # optional; relative to the mixture
//! ```
//!
//! A `.json` or `.jsonl` file alone is a mixture of one.

use crate::error::DataError;
use crate::location::Location;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use saphyr::{LoadableYamlNode, MarkedYaml, Scalar, YamlData};
use std::path::Path;

/// The files of a dataset, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// At least one.
    pub sources: Vec<Source>,
}

/// One file of samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// As the mixture writes it.
    pub name: String,
    /// The file, directory or pattern of shards.
    pub location: Location,
    /// Where relative media paths start.
    pub media_root: Location,
    /// Which of its samples are taken.
    pub sampling: Sampling,
}

/// Which samples of a source are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// Every one.
    All,
    /// The first ones.
    First(Amount),
    /// The last ones.
    End(Amount),
    /// Seeded draws without repetition, in the order of the file.
    Random(Amount),
}

/// How many samples of a source are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// So many; all, where the source has fewer.
    Count(u64),
    /// So many of a hundred, rounded up; from 0 to 100.
    Percent(f64),
}

impl Amount {
    /// Samples taken of `total`.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Count(count) => count.min(total),
            Self::Percent(percent) => ((total as f64 * percent / 100.0).ceil() as u64).min(total),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix('%') {
            Some(number) => {
                let percent: f64 = number.trim().parse().ok()?;
                (0.0..=100.0).contains(&percent).then_some(Self::Percent(percent))
            }
            None => text.parse().ok().map(Self::Count),
        }
    }
}

impl Sampling {
    /// The sampling that `text` names, `None` where it names none.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        match text.split_once(':') {
            None => (text == "all").then_some(Self::All),
            Some(("first", amount)) => Amount::parse(amount.trim()).map(Self::First),
            Some(("end", amount)) => Amount::parse(amount.trim()).map(Self::End),
            Some(("random", amount)) => Amount::parse(amount.trim()).map(Self::Random),
            Some(_) => None,
        }
    }

    /// Positions taken of a source with `total` samples, ascending; `stream` keeps the draws of sources apart.
    ///
    /// *Complexity*: O(total).
    pub fn choose(self, total: u64, seed: u64, stream: u64) -> Vec<u64> {
        match self {
            Self::All => (0..total).collect(),
            Self::First(amount) => (0..amount.of(total)).collect(),
            Self::End(amount) => (total - amount.of(total)..total).collect(),
            Self::Random(amount) => {
                let mut random = ChaCha8Rng::seed_from_u64(seed);
                random.set_stream(stream);
                // Selection sampling (Knuth, Algorithm S): one pass, ascending, every subset equally likely.
                let mut wanted = amount.of(total);
                let mut chosen = Vec::with_capacity(wanted as usize);
                for position in 0..total {
                    if random.random_range(0..total - position) < wanted {
                        chosen.push(position);
                        wanted -= 1;
                    }
                }
                chosen
            }
        }
    }

    /// The count it asks for, where that is more than `total`.
    pub fn missing(self, total: u64) -> Option<u64> {
        match self {
            Self::First(Amount::Count(n)) | Self::End(Amount::Count(n)) | Self::Random(Amount::Count(n)) => {
                (n > total).then_some(n)
            }
            _ => None,
        }
    }
}

/// The mixture at `path`; `media_root` stands in where a source names none, else the directory of its file does.
///
/// # Errors
/// [`DataError::Io`], and [`DataError::Mixture`] with every problem of the file.
pub fn read(path: &Path, media_root: Option<&Path>) -> Result<Mixture, DataError> {
    let location = Location::parse(&path.to_string_lossy());
    if matches!(location.extension().as_str(), "json" | "jsonl") {
        let root = media_root.map(|root| Location::parse(&root.to_string_lossy()));
        return Ok(Mixture {
            sources: vec![Source {
                name: location.name(),
                media_root: root.unwrap_or_else(|| location.parent()),
                location,
                sampling: Sampling::All,
            }],
        });
    }
    let text = std::fs::read_to_string(path).map_err(|source| DataError::Io {
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
    let documents =
        MarkedYaml::load_from_str(text).map_err(|error| unsound(vec![format!("it is not YAML: {error}")]))?;
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
    const KNOWN: [&str; 4] = ["json_path", "sampling_strategy", "media_root", "image_folder"];
    let line = entry.span.start.line();
    let YamlData::Mapping(fields) = &entry.data else {
        problems.push((line, format!("{field}: it must be a mapping with `json_path`")));
        return None;
    };
    let (mut name, mut sampling, mut root) = (None, Some(Sampling::All), None);
    for (key, value) in fields {
        let key_name = text_of(key);
        let line = value.span.start.line();
        let Some(key_name) = key_name.filter(|k| KNOWN.contains(k)) else {
            problems.push(unknown(key, &format!("{field}."), key_name, &KNOWN));
            continue;
        };
        let Some(text) = text_of(value) else {
            problems.push((line, format!("{field}.{key_name}: it must be text")));
            continue;
        };
        match key_name {
            "json_path" => name = Some(text),
            "sampling_strategy" => {
                sampling = Sampling::parse(text);
                if sampling.is_none() {
                    let rule =
                        "must be all, first:N, end:N or random:N, N a count or a percentage up to 100%";
                    problems.push((line, format!("{field}.sampling_strategy: `{text}`, {rule}")));
                }
            }
            _ if root.is_some() => {
                problems.push((line, format!("{field}.{key_name}: the root of media is named twice")));
            }
            _ => root = Some(directory.join(text)),
        }
    }
    let Some(name) = name else {
        if !fields.iter().any(|(key, _)| text_of(key) == Some("json_path")) {
            problems.push((line, format!("{field}.json_path: it is missing")));
        }
        return None;
    };
    let location = directory.join(name);
    let root = root.or_else(|| media_root.cloned()).unwrap_or_else(|| location.parent());
    Some(Source { name: name.to_owned(), media_root: root, location, sampling: sampling? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_mixture_is_read_with_its_paths() {
        let text = "datasets:\n- json_path: a.json\n  sampling_strategy: first:10%\n- json_path: sub/b.jsonl\n  \
                    image_folder: /images\n- {json_path: c.json, sampling_strategy: 'end:3'}\n";
        let mixture = parse(Path::new("mix/m.yaml"), text, None).unwrap();
        let seen: Vec<_> = mixture
            .sources
            .iter()
            .map(|s| (s.name.as_str(), s.location.to_string(), s.media_root.to_string(), s.sampling))
            .collect();
        assert_eq!(
            seen,
            [
                ("a.json", "mix/a.json".to_owned(), "mix".to_owned(), Sampling::First(Amount::Percent(10.0))),
                ("sub/b.jsonl", "mix/sub/b.jsonl".to_owned(), "/images".to_owned(), Sampling::All),
                ("c.json", "mix/c.json".to_owned(), "mix".to_owned(), Sampling::End(Amount::Count(3))),
            ]
        );
        let rooted = parse(Path::new("mix/m.yaml"), text, Some(Path::new("/root"))).unwrap();
        assert_eq!(rooted.sources[0].media_root, Location::parse("/root"));
        assert_eq!(rooted.sources[1].media_root, Location::parse("/images"));
    }

    #[test]
    fn every_problem_is_named_with_its_line() {
        let text = "datasets:\n- json_path: a.json\n  sampling_stratgy: all\n- sampling_strategy: some\n- 3\nseed: 1\n";
        let Err(DataError::Mixture { problems, .. }) = parse(Path::new("m.yaml"), text, None) else {
            panic!("a broken mixture was taken");
        };
        insta::assert_snapshot!(problems.join("\n"), @r"
        line 3: datasets[0].sampling_stratgy: unknown key, known are json_path, sampling_strategy, media_root, image_folder
        line 4: datasets[1].sampling_strategy: `some`, must be all, first:N, end:N or random:N, N a count or a percentage up to 100%
        line 4: datasets[1].json_path: it is missing
        line 5: datasets[2]: it must be a mapping with `json_path`
        line 6: seed: unknown key, known are datasets
        ");
    }

    #[test]
    fn a_broken_yaml_says_where() {
        let error = parse(Path::new("m.yaml"), "datasets: [\n  {json_path: a", None).unwrap_err();
        assert!(error.to_string().contains("line"), "{error}");
    }

    proptest! {
        #[test]
        fn draws_are_ascending_and_of_the_size_asked(total in 0u64..400, count in 0u64..500, seed: u64) {
            for sampling in [Sampling::First, Sampling::End, Sampling::Random].map(|s| s(Amount::Count(count))) {
                let chosen = sampling.choose(total, seed, 0);
                prop_assert_eq!(chosen.len() as u64, count.min(total));
                prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(chosen.iter().all(|&position| position < total));
                prop_assert_eq!(&chosen, &sampling.choose(total, seed, 0));
            }
        }
    }

    #[test]
    fn random_draws_differ_by_seed_and_source() {
        let half = Sampling::Random(Amount::Percent(50.0));
        assert_eq!(half.choose(101, 0, 0).len(), 51);
        assert_ne!(half.choose(101, 0, 0), half.choose(101, 1, 0));
        assert_ne!(half.choose(101, 0, 0), half.choose(101, 0, 1));
        assert_eq!(Sampling::First(Amount::Count(9)).missing(8), Some(9));
    }
}
