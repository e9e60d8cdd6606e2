//! The example in `docs/simulator.md` is what the simulator answers.

use dflop_sim::{Durations, simulate};
use dflop_types::PipelineOrder;
use serde_json::{Value, json};

const DOCUMENT: &str = include_str!("../../../docs/simulator.md");

fn blocks(language: &str) -> Vec<&'static str> {
    let after_fences = DOCUMENT.split("\n```").skip(1).step_by(2);
    after_fences.filter_map(|block| block.strip_prefix(language)?.strip_prefix('\n')).collect()
}

/// The durations give the output, and the picture shows it.
#[test]
fn the_example_is_true() {
    let [durations, output] = blocks("json")[..] else { panic!("two JSON blocks") };
    let timeline = simulate(&Durations::from_json(durations).unwrap(), PipelineOrder::OneFOneB).unwrap();
    let span = |span: &dflop_types::Span| {
        json!({
            "rank": span.rank,
            "stage": span.action.stage,
            "action": span.action,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
        })
    };
    let answer = json!({
        "makespan_ns": timeline.makespan_ns,
        "ideal_ns": timeline.ideal_ns(),
        "idle_ns": timeline.idle_ns,
        "spans": timeline.spans.iter().map(span).collect::<Vec<_>>(),
    });
    assert_eq!(serde_json::from_str::<Value>(output).unwrap(), answer);

    let picture = blocks("text").into_iter().find(|block| block.contains("stage 0  ")).unwrap();
    for stage in 0..2 {
        let row = picture.lines().find_map(|line| line.strip_prefix(&format!("stage {stage}  "))).unwrap();
        let mut expected = "..".repeat(timeline.makespan_ns as usize);
        for span in timeline.spans.iter().filter(|span| span.rank.0 == stage) {
            let letters = span.action.to_string()[1..].repeat(span.duration_ns() as usize);
            expected.replace_range(2 * span.start_ns as usize..2 * span.end_ns as usize, &letters);
        }
        assert_eq!(row, expected);
    }
}
