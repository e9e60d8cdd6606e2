//! The page and the figure through the crate's two functions: what people see, and what must hold for any input.

use crate::small::{arm, ranked, sample, small, span, timeline};
use crate::soundness::{check, shown, without};
use dflop_report::{Comparison, Measured, Report, StepView, figure, render};
use dflop_types::{
    Action, ActionKind, DataProfile, EncoderSegments, Idle, MeasuredCurve, MeasuredPoint, ModelProfile,
    ModuleProfile, Problem, ProfiledSample, Rank, SampleKind, SampleShape, Span, StageIndex, Timeline,
};
use proptest::prelude::*;

const HOSTILE: &str = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp; \u{1b}[2J\u{202e}\u{7f} \
                       https://user:5ec12e7@host/a.jpg?X-Signature=5ec12e7";

/// The whole small page is what a person reviewed.
#[test]
fn a_small_page_looks_as_reviewed() {
    let page = shown(&small()).replace(env!("CARGO_PKG_VERSION"), "[VERSION]").replace("><", ">\n<");
    insta::assert_snapshot!(page);
}

/// The figure of the README is what a person reviewed.
#[test]
fn a_small_figure_looks_as_reviewed() {
    let figure = figure(
        &[("blind", &timeline(10)), ("aware", &timeline(0))],
        Some(&ranked(1, 1).layout),
        "Two ranks, two microbatches.",
    );
    check(&without(&figure, "style"));
    insta::assert_snapshot!(without(&figure, "style").replace("><", ">\n<"));
}

/// The page needs no other file and no network.
#[test]
fn the_page_stands_alone() {
    let page = render(&small());
    check(&shown(&small()));
    for outside in ["http:", "https:", "//cdn", "src=", "@import", "<link", "url(h", "fetch("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(
        figure(&[("blind", &timeline(1)), ("aware", &timeline(0))], None, "").matches("http").count() == 1,
        "only the name space of SVG"
    );
}

/// An empty report says that it is empty, and each part alone makes a page.
#[test]
fn every_part_is_optional() {
    let empty = shown(&Report::default());
    check(&empty);
    assert!(empty.contains("There is nothing to show"));
    assert!(!empty.contains("<section"));
    let whole = small();
    // On the heap: a report is large.
    let parts = vec![
        (Report { steps: whole.steps.clone(), ..Report::default() }, "id=\"timelines\""),
        (Report { comparison: whole.comparison.clone(), ..Report::default() }, "id=\"pairs\""),
        (Report { plan: whole.plan.clone(), ..Report::default() }, "id=\"plan\""),
        (Report { data: whole.data.clone(), ..Report::default() }, "id=\"data\""),
        (Report { model: whole.model.clone(), ..Report::default() }, "id=\"model\""),
        (Report { loss: whole.loss.clone(), ..Report::default() }, "id=\"loss\""),
        (Report { warnings: whole.warnings.clone(), ..Report::default() }, "id=\"warnings\""),
        (Report { facts: whole.facts, ..Report::default() }, "id=\"provenance\""),
    ];
    for (report, section) in parts {
        let page = shown(&report);
        check(&page);
        assert!(page.contains(section), "{section}");
    }
}

/// Waiting for data is a cause of its own where a step did, and no word of it is said where none did. The parts of a
/// split backward have their own colours.
#[test]
fn data_wait_is_shown_where_there_is_some() {
    let mut report = small();
    assert!(!shown(&report).contains("data wait"));
    assert!(!shown(&report).contains("backward, weights"));
    let late = report.steps.iter_mut().find_map(|step| step.measured.as_mut()).unwrap();
    late.idle_ns.data_wait = late.idle_ns.imbalance / 2;
    late.idle_ns.imbalance -= late.idle_ns.data_wait;
    let split = late.spans.iter_mut().find(|span| span.action.kind == ActionKind::B).unwrap();
    split.action.kind = ActionKind::W;
    let page = shown(&report);
    check(&page);
    assert!(page.contains("swatch c-data-wait") && page.contains("samples of the step are not there yet"));
    assert!(page.contains("swatch W") && page.contains("backward, weights"));
}

/// What ranks waited for samples before the step is drawn as data wait, and is no part of the step's idle time.
#[test]
fn data_wait_before_a_step_is_beside_its_idle_time() {
    // 22 of 2 x 35 ms idle: 31.4 % of the step, with or without 7 ms (20 % of it) before the step.
    let step = StepView {
        step: 1,
        arm: "aware".to_owned(),
        layout: None,
        predicted: None,
        measured: Some(timeline(0)),
        data_wait_ns: 7_000_000,
        is_rehearsed: false,
    };
    let page = shown(&Report { steps: vec![step], ..Report::default() });
    check(&page);
    assert!(page.contains("data wait: 7.00 ms a rank and step, 20.0 % of the step"), "{page}");
    assert!(page.contains("11.0 (31.4 %)"), "{page}");
}

/// The first sentence says faster, slower or no difference, as the interval has it.
#[test]
fn the_headline_says_no_more_than_the_interval() {
    let page = |ratio: f64, low, high| {
        let comparison =
            Comparison { ratio, ratio_low: low, ratio_high: high, ..small().comparison.unwrap() };
        shown(&Report { comparison: Some(comparison), ..Report::default() })
    };
    let faster = page(1.3, 1.2, 1.4);
    assert!(faster.contains(
        "Data-aware steps (aware) are <strong>1.300x as fast</strong> as the fastest baseline (blind)"
    ));
    assert!(page(0.8, 0.7, 0.9).contains("are <strong>0.800x as fast</strong> as the fastest baseline"));
    assert!(page(1.01, 0.99, 1.03).contains("No difference measured"));
    let unknown = page(f64::NAN, f64::NAN, f64::NAN);
    check(&unknown);
    assert!(unknown.contains("is not known"));
}

/// After training the measured step leads; what was planned stands below, and a ratio is formed with what can run alone.
#[test]
fn a_measured_number_leads_before_the_forecast() {
    let measured = Measured {
        num_steps: 3,
        is_rehearsed: false,
        step_ms_median: 8_110.0,
        over_predicted_median: 2.96,
        idle_ratio: 0.2,
    };
    let plan = small().plan;
    let page = shown(&Report { measured: Some(measured), plan: plan.clone(), ..Report::default() });
    check(&page);
    let headline = page.split("class=\"headline\"").nth(1).unwrap().split("</p>").next().unwrap();
    assert!(
        headline.contains("A step took <strong>8,110 ms</strong> (median of 3 measured steps)"),
        "{headline}"
    );
    assert!(
        headline.contains("2.960x the time that was predicted") && !headline.contains("expected"),
        "{headline}"
    );
    let forecast = shown(&Report { plan, ..Report::default() });
    assert!(forecast.contains("the best baseline that can run (blind-ahead) 37.0 ms (1.028x)"));
    assert!(forecast.contains("does not fit: a rank needs 131.00 GiB, memory budget 76.00 GiB"));
}

/// Arms stand by their step time, the fastest first, whatever the order in which they ran.
#[test]
fn arms_stand_by_their_time() {
    let comparison = small().comparison.unwrap();
    let mut arms = comparison.arms.clone();
    arms.reverse();
    let page = shown(&Report { comparison: Some(Comparison { arms, ..comparison }), ..Report::default() });
    let table = &page[page.find("Step time of every arm, the fastest first").unwrap()..];
    let table = &table[..table.find("</table>").unwrap()];
    let times: Vec<f64> = table
        .split(" ms</td>")
        .filter_map(|before| before.rsplit('>').next()?.replace(',', "").parse().ok())
        .collect();
    assert!(times.len() > 2 && times.is_sorted(), "{times:?}: {table}");
}

/// The pair shown is one of the same global batch, the one with the median ratio.
#[test]
fn the_median_pair_is_shown() {
    let step = |step, arm: &str, late| StepView {
        step,
        arm: arm.to_owned(),
        layout: None,
        predicted: None,
        measured: Some(timeline(late)),
        data_wait_ns: 0,
        is_rehearsed: false,
    };
    // Ratios 40/35, 55/35, 45/35 for the steps 7, 8, 9: the median is that of step 9.
    let steps = vec![
        step(7, "blind", 5),
        step(8, "blind", 20),
        step(9, "blind", 10),
        step(9, "aware", 0),
        step(8, "aware", 0),
        step(7, "aware", 0),
    ];
    let page = shown(&Report { steps, ..Report::default() });
    assert!(page.contains("One global batch, twice"));
    assert!(page.contains("showing 1 of 3 pairs"));
    assert!(page.contains("Timeline of step 9, blind, measured: 45.0 ms"));
    assert!(!page.contains("Timeline of step 7"));
    let apart = vec![step(0, "blind", 5), step(1, "aware", 0)];
    assert!(
        shown(&Report { steps: apart, ..Report::default() })
            .contains("A step of the baseline and one of ours")
    );
}

/// Names from files never become markup.
#[test]
fn hostile_names_are_escaped() {
    let mut report = small();
    let hostile = || HOSTILE.to_owned();
    report.title = hostile();
    report.facts.push((hostile(), hostile()));
    report.warnings.push(hostile());
    report.steps.push(StepView { arm: hostile(), ..report.steps[0].clone() });
    let data = report.data.as_mut().unwrap();
    data.family = hostile();
    data.sources[0] = hostile();
    data.samples[2].id = hostile();
    data.problems[0] = Problem {
        file: hostile(),
        position: None,
        id: Some(hostile()),
        cause: hostile(),
        ..Default::default()
    };
    data.made_from.insert(hostile(), hostile());
    let model = report.model.as_mut().unwrap();
    model.device.name = hostile();
    let module = model.modules["encoder_layer"].clone();
    model.modules.insert(hostile(), module);
    let page = shown(&report);
    check(&page);
    assert!(!page.contains("<script>alert") && !page.contains("<img"));
    assert!(page.contains("&lt;script&gt;alert(1)"));
    assert!(!page.contains(['\u{1b}', '\u{202e}', '\u{7f}']) && page.contains("\\u{1b}[2J\\u{202e}\\u{7f}"));
    assert!(!page.contains("5ec12e7") && page.contains("https://***@host/a.jpg?***"));
    let figure =
        figure(&[("blind", &timeline(1)), ("aware", &timeline(0))], None, &format!("{HOSTILE}\u{0}\u{1b}"));
    check(&without(&figure, "style"));
    assert!(!figure.contains("<script>") && !figure.contains("5ec12e7"));
    assert!(!figure.contains(['\u{0}', '\u{1b}', '\u{202e}']));
}

/// Steps without time, spans or ranks make a page and a figure.
#[test]
fn nothing_took_any_time() {
    let still = Timeline {
        num_ranks: 2,
        spans: vec![span(0, "0F0", 0, 0), span(1, "1F0", 0, 0)],
        ..Timeline::default()
    };
    for timeline in [Timeline::default(), still] {
        let step = |arm: &str| StepView {
            step: 0,
            arm: arm.to_owned(),
            layout: None,
            predicted: Some(timeline.clone()),
            measured: Some(timeline.clone()),
            data_wait_ns: u64::MAX,
            is_rehearsed: false,
        };
        let report = Report {
            steps: vec![step("blind"), step("aware"), step("")],
            comparison: Some(Comparison { pairs: vec![(0.0, 0.0)], ..Comparison::default() }),
            loss: vec![(0, f64::NAN), (1, f64::INFINITY)],
            ..Report::default()
        };
        let page = shown(&report);
        check(&page);
        assert!(page.contains("Not finite at 2 steps"));
        check(&without(&figure(&[("blind", &timeline), ("aware", &timeline)], None, ""), "style"));
    }
}

/// A page over large inputs stays small, and says what it left out.
#[test]
fn large_inputs_are_drawn_in_part_and_said_so() {
    let wide = Timeline {
        num_ranks: 512,
        makespan_ns: 20_000,
        spans: (0..200_000u64).map(|i| span((i % 512) as u32, "1F3", i / 10, i / 10 + 9)).collect(),
        ..Timeline::default()
    };
    let mut report = small();
    report.steps[0].measured = Some(wide.clone());
    report.steps[1].measured = Some(wide);
    report.steps.truncate(2);
    let first = report.steps[0].clone();
    report.steps.extend((10..3_000).map(|step| StepView {
        step,
        measured: Some(Timeline { num_ranks: 2, makespan_ns: step, ..Timeline::default() }),
        ..first.clone()
    }));
    report.loss = (0..100_000).map(|step| (step, 2.0)).collect();
    report.comparison.as_mut().unwrap().pairs = vec![(2.0, 1.0); 20_000];
    let data = report.data.as_mut().unwrap();
    data.samples = (0..200_000)
        .map(|i| sample(&"long name ".repeat(100), SampleKind::Image, 1 + i % 40, 1 + (i * 7919) % 50_000))
        .collect();
    data.problems = vec![data.problems[0].clone(); 5_000];
    data.sources = vec!["source".repeat(100); 5_000];
    let page = shown(&report);
    check(&page);
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    for text in [
        "showing 16 of 512 ranks",
        "showing 600 of 20,000 pairs",
        "showing 1,500 of 200,000 samples",
        "showing 1,000 of 100,000 steps",
        "showing the first 20 of 5,000 problems",
        "showing the first 200 of 20,000 pairs",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

fn any_ns() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..4, 0u64..100_000_000, Just(u64::MAX), any::<u64>()]
}

fn any_float() -> impl Strategy<Value = f64> {
    prop_oneof![0.0..2.0, any::<f64>(), Just(f64::NAN), Just(f64::INFINITY), Just(0.0), Just(f64::MAX)]
}

fn any_timeline() -> impl Strategy<Value = Timeline> {
    let kind = prop::sample::select(vec![ActionKind::F, ActionKind::B, ActionKind::I, ActionKind::W]);
    let span = (prop_oneof![0u32..4, any::<u32>()], 0u32..4, kind, any::<u32>(), any_ns(), any_ns());
    let span = span.prop_map(|(rank, stage, kind, microbatch, start_ns, end_ns)| Span {
        rank: Rank(rank),
        action: Action { stage: StageIndex(stage), kind, microbatch },
        start_ns,
        end_ns,
    });
    let idle = (any_ns(), any_ns(), any_ns(), any_ns());
    (prop_oneof![0u32..6, any::<u32>()], any_ns(), idle, prop::collection::vec(span, 0..24)).prop_map(
        |(num_ranks, makespan_ns, (ramp, imbalance, transfer, data_wait), spans)| Timeline {
            num_ranks,
            makespan_ns,
            idle_ns: Idle { ramp, imbalance, transfer, data_wait },
            spans,
        },
    )
}

fn any_steps() -> impl Strategy<Value = Vec<StepView>> {
    let arm = prop::sample::select(vec!["blind", "aware", "other"]);
    let step = (0u64..4, arm, prop::option::of(any_timeline()), prop::option::of(any_timeline()));
    let step = step.prop_map(|(step, arm, predicted, measured)| StepView {
        step,
        arm: arm.to_owned(),
        layout: None,
        predicted,
        measured,
        data_wait_ns: 0,
        is_rehearsed: false,
    });
    prop::collection::vec(step, 0..6)
}

fn any_report() -> impl Strategy<Value = Report> {
    let floats = prop::collection::vec(any_float(), 9);
    let pairs = prop::collection::vec((any_float(), any_float()), 0..12);
    let comparison = prop::option::of((floats, pairs)).prop_map(|values| {
        values.map(|(v, pairs)| Comparison {
            baseline: HOSTILE.to_owned(),
            ours: "aware".to_owned(),
            step_ms_baseline: v[0],
            step_ms_ours: v[1],
            ratio: v[2],
            ratio_low: v[3],
            ratio_high: v[4],
            pairs,
            idle_ratio_baseline: v[5],
            idle_ratio_ours: v[6],
            prediction_error_median: v[7],
            prediction_error_p95: v[8],
            corrected_error_median: Some(v[7]),
            corrected_error_p95: None,
            arms: vec![
                arm(HOSTILE, true, v[0], v[2]),
                arm("aware", false, v[1], v[2]),
                arm("", false, v[3], v[4]),
            ],
        })
    });
    let loss = prop::collection::vec((any::<u64>(), any_float()), 0..12);
    let kind = prop::sample::select(SampleKind::ALL.to_vec());
    let segment = (any::<u32>(), any::<u32>()).prop_map(|(count, tokens)| EncoderSegments::of(count, tokens));
    let one = (kind, prop::collection::vec(segment, 0..4), prop_oneof![0u32..50, any::<u32>()], any_ns());
    let one = one.prop_map(|(kind, encoder_segments, llm_tokens, media_bytes)| ProfiledSample {
        shape: SampleShape {
            encoder_segments,
            llm_tokens,
            label_tokens: llm_tokens / 2,
            ..SampleShape::default()
        },
        media_bytes,
        ..sample("s", kind, 0, 0)
    });
    let samples = prop::option::of(prop::collection::vec(one, 0..20));
    let point = (any_ns(), any_ns(), any_ns(), any_ns());
    let points = prop::option::of(prop::collection::vec(point, 0..8));
    (any_steps(), comparison, loss, samples, points, (any_ns(), any_float())).prop_map(
        |(steps, comparison, loss, samples, points, (ns, share))| {
            let whole = small();
            let mut plan = whole.plan.unwrap();
            plan.best.prediction.step_ns_mean = ns;
            plan.best.prediction.bubble_ratio = share;
            plan.rejections[0].count = ns;
            let model = points.map(|points| {
                let point = |&(size, forward_ns, backward_ns, activation_bytes): &(u64, u64, u64, u64)| {
                    MeasuredPoint {
                        size,
                        forward_ns,
                        backward_ns,
                        activation_bytes,
                        repeats: 1,
                        ..MeasuredPoint::default()
                    }
                };
                let points = points.iter().map(point).collect();
                let curve = MeasuredCurve { points, ..MeasuredCurve::default() };
                let module =
                    ModuleProfile { linear: curve.clone(), attention: curve, ..ModuleProfile::default() };
                ModelProfile { modules: [("llm_layer".to_owned(), module)].into(), ..ModelProfile::default() }
            });
            let data = samples.map(|samples| DataProfile { samples, ..whole.data.unwrap() });
            Report { steps, comparison, loss, data, model, plan: Some(plan), ..Report::default() }
        },
    )
}

proptest! {
    /// Whatever the numbers, the page is well formed, shows no number that is none, and is the same each time.
    #[test]
    fn any_report_makes_a_sound_page(report in any_report()) {
        let page = shown(&report);
        check(&page);
        prop_assert_eq!(page, shown(&report));
    }

    /// Whatever the timelines, the figure is well formed, and is the same each time.
    #[test]
    fn any_timelines_make_a_sound_figure(blind in any_timeline(), aware in any_timeline()) {
        let drawn = figure(&[("blind", &blind), ("aware", &aware)], None, "caption");
        check(&without(&drawn, "style"));
        prop_assert_eq!(&drawn, &figure(&[("blind", &blind), ("aware", &aware)], None, "caption"));
    }
}

/// Why a step was slow and what changed: words, a drawing that names its actions, and all of it in tables.
#[test]
fn a_slow_step_is_explained() {
    let link = |action: &str, rank, start_ns, end_ns| dflop_report::PathLink {
        action: action.to_owned(),
        rank,
        is_forward: action.contains('F'),
        start_ns,
        end_ns,
        predicted_ns: 1_000_000,
        gap_ns: 0,
        samples: format!("`{HOSTILE}`, a video"),
    };
    let step = dflop_report::SlowStep {
        step: 412,
        arm: "aware".to_owned(),
        makespan_ns: 9_000_000,
        words: vec![
            "It took 9.0 ms.".to_owned(),
            format!("rank 3 ran {HOSTILE}"),
            "its largest sample is `a<b`, a video".to_owned(),
            "a ` alone".to_owned(),
        ],
        path: vec![link("0F2", 3, 0, 4_000_000), link("1B2", 5, 4_000_000, 9_000_000)],
    };
    let event =
        dflop_report::EventView { step: 40, is_alarm: true, words: "rank 3 takes 1.50 times".to_owned() };
    let page = shown(&Report { slow_steps: vec![step], events: vec![event], ..Report::default() });
    check(&page);
    for text in [
        "Why the slowest steps were slow",
        "Step 412",
        "0F2 on rank 3",
        "Critical path of step 412: 2 actions on 2 ranks.",
        "its largest sample is <code>a&lt;b</code>, a video",
        "a ` alone",
        "What changed",
        "1 alarm",
        "rank 3 takes 1.50 times",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.contains("<script>alert") && !page.contains("5ec12e7"), "{page}");
}
