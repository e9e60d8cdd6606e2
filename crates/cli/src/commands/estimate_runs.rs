//! `dflop estimate`: step time and memory of runs of text-only GPT models, from a table into a table.

use crate::Failure;
use crate::args;
use crate::runs::{Measured, Predicted, Predictor, Runs};
use dflop_analytic::{HARDWARE, Hardware};
use dflop_types::number::{percent, signed_percent};
use dflop_types::{counted, regular};
use std::collections::BTreeMap;
use std::path::Path;

/// Reasons for blank rows that are shown, at most.
const SHOWN_MAX: usize = 6;

pub(super) fn run(arguments: &args::EstimateRuns) -> Result<(), Failure> {
    if arguments.device.as_deref() == Some("list") {
        for hardware in &HARDWARE {
            let basis = hardware.chip.map_or_else(
                || "efficiencies assumed".to_owned(),
                |chip| format!("kernels as measured on {}", chip.to_uppercase()),
            );
            outln!("{:<12}{:<32}{basis}", hardware.name, hardware.title);
        }
        return Ok(());
    }
    let (Some(path), Some(out)) = (&arguments.runs, &arguments.out) else {
        return Err(Failure::new("`dflop estimate` needs `--runs` and `--out`", None));
    };
    if let Some(device) = &arguments.device {
        Hardware::named(device)?;
    }
    let bytes = regular::read(path, super::INPUT_BYTES_MAX)
        .map_err(|error| Failure::new(format!("cannot read `{}`: {error}", path.display()), None))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Failure::new(format!("`{}` is not text in UTF-8", path.display()), None))?;
    let runs = Runs::read(path, text.trim_start_matches('\u{feff}'), arguments.device.as_deref())?;
    let is_own = |out: &Path| {
        let text = std::fs::read(out).unwrap_or_default();
        Runs::is_written(&String::from_utf8_lossy(&text))
            || std::fs::canonicalize(out).ok() == std::fs::canonicalize(path).ok()
    };
    if out.is_file() && !is_own(out) {
        let hint = Some("choose another place with `--out`, or delete it".to_owned());
        let message = format!("`{}` is there, and is no table that `dflop estimate` wrote", out.display());
        return Err(Failure::new(message, hint));
    }
    for name in &runs.unread {
        talk!("note: column `{name}` is carried along, and not read");
    }
    let (mut predictor, mut reasons) = (Predictor::default(), BTreeMap::<String, u64>::new());
    let mut predictions = Vec::with_capacity(runs.asked.len());
    for row in &runs.asked {
        let predicted = predictor.predict(row);
        predictions.push(predicted.map_err(|why| *reasons.entry(why.to_string()).or_default() += 1).ok());
    }
    std::fs::write(out, runs.with(&predictions)?).map_err(|error| {
        let hint = Some("choose another place with `--out`".to_owned());
        Failure::new(format!("cannot write `{}`: {error}", out.display()), hint)
    })?;
    say(&runs, &predictions);
    for (why, count) in reasons.iter().take(SHOWN_MAX) {
        talk!("note: {} left blank: {why}", counted(*count, "row"));
    }
    if reasons.len() > SHOWN_MAX {
        talk!(
            "note: further rows left blank, for {}",
            counted((reasons.len() - SHOWN_MAX) as u64, "other reason")
        );
    }
    let outside = predictions.iter().flatten().filter(|predicted| predicted.is_extrapolated).count();
    if outside > 0 {
        talk!("note: {} beyond the sizes of the estimate", counted(outside as u64, "row"));
    }
    talk!("wrote {}", out.display());
    Ok(())
}

/// What was predicted, beside what was measured where the table says it.
fn say(runs: &Runs, predictions: &[Option<Predicted>]) {
    let predicted = predictions.iter().flatten().count();
    outln!(
        "{}, {predicted} with a prediction: estimated, not measured",
        counted(predictions.len() as u64, "run")
    );
    let ms = |predicted: &Predicted| predicted.step_ns as f64 / 1e6;
    let times: Vec<Measured> =
        ["iteration_ms", "step_ms_median"].into_iter().filter_map(|name| runs.measured(name)).collect();
    let is_one = times.len() == 1;
    for measured in times {
        // A table that has both is compared with each.
        let what = if is_one { "step time".to_owned() } else { format!("step time (`{}`)", measured.name) };
        compare(&what, &measured, predictions, ms);
    }
    let bytes = |predicted: &Predicted| predicted.peak_bytes as f64;
    if let Some(measured) = runs.measured("peak_allocated_bytes") {
        compare("peak memory", &measured, predictions, bytes);
    }
}

/// Errors against a measured column.
fn compare(
    what: &str,
    measured: &Measured,
    predictions: &[Option<Predicted>],
    of: impl Fn(&Predicted) -> f64,
) {
    if measured.num_unread > 0 {
        let cells = counted(measured.num_unread, "cell");
        talk!(
            "note: column `{}`: {cells} without a number above 0, left out of the comparison",
            measured.name
        );
    }
    let pairs = measured.numbers.iter().zip(predictions);
    let error = |(measured, predicted): (&Option<f64>, &Option<Predicted>)| {
        Some(of(predicted.as_ref()?) / (*measured)? - 1.0)
    };
    let errors: Vec<f64> = pairs.filter_map(error).collect();
    if errors.is_empty() {
        return;
    }
    let mean = errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
    let (least, most) =
        errors.iter().fold((f64::MAX, f64::MIN), |(least, most), &e| (least.min(e), most.max(e)));
    outln!(
        "{what} against what was measured, {}: mean absolute error {}, {} to {}",
        counted(errors.len() as u64, "run"),
        percent(mean),
        signed_percent(least),
        signed_percent(most)
    );
}
