//! The tests of the command, as one binary: each one more would link all of dflop again.

#![allow(clippy::unwrap_used, reason = "a test may give up, its helpers too")]

mod advise;
mod common;
mod errors;
mod estimate_runs;
mod families;
mod hostile;
mod named;
mod schedule;
mod session;
mod writes;

/// Cargo builds no file of this folder alone (`autotests = false` in `Cargo.toml`): one that is not named here would not run.
#[test]
fn no_file_is_left_out() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let here = include_str!("main.rs");
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(module) = name.strip_suffix(".rs").filter(|&module| module != "main") {
            assert!(here.lines().any(|line| line == format!("mod {module};")), "`mod {module};` is missing");
        }
    }
}
