//! The figure of plans under other conditions.

use dflop_report::{Sweep, SweepLine, sweep};

/// Two lines of three values: heights by hand, a gap where nothing fits, and names that cannot break the file.
#[test]
fn a_sweep_has_its_points_at_their_heights() {
    let line = |name: &str, plan: [Option<f64>; 3]| SweepLine {
        name: name.to_owned(),
        plan: plan.to_vec(),
        baseline: vec![Some(50.0); 3],
    };
    let drawn = sweep(&Sweep {
        field: "cluster.num_ranks".to_owned(),
        values: ["8", "16", "32"].map(str::to_owned).to_vec(),
        lines: vec![
            line("data.weights.video 0.2", [Some(100.0), None, Some(200.0)]),
            line("a <b> & \"c\"", [Some(f64::NAN), Some(100.0), Some(150.0)]),
        ],
    });
    // From 312 (0) up to 34 (1.06 x 200): 100 stands at 312 - 278 x 100 / 212, 200 at 312 - 278 x 200 / 212.
    for text in [
        "cy=\"180.87\"",
        "cy=\"49.74\"",
        "d=\"M170 180.87M594 49.74\"",
        "plan at 8: 100 a second",
        "&lt;b&gt; &amp;",
    ] {
        assert!(drawn.contains(text), "{text}: {drawn}");
    }
    assert_eq!(drawn.matches("<circle").count(), 4 + 6, "{drawn}");
    assert!(!drawn.contains("NaN") && drawn.starts_with("<svg xmlns=") && drawn.ends_with("</svg>\n"));
}

#[test]
fn a_sweep_in_which_nothing_fits_is_an_empty_figure() {
    let line = SweepLine { name: String::new(), plan: vec![None], baseline: vec![None] };
    let drawn = sweep(&Sweep {
        field: "cluster.device".to_owned(),
        values: vec!["a100-40gb".to_owned()],
        lines: vec![line],
    });
    assert!(!drawn.contains("<circle") && drawn.contains("a100-40gb"), "{drawn}");
}
