//! What `dflop estimate` predicts of runs that others measured, and what it says of tables that cannot be.

// `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(clippy::unwrap_used)]

use dflop_types::thousands;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/runs").join(name)
}

/// Status, stdout and stderr, and the table that was written.
struct Said {
    status: i32,
    stdout: String,
    stderr: String,
    table: String,
}

fn estimate(table: &str, further: &[&str]) -> Said {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("runs.csv"), table).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflop"));
    command.args(["estimate", "--runs", "runs.csv", "--out", "out.csv"]).args(further);
    let output = command.current_dir(directory.path()).env("COLUMNS", "100").output().unwrap();
    Said {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        table: fs::read_to_string(directory.path().join("out.csv")).unwrap_or_default(),
    }
}

/// Rows of a table by the names of its columns.
fn rows(table: &str) -> Vec<BTreeMap<String, String>> {
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let header = reader.headers().unwrap().clone();
    let row = |record: csv::StringRecord| {
        header.iter().map(str::to_owned).zip(record.iter().map(str::to_owned)).collect()
    };
    reader.records().map(|record| row(record.unwrap())).collect()
}

fn number(row: &BTreeMap<String, String>, name: &str) -> f64 {
    row[name].parse().unwrap_or_else(|_| panic!("{name}: {row:?}"))
}

const HEADER: &str = "gpu,gpus,global_batch_sequences,micro_batch_sequences,hidden_size,attention_heads,layers,sequence_tokens,\
                      tensor_parallel,data_parallel,pipeline_parallel";

fn table(lines: &[&str]) -> String {
    format!("{HEADER}\n{}\n", lines.join("\n"))
}

/// Two jobs of the published A100 runs: each time is near what was measured, and the plan that is predicted to be the fastest
/// is the fastest or nearly.
#[test]
fn published_runs() {
    let said = estimate(&fs::read_to_string(fixture("gpt_a100.csv")).unwrap(), &[]);
    assert_eq!((said.status, said.stderr.as_str()), (0, "wrote out.csv\n"), "{}", said.stdout);
    let rows = rows(&said.table);
    assert_eq!(rows.len(), 37);
    let error = |row| (number(row, "predicted_ms") / number(row, "iteration_ms") - 1.0).abs();
    assert!(rows.iter().map(error).sum::<f64>() / 37.0 < 0.15, "{}", said.stdout);
    assert!(rows.iter().all(|row| row["predicted_basis"] == "estimated"));
    for gpus in ["4", "8"] {
        let job: Vec<_> = rows.iter().filter(|row| row["gpus"] == gpus).collect();
        let least = |name| job.iter().min_by(|a, b| number(a, name).total_cmp(&number(b, name))).unwrap();
        let (chosen, best) = (least("predicted_ms"), least("iteration_ms"));
        assert!(number(chosen, "iteration_ms") <= 1.05 * number(best, "iteration_ms"), "{chosen:?} {best:?}");
    }
}

/// Megatron's own record of its last stage: the peak is at most 3 % above, never below.
#[test]
fn memory_of_megatron() {
    let said = estimate(&fs::read_to_string(fixture("megatron_7b.csv")).unwrap(), &[]);
    assert_eq!(said.status, 0, "{}", said.stderr);
    for row in rows(&said.table) {
        let share = number(&row, "predicted_peak_bytes") / number(&row, "peak_allocated_bytes");
        assert!((1.0..1.03).contains(&share), "{}: {share}", row["gpu"]);
    }
}

/// What the page of results says of these runs is what is predicted today.
#[test]
fn the_page_of_results_has_these_predictions() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results/2026-11_estimate_runs.md");
    let page = fs::read_to_string(page).unwrap();
    let said = estimate(&fs::read_to_string(fixture("megatron_7b.csv")).unwrap(), &[]);
    for row in rows(&said.table) {
        let (predicted, measured) = (number(&row, "predicted_ms"), number(&row, "step_ms_median"));
        let cells = format!(
            "| {} ms | {:+.0} % |",
            thousands(predicted.round() as u64),
            (predicted / measured - 1.0) * 100.0
        );
        let line = page.lines().find(|line| line.starts_with(&format!("| {} |", row["gpu"]))).unwrap();
        assert!(line.ends_with(&cells), "{cells}: {line}");
    }
}

/// A prediction that was there is replaced, other columns stay, a row that Megatron could not run is blank.
#[test]
fn columns_and_blanks() {
    let line = "A100,8,64,1,2048,16,24,1024";
    let more = format!(
        "{HEADER},mine,predicted_ms\n{line},1,8,1,a,7\n{line},8,1,1,b,7\n{line},1,1,8,c,7\nA100,5,60,1,2048,16,24,1024,1,1,5,d,7\n"
    );
    let said = estimate(&more, &[]);
    assert_eq!(said.status, 0, "{}", said.stderr);
    assert!(
        said.stdout.starts_with("4 runs, 3 with a prediction: estimated, not measured\n"),
        "{}",
        said.stdout
    );
    assert_eq!(
        said.stderr,
        "note: column `mine` is carried along, and not read\n\
         note: 1 row left blank: `layers` is 24, 5 stages do not divide it\nwrote out.csv\n"
    );
    assert!(
        said.table.starts_with(&format!("{HEADER},mine,predicted_ms,predicted_peak_bytes,predicted_basis\n"))
    );
    let rows = rows(&said.table);
    assert_eq!(rows.iter().map(|row| row["mine"].as_str()).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    // Cells of what was measured without a number are counted.
    let line = "A100,8,64,1,2048,16,24,1024,1,8,1";
    let said =
        estimate(&format!("{HEADER},iteration_ms\n{line},5000\n{line},NaN\n{line},-3\n{line},\n"), &[]);
    assert!(said.stdout.contains("step time against what was measured, 1 run: "), "{}", said.stdout);
    let note = "note: column `iteration_ms`: 2 cells without a number above 0, left out of the comparison\n";
    assert!(said.stderr.contains(note), "{}", said.stderr);
    // Both columns of times are compared.
    let said = estimate(&format!("{HEADER},step_ms_median,iteration_ms\n{line},4000,5000\n"), &[]);
    for column in ["iteration_ms", "step_ms_median"] {
        let start = format!("step time (`{column}`) against what was measured, 1 run: ");
        assert!(said.stdout.contains(&start), "{}", said.stdout);
    }
    assert_eq!((rows[3]["predicted_ms"].as_str(), rows[3]["predicted_basis"].as_str()), ("", ""));
    assert!(rows[..3].iter().all(|row| number(row, "predicted_ms") > 10.0));
}

/// Many reasons for blanks are counted, and so are rows whose sizes the estimate does not reach.
#[test]
fn further_reasons_and_sizes_beyond_the_estimate_are_counted() {
    let of_layers = |layers: u32| format!("A100,5,60,1,2048,16,{layers},1024,1,1,5");
    let blank: Vec<String> = [21, 22, 23, 24, 26, 27, 28].map(of_layers).to_vec();
    let long = "A100,1,16,16,2048,16,2,16000000,1,1,1".to_owned();
    let lines: Vec<&str> = blank.iter().chain([&long]).map(String::as_str).collect();
    let said = estimate(&table(&lines), &[]);
    assert_eq!(said.status, 0, "{}", said.stderr);
    assert!(said.stderr.contains("note: further rows left blank, for 1 other reason\n"), "{}", said.stderr);
    assert!(said.stderr.contains("note: 1 row beyond the sizes of the estimate\n"), "{}", said.stderr);

    let said = estimate(
        &table(&["A100,1,1,1,2048,16,2,4000000000,1,1,1", "A100,1,4096,4096,2048,16,2,16000000,1,1,1"]),
        &[],
    );
    assert_eq!(said.status, 2, "{}", said.stderr);
    let rules = [
        "`sequence_tokens`: 4000000000, must be at most 16777216",
        "their product must be at most 1073741824",
    ];
    assert!(rules.iter().all(|rule| said.stderr.contains(rule)), "{}", said.stderr);
}

/// More work never takes less time, and recomputation trades time for memory.
#[test]
fn what_must_grow_grows() {
    let of = |batch: u32, layers: u32, tail: &str| {
        let text =
            format!("{HEADER},activation_recompute\nA100,4,{batch},2,2048,16,{layers},1024,2,1,2,{tail}\n");
        let row = rows(&estimate(&text, &[]).table).remove(0);
        (number(&row, "predicted_ms"), number(&row, "predicted_peak_bytes"))
    };
    let (ms, bytes) = of(16, 24, "none");
    assert!(of(32, 24, "none").0 > 1.5 * ms && of(16, 48, "none").0 > 1.5 * ms);
    let (full_ms, full_bytes) = of(16, 24, "full");
    assert!(full_ms > 1.05 * ms && full_bytes < bytes);
    assert_eq!((of(16, 24, "0"), of(16, 24, "1")), ((ms, bytes), (full_ms, full_bytes)));
    let h100 = estimate(&table(&["H100,4,16,2,2048,16,24,1024,2,1,2"]), &[]);
    assert!(number(&rows(&h100.table)[0], "predicted_ms") <= ms);
}

/// What cannot be is told with its row and column, all of it at once.
#[test]
fn faults_have_a_row_and_a_column() {
    let faults = |text: &str, further: &[&str]| {
        let said = estimate(text, further);
        assert_eq!((said.status, said.table.as_str()), (2, ""), "{}", said.stderr);
        said.stderr
    };
    let text = table(&[
        "A100,8,64,1,2048,16,24,1024,1,8,1",
        "A100,8,64,0,2048,16,24,1024,1,8,1",
        "A100,8,64,1,2048,sixteen,-24,1024,1,8,1",
        "A100,8,64,1,2048,16,24,1024,2,8,1",
        "A100,8,63,1,2048,16,24,1024,1,8,1",
        "T800,8,64,1,2048,16,24,1024,1,8,",
        "A100,8,64,1,2048,16,24,1024,1,8,1e300",
    ]);
    assert_eq!(
        faults(&text, &[]),
        "error: `runs.csv`: 8 problems\n\
         \x20 row 3, column `micro_batch_sequences`: `0`, must be a whole number of at least 1\n\
         \x20 row 4, column `attention_heads`: `sixteen`, must be a whole number of at least 1\n\
         \x20 row 4, column `layers`: `-24`, must be a whole number of at least 1\n\
         \x20 row 5, column `gpus`: 8, `tensor_parallel` 2 x `data_parallel` 8 x `pipeline_parallel` 1 is 16; they must be equal\n\
         \x20 row 6, column `global_batch_sequences`: 63, must be a multiple of `data_parallel` 8 x `micro_batch_sequences` 1\n\
         \x20 row 7, column `gpu`: `T800`, no hardware named `T800` in the table, known are a100-40gb, a100-80gb, h100, h200, b200, \
         l40s, rtx-4090, mi300x\n\
         \x20 row 7, column `pipeline_parallel`: is empty, must be a whole number of at least 1\n\
         \x20 row 8, column `pipeline_parallel`: `1e300`, must be at most 4294967296\n"
    );
    let missing = HEADER.replace("gpu,", "").replace("hidden_size", "hiden_size").replace(",layers", "");
    let said = faults(&format!("{missing}\n8,64,1,2048,16,1024,1,8,1\n"), &[]);
    assert!(said.contains("  column `gpu`: missing, the device"), "{said}");
    assert!(said.contains("  column `layers`: missing, layers of the model\n"), "{said}");
    assert!(said.contains("  column `hiden_size`: unknown, did you mean `hidden_size`?\n"), "{said}");
    assert!(said.ends_with("\nhint: `dflop estimate --help` lists the columns\n"), "{said}");
    assert!(!faults(&format!("{missing}\n8\n"), &["--device", "h100"]).contains("`gpu`"));
    assert!(faults(&table(&[]), &[]).contains("has no rows, at least 1 is needed"));
    assert!(faults(&table(&["A100,8"]), &[]).contains("is not a table of runs"));
    assert!(faults(&table(&["A100,8"]), &["--device", "T800"]).contains("no hardware named `T800`"));
    let odd = format!(
        "{HEADER},activation_recompute,memory_rank_stage\nA100,8,64,1,2048,16,24,1024,1,8,1,some,7\n"
    );
    let said = faults(&odd, &[]);
    assert!(said.contains("must be one of none, 0, selective, full, 1, uniform, block"), "{said}");
    assert!(
        said.contains("column `memory_rank_stage`: `7`, must be first, last or a number below"),
        "{said}"
    );
}

/// A width that cannot be read is one problem: what follows from it is not told as well.
#[test]
fn a_problem_is_told_once() {
    let said = estimate(&table(&["A100,8,64,1,NaN,16,24,1024,1,8,1"]), &[]);
    assert!(said.stderr.starts_with("error: `runs.csv`: 1 problem\n"), "{}", said.stderr);
}

/// What stands at `--out` is replaced if it is a table of predictions, the table itself, or empty.
#[test]
fn no_other_file_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let runs = table(&["A100,8,64,1,2048,16,24,1024,1,8,1"]);
    fs::write(directory.path().join("runs.csv"), &runs).unwrap();
    let said = |out: &str, held: &str| {
        if out != "runs.csv" {
            fs::write(directory.path().join(out), held).unwrap();
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflop"));
        command.args(["estimate", "--runs", "runs.csv", "--out", out]).current_dir(directory.path());
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, stderr) = said("notes.txt", "mine\n");
    assert_eq!(status, 2, "{stderr}");
    assert!(stderr.starts_with("error: `notes.txt` is there, and is no table that"), "{stderr}");
    assert_eq!(fs::read_to_string(directory.path().join("notes.txt")).unwrap(), "mine\n");
    for (out, held) in [("empty.csv", ""), ("old.csv", "gpu,predicted_ms\n"), ("runs.csv", "")] {
        assert_eq!(said(out, held).0, 0, "{out}");
    }
}

#[test]
fn devices_are_listed() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_dflop")).args(["estimate", "--device", "list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("h200        NVIDIA H200 SXM 141 GB          kernels as measured on H100\n"),
        "{text}"
    );
    assert!(text.lines().count() == 8 && text.contains("efficiencies assumed"), "{text}");
}
