//! `dflop simulate --num-ranks`: the data and the model of a plan on clusters of other sizes.

use super::{Inputs, caveats};
use crate::Failure;
use dflop_plan::{Only, Outcome, SearchEffort, SearchInput, search};
use dflop_types::{Cluster, MadeFrom, Plan, SampleShape, WayPrediction, number};
use serde_json::json;

/// Global batches that each is judged on.
const SAMPLED_BATCHES: u32 = 2;

/// Simulates the plan's data and model on clusters of these numbers of ranks, and prints how each way does on them.
pub(super) fn run(inputs: &Inputs, plan: &Plan, num_ranks: &[u32], is_json: bool) -> Result<(), Failure> {
    let own_ranks = plan.best.layout.num_ranks();
    let shapes: Vec<SampleShape> = inputs.data_profile.samples.iter().map(|s| s.shape.clone()).collect();
    let mut rows = Vec::new();
    for &num_ranks in num_ranks {
        let size = u64::from(plan.global_batch_size) * u64::from(num_ranks) / u64::from(own_ranks);
        let global_batch_size = u32::try_from(size).unwrap_or(u32::MAX).max(1);
        // A large cluster may need more samples for a step than a small dataset has. Then samples come more than once.
        let copies = (SAMPLED_BATCHES as usize * global_batch_size as usize).div_ceil(shapes.len().max(1));
        let many: Vec<SampleShape> = std::iter::repeat_n(&shapes, copies.max(1)).flatten().cloned().collect();
        let outcome = search(&SearchInput {
            shapes: many.into(),
            model_profile: &inputs.model_profile,
            cluster: Cluster { num_ranks, ..inputs.config.cluster() },
            global_batch_size,
            num_microbatches: Some(plan.best.num_microbatches),
            giants: inputs.config.giants(),
            bucket_tokens_max: inputs.config.train.bucket_tokens_max,
            trained: plan.trained,
            order: Some(plan.best.pipeline_order),
            objective: inputs.config.objective(),
            num_steps: 0,
            num_sampled_batches: SAMPLED_BATCHES,
            only: Only::placed(plan.best.layout.placement),
            compares: false,
            effort: SearchEffort::Quick,
            halt: &|| false,
            seed: plan.seed,
            made_from: MadeFrom::new(),
            progress: &|_, _| {},
        })?;
        rows.push((num_ranks, global_batch_size, copies, outcome));
    }
    caveats::say(rows.iter().map(|(.., outcome)| outcome));
    if rows.iter().any(|(_, _, copies, _)| *copies > 1) {
        caveats::say_repeated();
    }
    if is_json {
        outln!("{}", json!(rows.iter().map(as_json).collect::<Vec<_>>()));
        return Ok(());
    }
    let basis = if inputs.model_profile.is_estimated { "estimated, not measured," } else { "measured" };
    outln!(
        "the same data and model on other clusters, {} microbatches, {}; simulated from the {basis} model profile",
        plan.best.num_microbatches,
        plan.best.pipeline_order
    );
    outln!(
        "{:>6} {:>8} {:>24} {:>12} {:>12} {:>24} {:>12} {:>7} {:>7}",
        "ranks",
        "samples",
        "layout",
        "aware",
        "aware-ahead",
        "best baseline",
        "it takes",
        "aware",
        "ahead"
    );
    for (num_ranks, samples, _, outcome) in &rows {
        let Some(best) = outcome.ranked.first() else {
            let hint = outcome.hint().map_or_else(String::new, |hint| format!(": {hint}"));
            outln!("{num_ranks:>6} {samples:>8} no plan fits{hint}");
            continue;
        };
        let ns =
            |name: &str| outcome.ways.iter().find(|way| way.way == name).and_then(|way| way.step_ns_mean);
        let (aware, ahead) = (ns("aware"), ns("aware-ahead"));
        let baseline = WayPrediction::best_baseline(&outcome.ways);
        let shown = |ns: Option<u64>| ns.map_or_else(|| number::NONE.to_owned(), number::ns);
        let over = |ns: Option<u64>| match (baseline, ns) {
            (Some((_, baseline)), Some(ns)) => number::times(baseline as f64 / ns.max(1) as f64),
            _ => number::NONE.to_owned(),
        };
        let (encoder, llm) = (best.layout.encoder, best.layout.llm);
        outln!(
            "{num_ranks:>6} {samples:>8} {:>24} {:>12} {:>12} {:>24} {:>12} {:>7} {:>7}",
            if best.layout.is_colocated() {
                format!("colocated {}", llm.dp)
            } else {
                format!("encoder {}, llm {} x {}", encoder.dp, llm.pp, llm.dp)
            },
            shown(aware),
            shown(ahead),
            baseline.map_or("none can run", |(way, _)| way.way.as_str()),
            shown(baseline.map(|(_, ns)| ns)),
            over(aware),
            over(ahead),
        );
        for way in &outcome.ways {
            if let Some(refusal) = &way.refusal {
                outln!("{:>16} {} {refusal}", "", way.way);
            }
        }
    }
    outln!(
        "layout: encoder replicas, then LLM stages x replicas, or replicas of both on the same ranks; the last two columns divide the best baseline's time by ours"
    );
    Ok(())
}

fn as_json((num_ranks, global_batch_size, _, outcome): &(u32, u32, usize, Outcome)) -> serde_json::Value {
    json!({
        "num_ranks": num_ranks,
        "global_batch_size": global_batch_size,
        "memory_budget_bytes": outcome.memory_budget_bytes,
        "best": outcome.ranked.first(),
        "ways": outcome.ways,
        "rejections": outcome.rejections,
    })
}
