//! The trace of timelines, read back.

use dflop_sim::{Durations, perfetto, simulate};
use dflop_types::{PipelineOrder, Rank, Span, Timeline};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

fn timeline() -> Timeline {
    let durations = Durations {
        forward_ns: vec![vec![1_001, 2_000], vec![999, 0]],
        backward_ns: vec![vec![3_000, 1], vec![1_500, 1_500]],
        transfer_ns: 250,
        ..Durations::default()
    };
    simulate(&durations, PipelineOrder::OneFOneB).unwrap()
}

/// Every span of every timeline comes back, to the nanosecond, on the track of its rank.
#[test]
fn spans_come_back() {
    let (one, two) = (timeline(), Timeline { num_ranks: 3, ..Timeline::default() });
    let json: Value =
        serde_json::from_str(&perfetto(&[("simulated", &one), ("a \"quoted\" one", &two)])).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let slices: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(slices.len(), one.spans.len());
    for (event, span) in slices.iter().zip(&one.spans) {
        let ns = |key: &str| (event[key].as_f64().unwrap() * 1000.0).round() as u64;
        let read = Span {
            // Behind the numbers of the two processes.
            rank: Rank(event["tid"].as_u64().unwrap() as u32 - 3),
            action: event["name"].as_str().unwrap().parse().unwrap(),
            start_ns: ns("ts"),
            end_ns: ns("ts") + ns("dur"),
        };
        assert_eq!(read, *span);
        assert_eq!(event["pid"], 1);
        assert_eq!(
            event["cat"],
            if event["name"].as_str().unwrap().contains('F') { "forward" } else { "backward" }
        );
        assert_eq!(event["args"]["stage"], span.action.stage.0);
        assert_eq!(event["args"]["microbatch"], span.action.microbatch);
    }
    let names = |key: &str, pid: u64| -> Vec<&str> {
        let named = events.iter().filter(|event| event["name"] == key && event["pid"] == pid);
        named.map(|event| event["args"]["name"].as_str().unwrap()).collect()
    };
    assert_eq!(
        (names("process_name", 1), names("process_name", 2)),
        (vec!["simulated"], vec!["a \"quoted\" one"])
    );
    assert_eq!(names("thread_name", 2), ["rank 0", "rank 1", "rank 2"]);
    let label = events.iter().find(|event| event["name"] == "process_labels").unwrap();
    // 1F0 1251..2250, 1B0 ..3750, so 0B0 4000..7000 and 0B1 ..7001; 10,001 of 2 x 7,001 are busy.
    assert_eq!(label["args"]["labels"], "makespan 7,001 ns, idle 28.6 %");
}

/// No timeline is an empty trace, still JSON.
#[test]
fn nothing_is_an_empty_trace() {
    let json: Value = serde_json::from_str(&perfetto(&[])).unwrap();
    assert_eq!(json["traceEvents"].as_array().unwrap().len(), 0);
}

/// The rules that Perfetto's importer counts errors by: each slice has a whole name, time and duration; slices of one track lie one
/// after the other or one in the other; every track has a name; nothing flows from a slice that is not there.
#[test]
fn an_importer_finds_nothing_to_complain_of() {
    let mut measured = timeline();
    // A measured step: its ranks do not begin at zero, and a span may be empty.
    for span in &mut measured.spans {
        (span.start_ns, span.end_ns) = (span.start_ns + 123_456_789, span.end_ns + 123_456_789);
    }
    let simulated = timeline();
    let json: Value =
        serde_json::from_str(&perfetto(&[("step 3 aware predicted", &simulated), ("measured", &measured)]))
            .unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let mut tracks: BTreeMap<(u64, u64), Vec<(u64, u64)>> = BTreeMap::new();
    let mut named = BTreeSet::new();
    for event in events {
        let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap_or(0));
        let name = event["name"].as_str().unwrap();
        match event["ph"].as_str().unwrap() {
            "M" => {
                assert!(event["args"].is_object() && event.get("ts").is_none(), "{event}");
                if name == "thread_name" {
                    named.insert(track);
                }
            }
            "X" => {
                assert!(!name.is_empty() && event["cat"].is_string() && event["args"].is_object(), "{event}");
                let ns = |key: &str| (event[key].as_f64().unwrap() * 1000.0).round();
                assert!(ns("ts") >= 0.0 && ns("dur") >= 0.0, "{event}");
                tracks.entry(track).or_default().push((ns("ts") as u64, (ns("ts") + ns("dur")) as u64));
            }
            other => {
                panic!("an event of another kind, {other}: flows and asynchronous slices must be paired")
            }
        }
    }
    assert_eq!(tracks.len(), 4);
    // Perfetto takes two tracks of the same number for one, and a track with the number of a process for that process.
    let numbers: BTreeSet<u64> = tracks.keys().flat_map(|&(pid, tid)| [pid, tid]).collect();
    assert_eq!(numbers, (1..=6).collect());
    for (track, mut slices) in tracks {
        assert!(named.contains(&track), "track {track:?} has no name");
        slices.sort_unstable();
        // A rank runs one action at a time: no slice lies in another one.
        assert!(slices.windows(2).all(|two| two[0].1 <= two[1].0), "{track:?}: {slices:?}");
    }
}
