//! `dflop plan`: profiles and cluster in, the plan and its reasons out.

use super::caveats;
use super::emit::launch;
use super::from_run::FromRun;
use super::price::Run;
use super::report::named_in;
use super::{Inputs, out_path, progress_bar, write};
use crate::Failure;
use crate::args;
use crate::config::Config;
use dflop_analytic::{Architecture, HARDWARE, Hardware};
use dflop_data::profile::{ESTIMATED, TEXT_TOKENS};
use dflop_plan::{
    Communication, Detail, FewerRanks, Only, Outcome, Rival, SearchEffort, SearchInput, Sent, communication,
    detail, explain, fewer_ranks, search, spent, way_out, why_no_candidate,
};
use dflop_types::{
    DataProfile, MicrobatchShape, ModelProfile, ModuleProfile, Plan, RankedPlan, Tower, Trained, artifact,
    number, thousands,
};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Samples of the global batches that candidates are judged on, by default.
const SAMPLES: u32 = 2_048;

/// Global batches of so many samples that candidates are judged on, by default.
pub(super) fn sampled_batches(global_batch_size: u32) -> u32 {
    (SAMPLES / global_batch_size.max(1)).clamp(2, 8)
}

/// As the command line asks, or by default.
fn judged_batches(arguments: &args::Plan, config: &Config) -> u32 {
    arguments.sampled_batches.unwrap_or_else(|| sampled_batches(config.train.global_batch_size))
}

/// Milliseconds of a step that a rank spends on communication alone.
fn exposed_ms(sent: &Communication) -> Value {
    json!(sent.total().exposed_ns as f64 / 1e6)
}

pub(super) fn run(arguments: &args::Plan) -> Result<(), Failure> {
    let start = Instant::now();
    let mut inputs = Inputs::read_to_plan(&arguments.files)?;
    inputs.note_device();
    let from_run = FromRun::asked(arguments.from_run.as_deref(), &mut inputs)?;
    let config = &inputs.config;
    let name = from_run.as_ref().map_or_else(|| "plan.json".to_owned(), FromRun::plan_name);
    let out = out_path::<Plan>(config, arguments.out.as_ref(), &name)?;
    say_what_data(&inputs);
    let made_from = [
        ("data_profile", inputs.data_profile.content_hash()),
        ("model_profile", artifact::hash_of(&inputs.model_profile)),
    ];
    let bar = progress_bar(0, "judging candidates");
    let input = SearchInput {
        shapes: inputs.data_profile.samples.iter().map(|s| s.shape.clone()).collect(),
        model_profile: &inputs.model_profile,
        cluster: config.cluster(),
        global_batch_size: config.train.global_batch_size,
        num_microbatches: config.train.num_microbatches,
        giants: config.giants(),
        bucket_tokens_max: config.train.bucket_tokens_max,
        trained: config.trained(),
        order: config.train.order(),
        objective: arguments.objective.unwrap_or_else(|| config.objective()),
        num_steps: config.train.steps,
        num_sampled_batches: judged_batches(arguments, config),
        only: arguments.only.clone().unwrap_or_default(),
        compares: arguments.compare || arguments.samples.is_some(), // saved against what people run
        effort: if arguments.exhaustive { SearchEffort::Whole } else { SearchEffort::Quick },
        halt: &|| arguments.time_limit.is_some_and(|seconds| start.elapsed().as_secs_f64() > seconds),
        seed: config.train.seed,
        made_from: made_from.into_iter().map(|(name, hash)| (name.to_owned(), hash)).collect(),
        progress: &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    };
    check_degrees(config, &input.only)?;
    let mut outcome = search(&input)?;
    let hint = hint(&input, &outcome)?;
    let change = match &from_run {
        Some(found) => Some((found, found.change(&inputs, &mut outcome.ranked, arguments.restart_seconds)?)),
        None => None,
    };
    // Without a plan the answer is why there is none, not that the list is empty.
    let asked = arguments.explain.as_deref().filter(|_| !outcome.ranked.is_empty());
    let explained = asked.map(|asked| explained(&input, &outcome, asked)).transpose()?;
    let fewer = if arguments.compare { fewer_ranks(&input, &outcome)? } else { None };
    let sent = outcome.ranked.first().map(|best| communication(&input, best)).transpose()?.flatten();
    bar.finish_and_clear();
    let run = arguments.samples.map(|samples| Run {
        samples,
        num_ranks: config.cluster.num_ranks,
        global_batch_size: outcome.num_samples,
        price_per_gpu_hour: arguments.price_per_gpu_hour,
    });
    let costs = run.zip(outcome.ranked.first().map(|plan| plan.prediction.step_ns_mean));
    if arguments.json {
        let seconds = start.elapsed().as_secs_f64();
        let mut value = as_json(&outcome, hint.as_deref(), &inputs, seconds);
        add_spent(&input, &outcome.ranked, sent.as_ref(), &mut value["plans"])?;
        let parts = [
            ("exposed_communication_ms", sent.as_ref().map(exposed_ms)),
            ("communication", sent.as_ref().map(communication_json)),
            ("fewer_ranks", fewer.as_ref().map(fewer_json)),
            ("run", costs.map(|(run, ns)| run.json(ns, &baselines(&outcome)))),
            ("explained", explained.as_ref().map(|(plan, detail)| detail_json(plan, detail))),
            ("from_run", change.as_ref().map(|(found, _)| found.json())),
            ("change", change.as_ref().map(|(_, change)| change.json())),
        ];
        for (name, part) in parts.into_iter().filter_map(|(name, part)| Some((name, part?))) {
            value[name] = part;
        }
        outln!("{value:#}");
    }
    let Some(plan) = outcome.plan() else {
        return Err(Failure::answer(explain(&outcome), hint));
    };
    match arguments.emit {
        Some(launcher) => {
            let (size, of_node) = (plan.global_batch_size, config.cluster.ranks_per_node);
            let num_layers = inputs.model_profile.num_llm_layers();
            let told = told(arguments, &out);
            out!("{}", launch(launcher, &plan.best, size, num_layers, of_node, &told));
        }
        None if !arguments.json => {
            out!("{}", explain(&outcome));
            out!("{}", speed(&outcome, &inputs, sent.as_ref(), fewer.as_ref()));
            if let Some((run, ns)) = costs {
                out!("{}", run.words(ns, &baselines(&outcome)));
            }
            if let Some((plan, detail)) = &explained {
                out!("\n{}: {}", plan.in_words(), detail.words().trim_start());
            }
        }
        None => {}
    }
    change.map_or(Ok(()), |(found, change)| {
        found.tell(&change, &arguments.files.config.config, &out, arguments.json)
    })?;
    replace(&out, &plan)
}

/// What training must be told, or it would take other files than the search did.
fn told(arguments: &args::Plan, out: &Path) -> Vec<(&'static str, PathBuf)> {
    let files = &arguments.files;
    let is_of_run = arguments.from_run.is_some();
    let renewed = is_of_run.then(|| FromRun::profile_beside(out));
    let more = [
        ("--data-profile", files.data_profile.clone()),
        ("--model-profile", renewed.or_else(|| files.model_profile.clone())),
        ("--plan", (is_of_run || arguments.out.is_some()).then(|| out.to_owned())),
        // The run that the plan was renewed from goes on.
        ("--resume", is_of_run.then(|| PathBuf::from("auto"))),
    ];
    let more = more.into_iter().filter_map(|(name, path)| Some((name, path?)));
    std::iter::once(("--config", files.config.config.clone())).chain(more).collect()
}

/// The profile says which tensor degrees it has; the model, why it cannot have another.
fn check_degrees(config: &Config, only: &Only) -> Result<(), Failure> {
    match super::estimate::architecture_of(config) {
        Some(architecture) => Ok(architecture.check_degrees(only.tensor_degrees())?),
        None => Ok(()),
    }
}

/// Ranks of the nodes that most clusters have.
const USUAL_NODE: u32 = 8;

/// Writes the plan, and says which run needs the one that was there.
fn replace(out: &Path, plan: &Plan) -> Result<(), Failure> {
    note_replaced(out, plan);
    write(out, plan)
}

/// Says so on stderr where a run beside the plan at `out` was trained with it, and it is now another.
fn note_replaced(out: &Path, plan: &Plan) {
    // What cannot be read is no plan that a run would need.
    let Ok(before) = artifact::read::<Plan>(out) else { return };
    let hash = artifact::hash_of(&before);
    if hash == artifact::hash_of(plan) {
        return;
    }
    let directory = out.parent().filter(|directory| !directory.as_os_str().is_empty());
    let Ok(entries) = std::fs::read_dir(directory.unwrap_or(Path::new("."))) else { return };
    let is_of = |run: &PathBuf| {
        let Ok(log) = File::open(run.join("schedules.jsonl")) else { return false };
        // Each line names the plan. The first one will do: the file may be large.
        let names =
            BufReader::new(log).lines().next().and_then(Result::ok).is_some_and(|line| line.contains(&hash));
        // A run keeps a copy of its plan, and whoever asks the run finds it there.
        names && named_in::<Plan>(run, "plan.").iter().all(|(_, copy)| artifact::hash_of(copy) != hash)
    };
    let mut runs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_of).collect();
    runs.sort();
    if let Some(run) = runs.first() {
        talk!(
            "note: `{}` was trained with the plan that is now replaced in `{}`, and has no copy of it (`plan.HASH.json`); `--from-run` and its report need that plan: make it again with the configuration of before, and give the next one another place (`--out FILE`)",
            run.display(),
            out.display()
        );
    }
}

/// What to do if no plan fits: the nearest change with which one does, else the limit that binds.
fn hint(input: &SearchInput<'_>, outcome: &Outcome) -> Result<Option<String>, Failure> {
    let found = way_out(input, outcome)?;
    let nearest = || outcome.hint().or_else(|| why_no_candidate(input, outcome));
    Ok(found.map(|way| way.hint(input, outcome)).or_else(nearest))
}

/// Says what the plan's data is not: all samples, text by the model's tokenizer, enough for a whole global batch. And which
/// nodes the ranks are on, where these are smaller than usual, or the last one has fewer: messages between nodes are slow.
fn say_what_data(inputs: &Inputs) {
    let (num_ranks, of_node) = (inputs.config.cluster.num_ranks, inputs.config.cluster.ranks_per_node);
    let num_last = num_ranks % of_node.max(1);
    if num_ranks > of_node && (of_node < USUAL_NODE || num_last > 0) {
        let num_nodes = num_ranks.div_ceil(of_node.max(1));
        let last = if num_last > 0 { format!("; the last node has {num_last}") } else { String::new() };
        talk!(
            "note: {num_ranks} ranks are planned on {num_nodes} nodes of {of_node} (`cluster.ranks_per_node`){last}"
        );
    }
    let has = inputs.model_profile.device.memory_bytes;
    let asked = inputs.config.cluster.memory_budget_bytes.filter(|&asked| has > 0 && asked > has);
    if let Some(asked) = asked {
        talk!(
            "note: `cluster.memory_budget_bytes` is {}, more than the {} that the device of the model profile has",
            number::memory_size(asked),
            number::memory_size(has)
        );
    }
    if !inputs.data_profile.strata.is_empty() {
        let population: u64 = inputs.data_profile.strata.iter().map(|stratum| stratum.population).sum();
        talk!(
            "note: planned with a random sample: {} of {} samples; training needs the profile of all",
            thousands(inputs.data_profile.samples.len() as u64),
            thousands(population)
        );
    }
    if inputs.data_profile.settings.get(TEXT_TOKENS).is_some_and(|how| how == ESTIMATED) {
        talk!(
            "note: text tokens are estimated, because no tokenizer was given; media are counted as the model counts them"
        );
    }
    let (num_samples, asked) =
        (inputs.data_profile.samples.len() as u64, inputs.config.train.global_batch_size);
    if inputs.data_profile.strata.is_empty() && num_samples < u64::from(asked) {
        caveats::say_fewer(num_samples, asked);
    }
}

/// The plan that `--explain` asks for: one of the list by its place, or the best of some candidates.
fn explained(
    input: &SearchInput<'_>,
    outcome: &Outcome,
    asked: &str,
) -> Result<(RankedPlan, Detail), Failure> {
    let plan = if let Ok(place) = asked.parse::<usize>() {
        let found = place.checked_sub(1).and_then(|at| outcome.ranked.get(at).copied());
        found.ok_or_else(|| {
            let message = format!("`--explain {place}`: the list has {} plans", outcome.ranked.len());
            Failure::new(message, Some("1 is the plan".to_owned()))
        })?
    } else {
        let only = asked.parse::<Only>().map_err(|error| {
            let hint = "give a place in the list, or a candidate as for `--only`".to_owned();
            Failure::new(format!("`--explain {asked}`: {error}"), Some(hint))
        })?;
        let input = SearchInput { only, ..input.clone() };
        let of_those = search(&input)?;
        let Some(&first) = of_those.ranked.first() else {
            return Err(Failure::answer(explain(&of_those), hint(&input, &of_those)?));
        };
        // With these parts of the search: a mode that they name holds in every microbatch.
        return Ok((first, detail(&input, &first)?));
    };
    Ok((plan, detail(input, &plan)?))
}

/// Baselines with their steps: what people run today where that was searched, else the other ways of the same layout.
fn baselines(outcome: &Outcome) -> Vec<(String, u64)> {
    let rivals = outcome.rivals.iter().filter(|rival| rival.is_of_others);
    let rivals: Vec<_> =
        rivals.filter_map(|rival| Some((rival.name.to_owned(), rival.step_ns_mean?))).collect();
    if !rivals.is_empty() {
        return rivals;
    }
    let ways = outcome.ways.iter().filter(|way| way.is_baseline);
    ways.filter_map(|way| Some((way.way.clone(), way.step_ns_mean?))).collect()
}

/// Samples a second of the plan, its MFU, its communication, and what fewer ranks would give.
fn speed(
    outcome: &Outcome,
    inputs: &Inputs,
    sent: Option<&Communication>,
    fewer: Option<&FewerRanks>,
) -> String {
    let Some(best) = outcome.ranked.first() else { return String::new() };
    let step_ns = best.prediction.step_ns_mean;
    let (rate, num_ranks) = (samples_per_s(outcome, step_ns), best.layout.num_ranks());
    let of_rank = number::number(rate / f64::from(num_ranks));
    let mfu = mfu(inputs, rate, num_ranks)
        .map_or_else(String::new, |mfu| format!(", MFU {} (encoder counted)", number::percent(mfu)));
    let sent = sent.map_or_else(String::new, |sent| sent.words(step_ns));
    let fewer = fewer.map_or_else(String::new, |fewer| format!("{}\n", fewer.words()));
    format!("\nspeed: {} samples/s, {of_rank} of each rank{mfu}\n{sent}{fewer}", number::number(rate))
}

/// Operations of forward and backward over those that the devices could do, by samples a second; `None` for a device that the table
/// does not have.
fn mfu(inputs: &Inputs, samples_per_s: f64, num_ranks: u32) -> Option<f64> {
    let (model, data) = (&inputs.model_profile, &inputs.data_profile);
    let peak = peak_rate(model)?;
    let useful = match super::estimate::architecture_of(&inputs.config) {
        Some(architecture) => useful_operations(&architecture, data, inputs.config.trained()),
        None => products_with_weights(model, data),
    };
    Some(samples_per_s * useful / (peak * f64::from(num_ranks)))
}

/// The field `communication` of `--json`: the sum of all kinds of a step, and each kind in `by_kind`.
fn communication_json(communication: &Communication) -> Value {
    let of = |sent: &Sent| {
        let ms = |ns: u64| ns as f64 / 1e6;
        json!({"bytes": sent.bytes, "time_ms": ms(sent.ns), "exposed_ms": ms(sent.exposed_ns),
               "overlapped_ms": ms(sent.overlapped_ns())})
    };
    let kinds: Map<_, _> =
        communication.kinds.iter().map(|(name, sent)| (name.replace([' ', '-'], "_"), of(sent))).collect();
    let mut value = of(&communication.total());
    value["by_kind"] = Value::Object(kinds);
    value
}

fn fewer_json(fewer: &FewerRanks) -> Value {
    json!({"num_ranks": fewer.num_ranks, "layout": fewer.plan.layout, "recompute": fewer.plan.recompute,
           "num_microbatches": fewer.plan.num_microbatches,
           "step_ms": fewer.plan.prediction.step_ns_mean as f64 / 1e6, "speed_ratio": fewer.speed_ratio})
}

/// Samples a second of a step of so many nanoseconds.
fn samples_per_s(outcome: &Outcome, ns: u64) -> f64 {
    f64::from(outcome.num_samples) / (ns.max(1) as f64 / 1e9)
}

/// Numbers by name.
fn parts(parts: &[(&str, u64)]) -> Map<String, Value> {
    parts.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect()
}

/// Adds to each plan of `--json` where its time and memory go, and what its ranks send. `of_best`: what those of the first plan
/// send, which is known already.
fn add_spent(
    input: &SearchInput<'_>,
    plans: &[RankedPlan],
    of_best: Option<&Communication>,
    values: &mut Value,
) -> Result<(), Failure> {
    for (at, (value, plan)) in values.as_array_mut().into_iter().flatten().zip(plans).enumerate() {
        if let Some(spent) = spent(input, plan)? {
            value["time_ns"] = Value::Object(parts(&spent.time_ns));
            value["memory_bytes"] = Value::Object(parts(&spent.memory));
            value["fullest_rank"] = json!(spent.fullest_rank);
        }
        let of_other = if at == 0 { None } else { communication(input, plan)? };
        if let Some(sent) = of_best.filter(|_| at == 0).or(of_other.as_ref()) {
            value["communication"] = communication_json(sent);
        }
    }
    Ok(())
}

fn detail_json(plan: &RankedPlan, detail: &Detail) -> Value {
    let spent = &detail.spent;
    let without: Vec<_> = detail.without.iter().map(|(way, ns)| json!({"way": way, "step_ns": ns})).collect();
    let without_parts: Vec<_> =
        detail.without_parts.iter().map(|(way, ns)| json!({"way": way, "step_ns": ns})).collect();
    json!({"layout": plan.layout, "num_batches": spent.num_batches,
           "num_sampled_batches": detail.num_sampled_batches, "step_ns": spent.step_ns, "step_ns_max": spent.step_ns_max,
           "time_ns": parts(&spent.time_ns), "fullest_rank": spent.fullest_rank,
           "memory_bytes": parts(&spent.memory), "without": without, "without_parts": without_parts})
}

/// A search for programs: its plans, what people run today, why others were not chosen.
fn as_json(outcome: &Outcome, hint: Option<&str>, inputs: &Inputs, seconds: f64) -> Value {
    let (model, data) = (&inputs.model_profile, &inputs.data_profile);
    let ms = |ns: u64| ns as f64 / 1e6;
    let per_second = |ns: u64| samples_per_s(outcome, ns);
    let plan = |plan: &RankedPlan| {
        let prediction = &plan.prediction;
        let rate = per_second(prediction.step_ns_mean);
        let num_ranks = plan.layout.num_ranks();
        json!({
            "layout": plan.layout,
            "num_ranks": num_ranks,
            "num_free_ranks": outcome.num_ranks.saturating_sub(num_ranks),
            "recompute": plan.recompute,
            "is_eased": plan.is_eased,
            "num_microbatches": plan.num_microbatches,
            "pipeline_order": plan.pipeline_order,
            "step_ms": ms(prediction.step_ns_mean),
            "step_ms_p95": outcome.step_ns_p95(plan).map(ms),
            "step_ms_half_width": ms(prediction.step_ns_half_width),
            "work_bound_ms": ms(outcome.work_bound_ns),
            "samples_per_s": rate,
            "samples_per_s_per_rank": rate / f64::from(num_ranks),
            "mfu": mfu(inputs, rate, num_ranks),
            "bubble_ratio": prediction.bubble_ratio,
            "peak_bytes": prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak),
            "encoder_peak_bytes": prediction.encoder_memory_bytes_peak,
            "llm_peak_bytes": prediction.llm_memory_bytes_peak,
            "extrapolated_ratio": prediction.extrapolated_ratio,
        })
    };
    let rival = |rival: &Rival| {
        let value = json!({
            "step_ms": rival.step_ns_mean.map(ms),
            "samples_per_s": rival.step_ns_mean.map(per_second),
            "layout": rival.layout,
            "num_microbatches": rival.num_microbatches,
            "bubble_ratio": rival.bubble_ratio,
            "is_of_others": rival.is_of_others,
            "is_cut": rival.is_cut,
        });
        (rival.name.to_owned(), value)
    };
    let mends: Vec<_> = outcome
        .mends
        .iter()
        .map(|mend| json!({"component": mend.component, "fits": mend.words, "step_ms": ms(mend.step_ns)}))
        .collect();
    json!({
        "objective": outcome.objective.to_string(),
        "plans": outcome.ranked.iter().map(plan).collect::<Vec<_>>(),
        "baselines": outcome.rivals.iter().map(rival).collect::<Map<_, _>>(),
        "rejected": {"num_candidates": outcome.num_candidates, "num_judged": outcome.num_judged,
                     "num_slower": outcome.num_judged - outcome.ranked.len() as u64,
                     "causes": outcome.rejections, "mends": mends, "hint": hint},
        "run_memory": outcome.run_memory.map(|run| json!({
            "num_batches": run.num_batches, "num_near": run.num_near, "num_scheduled": run.num_scheduled,
        })),
        "ways": outcome.ways,
        "is_estimated": model.is_estimated,
        "is_text_estimated": data.settings.get(TEXT_TOKENS).is_some_and(|how| how == ESTIMATED),
        "seconds": seconds,
    })
}

/// Floating point operations of forward and backward of a mean sample, counted as the MFU of a run counts them. Parts that `trained`
/// leaves out are frozen.
fn useful_operations(architecture: &Architecture, data: &DataProfile, trained: Trained) -> f64 {
    let all = MicrobatchShape::pack(data.samples.iter().map(|sample| &sample.shape));
    architecture.training_flops_of(&all, &trained) as f64 / data.samples.len().max(1) as f64
}

/// The same of a model whose configuration this version cannot read: six for each parameter and token, as if all trained.
/// Attention's own products are left out.
fn products_with_weights(model: &ModelProfile, data: &DataProfile) -> f64 {
    let parameters = |prefixes: &[&str]| -> f64 {
        let of = |(name, module): (&String, &ModuleProfile)| {
            let is_held = prefixes.iter().any(|prefix| name.starts_with(prefix));
            if is_held { module.num_parameters as f64 * f64::from(module.count) } else { 0.0 }
        };
        model.modules.iter().map(of).sum()
    };
    let shapes = || data.samples.iter().map(|sample| &sample.shape);
    let of_tower = |tower: Tower| -> u64 { shapes().map(|shape| shape.tower_tokens()[tower.index()]).sum() };
    let llm_tokens: u64 = shapes().map(|shape| u64::from(shape.llm_tokens)).sum();
    let label_tokens: u64 = shapes().map(|shape| u64::from(shape.label_tokens)).sum();
    // The embedding is no product: its rows are read.
    let pictures = parameters(&["encoder_layer", "encoder_window_layer", "projector"]);
    let sounds = parameters(&ModelProfile::SECOND_TOWER[1..]);
    let sum = pictures * of_tower(Tower::First) as f64
        + sounds * of_tower(Tower::Second) as f64
        + parameters(&["llm_layer"]) * llm_tokens as f64
        + parameters(&["llm_head"]) * label_tokens as f64;
    6.0 * sum / data.samples.len().max(1) as f64
}

/// Operations a second that the profile's device could do in its dtype, where the table of devices has it.
fn peak_rate(model: &ModelProfile) -> Option<f64> {
    let name = model.device.name.to_ascii_lowercase();
    let is_device = |hardware: &&Hardware| {
        name == hardware.name
            || name == hardware.title.to_ascii_lowercase()
            || name.contains(&hardware.title.to_ascii_lowercase())
    };
    let hardware = HARDWARE.iter().find(is_device)?;
    hardware.rate(&model.device.dtype).ok().map(|(gflops, _)| gflops as f64 * 1e9)
}
