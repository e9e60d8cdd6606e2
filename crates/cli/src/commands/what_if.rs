//! `dflop simulate --set FIELD=VALUE[,VALUE...]`: the best plan under other conditions, one row for each combination.

mod setting;

use super::plan::sampled_batches;
use super::{Inputs, caveats};
use crate::Failure;
use crate::config::Config;
use dflop_plan::{Only, Outcome, SearchEffort, SearchInput, search};
use dflop_report::{Sweep, SweepLine};
use dflop_types::number::thousands;
use dflop_types::{
    DataProfile, MadeFrom, ModelProfile, ProfiledSample, RankedPlan, Rejection, SampleKind, SampleShape,
    WayPrediction, artifact,
};
use serde_json::json;
pub(crate) use setting::{Setting, check_named_once, setting};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Combinations at most: each is a search of about a second.
const ROWS_MAX: usize = 1_000;

/// Samples of a step at most, where the data has fewer: 4 for each of 4,096 ranks. Such a search takes some twenty
/// seconds, and more samples take as much longer.
const STEP_SAMPLES_MAX: u32 = 16_384;

/// One combination: what is planned with.
struct Case {
    values: Vec<String>,
    config: Config,
    model: ModelProfile,
    /// Parts of all samples that kinds are to have.
    weights: BTreeMap<usize, f64>,
    /// Whether the batch grows and shrinks with the ranks: nothing sets it.
    is_batch_set: bool,
    /// Samples with more LLM tokens are left out.
    llm_tokens_max: Option<u64>,
}

impl Case {
    /// The samples that the limit on their length leaves, and how many are above it.
    fn within<'a>(&self, data: &'a DataProfile) -> (Cow<'a, DataProfile>, u64) {
        let Some(most) = self.llm_tokens_max else { return (Cow::Borrowed(data), 0) };
        let is_within = |sample: &&ProfiledSample| u64::from(sample.shape.llm_tokens) <= most;
        let samples: Vec<ProfiledSample> = data.samples.iter().filter(is_within).cloned().collect();
        let num_above = (data.samples.len() - samples.len()) as u64;
        (Cow::Owned(DataProfile { samples, ..data.clone() }), num_above)
    }
}

/// One combination, and what its search found or why there could be none.
struct Row {
    case: Case,
    answer: Result<Outcome, Failure>,
    /// Samples that are longer than the row's limit, and so not in its steps.
    num_above: u64,
    /// Whether a step takes some sample more than once, as the data has too few.
    is_repeated: bool,
    /// Samples of a step: fewer than `train.global_batch_size` where there are fewer.
    num_samples: u32,
}

impl Row {
    fn best(&self) -> Option<&RankedPlan> {
        self.answer.as_ref().ok()?.ranked.first()
    }

    /// Why no plan fits; `None` where one does.
    fn reason(&self) -> Option<String> {
        let outcome = match &self.answer {
            Err(failure) => return Some(failure.message.clone()),
            Ok(outcome) if !outcome.ranked.is_empty() => return None,
            Ok(outcome) => outcome,
        };
        let is_said = |rejection: &&Rejection| !matches!(rejection, Rejection::Bound | Rejection::Estimate);
        let first = outcome.rejections.iter().map(|count| &count.rejection).find(is_said);
        Some(first.map_or_else(|| "no layout is a candidate".to_owned(), Rejection::to_string))
    }

    fn hint(&self) -> Option<String> {
        match &self.answer {
            Ok(outcome) => outcome.hint(),
            Err(failure) => failure.hint.clone(),
        }
    }
}

/// The shapes of the samples of each kind, by the place of the kind.
fn by_kind(data: &DataProfile) -> Vec<Vec<&SampleShape>> {
    let mut of_kind: Vec<Vec<&SampleShape>> = vec![Vec::new(); SampleKind::ALL.len()];
    for sample in &data.samples {
        let kind = SampleKind::ALL.iter().position(|kind| *kind == sample.kind).unwrap_or(0);
        of_kind[kind].push(&sample.shape);
    }
    of_kind
}

/// `Ok` if the data can have these parts: together one at most, and samples of each kind that has a part.
fn check_mix(of_kind: &[Vec<&SampleShape>], weights: &BTreeMap<usize, f64>) -> Result<(), Failure> {
    let given: f64 = weights.values().sum();
    let is_other = |kind: usize| !weights.contains_key(&kind);
    let has_others = of_kind.iter().enumerate().any(|(kind, of)| is_other(kind) && !of.is_empty());
    // 0.7 and 0.6 add up to 1.3, not to 1.2999999999999998.
    let given = (given * 1e6).round() / 1e6;
    if given > 1.0 + 1e-9 || (!has_others && (given - 1.0).abs() > 1e-9) {
        let rule =
            format!("the parts add up to {given}, must to {}", if has_others { "1 at most" } else { "1" });
        return Err(Failure::new(format!("`--set data.weights`: {rule}"), None));
    }
    match weights.iter().find(|&(&kind, &part)| part > 0.0 && of_kind[kind].is_empty()) {
        Some((&kind, _)) => {
            let name = SampleKind::ALL[kind].to_string();
            Err(Failure::new(format!("`--set data.weights.{name}`: the data has no such sample"), None))
        }
        None => Ok(()),
    }
}

/// The shapes of `count` samples in which kinds have the parts of `weights`, the others as before among themselves; of each
/// kind samples evenly spread over those there are.
fn mixed(
    data: &DataProfile,
    weights: &BTreeMap<usize, f64>,
    count: usize,
) -> Result<Vec<SampleShape>, Failure> {
    if weights.is_empty() {
        // In their own order, so that global batches are those of `dflop plan`.
        return Ok(data.samples.iter().cycle().take(count).map(|sample| sample.shape.clone()).collect());
    }
    let of_kind = by_kind(data);
    check_mix(&of_kind, weights)?;
    let given: f64 = weights.values().sum();
    let others: usize = of_kind
        .iter()
        .enumerate()
        .filter(|(kind, _)| !weights.contains_key(kind))
        .map(|(_, of)| of.len())
        .sum();
    let mut shapes = Vec::with_capacity(count);
    for (kind, of) in of_kind.iter().enumerate() {
        let part = weights
            .get(&kind)
            .copied()
            .unwrap_or_else(|| (1.0 - given) * of.len() as f64 / others.max(1) as f64);
        let wanted = (part * count as f64).round() as usize;
        // Fewer than there are: evenly spread over them; more: each comes as often as the others, once more or less.
        let at = |turn: usize| if wanted <= of.len() { turn * of.len() / wanted } else { turn % of.len() };
        shapes.extend((0..wanted).map(|turn| of[at(turn)].clone()));
    }
    Ok(shapes)
}

/// Every combination of the settings' values, the last setting changing fastest.
fn combinations(settings: &[Setting]) -> Vec<Vec<String>> {
    settings.iter().fold(vec![Vec::new()], |rows, setting| {
        rows.iter()
            .flat_map(|row| {
                setting.values.iter().map(move |value| [row.as_slice(), std::slice::from_ref(value)].concat())
            })
            .collect()
    })
}

/// Files that the rows are also written to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Files<'a> {
    pub(super) csv: Option<&'a Path>,
    pub(super) plot: Option<&'a Path>,
}

/// Plans each combination and prints a row for it: as CSV to a file, as JSON, or as a table. Draws them where a file for
/// that is named.
pub(super) fn run(
    inputs: &Inputs,
    settings: &[Setting],
    files: Files<'_>,
    is_json: bool,
) -> Result<(), Failure> {
    let num_rows = settings.iter().fold(1_usize, |rows, setting| rows.saturating_mul(setting.values.len()));
    if num_rows > ROWS_MAX {
        return Err(Failure::new(
            format!("{} combinations, at most {}", thousands(num_rows as u64), thousands(ROWS_MAX as u64)),
            Some("give fewer values to `--set`".to_owned()),
        ));
    }
    for (path, kind, flag) in [(files.csv, "table", "--csv FILE"), (files.plot, "figure", "--plot FILE")] {
        path.map(|path| artifact::target(path, kind))
            .transpose()
            .map_err(|error| Failure::of_flag(error, flag))?;
    }
    // All values are checked before the first search: what the last one breaks must not cost the work of the others.
    let cases: Vec<Case> = combinations(settings)
        .into_iter()
        .map(|values| case(inputs, settings, values))
        .collect::<Result<_, _>>()?;
    let found: Vec<Row> = cases
        .into_iter()
        .map(|case| {
            let (data, num_above) = case.within(&inputs.data_profile);
            let own = inputs.config.train.global_batch_size;
            let count = samples_for(&case, &data, own);
            let is_repeated = count > data.samples.len();
            let answer = planned(&case, &data, count);
            let asked = case.config.train.global_batch_size;
            let num_samples = asked.min(u32::try_from(count).unwrap_or(u32::MAX));
            Row { case, answer, num_above, is_repeated, num_samples }
        })
        .collect();
    say_above(&found, inputs.data_profile.samples.len() as u64);
    caveats::say(found.iter().filter_map(|row| row.answer.as_ref().ok()));
    if found.iter().any(|row| row.is_repeated && row.answer.is_ok()) {
        caveats::say_repeated();
    }
    let is_short =
        |row: &&Row| row.num_samples < row.case.config.train.global_batch_size && row.answer.is_ok();
    if let Some(row) = found.iter().find(is_short) {
        caveats::say_fewer(row.num_samples.into(), row.case.config.train.global_batch_size);
    }
    show(settings, &found, files.csv, is_json)?;
    if let Some(path) = files.plot {
        let text = dflop_report::sweep(&drawn(settings, &found));
        artifact::write_text(path, "figure", &text)
            .map_err(|error| Failure::of_flag(error, "--plot FILE"))?;
        talk!("wrote {}", path.display());
    }
    let Some(first) = found.first().filter(|_| found.iter().all(|row| row.best().is_none())) else {
        return Ok(());
    };
    let which = if found.len() == 1 { String::new() } else { "; the first".to_owned() };
    Err(Failure::answer(format!("no plan fits{which}: {}", first.reason().unwrap_or_default()), first.hint()))
}

/// The case of one combination, with all its values checked.
fn case(inputs: &Inputs, settings: &[Setting], values: Vec<String>) -> Result<Case, Failure> {
    let mut case = Case {
        values,
        config: inputs.config.clone(),
        model: inputs.model_profile.clone(),
        weights: BTreeMap::new(),
        is_batch_set: settings.iter().any(|setting| setting.field == "train.global_batch_size"),
        llm_tokens_max: None,
    };
    case.set_all(settings)?;
    let (within, num_above) = case.within(&inputs.data_profile);
    if within.samples.is_empty() && num_above > 0 {
        let most = case.llm_tokens_max.unwrap_or(0);
        let rule = format!("all {} samples have more LLM tokens", thousands(num_above));
        return Err(Failure::new(format!("`--set data.llm_tokens_max={most}`: {rule}"), None));
    }
    check_mix(&by_kind(&within), &case.weights)?;
    let (size, num_samples) = (case.config.train.global_batch_size, inputs.data_profile.samples.len());
    let most = u32::try_from(num_samples).unwrap_or(u32::MAX).max(STEP_SAMPLES_MAX);
    // What the configuration has by itself is planned as `dflop plan` does.
    if size > most && size != inputs.config.train.global_batch_size {
        let named = settings.iter().zip(&case.values).find(|(setting, _)| {
            setting.field == if case.is_batch_set { "train.global_batch_size" } else { "cluster.num_ranks" }
        });
        let named =
            named.map_or_else(String::new, |(setting, value)| format!("`--set {}={value}`: ", setting.field));
        return Err(Failure::new(
            format!(
                "{named}a step of {} samples, at most {} where the data has {}",
                thousands(size.into()),
                thousands(most.into()),
                thousands(num_samples as u64)
            ),
            Some(format!("set `train.global_batch_size` to {most} or less")),
        ));
    }
    Ok(case)
}

/// The rows as lines over the values of the first setting.
fn drawn(settings: &[Setting], found: &[Row]) -> Sweep {
    let (first, others) = settings.split_first().expect("clap asks for a setting");
    // The last setting changes fastest, so the rows of one value of the first stand together.
    let num_lines = found.len() / first.values.len().max(1);
    let per_s =
        |row: &Row, ns: Option<u64>| ns.map(|ns| f64::from(row.num_samples) / (ns.max(1) as f64 / 1e9));
    let line = |at: usize| {
        let of_line: Vec<&Row> = found.iter().skip(at).step_by(num_lines.max(1)).collect();
        let named = others.iter().zip(&found[at].case.values[1..]);
        let rate = |step_ns: fn(&Outcome) -> Option<u64>| {
            of_line
                .iter()
                .map(|row| row.answer.as_ref().ok().and_then(|outcome| per_s(row, step_ns(outcome))))
                .collect()
        };
        SweepLine {
            name: named
                .map(|(field, value)| format!("{} {value}", field.field))
                .collect::<Vec<_>>()
                .join(", "),
            plan: rate(|outcome| outcome.ranked.first().map(|plan| plan.prediction.step_ns_mean)),
            baseline: rate(|outcome| WayPrediction::best_baseline(&outcome.ways).map(|(_, ns)| ns)),
        }
    };
    Sweep {
        field: first.field.clone(),
        values: first.values.clone(),
        lines: (0..num_lines).map(line).collect(),
    }
}

/// Says how many samples each limit on their length leaves out, and what training does with such.
fn say_above(found: &[Row], num_samples: u64) {
    let mut said: Vec<u64> = Vec::new();
    for row in found {
        let Some(most) = row.case.llm_tokens_max.filter(|most| row.num_above > 0 && !said.contains(most))
        else {
            continue;
        };
        said.push(most);
        talk!(
            "note: {} of {} samples have more than {} LLM tokens: rows with that limit are without them; `dflop train` cuts no sample and trains these too, unless the data leaves them out",
            thousands(row.num_above),
            thousands(num_samples),
            thousands(most)
        );
    }
}

/// How many samples a row plans with: those there are, each more than once where a step takes more. A step of `own` samples, as
/// the configuration has it, takes no more than there are, as under `dflop plan`.
fn samples_for(case: &Case, data: &DataProfile, own: u32) -> usize {
    let size = case.config.train.global_batch_size;
    let needed = if size == own { 0 } else { size as usize };
    data.samples.len().max(needed)
}

fn planned(case: &Case, data: &DataProfile, count: usize) -> Result<Outcome, Failure> {
    let config = &case.config;
    let size = config.train.global_batch_size;
    let shapes = mixed(data, &case.weights, count)?;
    Ok(search(&SearchInput {
        shapes: shapes.into(),
        model_profile: &case.model,
        cluster: config.cluster(),
        global_batch_size: size,
        num_microbatches: config.train.num_microbatches,
        giants: config.giants(),
        bucket_tokens_max: config.train.bucket_tokens_max,
        trained: config.trained(),
        order: config.train.order(),
        objective: config.objective(),
        num_steps: config.train.steps,
        num_sampled_batches: sampled_batches(size),
        only: Only::default(),
        compares: false,
        effort: SearchEffort::Quick,
        halt: &|| false,
        seed: config.train.seed,
        made_from: MadeFrom::new(),
        progress: &|_, _| {},
    })?)
}

fn show(settings: &[Setting], found: &[Row], csv: Option<&Path>, is_json: bool) -> Result<(), Failure> {
    let fields: Vec<&str> = settings.iter().map(|setting| setting.field.as_str()).collect();
    let mut head: Vec<String> = fields.iter().map(|&field| field.to_owned()).collect();
    head.extend(
        [
            "samples",
            "step_ms",
            "samples_per_s",
            "peak_gib",
            "work_bound_ms",
            "best_baseline_ms",
            "layout",
            "reason",
        ]
        .map(str::to_owned),
    );
    let mut rows = Vec::new();
    let mut objects = Vec::new();
    for row in found {
        let ms = |ns: u64| ns as f64 / 1e6;
        let size = row.num_samples;
        let (best, reason) = (row.best(), row.reason());
        let outcome = row.answer.as_ref().ok();
        let step_ns = best.map(|plan| plan.prediction.step_ns_mean);
        let baseline =
            outcome.and_then(|outcome| WayPrediction::best_baseline(&outcome.ways)).map(|(_, ns)| ns);
        let work_bound = outcome.map(|outcome| ms(outcome.work_bound_ns));
        let per_s = step_ns.map(|ns| f64::from(size) / (ns.max(1) as f64 / 1e9));
        let peak = best
            .map(|plan| plan.prediction.encoder_memory_bytes_peak.max(plan.prediction.llm_memory_bytes_peak));
        let layout = best.map_or_else(|| "no plan fits".to_owned(), RankedPlan::in_words);
        let shown = |number: Option<f64>, digits: usize| {
            number.map_or_else(String::new, |number| format!("{number:.digits$}"))
        };
        let mut cells = row.case.values.clone();
        cells.extend([
            size.to_string(),
            shown(step_ns.map(ms), 1),
            shown(per_s, 1),
            shown(peak.map(|bytes| bytes as f64 / f64::from(1 << 30)), 2),
            shown(work_bound, 1),
            shown(baseline.map(ms), 1),
            layout,
            reason.clone().unwrap_or_default(),
        ]);
        objects.push(json!({
            "set": fields.iter().zip(&row.case.values).collect::<BTreeMap<_, _>>(),
            "global_batch_size": row.case.config.train.global_batch_size,
            "samples": size,
            "num_samples_above": row.num_above,
            "step_ms": step_ns.map(ms),
            "samples_per_s": per_s,
            "peak_bytes": peak,
            "work_bound_ms": work_bound,
            "best_baseline_ms": baseline.map(ms),
            "plan": best,
            "reason": reason,
            "hint": row.hint(),
        }));
        rows.push(cells);
    }
    if let Some(path) = csv {
        let quoted = |cell: &String| {
            if cell.contains([',', '"']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell.clone()
            }
        };
        let line = |cells: &Vec<String>| cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n";
        let text: String = std::iter::once(&head).chain(&rows).map(line).collect();
        artifact::write_text(path, "table", &text).map_err(|error| Failure::of_flag(error, "--csv FILE"))?;
        talk!("wrote {}", path.display());
    }
    if is_json {
        outln!("{:#}", json!(objects));
    } else if csv.is_none() {
        // People need no column of reasons where there are none; a file has the same columns always.
        if rows.iter().all(|row| row.last().is_some_and(String::is_empty)) {
            for row in std::iter::once(&mut head).chain(&mut rows) {
                row.pop();
            }
        }
        let widths: Vec<usize> = (0..head.len())
            .map(|at| std::iter::once(&head).chain(&rows).map(|row| row[at].len()).max().unwrap_or(0))
            .collect();
        for row in std::iter::once(&head).chain(&rows) {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            outln!("{}", cells.join("  ").trim_end());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_setting_changes_fastest() {
        let settings = [setting("a=1,2").unwrap(), setting("b=x,y").unwrap()];
        assert_eq!(combinations(&settings), [["1", "x"], ["1", "y"], ["2", "x"], ["2", "y"]]);
    }

    #[test]
    fn a_mix_has_the_parts_asked_for() {
        let sample = |kind, tokens| ProfiledSample {
            kind,
            shape: SampleShape { llm_tokens: tokens, ..SampleShape::default() },
            ..ProfiledSample::default()
        };
        let data = DataProfile {
            samples: (0..10)
                .map(|at| sample(if at < 6 { SampleKind::Text } else { SampleKind::Video }, at))
                .collect(),
            ..DataProfile::default()
        };
        let video = SampleKind::ALL.iter().position(|kind| *kind == SampleKind::Video).unwrap();
        let counted = |part: f64, count| {
            let shapes = mixed(&data, &BTreeMap::from([(video, part)]), count).unwrap();
            let videos = shapes.iter().filter(|shape| shape.llm_tokens >= 6).count();
            (shapes.len(), videos)
        };
        assert_eq!(counted(0.5, 10), (10, 5));
        assert_eq!(counted(0.2, 100), (100, 20));
        assert_eq!(counted(1.0, 8), (8, 8));
        // Nothing asked for: as it is.
        let as_is: Vec<SampleShape> = data.samples.iter().map(|sample| sample.shape.clone()).collect();
        assert_eq!(mixed(&data, &BTreeMap::new(), 10).unwrap(), as_is);
        assert_eq!(mixed(&data, &BTreeMap::new(), 12).unwrap()[10..], as_is[..2]);
        assert!(mixed(&data, &BTreeMap::from([(video, 1.5)]), 10).is_err());
        let audio = SampleKind::ALL.iter().position(|kind| *kind == SampleKind::Audio).unwrap();
        assert!(mixed(&data, &BTreeMap::from([(audio, 0.5)]), 10).is_err());
    }
}
