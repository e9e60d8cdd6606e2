//! Traces: timelines in the JSON that Perfetto and `chrome://tracing` open.

use dflop_types::{ActionKind, Span, Timeline, number};
use std::fmt::Write as _;

/// Timelines as Chrome trace JSON: each timeline is a process with its name, each rank a track, each action a slice.
///
/// Processes are numbered from 1, tracks go on from there, and no number is given twice: Perfetto takes a track for one of another
/// process if it has its number or that process's, and drops slices that then overlap.
///
/// Slices are named as actions are (`2F0`) and carry their kind as category, stage and microbatch as
/// arguments. Times are microseconds with three decimals, so that no nanosecond is lost. Times of spans are written as
/// they are: two steps are drawn one above the other if the times of each count from its own start.
///
/// # Examples
/// ```
/// # use dflop_types::{PipelineOrder, Timeline};
/// let durations = dflop_sim::Durations {
///     forward_ns: vec![vec![1_500]],
///     backward_ns: vec![vec![2_001]],
///     transfer_ns: 0,
///     ..dflop_sim::Durations::default()
/// };
/// let timeline = dflop_sim::simulate(&durations, PipelineOrder::GPipe)?;
/// let json = dflop_sim::perfetto(&[("simulated", &timeline)]);
/// assert!(json.contains(r#""name":"0B0","cat":"backward","ph":"X","pid":1,"tid":2,"ts":1.500,"dur":2.001"#));
/// # Ok::<(), dflop_sim::SimError>(())
/// ```
///
/// # References
/// "Trace Event Format", the Chromium project: `X` are complete events, `M` metadata.
pub fn perfetto(timelines: &[(&str, &Timeline)]) -> String {
    let spans: usize = timelines.iter().map(|(_, timeline)| timeline.spans.len()).sum();
    let mut json = String::with_capacity(256 + 128 * spans);
    json.push_str("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
    let mut separator = "\n";
    let mut first_tid = timelines.len() as u64 + 1;
    for (pid, (name, timeline)) in (1..).zip(timelines) {
        let label = format!(
            "makespan {}, idle {}",
            number::ns(timeline.makespan_ns),
            number::percent(timeline.bubble_ratio())
        );
        for (event, key, value) in [
            ("process_name", "name", quoted(name)),
            ("process_sort_index", "sort_index", pid.to_string()),
            ("process_labels", "labels", quoted(&label)),
        ] {
            let _ = write!(
                json,
                "{separator}{{\"name\":\"{event}\",\"ph\":\"M\",\"pid\":{pid},\"args\":{{\"{key}\":{value}}}}}"
            );
            separator = ",\n";
        }
        for rank in 0..timeline.num_ranks {
            let tid = first_tid + u64::from(rank);
            let _ = write!(
                json,
                ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"name\":\"rank {rank}\"}}}}\
                 ,\n{{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"sort_index\":{rank}}}}}"
            );
        }
        for span in &timeline.spans {
            slice(&mut json, pid, first_tid, span);
        }
        first_tid += u64::from(timeline.num_ranks);
    }
    json.push_str("\n]}\n");
    json
}

fn slice(json: &mut String, pid: u64, first_tid: u64, span: &Span) {
    let Span { rank, action, start_ns, .. } = *span;
    let category = match action.kind {
        ActionKind::F => "forward",
        ActionKind::B => "backward",
        ActionKind::I => "input gradient",
        ActionKind::W => "weight gradient",
    };
    let tid = first_tid + u64::from(rank.0);
    let (ts, dur) = (microseconds(start_ns), microseconds(span.duration_ns()));
    let _ = write!(
        json,
        ",\n{{\"name\":\"{action}\",\"cat\":\"{category}\",\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\
         \"ts\":{ts},\"dur\":{dur},\"args\":{{\"stage\":{},\"microbatch\":{}}}}}",
        action.stage, action.microbatch
    );
}

/// Nanoseconds as microseconds with three decimals. It uses no float, because times past 2^53 ns would be rounded.
fn microseconds(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
