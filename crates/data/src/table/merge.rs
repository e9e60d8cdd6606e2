//! Joins the parts of a data profile that several processes made: the result is what one process would have written.

use crate::error::DataError;
use crate::table;
use crate::table::problems::check_bad_samples;
use dflop_types::{DataProfile, DatasetHasher, Problem, ProfiledSample};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::path::{Path, PathBuf};

/// Missing parts that are named; the others are counted.
const SHOWN: usize = 20;

/// The setting that says how many percent of the samples may be bad where they are left out or replaced.
pub(crate) const BAD_SAMPLES_MAX: &str = "bad_samples_max_percent";
/// What it is where the user set no percentage.
pub(crate) const BAD_SAMPLES_DEFAULT: &str = "default";

/// What a merge came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The profile without its samples.
    pub header: DataProfile,
    /// Rows written.
    pub num_rows: u64,
    /// Samples looked at, bad ones included.
    pub num_samples: u64,
    /// Hash of the content.
    pub content_hash: String,
}

/// Merges the parts, in any order, into the profile at `out`; what is done about bad samples is decided here.
///
/// The parts must be of one dataset, measured by one rule, each there exactly once. Under `substitute`, the nearest good
/// sample before a bad one in its source takes its turn, else the first after it; a source without a good one is left
/// out. *Complexity*: O(rows x log parts) time; memory for the problems and one batch of rows a part.
///
/// # Errors
/// Those of [`table::read`]; [`DataError::Record`] where the parts do not belong together; [`DataError::Samples`] with
/// every bad sample under `fail`; [`DataError::TooManyBad`] under the other policies; [`DataError::NoSamples`] where none is good. The old file then stands.
pub fn merge(parts: &[PathBuf], out: &Path) -> Result<Merged, DataError> {
    let headers: Vec<(DataProfile, u64)> =
        parts.iter().map(|path| table::header(path)).collect::<Result<_, _>>()?;
    check(parts, &headers)?;
    let policy = headers[0].0.settings.get("on_bad_sample").map_or("fail", String::as_str);
    let num_samples = headers.iter().map(|(header, rows)| rows + header.problems.len() as u64).sum();
    let problems = ordered_problems(&headers)?;
    if policy == "fail" && !problems.is_empty() {
        let problems = problems.into_iter().map(|(_, problem)| problem).collect();
        return Err(DataError::Samples { problems, num_samples, files: headers[0].0.files.clone() });
    }
    let percent_max = match headers[0].0.settings.get(BAD_SAMPLES_MAX).map(String::as_str) {
        Some(BAD_SAMPLES_DEFAULT) => Some(None),
        Some(percent) => percent.parse().ok().map(Some),
        // Parts of a version that had no such limit.
        None => None,
    };
    if let Some(percent_max) = percent_max {
        let all: Vec<_> = problems.iter().map(|(_, problem)| problem.clone()).collect();
        check_bad_samples(&all, num_samples, percent_max, &headers[0].0.files)?;
    }
    let mut output = Output {
        writer: table::Writer::create(out)?,
        dataset: DatasetHasher::default(),
        num_rows: 0,
        ahead: if policy == "substitute" {
            problems.iter().map(|(key, _)| *key).enumerate().collect()
        } else {
            VecDeque::new()
        },
        waiting: Vec::new(),
        neighbour: None,
        problems: problems.into_iter().map(|(_, problem)| problem).collect(),
    };
    Rows::open(parts)?.try_for_each(|row| output.take(row?))?;
    output.decide_before((u32::MAX, u64::MAX))?;
    let Output { writer, dataset, num_rows, problems, .. } = output;
    if num_rows == 0 {
        return Err(DataError::NoSamples {
            path: parts[0].clone(),
            problems,
            files: headers[0].0.files.clone(),
        });
    }
    let mut header = DataProfile { problems, part: None, ..headers[0].0.clone() };
    header.made_from.insert("dataset".to_owned(), dataset.finish());
    let content_hash = writer.finish(&header)?;
    Ok(Merged { header, num_rows, num_samples, content_hash })
}

/// Where a sample stands in the order of the mixture: source, position.
type Key = (u32, u64);

/// `Ok` if the parts are all those of one profile.
fn check(parts: &[PathBuf], headers: &[(DataProfile, u64)]) -> Result<(), DataError> {
    let wrong = |cause: String| Err(DataError::Record(cause));
    let Some((first, _)) = headers.first() else { return wrong("0 parts, at least 1 is needed".to_owned()) };
    let mut seen: Vec<(u32, &PathBuf)> = Vec::new();
    for (path, (header, _)) in parts.iter().zip(headers) {
        let (name, other) = (path.display(), parts[0].display());
        let Some(part) = header.part else {
            return wrong(format!("`{name}` is the profile of a whole dataset, must be a part"));
        };
        let num_parts = first.part.map_or(part.num_parts, |part| part.num_parts);
        if part.num_parts != num_parts {
            return wrong(format!("`{name}` is a part of {}, `{other}` of {num_parts}", part.num_parts));
        }
        if let Some((_, twin)) = seen.iter().find(|(index, _)| *index == part.index) {
            return wrong(format!("`{name}` and `{}` are both part {}", twin.display(), part.index));
        }
        seen.push((part.index, path));
        if let Some(what) = difference(first, header) {
            return wrong(format!("`{name}` and `{other}` are no parts of one profile: {what}"));
        }
    }
    let num_parts = first.part.map_or(1, |part| part.num_parts);
    let num_missing = num_parts as usize - seen.len();
    if num_missing > 0 {
        let is_there: std::collections::BTreeSet<u32> = seen.iter().map(|(index, _)| *index).collect();
        let missing = (0..num_parts).filter(|index| !is_there.contains(index)).take(SHOWN);
        let mut list = missing.map(|index| index.to_string()).collect::<Vec<_>>().join(", ");
        if num_missing > SHOWN {
            list = format!("{list} and {} more", num_missing - SHOWN);
        }
        return wrong(format!("{} of {num_parts} parts are given, missing: {list}", seen.len()));
    }
    Ok(())
}

/// What two parts must have in common and do not, in words.
fn difference(a: &DataProfile, b: &DataProfile) -> Option<String> {
    let say = |name: &str, a: Option<&String>, b: Option<&String>| {
        let text = |value: Option<&String>| value.map_or_else(|| "none".to_owned(), |v| format!("`{v}`"));
        (a != b).then(|| format!("`{name}` is {}, of the other {}", text(b), text(a)))
    };
    for name in ["tokenizer", "processor"] {
        if let Some(text) = say(name, a.made_from.get(name), b.made_from.get(name)) {
            return Some(text);
        }
    }
    if let Some(text) = say("family", Some(&a.family), Some(&b.family)) {
        return Some(text);
    }
    for name in a.settings.keys().chain(b.settings.keys()) {
        if let Some(text) = say(name, a.settings.get(name), b.settings.get(name)) {
            return Some(text);
        }
    }
    let sources = [&a.sources, &b.sources].map(|sources| sources.join(", "));
    if a.sources != b.sources {
        return say("sources", Some(&sources[0]), Some(&sources[1])).or(Some("sources".to_owned()));
    }
    if a.strata != b.strata {
        return Some("their samples are drawn differently".to_owned());
    }
    // Copies of a file differ in their times of change. Their contents must be the same.
    let facts = |file: Option<&dflop_types::SourceFile>| {
        file.map_or_else(|| "none".to_owned(), |f| format!("{} of {} bytes", f.path, f.bytes))
    };
    (0..a.files.len().max(b.files.len())).find_map(|index| {
        let [a, b] = [&a.files, &b.files].map(|files| facts(files.get(index)));
        say(&format!("file {index}"), Some(&a), Some(&b))
    })
}

/// The problems of all parts in the order of the mixture; those of a source as a whole come first in it.
pub(crate) fn ordered_problems(headers: &[(DataProfile, u64)]) -> Result<Vec<(Key, Problem)>, DataError> {
    let mut problems = Vec::new();
    for (header, _) in headers {
        for problem in &header.problems {
            let file = problem.place.and_then(|place| header.files.get(place.file as usize));
            let source = file.map(|file| file.source as usize);
            let source = source.or_else(|| header.sources.iter().position(|name| *name == problem.file));
            let source = source.ok_or_else(|| {
                let name = &problem.file;
                DataError::Record(format!("a problem is of source `{name}`, the profile has no such source"))
            })?;
            problems.push(((source as u32, problem.position.unwrap_or(0)), problem.clone()));
        }
    }
    // Stable: what stands in one place keeps the order of the parts.
    problems.sort_by_key(|(key, problem)| (key.0, problem.position));
    Ok(problems)
}

/// The rows of all parts in the order of the mixture.
struct Rows {
    parts: Vec<(PathBuf, PartRows)>,
    /// The next row of each part, the first in the order on top.
    next: BinaryHeap<Reverse<(Key, usize)>>,
    /// Those rows, by part.
    heads: Vec<Option<ProfiledSample>>,
    /// The last row handed out, and its part.
    last: Option<(Key, usize)>,
}

type PartRows = Box<dyn Iterator<Item = Result<ProfiledSample, DataError>> + Send>;

impl Rows {
    fn open(paths: &[PathBuf]) -> Result<Self, DataError> {
        let parts: Vec<_> = paths
            .iter()
            .map(|path| Ok((path.clone(), table::rows(path)?)))
            .collect::<Result<_, DataError>>()?;
        let heads = parts.iter().map(|_| None).collect();
        let mut opened = Self { parts, next: BinaryHeap::new(), heads, last: None };
        (0..paths.len()).try_for_each(|part| opened.advance(part))?;
        Ok(opened)
    }

    /// Reads the next row of a part.
    fn advance(&mut self, part: usize) -> Result<(), DataError> {
        let Some(row) = self.parts[part].1.next().transpose()? else { return Ok(()) };
        self.next.push(Reverse(((row.source, row.position), part)));
        self.heads[part] = Some(row);
        Ok(())
    }

    fn step(&mut self) -> Result<Option<ProfiledSample>, DataError> {
        let Some(Reverse((key, part))) = self.next.pop() else { return Ok(None) };
        if let Some((last, other)) = self.last.filter(|(last, _)| *last >= key) {
            let name = self.parts[part].0.display();
            let place = format!("position {} of source {}", key.1, key.0);
            return Err(DataError::Record(if last == key {
                format!(
                    "`{name}` and `{}` both hold {place}, must be in one part",
                    self.parts[other].0.display()
                )
            } else {
                format!("`{name}` has {place} after a later one, must be in order")
            }));
        }
        self.last = Some((key, part));
        let row = self.heads[part].take();
        self.advance(part)?;
        Ok(row)
    }
}

impl Iterator for Rows {
    type Item = Result<ProfiledSample, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step().transpose()
    }
}

/// Takes good rows in order and writes them, with a row in the place of each bad one where that is the policy.
struct Output {
    writer: table::Writer,
    dataset: DatasetHasher,
    num_rows: u64,
    problems: Vec<Problem>,
    /// Problems to be decided, as positions in `problems`; none where the policy leaves them out.
    ahead: VecDeque<(usize, Key)>,
    /// Problems that wait for the first good sample of their source.
    waiting: Vec<usize>,
    /// The last good sample.
    neighbour: Option<ProfiledSample>,
}

impl Output {
    fn take(&mut self, sample: ProfiledSample) -> Result<(), DataError> {
        self.decide_before((sample.source, sample.position))?;
        for index in std::mem::take(&mut self.waiting) {
            self.substitute(index, &sample)?;
        }
        self.row(&sample)?;
        self.neighbour = Some(sample);
        Ok(())
    }

    /// Decides the problems that stand before `key`; `waiting` then holds those of its source.
    fn decide_before(&mut self, key: Key) -> Result<(), DataError> {
        while let Some((index, at)) = self.ahead.front().copied().filter(|(_, at)| *at <= key) {
            self.ahead.pop_front();
            match self.neighbour.take_if(|neighbour| neighbour.source == at.0) {
                Some(neighbour) => {
                    self.substitute(index, &neighbour)?;
                    self.neighbour = Some(neighbour);
                }
                None if at.0 == key.0 => self.waiting.push(index),
                // Its source has no good sample: it is left out, and its problem says so.
                None => {}
            }
        }
        Ok(())
    }

    fn substitute(&mut self, problem: usize, sample: &ProfiledSample) -> Result<(), DataError> {
        let Some(position) = self.problems[problem].position else { return Ok(()) };
        self.problems[problem].substitute = Some(sample.id.clone());
        self.row(&ProfiledSample { position, ..sample.clone() })
    }

    fn row(&mut self, sample: &ProfiledSample) -> Result<(), DataError> {
        self.num_rows += 1;
        self.dataset.push(sample);
        self.writer.push(sample)
    }
}
