//! `dflop schedule`: costs in, an assignment out.

use super::milliseconds;
use crate::Failure;
use crate::args;
use dflop_schedule::{Costs, Limits};
use dflop_types::thousands;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Instant;

pub(super) fn run(arguments: &args::Schedule) -> Result<(), Failure> {
    let text = std::fs::read_to_string(&arguments.costs)
        .map_err(|e| Failure::new(format!("cannot read `{}`: {e}", arguments.costs.display()), None))?;
    let costs = parse_costs(&arguments.costs, &text)?;
    if arguments.bucket_bytes_max.is_some() && costs.bytes.is_none() {
        return Err(Failure::new(
            format!(
                "`--bucket-bytes-max` is given, but `{}` has no column `bytes`",
                arguments.costs.display()
            ),
            Some("add the column, or leave the flag out".to_owned()),
        ));
    }
    let limits = Limits {
        bucket_bytes_max: arguments.bucket_bytes_max,
        seed: arguments.seed,
        ..Limits::patient(costs.llm_ns.len(), arguments.buckets)
    };
    let start = Instant::now();
    let assignment = dflop_schedule::schedule(&costs, &limits)?;
    let elapsed_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    if arguments.json {
        let answer = json!({
            "assignment": assignment.bucket,
            "encoder_load_ns": assignment.encoder_load_ns,
            "llm_load_ns": assignment.llm_load_ns,
            "max_load_ns": assignment.max_load_ns,
            "lower_bound_ns": assignment.lower_bound_ns,
            "gap": assignment.gap(),
            "proven_optimal": assignment.proven_optimal,
            "elapsed_us": elapsed_us,
        });
        println!("{answer}");
        return Ok(());
    }
    println!(
        "{} samples in {} buckets: largest load {}, {:.4} % over the lower bound{}; {} us",
        thousands(assignment.bucket.len() as u64),
        thousands(u64::from(arguments.buckets)),
        milliseconds(assignment.max_load_ns),
        assignment.gap() * 100.0,
        if assignment.proven_optimal { " (proven optimal)" } else { "" },
        thousands(elapsed_us)
    );
    let mut table = format!("{:>8} {:>8} {:>14} {:>14}\n", "bucket", "samples", "encoder", "llm");
    for bucket in 0..assignment.encoder_load_ns.len() {
        let count = assignment.bucket.iter().filter(|&&b| b as usize == bucket).count();
        let _ = writeln!(
            table,
            "{bucket:>8} {count:>8} {:>14} {:>14}",
            milliseconds(assignment.encoder_load_ns[bucket]),
            milliseconds(assignment.llm_load_ns[bucket])
        );
    }
    print!("{table}");
    Ok(())
}

/// Bad cells shown; the number of all of them stands above.
const SHOWN: usize = 10;

/// The costs of a CSV with a header; every bad row is listed.
fn parse_costs(path: &Path, text: &str) -> Result<Costs, Failure> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = lines.next().map_or("", |(_, line)| line.trim_start_matches('\u{feff}'));
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let position = |name: &str| columns.iter().position(|column| *column == name);
    let (Some(encoder), Some(llm)) = (position("encoder_ns"), position("llm_ns")) else {
        return Err(Failure::new(
            format!(
                "`{}` has the header `{header}`, expected the columns encoder_ns,llm_ns[,bytes]",
                path.display()
            ),
            None,
        ));
    };
    let bytes = position("bytes");
    let mut costs = Costs { bytes: bytes.map(|_| Vec::new()), ..Costs::default() };
    let mut problems = Vec::new();
    for (index, line) in lines {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() > columns.len() {
            problems.push(format!(
                "line {}: {} cells, the header has {}",
                index + 1,
                cells.len(),
                columns.len()
            ));
        }
        let mut cell = |name: &str, column: usize| match cells.get(column).map(|cell| cell.parse::<u64>()) {
            Some(Ok(value)) => value,
            found => {
                let shown = found.map_or_else(|| "missing".to_owned(), |_| format!("`{}`", cells[column]));
                problems.push(format!("line {}: {name}: {shown}, must be an integer from 0", index + 1));
                0
            }
        };
        costs.encoder_ns.push(cell("encoder_ns", encoder));
        costs.llm_ns.push(cell("llm_ns", llm));
        if let (Some(column), Some(list)) = (bytes, &mut costs.bytes) {
            list.push(cell("bytes", column));
        }
    }
    if problems.is_empty() {
        return Ok(costs);
    }
    let mut message = format!("`{}` has {} bad cells", path.display(), problems.len());
    for problem in problems.iter().take(SHOWN) {
        let _ = write!(message, "\n  {problem}");
    }
    if problems.len() > SHOWN {
        let _ = write!(message, "\n  and {} more", problems.len() - SHOWN);
    }
    Err(Failure::new(message, None))
}
