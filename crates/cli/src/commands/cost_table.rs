//! What samples cost, as people hand it over: a CSV with a line for each.

use super::counted;
use crate::Failure;
use dflop_schedule::Costs;
use dflop_types::regular;
use std::fmt::Write as _;
use std::path::Path;

/// Line of a record, from 1: its position is that before the blank lines that are skipped.
fn line_of(text: &str, position: &csv::Position) -> usize {
    let rest = text.as_bytes().iter().skip(position.byte() as usize);
    let skipped =
        rest.take_while(|byte| matches!(byte, b'\r' | b'\n')).filter(|&&byte| byte == b'\n').count();
    position.line() as usize + skipped
}

/// Bad cells shown; the number of all of them stands above.
const SHOWN: usize = 10;

/// The file of costs, and where each sample stands in it.
pub(super) struct Table {
    pub(super) costs: Costs,
    /// Line of each sample, from 1.
    pub(super) lines: Vec<usize>,
    /// The first line whose `sample` is not above that of the line before, where the table has this column.
    pub(super) out_of_order: Option<usize>,
}

impl Table {
    /// The table at `path`.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let text = regular::read_to_string(path, super::INPUT_BYTES_MAX)
            .map_err(|e| Failure::new(format!("cannot read `{}`: {e}", path.display()), None))?;
        Self::parse(path, &text)
    }

    /// The costs of a CSV with a header; every bad row is listed.
    fn parse(path: &Path, text: &str) -> Result<Self, Failure> {
        let malformed = |error: csv::Error| {
            Failure::new(format!("`{}` is not a table of costs: {error}", path.display()), None)
        };
        let mut reader =
            csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(text.as_bytes());
        let columns = reader.headers().map_err(malformed)?.clone();
        let is_twice = |name: &&str| columns.iter().filter(|column| column == name).count() > 1;
        if let Some(name) = ["encoder_ns", "llm_ns", "bytes", "tokens"].iter().find(|name| is_twice(name)) {
            return Err(Failure::new(
                format!("`{}` has the column `{name}` more than once, must have it once", path.display()),
                None,
            ));
        }
        let position = |name: &str| columns.iter().position(|column| column == name);
        let (Some(encoder), Some(llm)) = (position("encoder_ns"), position("llm_ns")) else {
            return Err(Failure::new(
                format!(
                    "`{}` has the header `{}`, expected the columns encoder_ns,llm_ns[,bytes][,tokens]",
                    path.display(),
                    columns.iter().collect::<Vec<_>>().join(",")
                ),
                None,
            ));
        };
        let (bytes, tokens) = (position("bytes"), position("tokens"));
        let column = |position: Option<usize>| position.map(|_| Vec::new());
        let mut costs = Costs { bytes: column(bytes), tokens: column(tokens), ..Costs::default() };
        let sample = position("sample");
        let (mut before, mut out_of_order) = (None, None);
        let mut numbers = Vec::new();
        let mut problems = Vec::new();
        for record in reader.records() {
            let cells = record.map_err(malformed)?;
            // A line of blanks alone.
            if cells.len() == 1 && cells[0].is_empty() && columns.len() > 1 {
                continue;
            }
            let line = cells.position().map_or(0, |position| line_of(text, position));
            if cells.len() > columns.len() {
                problems.push(format!(
                    "line {line}: {} cells, the header has {}",
                    cells.len(),
                    columns.len()
                ));
            }
            let mut cell = |name: &str, column: usize| match cells.get(column).map(str::parse::<u64>) {
                Some(Ok(value)) => value,
                found => {
                    let shown =
                        found.map_or_else(|| "missing".to_owned(), |_| format!("`{}`", &cells[column]));
                    problems.push(format!("line {line}: {name}: {shown}, must be an integer from 0"));
                    0
                }
            };
            numbers.push(line);
            if let Some(now) = sample.and_then(|column| cells.get(column)?.parse::<u64>().ok()) {
                out_of_order = out_of_order.or_else(|| (before >= Some(now)).then_some(line));
                before = Some(now);
            }
            costs.encoder_ns.push(cell("encoder_ns", encoder));
            costs.llm_ns.push(cell("llm_ns", llm));
            for (name, position, sizes) in
                [("bytes", bytes, &mut costs.bytes), ("tokens", tokens, &mut costs.tokens)]
            {
                if let (Some(position), Some(sizes)) = (position, sizes) {
                    sizes.push(cell(name, position));
                }
            }
        }
        if problems.is_empty() {
            return Ok(Self { costs, lines: numbers, out_of_order });
        }
        let mut message = format!("`{}` has {}", path.display(), counted(problems.len() as u64, "bad cell"));
        for problem in problems.iter().take(SHOWN) {
            let _ = write!(message, "\n  {problem}");
        }
        if problems.len() > SHOWN {
            let _ = write!(message, "\n  and {} more", problems.len() - SHOWN);
        }
        Err(Failure::new(message, None))
    }
}
