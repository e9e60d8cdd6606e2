//! The part of the page that shows losses.

use crate::soundness::{check, shown};
use dflop_report::{GroupLoss, LossPoint, Report};
use proptest::prelude::*;

fn point(step: u64, loss: f64, label_tokens: u64) -> LossPoint {
    LossPoint { step, loss, label_tokens }
}

fn group(name: &str, trained: Vec<LossPoint>, held_out: Vec<LossPoint>) -> GroupLoss {
    GroupLoss { name: name.to_owned(), trained, held_out }
}

/// Everything from the heading of the losses on.
fn section(report: &Report) -> String {
    let page = shown(report);
    check(&page);
    page[page.find("<section id=\"loss\"").unwrap()..].to_owned()
}

fn row(cells: &[&str]) -> String {
    let cell = |(i, text): (usize, &&str)| {
        if i == 0 { format!("<td>{text}</td>") } else { format!("<td class=\"n\">{text}</td>") }
    };
    format!("<tr>{}</tr>", cells.iter().enumerate().map(cell).collect::<String>())
}

/// Evaluations stand in the curve of training and in a table of their own.
#[test]
fn samples_that_are_held_out_have_their_line() {
    let report = Report {
        loss: vec![(0, 6.0), (1, 5.5)],
        held_out: vec![point(1, 5.75, 1_200), point(3, 5.25, 1_200), point(5, 5.5, 1_200)],
        ..Report::default()
    };
    let page = section(&report);
    let sentence = "Held out (3 evaluations): from 5.75 after step 1 to 5.50 after step 5; the lowest is 5.25 after step 3.";
    for text in [sentence, "held out, step 3: 5.25", "swatch m-held", "line m-held"] {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert!(
        page.contains("<td class=\"n\">5</td><td class=\"n\">5.50</td><td class=\"n\">1,200</td>"),
        "{page}"
    );
    // Of a run that was only evaluated, or never.
    assert!(section(&Report { loss: Vec::new(), ..report.clone() }).contains(sentence));
    assert!(!section(&Report { held_out: Vec::new(), ..report }).contains("held out"));
}

/// Means are over label tokens, the group with most of them stands first, what is not known is a dash.
#[test]
fn each_kind_and_source_has_its_line() {
    // Twenty steps: a tenth is two. (4 x 10 + 2 x 30) / 40 = 2.5; the last two 1.5 and 0.5 over equal tokens: 1.
    let mut images = vec![point(0, 4.0, 10), point(1, 2.0, 30)];
    images.extend((2..18).map(|step| point(step, 1.75, 10)));
    images.extend([point(18, 1.5, 10), point(19, 0.5, 10)]);
    let kinds = vec![
        group("audio", Vec::new(), vec![point(9, 7.5, 3)]),
        group("image", images, vec![point(9, 1.25, 8), point(19, 1.0, 8)]),
        group("text", vec![point(3, f64::NAN, 500)], Vec::new()),
    ];
    let report = Report { loss_by_kind: kinds.clone(), ..Report::default() };
    let page = section(&report);
    let rows = [
        row(&["text", "500", "-", "-", "-", "-"]),
        row(&["image", "220", "2.50", "1.00", "1.25", "1.00"]),
        row(&["audio", "0", "-", "-", "7.50", "7.50"]),
    ];
    assert!(page.contains(&rows.concat()), "{}\n{page}", rows.concat());
    assert!(page.contains("Loss by kind") && !page.contains("Loss by source"));
    assert!(page.contains("image, step 19: 0.500") && page.contains("audio, step 9: 7.50"), "{page}");
    assert!(section(&Report { loss_by_source: kinds, ..Report::default() }).contains("Loss by source"));
}

/// Nothing was held out: no columns of dashes. Kinds are called as in the rest of the page.
#[test]
fn what_nobody_measured_has_no_column() {
    let kinds = vec![group("multi_image", vec![point(0, 2.0, 5)], Vec::new())];
    let page = section(&Report { loss_by_kind: kinds, ..Report::default() });
    assert!(page.contains(&row(&["several images", "5", "2.00", "2.00"])), "{page}");
    assert!(!page.contains("held out"), "{page}");
}

/// Where arms train in turns a step has several updates, and each has a place of its own.
#[test]
fn losses_of_a_comparison_are_counted_by_update() {
    let trained = vec![point(1, 6.0, 5), point(2, 5.5, 5)];
    let report = Report {
        loss: vec![(1, 6.0), (2, 5.5)],
        is_loss_by_update: true,
        held_out: vec![point(2, 5.25, 9)],
        loss_by_kind: vec![group("text", trained, Vec::new())],
        ..Report::default()
    };
    let page = section(&report);
    for text in [
        "each of them is an update of the model: losses are counted by update",
        "Loss over updates, from 6.00 at update 1 to 5.50 at update 2.",
        "from 5.25 after update 2 to 5.25 after update 2",
        "text, update 2: 5.50",
        "first tenth of updates",
    ] {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert!(!section(&Report { is_loss_by_update: false, ..report }).contains("update"));
}

/// What is left out of a drawing is said below it.
#[test]
fn many_steps_and_sources_are_drawn_in_part() {
    // 601 steps, at most 60 points: 11 steps each.
    let steps = || (0..601).map(|step| point(step, 2.0, 5)).collect();
    let sources = (0..300).map(|i| group(&format!("source {i} {}", "long ".repeat(50)), steps(), Vec::new()));
    let page = section(&Report { loss_by_source: sources.collect(), ..Report::default() });
    for text in [
        "Each point is the mean over the label tokens of 11 steps.",
        "showing 8 of 300 sources, those with the most label tokens",
        "showing 200 of 300 sources",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.contains("In training</figcaption></figure>") && !page.contains("Held out"), "{page}");
    assert!(page.len() < 200_000, "{} bytes", page.len());
}

fn any_points() -> impl Strategy<Value = Vec<LossPoint>> {
    let number = prop_oneof![any::<f64>(), Just(f64::NAN), Just(f64::INFINITY), 0.0..9.0];
    let one = (any::<u64>(), number, prop_oneof![Just(0), any::<u64>()]);
    prop::collection::vec(one.prop_map(|(step, loss, tokens)| point(step, loss, tokens)), 0..70)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever was lost, the page is well formed and shows no number that is none.
    #[test]
    fn any_losses_make_a_sound_page(groups in prop::collection::vec((any_points(), any_points()), 1..12), held_out in any_points()) {
        let groups: Vec<GroupLoss> = groups.into_iter().map(|(a, b)| group("<b>\u{1b}", a, b)).collect();
        let report = Report { held_out, loss_by_kind: groups.clone(), loss_by_source: groups, ..Report::default() };
        section(&report);
    }
}
