//! Runs of text-only GPT models that somebody measured, or thinks of: a table in, the same table with predictions out.
//!
//! `columns` says what may stand in a row, `predict` what comes of it.

mod columns;
mod predict;

use crate::Failure;
use columns::{COLUMNS, Row};
use dflop_types::counted;
pub(crate) use predict::{Predicted, Predictor};
use std::fmt::Write as _;
use std::path::Path;
use strsim::levenshtein;

/// What is filled in; where the table has such a column, it is replaced.
const FILLED: [&str; 3] = ["predicted_ms", "predicted_peak_bytes", "predicted_basis"];
/// Columns that a table may have beside those that are read: what was measured, and names.
const CARRIED: [&str; 11] = [
    "case",
    "iteration_ms",
    "step_ms_median",
    "step_ms_min",
    "step_ms_max",
    "step_times_used",
    "peak_allocated_bytes",
    "peak_allocated_bytes_first_step",
    "resident_allocated_bytes",
    "memory_rank",
    "nccl_algorithm",
];
/// Problems that are shown, at most.
const SHOWN_MAX: usize = 12;

/// A table of runs.
pub(crate) struct Runs {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    /// What each row asks.
    pub(crate) asked: Vec<Row>,
    /// Columns that are neither read nor known.
    pub(crate) unread: Vec<String>,
}

impl Runs {
    /// The table in `text`, of the file at `path`; `device` is that of rows which name none.
    ///
    /// # Errors
    /// Every column that is missing or may be misspelt; else every cell that cannot be, with its row and column.
    pub(crate) fn read(path: &Path, text: &str, device: Option<&str>) -> Result<Self, Failure> {
        let file = path.display();
        let broken =
            |error: csv::Error| Failure::new(format!("`{file}` is not a table of runs: {error}"), None);
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
        let header: Vec<String> = reader.headers().map_err(broken)?.iter().map(str::to_owned).collect();
        let unread = check_header(path, &header, device)?;
        let (mut rows, mut asked, mut problems) = (Vec::new(), Vec::new(), Vec::new());
        for record in reader.records() {
            let record = record.map_err(broken)?;
            let line = record.position().map_or(0, csv::Position::line);
            let row: Vec<String> = record.iter().map(str::to_owned).collect();
            match Row::read(&header, &row, device) {
                Ok(one) => asked.push(one),
                Err(faults) => {
                    problems.extend(faults.into_iter().map(|fault| format!("row {line}, {fault}")));
                }
            }
            rows.push(row);
        }
        if !problems.is_empty() {
            return Err(Failure::new(listed(path, &problems), None));
        }
        if rows.is_empty() {
            return Err(Failure::new(format!("`{file}` has no rows, at least 1 is needed"), None));
        }
        Ok(Self { header, rows, asked, unread })
    }

    /// The table with what was predicted, blank where nothing could be.
    pub(crate) fn with(&self, predictions: &[Option<Predicted>]) -> Result<String, Failure> {
        let kept: Vec<usize> =
            (0..self.header.len()).filter(|&at| !FILLED.contains(&self.header[at].as_str())).collect();
        let mut writer = csv::Writer::from_writer(Vec::new());
        let write = |writer: &mut csv::Writer<Vec<u8>>, of: &[String], filled: [String; 3]| {
            let old = kept.iter().map(|&at| of[at].clone());
            writer.write_record(old.chain(filled))
        };
        let written = write(&mut writer, &self.header, FILLED.map(str::to_owned)).and_then(|()| {
            self.rows.iter().zip(predictions).try_for_each(|(row, predicted)| {
                let filled = predicted.as_ref().map_or_else(Default::default, |predicted| {
                    let ms = format!("{:.3}", predicted.step_ns as f64 / 1e6);
                    [ms, predicted.peak_bytes.to_string(), "estimated".to_owned()]
                });
                write(&mut writer, row, filled)
            })
        });
        written.map_err(|error| Failure::new(format!("cannot write the table: {error}"), None))?;
        let bytes = writer.into_inner().map_err(|error| Failure::new(error.to_string(), None))?;
        String::from_utf8(bytes).map_err(|error| Failure::new(error.to_string(), None))
    }

    /// The column of this name, which holds what was measured; `None` where the table has none.
    pub(crate) fn measured(&self, name: &str) -> Option<Measured> {
        let at = self.header.iter().position(|column| column == name)?;
        let number = |text: &str| text.parse::<f64>().ok().filter(|one| one.is_finite() && *one > 0.0);
        let cells = || self.rows.iter().map(|row| row[at].as_str());
        Some(Measured {
            name: self.header[at].clone(),
            numbers: cells().map(number).collect(),
            num_unread: cells().filter(|text| !text.is_empty() && number(text).is_none()).count() as u64,
        })
    }

    /// Whether a file of this text is a table that [`Runs::with`] wrote, or one that is empty.
    pub(crate) fn is_written(text: &str) -> bool {
        let header = text.lines().next().unwrap_or_default();
        text.is_empty() || header.split(',').any(|name| name == FILLED[0])
    }
}

/// What was measured.
pub(crate) struct Measured {
    /// The column.
    pub(crate) name: String,
    /// One for each row; `None` where the cell has no number above 0.
    pub(crate) numbers: Vec<Option<f64>>,
    /// Cells that hold something else than a number above 0.
    pub(crate) num_unread: u64,
}

/// Columns that nobody knows, if the header has all that are needed, each once, and none that looks misspelt.
fn check_header(path: &Path, header: &[String], device: Option<&str>) -> Result<Vec<String>, Failure> {
    let is_known = |name: &str| {
        COLUMNS.iter().any(|column| column.name == name) || CARRIED.contains(&name) || FILLED.contains(&name)
    };
    let mut problems = Vec::new();
    for column in &COLUMNS {
        let is_needed = column.is_needed && !(column.name == "gpu" && device.is_some());
        if is_needed && !header.iter().any(|name| name == column.name) {
            problems.push(format!("column `{}`: missing, {}", column.name, column.what));
        }
    }
    let mut unread = Vec::new();
    for (at, name) in header.iter().enumerate() {
        if header[..at].contains(name) {
            problems.push(format!("column `{name}`: is there twice"));
        } else if !is_known(name) {
            let near = COLUMNS.iter().map(|column| column.name).min_by_key(|known| levenshtein(known, name));
            match near.filter(|known| levenshtein(known, name) <= 1 + name.len() / 4) {
                Some(meant) => problems.push(format!("column `{name}`: unknown, did you mean `{meant}`?")),
                None => unread.push(name.clone()),
            }
        }
    }
    if problems.is_empty() {
        return Ok(unread);
    }
    let hint = "`dflop estimate --help` lists the columns".to_owned();
    Err(Failure::new(listed(path, &problems), Some(hint)))
}

fn listed(path: &Path, problems: &[String]) -> String {
    let mut text = format!("`{}`: {}", path.display(), counted(problems.len() as u64, "problem"));
    for problem in problems.iter().take(SHOWN_MAX) {
        let _ = write!(text, "\n  {problem}");
    }
    if problems.len() > SHOWN_MAX {
        let _ = write!(text, "\n  and {} more", problems.len() - SHOWN_MAX);
    }
    text
}
