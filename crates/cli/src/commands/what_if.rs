//! `dflop simulate --set FIELD=VALUE[,VALUE...]`: the best plan under other conditions, one row for each combination.

use super::ready::has_adapters;
use super::{Inputs, caveats, estimate};
use crate::Failure;
use crate::config::Config;
use dflop_analytic::{HARDWARE, Hardware};
use dflop_plan::{Only, Outcome, SearchEffort, SearchInput, search};
use dflop_report::{Sweep, SweepLine};
use dflop_types::{
    DataProfile, LinkSpan, MadeFrom, ModelProfile, Recipe, SampleKind, SampleShape, WayPrediction, artifact,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Combinations at most: each is a search of about a second.
const ROWS_MAX: usize = 1_000;

/// Samples of the global batches that a plan is judged on, and how many batches at most.
const SAMPLES: u32 = 1_024;

/// A field with the values that it is set to, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    field: String,
    values: Vec<String>,
}

/// The fields that can be set.
const FIELDS: &str = "cluster.num_ranks, cluster.ranks_per_node, cluster.device, cluster.memory_budget_bytes, \
    network.cluster_bytes_per_s, network.node_bytes_per_s, train.global_batch_size, train.num_microbatches, \
    train.bucket_tokens_max, train.recipe, data.weights.KIND (text, image, multi_image, video, audio)";

/// The setting in `FIELD=VALUE[,VALUE...]`.
pub(crate) fn setting(text: &str) -> Result<Setting, String> {
    let (field, values) =
        text.split_once('=').ok_or("must be FIELD=VALUE, as in cluster.num_ranks=64,128")?;
    let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
    if values.iter().any(String::is_empty) {
        return Err("a value is missing behind `=` or `,`".to_owned());
    }
    Ok(Setting { field: field.trim().to_owned(), values })
}

/// One combination: what is planned with.
struct Case {
    values: Vec<String>,
    config: Config,
    model: ModelProfile,
    /// Parts of all samples that kinds are to have.
    weights: BTreeMap<usize, f64>,
    /// Whether the batch grows and shrinks with the ranks: nothing sets it.
    is_batch_set: bool,
}

fn wrong(field: &str, value: &str, rule: &str) -> Failure {
    Failure::new(format!("`--set {field}={value}`: {rule}"), Some(format!("fields: {FIELDS}")))
}

impl Case {
    fn set(&mut self, field: &str, value: &str) -> Result<(), Failure> {
        let count = |least: u64| {
            let number =
                value.parse::<f64>().ok().filter(|n| n.fract() == 0.0 && *n >= least as f64 && *n < 1e18);
            number
                .map(|n| n as u64)
                .ok_or_else(|| wrong(field, value, &format!("must be a whole number from {least} on")))
        };
        let small = |least| count(least).map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        match field {
            "cluster.num_ranks" => {
                let (before, ranks) = (self.config.cluster.num_ranks.max(1), small(1)?);
                if !self.is_batch_set {
                    let size =
                        u64::from(self.config.train.global_batch_size) * u64::from(ranks) / u64::from(before);
                    self.config.train.global_batch_size = u32::try_from(size).unwrap_or(u32::MAX).max(1);
                }
                self.config.cluster.num_ranks = ranks;
                let of_node = self.config.cluster.ranks_per_node;
                if of_node == before || !ranks.is_multiple_of(of_node) {
                    let node = if of_node == before { ranks } else { of_node };
                    self.config.cluster.ranks_per_node =
                        (1..=node.min(ranks)).rev().find(|part| ranks.is_multiple_of(*part)).unwrap_or(1);
                }
            }
            "cluster.ranks_per_node" => self.config.cluster.ranks_per_node = small(1)?,
            "cluster.memory_budget_bytes" => self.config.cluster.memory_budget_bytes = Some(count(1)?),
            "cluster.device" => {
                let hardware = Hardware::named(value)?;
                self.model = estimate::configured(&self.config, hardware)?;
            }
            "network.cluster_bytes_per_s" | "network.node_bytes_per_s" => {
                let span = if field.contains("cluster") { LinkSpan::Cluster } else { LinkSpan::Node };
                let rate = count(1)?;
                let links = &mut self.model.network.links;
                if links.iter().all(|link| link.span != span) {
                    return Err(wrong(field, value, "has no effect: the model profile knows no such link"));
                }
                for link in links.iter_mut().filter(|link| link.span == span) {
                    link.bandwidth_bytes_per_s = rate;
                    // What was measured was measured at another rate.
                    link.points.clear();
                }
                self.model.network.is_assumed = true;
            }
            "train.global_batch_size" => {
                self.config.train.global_batch_size = small(1)?;
                self.is_batch_set = true;
            }
            "train.num_microbatches" => self.config.train.num_microbatches = Some(small(1)?),
            "train.bucket_tokens_max" => self.config.train.bucket_tokens_max = Some(count(1)?),
            "train.recipe" => {
                let recipe: Recipe =
                    value.parse().map_err(|_| wrong(field, value, "must be a recipe of `train.recipe`"))?;
                self.config.train.recipe = recipe.to_string();
                self.add_adapters()?;
            }
            _ => {
                let kind = field
                    .strip_prefix("data.weights.")
                    .and_then(|name| SampleKind::ALL.iter().position(|kind| kind.to_string() == name));
                let Some(kind) = kind else { return Err(wrong(field, value, "is no field that can be set")) };
                let part = value.parse::<f64>().ok().filter(|part| (0.0..=1.0).contains(part));
                self.weights.insert(kind, part.ok_or_else(|| wrong(field, value, "must be from 0 to 1"))?);
            }
        }
        Ok(())
    }

    /// Adds the layers with the adapters that now train to a profile that was estimated without them; a measured one stays as it
    /// is.
    fn add_adapters(&mut self) -> Result<(), Failure> {
        let lora_rank = self.config.trained().lora_rank;
        let device = HARDWARE.iter().find(|one| one.title == self.model.device.name);
        if let (Some(device), true, false) =
            (device, self.model.is_estimated, has_adapters(&self.model, lora_rank))
        {
            let made = estimate::configured(&self.config, device)?;
            let adapted = made.variants.into_iter().filter(|variant| variant.lora_rank == lora_rank);
            self.model.variants.extend(adapted);
        }
        Ok(())
    }
}

/// The shapes of `count` samples in which kinds have the parts of `weights`, the others as before among themselves; of each
/// kind samples evenly spread over those there are.
fn mixed(
    data: &DataProfile,
    weights: &BTreeMap<usize, f64>,
    count: usize,
) -> Result<Vec<SampleShape>, Failure> {
    let mut of_kind: Vec<Vec<&SampleShape>> = vec![Vec::new(); SampleKind::ALL.len()];
    for sample in &data.samples {
        let kind = SampleKind::ALL.iter().position(|kind| *kind == sample.kind).unwrap_or(0);
        of_kind[kind].push(&sample.shape);
    }
    let given: f64 = weights.values().sum();
    let others: usize = of_kind
        .iter()
        .enumerate()
        .filter(|(kind, _)| !weights.contains_key(kind))
        .map(|(_, of)| of.len())
        .sum();
    if given > 1.0 + 1e-9 || (others == 0 && (given - 1.0).abs() > 1e-9) {
        let rule =
            format!("the parts add up to {given}, must to {}", if others == 0 { "1" } else { "1 at most" });
        return Err(Failure::new(format!("`--set data.weights`: {rule}"), None));
    }
    let mut shapes = Vec::with_capacity(count);
    for (kind, of) in of_kind.iter().enumerate() {
        let part = weights
            .get(&kind)
            .copied()
            .unwrap_or_else(|| (1.0 - given) * of.len() as f64 / others.max(1) as f64);
        let wanted = (part * count as f64).round() as usize;
        if wanted > 0 && of.is_empty() {
            let name = SampleKind::ALL[kind].to_string();
            return Err(Failure::new(
                format!("`--set data.weights.{name}`: the data has no such sample"),
                None,
            ));
        }
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
    let rows = combinations(settings);
    if rows.len() > ROWS_MAX {
        return Err(Failure::new(format!("{} combinations, at most {ROWS_MAX}", rows.len()), None));
    }
    let mut found = Vec::new();
    for values in rows {
        let mut case = Case {
            values,
            config: inputs.config.clone(),
            model: inputs.model_profile.clone(),
            weights: BTreeMap::new(),
            is_batch_set: settings.iter().any(|setting| setting.field == "train.global_batch_size"),
        };
        for (setting, value) in settings.iter().zip(case.values.clone()) {
            case.set(&setting.field, &value)?;
        }
        let (ranks, of_node) = (case.config.cluster.num_ranks, case.config.cluster.ranks_per_node);
        if of_node == 0 || !ranks.is_multiple_of(of_node) {
            let rule = format!("must divide `cluster.num_ranks`, {ranks}");
            return Err(wrong("cluster.ranks_per_node", &of_node.to_string(), &rule));
        }
        let outcome = planned(&case, &inputs.data_profile)?;
        found.push((case, outcome));
    }
    caveats::say(found.iter().map(|(_, outcome)| outcome));
    let num_samples = inputs.data_profile.samples.len() as u64;
    let needed = |of: &Outcome| u64::from(of.num_sampled_batches) * u64::from(of.global_batch_size);
    if found.iter().any(|(_, outcome)| needed(outcome) > num_samples) {
        caveats::say_repeated();
    }
    show(settings, &found, files.csv, is_json)?;
    if let Some(path) = files.plot {
        let text = dflop_report::sweep(&drawn(settings, &found));
        artifact::write_text(path, "figure", &text)
            .map_err(|error| Failure::of_flag(error, "--plot FILE"))?;
        talk!("wrote {}", path.display());
    }
    Ok(())
}

/// The rows as lines over the values of the first setting.
fn drawn(settings: &[Setting], found: &[(Case, Outcome)]) -> Sweep {
    let (first, others) = settings.split_first().expect("clap asks for a setting");
    // The last setting changes fastest, so the rows of one value of the first stand together.
    let num_lines = found.len() / first.values.len().max(1);
    let per_s = |outcome: &Outcome, ns: Option<u64>| {
        ns.map(|ns| f64::from(outcome.global_batch_size) / (ns.max(1) as f64 / 1e9))
    };
    let line = |at: usize| {
        let of_line: Vec<&(Case, Outcome)> = found.iter().skip(at).step_by(num_lines.max(1)).collect();
        let named = others.iter().zip(&found[at].0.values[1..]);
        let rate = |step_ns: fn(&Outcome) -> Option<u64>| {
            of_line.iter().map(|(_, outcome)| per_s(outcome, step_ns(outcome))).collect()
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

fn planned(case: &Case, data: &DataProfile) -> Result<Outcome, Failure> {
    let config = &case.config;
    let size = config.train.global_batch_size;
    let sampled = (SAMPLES / size.max(1)).clamp(2, 4);
    // A larger step may take more samples than a small dataset has: then each comes more than once.
    let needed = (sampled as usize) * (size as usize);
    let count = data.samples.len().max(needed);
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
        order: config.pipeline_order(),
        objective: config.objective(),
        num_steps: 0,
        num_sampled_batches: sampled,
        only: Only::default(),
        compares: false,
        effort: SearchEffort::Quick,
        halt: &|| false,
        seed: config.train.seed,
        made_from: MadeFrom::new(),
        progress: &|_, _| {},
    })?)
}

fn show(
    settings: &[Setting],
    found: &[(Case, Outcome)],
    csv: Option<&Path>,
    is_json: bool,
) -> Result<(), Failure> {
    let fields: Vec<&str> = settings.iter().map(|setting| setting.field.as_str()).collect();
    let mut head: Vec<String> = fields.iter().map(|&field| field.to_owned()).collect();
    head.extend(
        ["samples", "step_ms", "samples_per_s", "peak_gib", "work_bound_ms", "best_baseline_ms", "layout"]
            .map(str::to_owned),
    );
    let mut rows = Vec::new();
    let mut objects = Vec::new();
    for (case, outcome) in found {
        let ms = |ns: u64| ns as f64 / 1e6;
        let size = outcome.global_batch_size;
        let best = outcome.ranked.first();
        let step_ns = best.map(|plan| plan.prediction.step_ns_mean);
        let baseline = WayPrediction::best_baseline(&outcome.ways).map(|(_, ns)| ns);
        let per_s = step_ns.map(|ns| f64::from(size) / (ns.max(1) as f64 / 1e9));
        let peak = best
            .map(|plan| plan.prediction.encoder_memory_bytes_peak.max(plan.prediction.llm_memory_bytes_peak));
        let layout = best.map_or_else(|| "no plan fits".to_owned(), dflop_types::RankedPlan::in_words);
        let shown = |number: Option<f64>, digits: usize| {
            number.map_or_else(String::new, |number| format!("{number:.digits$}"))
        };
        let mut cells = case.values.clone();
        cells.extend([
            size.to_string(),
            shown(step_ns.map(ms), 1),
            shown(per_s, 1),
            shown(peak.map(|bytes| bytes as f64 / f64::from(1 << 30)), 2),
            shown(Some(ms(outcome.work_bound_ns)), 1),
            shown(baseline.map(ms), 1),
            layout,
        ]);
        objects.push(json!({
            "set": fields.iter().zip(&case.values).collect::<BTreeMap<_, _>>(),
            "global_batch_size": size,
            "step_ms": step_ns.map(ms),
            "samples_per_s": per_s,
            "peak_bytes": peak,
            "work_bound_ms": ms(outcome.work_bound_ns),
            "best_baseline_ms": baseline.map(ms),
            "plan": best,
            "hint": outcome.hint(),
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
    use dflop_types::ProfiledSample;

    #[test]
    fn the_last_setting_changes_fastest() {
        let settings = [setting("a=1,2").unwrap(), setting("b=x,y").unwrap()];
        assert_eq!(combinations(&settings), [["1", "x"], ["1", "y"], ["2", "x"], ["2", "y"]]);
        assert!(setting("a").is_err() && setting("a=1,,2").is_err());
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
        assert_eq!(mixed(&data, &BTreeMap::new(), 10).unwrap().len(), 10);
        assert!(mixed(&data, &BTreeMap::from([(video, 1.5)]), 10).is_err());
        let audio = SampleKind::ALL.iter().position(|kind| *kind == SampleKind::Audio).unwrap();
        assert!(mixed(&data, &BTreeMap::from([(audio, 0.5)]), 10).is_err());
    }
}
