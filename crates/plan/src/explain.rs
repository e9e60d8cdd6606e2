//! The outcome of a search, and the plan of a file, in words for people.

use crate::objective::Objective;
use crate::outcome::{Outcome, StopReason};
use crate::rival::Rival;
use dflop_types::number::{self, ms_alone, percent, times};
use dflop_types::{
    Layout, ModelProfile, PipelineOrder, Plan, RankedPlan, Rejection, SearchedSpace, WayPrediction, Zero,
    counted, memory_size, thousands,
};
use std::fmt::Write as _;

/// The layout of a plan in words: the degrees that are not always 1, and what is recomputed, if anything is.
fn degrees(plan: &RankedPlan) -> String {
    let layout = &plan.layout;
    let mut text = if is_plain(layout) {
        format!("encoder dp {}, llm pp {} dp {}", layout.encoder.dp, layout.llm.pp, layout.llm.dp)
    } else {
        layout.to_string()
    };
    if !plan.recompute.is_none() {
        let most = if plan.is_eased { "at most " } else { "" };
        let _ = write!(text, ", {most}{} recomputation", plan.recompute);
    }
    text
}

/// The order of a pipeline's actions, where it is not 1F1B; nothing runs in an order on colocated ranks.
fn order(plan: &RankedPlan) -> String {
    match plan.pipeline_order {
        PipelineOrder::OneFOneB => String::new(),
        _ if plan.layout.is_colocated() => String::new(),
        other => format!(", {other}"),
    }
}

/// Whether three numbers describe the layout: a pipeline with one encoder stage and even cuts, of which nothing is sharded,
/// interleaved or cut over a tensor group.
fn is_plain(layout: &Layout) -> bool {
    let is_even = layout.encoder_cut.is_none() && layout.llm_cut.is_none();
    let is_whole = layout.zero == Zero::Nothing && !layout.cuts_layers();
    !layout.is_colocated() && layout.encoder.pp == 1 && !layout.is_interleaved() && is_even && is_whole
}

/// The outcome for people: the choice, the runners-up, why the others were not chosen, and what is not certain about the
/// numbers. Ends with a line end.
pub fn explain(outcome: &Outcome) -> String {
    let mut text = String::new();
    match outcome.ranked.split_first() {
        None => {
            let _ = writeln!(text, "no plan fits {}", counted(outcome.num_ranks.into(), "rank"));
            let _ = match outcome.num_candidates {
                0 => writeln!(text, "  no layout is a candidate"),
                1 => writeln!(text, "  1 candidate, which is rejected"),
                number if outcome.rejections.iter().any(|r| r.rejection == Rejection::Estimate) => {
                    writeln!(
                        text,
                        "  {}, of which all that were judged are rejected",
                        counted(number, "candidate")
                    )
                }
                number => writeln!(text, "  {}, all rejected", counted(number, "candidate")),
            };
            reasons(&mut text, outcome);
        }
        Some((best, runners_up)) => {
            let budget = budget_words(&outcome.searched());
            choice(&mut text, best, outcome.num_sampled_batches, outcome.num_samples, Some(&budget));
            free_ranks(&mut text, best, outcome.num_free_ranks(), outcome.num_samples);
            if let (Objective::P95, Some(ns)) = (outcome.objective, outcome.step_ns_p95(best)) {
                let _ = writeln!(
                    text,
                    "  p95     {}, which plans are ranked by{}",
                    number::ns(ns),
                    longest_words(outcome)
                );
            }
            text.push_str(&outcome.run_memory.and_then(|run| run.words()).unwrap_or_default());
            others(&mut text, &outcome.ways, best);
            if !outcome.rivals.is_empty() {
                versus(&mut text, &outcome.rivals, best, outcome.caveats.has_experts);
            } else if !outcome.ways.is_empty() {
                text.push_str(
                    "  `--compare` searches what people run today, each in the best of its own layouts\n",
                );
            }
            if !runners_up.is_empty() {
                table(&mut text, &outcome.ranked);
                slower_than_a_baseline(&mut text, &outcome.ways, runners_up);
            }
            let num_others = outcome.num_candidates - outcome.ranked.len() as u64;
            if num_others > 0 {
                not_chosen(&mut text, num_others, outcome.num_candidates);
                reasons(&mut text, outcome);
            }
            let notes = outcome.caveats.notes(&best.prediction);
            let notes: Vec<String> = few_samples(outcome).into_iter().chain(notes).collect();
            if !notes.is_empty() {
                text.push('\n');
            }
            for note in notes {
                let _ = writeln!(text, "note: {note}");
            }
        }
    }
    text
}

/// That there are more ranks than samples of a step, so that they cannot all work on samples of their own.
fn few_samples(outcome: &Outcome) -> Option<String> {
    (outcome.num_samples < outcome.num_ranks).then(|| {
        format!(
            "a step has {}, fewer than the {}: a larger `train.global_batch_size` uses them better",
            counted(outcome.num_samples.into(), "sample"),
            counted(outcome.num_ranks.into(), "rank")
        )
    })
}

/// What the percentile is of few batches.
const fn longest_words(outcome: &Outcome) -> &'static str {
    if outcome.num_sampled_batches < 20 { ": the slowest of these batches" } else { "" }
}

/// The memory budget in words.
fn budget_words(searched: &SearchedSpace) -> String {
    match searched.memory_budget_bytes {
        Some(bytes) if searched.is_budget_given => format!("memory budget {}", memory_size(bytes)),
        Some(bytes) => format!(
            "memory budget {}: {} of the device's memory, as none is set",
            memory_size(bytes),
            percent(ModelProfile::MEMORY_PERMILLE as f64 / 1e3)
        ),
        None => "no memory budget was given".to_owned(),
    }
}

fn not_chosen(text: &mut String, num_others: u64, num_candidates: u64) {
    let verb = if num_others == 1 { "was" } else { "were" };
    let (others, all) = (thousands(num_others), counted(num_candidates, "candidate"));
    let _ = writeln!(text, "\n{others} of {all} {verb} not chosen");
}

/// A plan for people, as its file has it: the choice, the runners-up, why the others were not chosen. Ends with a line
/// end.
pub fn describe(plan: &Plan) -> String {
    let mut text = String::new();
    let budget = plan.searched.as_ref().map(budget_words);
    let num_samples =
        plan.searched.and_then(|searched| searched.num_samples).unwrap_or(plan.global_batch_size);
    choice(&mut text, &plan.best, plan.num_sampled_batches, num_samples, budget.as_deref());
    let num_free = plan.searched.map_or(0, |searched| searched.num_free_ranks);
    free_ranks(&mut text, &plan.best, num_free, num_samples);
    others(&mut text, &plan.ways, &plan.best);
    if !plan.runners_up.is_empty() {
        let ranked: Vec<RankedPlan> =
            std::iter::once(plan.best).chain(plan.runners_up.iter().copied()).collect();
        table(&mut text, &ranked);
        slower_than_a_baseline(&mut text, &plan.ways, &plan.runners_up);
    }
    let num_chosen = 1 + plan.runners_up.len() as u64;
    match plan.searched {
        Some(searched) if searched.num_candidates > num_chosen => {
            not_chosen(&mut text, searched.num_candidates - num_chosen, searched.num_candidates);
        }
        _ if !plan.rejections.is_empty() => text.push_str("\nothers were not chosen\n"),
        _ => {}
    }
    if !plan.rejections.is_empty() {
        causes(&mut text, plan.rejections.iter().map(|r| (r.count, r.rejection.to_string())).collect());
    }
    text
}

fn choice(
    text: &mut String,
    best: &RankedPlan,
    num_sampled_batches: u32,
    num_samples: u32,
    budget: Option<&str>,
) {
    let prediction = &best.prediction;
    let is_colocated = best.layout.is_colocated();
    if is_plain(&best.layout) && best.recompute.is_none() {
        let microbatches =
            counted(best.num_microbatches.into(), "microbatch").replace("microbatchs", "microbatches");
        let _ = writeln!(text, "plan: {}, {microbatches}, {}", degrees(best), best.pipeline_order);
    } else {
        let _ = writeln!(text, "plan: {}", best.in_words());
    }
    let interval = if num_sampled_batches > 1 {
        format!(" +- {} (95 %)", number::ns(prediction.step_ns_half_width))
    } else {
        String::new()
    };
    let _ = writeln!(
        text,
        "  step    {}{interval}, idle {}, over {} of {}",
        number::ns(prediction.step_ns_mean),
        percent(prediction.bubble_ratio),
        counted(num_sampled_batches.into(), "sampled global batch").replace("batchs", "batches"),
        counted(num_samples.into(), "sample"),
    );
    let llm = memory_size(prediction.llm_memory_bytes_peak);
    let peaks = if is_colocated {
        format!("rank {llm}")
    } else {
        format!("encoder rank {}, llm rank {llm}", memory_size(prediction.encoder_memory_bytes_peak))
    };
    let budget = budget.map(|budget| format!(", {budget}")).unwrap_or_default();
    let _ = writeln!(text, "  memory  {peaks}{budget}");
}

/// That the plan leaves ranks free, where it does, and what each of the others gives.
fn free_ranks(text: &mut String, best: &RankedPlan, num_free: u32, num_samples: u32) {
    if num_free == 0 {
        return;
    }
    let num_used = best.layout.num_ranks();
    let which = if num_free == 1 {
        "the last is left free, as".to_owned()
    } else {
        format!("the last {} are left free, as", thousands(num_free.into()))
    };
    let rate = f64::from(num_samples) / (best.prediction.step_ns_mean.max(1) as f64 / 1e9);
    let _ = writeln!(
        text,
        "  ranks   {} of {}: {which} no plan of all ranks that was judged is faster; {} samples/s of each used rank",
        thousands(num_used.into()),
        thousands((num_used + num_free).into()),
        number::number(rate / f64::from(num_used.max(1))),
    );
}

/// The same global batches in other ways, and what the plan gains over the best baseline that can run.
fn others(text: &mut String, ways: &[WayPrediction], best: &RankedPlan) {
    if ways.is_empty() {
        return;
    }
    text.push_str("\nthe same global batches in other ways on the same ranks\n");
    let header = ["way", "", "step ms", "over the plan", "microbatches"];
    let own_ns = best.prediction.step_ns_mean.max(1) as f64;
    let row = |way: &WayPrediction| {
        let (step, over) = match (way.step_ns_mean, &way.refusal) {
            (Some(ns), _) => (ms_alone(ns), times(ns as f64 / own_ns)),
            _ => (number::NONE.to_owned(), number::NONE.to_owned()),
        };
        let kind = if way.is_baseline { "baseline" } else { "dflop" };
        let at_most = if !way.is_baseline && best.layout.is_colocated() { "<= " } else { "" };
        let num_microbatches = format!("{at_most}{}", way.num_microbatches);
        vec![way.way.clone(), kind.to_owned(), step, over, num_microbatches]
    };
    lines(text, &header, 2, &ways.iter().map(row).collect::<Vec<_>>());
    for way in ways {
        if let Some(refusal) = &way.refusal {
            let _ = writeln!(text, "  {} {refusal}", way.way);
        }
    }
    let _ = writeln!(text, "  {}", gain(ways, best));
}

/// What the plan gains over the best baseline that can run, in a sentence.
pub fn gain(ways: &[WayPrediction], best: &RankedPlan) -> String {
    let Some((baseline, baseline_ns)) = WayPrediction::best_baseline(ways) else {
        return "no baseline can run on these ranks: there is nothing to divide by".to_owned();
    };
    let over = |ns: u64| baseline_ns as f64 / ns.max(1) as f64;
    let own = over(best.prediction.step_ns_mean);
    let ahead = ways.iter().find(|way| way.way == "aware-ahead").and_then(|way| way.step_ns_mean);
    // On colocated ranks nothing runs ahead: both are one.
    let ahead = ahead.filter(|&ns| ns != best.prediction.step_ns_mean);
    let ahead = ahead
        .map_or_else(String::new, |ns| format!("; with `train.schedule: aware-ahead` {}", times(over(ns))));
    let verdict = if own > 1.0 { "gain" } else { "no gain" };
    let own = times(own);
    format!("{verdict}: {own} over the best baseline above that can run, {}{ahead}", baseline.way)
}

fn table(text: &mut String, ranked: &[RankedPlan]) {
    text.push_str("\nthe best and its runners-up\n");
    let is_told =
        |plan: &RankedPlan| is_plain(&plan.layout) && plan.recompute.is_none() && order(plan).is_empty();
    if !ranked.iter().all(is_told) {
        return mixed_table(text, ranked);
    }
    let header = ["", "step ms", "+- ms", "idle", "encoder dp", "llm pp", "llm dp", "microbatches"];
    let rows: Vec<Vec<String>> = (1u32..)
        .zip(ranked)
        .map(|(place, plan)| {
            vec![
                place.to_string(),
                ms_alone(plan.prediction.step_ns_mean),
                ms_alone(plan.prediction.step_ns_half_width),
                percent(plan.prediction.bubble_ratio),
                plan.layout.encoder.dp.to_string(),
                plan.layout.llm.pp.to_string(),
                plan.layout.llm.dp.to_string(),
                plan.num_microbatches.to_string(),
            ]
        })
        .collect();
    lines(text, &header, 0, &rows);
}

/// How many of the runners-up take longer than the best baseline: it does not have their layouts, but the plan's.
fn slower_than_a_baseline(text: &mut String, ways: &[WayPrediction], runners_up: &[RankedPlan]) {
    let Some((baseline, ns)) = WayPrediction::best_baseline(ways) else { return };
    let num_slower = runners_up.iter().filter(|plan| plan.prediction.step_ns_mean > ns).count();
    if num_slower > 0 {
        let all = counted(runners_up.len() as u64, "runner-up").replace("runner-ups", "runners-up");
        let _ =
            writeln!(text, "  {num_slower} of {all} slower than the best baseline above, {}", baseline.way);
    }
}

/// The table of plans if not all of them are plain pipelines: layouts are in words.
fn mixed_table(text: &mut String, ranked: &[RankedPlan]) {
    let header = ["layout", "step ms", "+- ms", "idle", "memory", "microbatches"];
    let row = |plan: &RankedPlan| {
        let prediction = &plan.prediction;
        let most = prediction.encoder_memory_bytes_peak.max(prediction.llm_memory_bytes_peak);
        let at_most = if plan.layout.is_colocated() { "<= " } else { "" };
        vec![
            format!("{}{}", degrees(plan), order(plan)),
            ms_alone(prediction.step_ns_mean),
            ms_alone(prediction.step_ns_half_width),
            percent(prediction.bubble_ratio),
            memory_size(most),
            format!("{at_most}{}", plan.num_microbatches),
        ]
    };
    lines(text, &header, 1, &ranked.iter().map(row).collect::<Vec<_>>());
}

/// What people run today beside the best plan, and the ratio to the best of it.
fn versus(text: &mut String, rivals: &[Rival], best: &RankedPlan, has_experts: bool) {
    text.push_str(
        "\nwhat people run today, each with the best of its own search on the same ranks and memory\n",
    );
    let own_ns = best.prediction.step_ns_mean.max(1) as f64;
    let row = |rival: &Rival| match rival.step_ns_mean {
        Some(ns) => vec![
            rival.name.to_owned(),
            rival.layout.clone(),
            ms_alone(ns),
            times(ns as f64 / own_ns),
            rival.num_microbatches.to_string(),
        ],
        None => {
            [rival.name, "does not fit", number::NONE, number::NONE, number::NONE].map(str::to_owned).to_vec()
        }
    };
    let header = ["", "layout", "step ms", "over the plan", "microbatches"];
    lines(text, &header, 2, &rivals.iter().map(row).collect::<Vec<_>>());
    let of_others = rivals.iter().filter(|rival| rival.is_of_others);
    let fastest =
        of_others.filter_map(|rival| Some((rival.name, rival.step_ns_mean?))).min_by_key(|(_, ns)| *ns);
    let _ = match fastest {
        Some((name, ns)) if (ns as f64) < own_ns => {
            writeln!(
                text,
                "  {name} of other people is {} as fast as the plan: run that one",
                times(own_ns / ns as f64)
            )
        }
        Some((name, ns)) => {
            writeln!(text, "  {} over the best of other people's, {name}", times(ns as f64 / own_ns))
        }
        None => writeln!(text, "  nothing of other people's fits"),
    };
    if has_experts {
        text.push_str("  megatron is searched without its expert parallelism\n");
    }
    let cut: Vec<&str> = rivals.iter().filter(|rival| rival.is_cut).map(|rival| rival.name).collect();
    if !cut.is_empty() {
        let _ = writeln!(
            text,
            "  the time limit struck before all configurations were looked at of {}: they may be faster",
            cut.join(", ")
        );
    }
}

/// A table; the first `num_left` columns stand at the left.
fn lines(text: &mut String, header: &[&str], num_left: usize, rows: &[Vec<String>]) {
    let widths: Vec<usize> = (0..header.len())
        .map(|column| {
            rows.iter().map(|row| row[column].len()).chain([header[column].len()]).max().unwrap_or(0)
        })
        .collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        for (column, (cell, width)) in cells.zip(&widths).enumerate() {
            let _ = if column < num_left {
                write!(text, "  {cell:<width$}")
            } else {
                write!(text, "  {cell:>width$}")
            };
        }
        text.push('\n');
    };
    line(&mut header.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
}

fn reasons(text: &mut String, outcome: &Outcome) {
    let mend = |rejection: &Rejection| match rejection {
        Rejection::Memory { component, .. } => outcome.mends.iter().find(|mend| mend.component == *component),
        _ => None,
    };
    let cause = |rejection: &Rejection| match mend(rejection) {
        None if *rejection == Rejection::Estimate && outcome.ranked.is_empty() => {
            "not judged: estimates put others before them (`--exhaustive` judges all)".to_owned()
        }
        Some(mend) => format!("{rejection}; {} fits: {}", mend.words, number::ns(mend.step_ns)),
        None => rejection.to_string(),
    };
    let mut others: Vec<(u64, String)> =
        outcome.rejections.iter().map(|r| (r.count, cause(&r.rejection))).collect();
    let slower = outcome.num_judged - outcome.ranked.len() as u64;
    if slower > 0 {
        others.push((slower, "slower than these on the sampled global batches".to_owned()));
    }
    if let StopReason::Halted { num_left, is_cut } = outcome.stop {
        if num_left > 0 {
            others.push((num_left, "not judged: the time limit struck".to_owned()));
        }
        if is_cut {
            text.push_str("  the time limit struck before all layouts were looked at\n");
        }
    }
    causes(text, others);
}

/// Causes with how many candidates each rejected.
fn causes(text: &mut String, others: Vec<(u64, String)>) {
    let width = others.iter().map(|(count, _)| thousands(*count).len()).max().unwrap_or(0);
    for (count, cause) in others {
        let _ = writeln!(text, "    {:>width$}  {cause}", thousands(count));
    }
}
