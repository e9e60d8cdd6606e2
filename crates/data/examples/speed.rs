//! Speed of header reading and of tokenization on one thread, as one line of JSON; `benches/data.py` calls it.
//!
//! `speed probe SECONDS FILE_LIST`: media files a second, the same files again and again (page cache).
//! `speed tokens MODEL_DIR JSONL`: seconds of the whole profile of text records, and of the tokenizer alone on the
//! very texts that the profile tokenizes.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use dflop_data::probe::probe;
use std::path::PathBuf;
use std::time::Instant;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["probe", seconds, list] => probes(seconds.parse().unwrap(), list),
        _ => panic!("usage: speed probe SECONDS FILE_LIST"),
    }
}

fn probes(seconds: f64, list: &str) {
    let files: Vec<PathBuf> = std::fs::read_to_string(list).unwrap().lines().map(PathBuf::from).collect();
    for file in &files {
        probe(file).unwrap();
    }
    let (begin, mut num_files) = (Instant::now(), 0_u64);
    while begin.elapsed().as_secs_f64() < seconds {
        for file in &files {
            std::hint::black_box(probe(file).unwrap());
        }
        num_files += files.len() as u64;
    }
    println!("{{\"files_per_s\": {:.1}}}", num_files as f64 / begin.elapsed().as_secs_f64());
}
