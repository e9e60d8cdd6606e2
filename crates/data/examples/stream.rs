//! Profiles many small text records and prints how fast, and the peak memory: it must not grow with their number.
//!
//! ```text
//! cargo run --release -p dflop-data --example stream -- 10000000 [DIR]
//! ```
//!
//! The second run takes all rows over from the first.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "an example talks, and may give up")]

use dflop_data::profile::{Previous, ProfileSettings, profile_into};
use dflop_data::{demo, table};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::time::Instant;

/// Peak resident memory of this process in MiB, as Linux counts it.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn main() {
    let num_samples: u64 = std::env::args().nth(1).map_or(200_000, |text| text.parse().unwrap());
    let dir = std::env::args().nth(2).map_or_else(std::env::temp_dir, Into::into).join("dflop_stream");
    std::fs::create_dir_all(&dir).unwrap();
    demo::write(&dir, 0, 1, |_, _| {}).unwrap();
    let source = dir.join("stream.jsonl");
    let mut out = BufWriter::new(File::create(&source).unwrap());
    for n in 0..num_samples {
        writeln!(
            out,
            "{{\"id\": \"{n:09}\", \"conversations\": [{{\"from\": \"human\", \"value\": \"what is {n}?\"}}, \
             {{\"from\": \"gpt\", \"value\": \"a number{}\"}}]}}",
            " and one more".repeat((n % 7) as usize)
        )
        .unwrap();
    }
    out.into_inner().unwrap().sync_all().unwrap();
    println!(
        "{num_samples} records, {} MiB; peak {} MiB",
        source.metadata().unwrap().len() >> 20,
        peak_mib()
    );

    let settings = ProfileSettings::new(&source, dir.join("model"));
    let profile = dir.join("first.parquet");
    let start = Instant::now();
    let mut first = table::Writer::create(&profile).unwrap();
    let outcome = profile_into(&settings, None, &mut first, &|_| {}).unwrap();
    first.finish(&outcome.header).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!("measured {} in {seconds:.1} s; peak {} MiB", outcome.num_samples, peak_mib());

    let header = table::header(&profile).unwrap().0;
    let previous = Previous { header, rows: table::rows(&profile).unwrap() };
    let start = Instant::now();
    let mut second = table::Writer::create(&dir.join("second.parquet")).unwrap();
    let outcome = profile_into(&settings, Some(previous), &mut second, &|_| {}).unwrap();
    second.finish(&outcome.header).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!("took over {} in {seconds:.1} s; peak {} MiB", outcome.num_reused, peak_mib());
    std::fs::remove_dir_all(&dir).unwrap();
}
