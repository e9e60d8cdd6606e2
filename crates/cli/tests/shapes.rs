//! Error by size of sample, and memory by part, on the page of a run.

use crate::from_run::with_run;
use serde_json::{Value, json};
use std::fs;

/// The text between two marks.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let rest = text.split_once(from).unwrap_or_else(|| panic!("no {from}")).1;
    rest.split_once(to).unwrap_or_else(|| panic!("no {to}")).0
}

#[test]
fn a_run_shows_its_error_by_size_and_its_memory_by_part() {
    let session = with_run(1.5);
    let page = |name: &str| {
        let said = session.dflop(&["report", "demo"]);
        assert!(said.contains("status: 0"), "{said}");
        let page = fs::read_to_string(session.path("demo/report.html")).unwrap();
        between(&page, &format!("<section id=\"{name}\""), "</section>").to_owned()
    };
    let shapes = page("shapes");
    // All LLM ranks take one and a half: their error is that of the hardware, and no size is named.
    let said = "Samples of all sizes take 1.50 times the predicted time in the LLM. No size parts from the others by more than chance.";
    assert!(shapes.contains(said), "{shapes}");
    let llm = between(
        &shapes,
        "<caption>Predicted and measured time in the LLM by size of sample</caption>",
        "</table>",
    );
    let rows: Vec<Vec<&str>> = between(llm, "<tbody>", "</tbody>")
        .split("<tr>")
        .skip(1)
        .map(|row| row.split("<td").skip(1).map(|cell| between(cell, ">", "</td>")).collect())
        .collect();
    assert!(rows.len() > 3, "{llm}");
    assert!(rows.iter().all(|row| row[6] == "-33.3 %"), "1 / 1.5 less 1: {rows:?}");
    let count = |text: &str| text.replace(',', "").parse::<u64>().unwrap();
    let lines = fs::read_to_string(session.path("demo/run/schedules.jsonl")).unwrap();
    let samples =
        |line: &str| serde_json::from_str::<Value>(line).unwrap()["samples"].as_array().unwrap().len() as u64;
    let all: u64 = lines.lines().map(samples).sum();
    assert_eq!(rows.iter().map(|row| count(row[2])).sum::<u64>(), all, "each sample once a step");
    let memory = page("memory");
    assert!(
        memory.contains("Nothing was measured")
            && memory.contains(">encoder<")
            && !memory.contains("tensors, measured"),
        "{memory}"
    );
    // What --measure-memory-step writes, as far as it is read.
    let rank = |rank: u32| json!({"rank": rank, "measured": {"tensor_bytes": 100 << 20, "moment": "0F1"}});
    let line = json!({"step": 5, "arm": "aware", "ranks": [rank(0), rank(1)]});
    fs::write(session.path("demo/run/memory.jsonl"), format!("{line}\n")).unwrap();
    let memory = page("memory");
    assert!(memory.contains("tensors, measured") && memory.contains("100.0 MiB"), "{memory}");
}
