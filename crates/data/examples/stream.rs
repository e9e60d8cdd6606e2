//! Profiles many small text records and prints how fast, and the peak memory: it must not grow with their number.
//!
//! ```text
//! cargo run --release -p dflop-data --example stream -- 10000000 [DIR]
//! ```
//!
//! The second run takes all rows over from the first, whose rows went to a file of lines.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "an example talks, and may give up")]

use dflop_data::DataError;
use dflop_data::demo;
use dflop_data::profile::{Previous, ProfileSettings, RowSink, profile_into};
use dflop_types::ProfiledSample;
use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::time::Instant;

/// Rows as lines of JSON.
struct Lines(BufWriter<File>);

impl RowSink for Lines {
    fn push(&mut self, sample: &ProfiledSample) -> Result<(), DataError> {
        serde_json::to_writer(&mut self.0, sample).unwrap();
        self.0.write_all(b"\n").unwrap();
        Ok(())
    }
}

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
    let rows = |name: &str| Lines(BufWriter::new(File::create(dir.join(name)).unwrap()));
    let start = Instant::now();
    let mut first = rows("first.jsonl");
    let outcome = profile_into(&settings, None, &mut first, &|_| {}).unwrap();
    first.0.flush().unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!("measured {} in {seconds:.1} s; peak {} MiB", outcome.num_samples, peak_mib());

    let lines = BufReader::new(File::open(dir.join("first.jsonl")).unwrap()).lines();
    let parse = |line: std::io::Result<String>| Ok(serde_json::from_str(&line.unwrap()).unwrap());
    let previous = Previous { header: outcome.header, rows: Box::new(lines.map(parse)) };
    let start = Instant::now();
    let outcome = profile_into(&settings, Some(previous), &mut rows("second.jsonl"), &|_| {}).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!("took over {} in {seconds:.1} s; peak {} MiB", outcome.num_reused, peak_mib());
    std::fs::remove_dir_all(&dir).unwrap();
}
