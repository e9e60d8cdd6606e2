//! `dflop schedule`: costs in, an assignment out.

use super::cost_table::Table;
use super::counted;
use crate::Failure;
use crate::args;
use dflop_schedule::{Assignment, BalanceError, EXACT_WORK, Limits};
use dflop_types::{Hint, number, thousands};
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Instant;

pub(super) fn run(arguments: &args::Schedule) -> Result<(), Failure> {
    let path = arguments.costs.as_path();
    let table = Table::read(path)?;
    let costs = &table.costs;
    check_sizes(path, "bytes", arguments.bucket_bytes_max, costs.bytes.as_ref())?;
    check_sizes(path, "tokens", arguments.bucket_tokens_max, costs.tokens.as_ref())?;
    let patient = Limits::patient(costs.llm_ns.len(), arguments.buckets);
    let limits = Limits {
        bucket_bytes_max: arguments.bucket_bytes_max,
        bucket_tokens_max: arguments.bucket_tokens_max,
        seed: arguments.seed,
        max_exact_work: if arguments.exact { EXACT_WORK } else { patient.max_exact_work },
        ..patient
    };
    let start = Instant::now();
    let assignment =
        dflop_schedule::schedule(costs, &limits).map_err(|error| failure(&table, path, &error))?;
    let elapsed_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let held = |sizes: &Option<Vec<u64>>| sizes.as_ref().map(|sizes| sums(sizes, &assignment));
    let (bytes, tokens) = (held(&costs.bytes), held(&costs.tokens));
    if arguments.json {
        let mut answer = json!({
            "assignment": assignment.bucket,
            "encoder_load_ns": assignment.encoder_load_ns,
            "llm_load_ns": assignment.llm_load_ns,
            "max_load_ns": assignment.max_load_ns,
            "lower_bound_ns": assignment.lower_bound_ns,
            "gap": assignment.gap(),
            "proven_optimal": assignment.proven_optimal,
            "elapsed_us": elapsed_us,
        });
        for (field, held) in [("bucket_bytes", bytes), ("bucket_tokens", tokens)] {
            if let Some(held) = held {
                answer[field] = held.into();
            }
        }
        outln!("{answer}");
        return Ok(());
    }
    let proof = match (assignment.proven_optimal, arguments.exact) {
        (true, _) => " (proven optimal)",
        (false, true) => " (not proven optimal)",
        (false, false) => "",
    };
    outln!(
        "{} in {}: largest load {}, {:.4} % over the lower bound{proof}; {} us",
        counted(assignment.bucket.len() as u64, "sample"),
        counted(u64::from(arguments.buckets), "bucket"),
        number::ns(assignment.max_load_ns),
        assignment.gap() * 100.0,
        thousands(elapsed_us)
    );
    out!("{}", buckets_as_table(&assignment, &[("bytes", bytes), ("tokens", tokens)]));
    Ok(())
}

/// A line a bucket; of `held`, the columns that there are.
fn buckets_as_table(assignment: &Assignment, held: &[(&str, Option<Vec<u64>>)]) -> String {
    let held: Vec<(&str, &Vec<u64>)> =
        held.iter().filter_map(|(name, held)| held.as_ref().map(|held| (*name, held))).collect();
    let mut text = format!("{:>8} {:>8} {:>14} {:>14}", "bucket", "samples", "encoder", "llm");
    for (name, _) in &held {
        let _ = write!(text, " {name:>16}");
    }
    let counts = sums(&vec![1; assignment.bucket.len()], assignment);
    for (bucket, count) in counts.into_iter().enumerate() {
        let _ = write!(
            text,
            "\n{bucket:>8} {count:>8} {:>14} {:>14}",
            number::ns(assignment.encoder_load_ns[bucket]),
            number::ns(assignment.llm_load_ns[bucket])
        );
        for (_, held) in &held {
            let _ = write!(text, " {:>16}", thousands(held[bucket]));
        }
    }
    text.push('\n');
    text
}

/// What each bucket holds of `sizes`.
fn sums(sizes: &[u64], assignment: &Assignment) -> Vec<u64> {
    let mut held = vec![0; assignment.llm_load_ns.len()];
    for (&bucket, &size) in assignment.bucket.iter().zip(sizes) {
        held[bucket as usize] += size;
    }
    held
}

/// `Ok` if there is no cap, or the file has the column that it needs.
fn check_sizes(path: &Path, unit: &str, cap: Option<u64>, sizes: Option<&Vec<u64>>) -> Result<(), Failure> {
    if cap.is_none() || sizes.is_some() {
        return Ok(());
    }
    Err(Failure::new(
        format!("`--bucket-{unit}-max` is given, but `{}` has no column `{unit}`", path.display()),
        Some("add the column, or leave the flag out".to_owned()),
    ))
}

/// The scheduler's error in the words of the command line: a line of the file, and a flag to mend it with.
fn failure(table: &Table, path: &Path, error: &BalanceError) -> Failure {
    match error {
        BalanceError::SampleOverCap { sample, unit, size, cap } => Failure::answer(
            format!(
                "`{}` line {}: sample {sample} has {size} {unit}, `--bucket-{unit}-max` is {cap}",
                path.display(),
                table.lines[*sample]
            ),
            Some(format!("pass `--bucket-{unit}-max {size}` or more, or split or leave out this sample")),
        ),
        BalanceError::CapsInfeasible { unit, .. } | BalanceError::NoPacking { unit, .. } => {
            let hint = format!("raise `--buckets` or `--bucket-{unit}-max`, or give fewer samples");
            Failure::answer(error.to_string(), Some(hint))
        }
        _ => Failure::new(error.to_string(), error.hint()),
    }
}
