//! `dflop advise`: a dataset and a model, or a log of step times, in; one screen out.

use super::advise_inputs::{Basis, Inputs, Survey, microbatches};
use super::counted;
use crate::Failure;
use crate::advice::code::{Code, Trainer, quoted};
use crate::advice::estimate::Estimate;
use crate::advice::gains::{Advice, Gains, Lines};
use crate::advice::step_times::{StepTimes, Waiting};
use crate::advice::ways::{Setup, Simulated, Way};
use crate::args;
use dflop_schedule::Meets;
use dflop_types::number::{self, percent, whole_percent};
use dflop_types::{FAMILIES, Recipe, SampleKind, Trained, printable, regular, statistics, thousands};
use serde_json::{Value, json};
use std::path::Path;

/// Columns of a screen.
const COLUMNS: usize = 100;

/// Samples are alike where their costs deviate by less than this part of the mean.
const ALIKE: f64 = 0.01;

/// Letters of a sample's id that are shown.
const ID_LETTERS: usize = 40;

pub(super) fn run(arguments: &args::Advise) -> Result<(), Failure> {
    if let Some(path) = &arguments.step_times {
        return of_log(path, arguments.json);
    }
    let inputs = Inputs::of(arguments)?;
    let basis = Basis::of(arguments, &inputs)?;
    let survey = Survey::read(&inputs, &basis, arguments)?;
    let all = survey.mixture.simulate(inputs.ranks, arguments.seed)?;
    let advised = Advised::new(&survey, &all, &inputs, arguments);
    if arguments.json {
        outln!("{}", advised.as_json(&survey, &basis, &all));
    } else {
        advised.print(&survey, &basis, &all);
    }
    if survey.num_extrapolated > 0 {
        talk!("note: {} outside the sizes that were measured", counted(survey.num_extrapolated, "sample"));
    }
    if let Some(notice) = &survey.notice {
        talk!("note: {notice}");
    }
    Ok(())
}

/// The answer.
struct Advised {
    ranks: Setup,
    trained: Trained,
    gains: Gains,
    advice: Advice,
    /// Whether the second line would pay, but for the family.
    lacks_family: bool,
    /// Mean work of a step divided evenly over the ranks, in nanoseconds.
    bound_ns: f64,
    /// Samples that have more work than an even share of a rank in a mean step.
    num_giants: usize,
    /// Work of the costliest sample, in nanoseconds.
    largest_ns: f64,
    are_alike: bool,
    trainer: Trainer,
    code: Vec<String>,
}

impl Advised {
    fn new(survey: &Survey, all: &[Simulated], inputs: &Inputs, arguments: &args::Advise) -> Self {
        let ranks = inputs.ranks;
        let gains = Gains::of(all);
        let family = FAMILIES.iter().find(|family| family.model_type == survey.family);
        let is_shared = family.is_some_and(|family| family.has_shared_encoder);
        let lacks_family = gains.advice(true).lines == Lines::Both && !is_shared;
        let advice = gains.advice(!lacks_family);
        let batches = &survey.mixture.batches;
        let bounds = batches.iter().map(|batch| survey.mixture.bound_ns(batch, ranks));
        let bound_ns = bounds.sum::<f64>() / batches.len().max(1) as f64;
        let work_ns = survey.work_ns();
        let mean = work_ns.iter().sum::<f64>() / work_ns.len() as f64;
        let variance = work_ns.iter().map(|ns| (ns - mean).powi(2)).sum::<f64>() / work_ns.len() as f64;
        let code = Code {
            trainer: arguments.trainer,
            costs: costs_arguments(&inputs.data, arguments, inputs.trained),
            batch_size: ranks.batch_size,
            accumulation: ranks.accumulation,
            meets: ranks.meets,
            is_padded: ranks.is_padded,
            has_second_line: advice.lines == Lines::Both,
            removes_padding: advice.removes_padding,
            num_ranks: ranks.num_ranks,
            trained: inputs.trained,
        };
        Self {
            ranks,
            trained: inputs.trained,
            gains,
            advice,
            lacks_family,
            bound_ns,
            num_giants: work_ns.iter().filter(|ns| **ns > bound_ns).count(),
            largest_ns: work_ns.iter().copied().fold(0.0, f64::max),
            are_alike: variance.sqrt() < ALIKE * mean,
            trainer: arguments.trainer,
            code: if advice == Advice::NOTHING { Vec::new() } else { code.lines() },
        }
    }

    fn print(&self, survey: &Survey, basis: &Basis, all: &[Simulated]) {
        for line in mixture_lines(survey, basis, self.trained) {
            outln!("{line}");
        }
        let Setup { num_ranks, batch_size, accumulation, meets, is_padded } = self.ranks;
        let accumulated =
            if accumulation == 1 { String::new() } else { format!(" x {}", microbatches(accumulation)) };
        let layout = match meets {
            Meets::Phase => "ranks meet in each layer (FSDP, ZeRO-3)",
            _ => "ranks meet once a step (DDP, ZeRO-1, ZeRO-2)",
        };
        let rows = if is_padded { ", rows padded" } else { "" };
        outln!("\n{num_ranks} ranks x {batch_size} samples{accumulated}, {layout}{rows}");
        outln!(
            "simulated from {} costs: {} global batches; work bound {} a step, work divided evenly",
            basis.kind(),
            thousands(survey.mixture.batches.len() as u64),
            number::ns(self.bound_ns as u64)
        );
        outln!("{:<28}{:<30}best other way over it", "way", "step over work bound (95 %)");
        for simulated in all {
            let gain = match simulated.way {
                Way::Line => self.gains.line.times(),
                Way::Both => self.gains.both.times(),
                Way::Removed => self.gains.removed.map_or_else(String::new, Estimate::times),
                Way::BothRemoved => self.gains.both_removed.map_or_else(String::new, Estimate::times),
                way if way == self.gains.best => "best other way".to_owned(),
                _ => String::new(),
            };
            // Rows that are padded are not packed.
            let way = if is_padded && simulated.way == Way::Packed {
                "spread by tokens"
            } else {
                simulated.way.name()
            };
            let name = format!("{}{way}", if simulated.way.is_other() { "" } else { "dflop, " });
            outln!("{}", format!("{name:<28}{:<30}{gain}", simulated.over_bound.text()).trim_end());
        }
        outln!();
        let padding = padding(all, self.advice, self.gains);
        let rest = if is_padded { "the optimizer and memory" } else { "the optimizer, padding and memory" };
        let not_in_it = format!(
            "not in it: communication between ranks, data loading, {rest}; their time makes the gain smaller."
        );
        for sentence in [self.verdict(), self.limits(survey), not_in_it].into_iter().chain(padding) {
            print_wrapped(&sentence);
        }
        if !self.code.is_empty() {
            outln!("\nadd to your trainer ({}; {} says more):", self.trainer, self.trainer.page());
            for line in &self.code {
                outln!("    {line}");
            }
        }
    }

    /// What to do.
    fn verdict(&self) -> String {
        let Gains { best, line, both, removed, both_removed } = self.gains;
        let best_way = format!("{}, the best other way", best.name());
        let of = |gain: Option<Estimate>| gain.map_or_else(String::new, Estimate::times);
        let mut text = match (self.advice.lines, self.advice.removes_padding) {
            (Lines::None, _) => format!(
                "nothing to gain: the first line is {} as fast as {best_way}, both lines {}.",
                line.times(),
                both.times()
            ),
            (Lines::First, false) => {
                format!("add the first line: {} as fast as {best_way}.", line.times())
            }
            (Lines::Both, false) => format!(
                "add both lines: {} as fast as {best_way}; the first alone {}.",
                both.times(),
                line.times()
            ),
            (Lines::First, true) => format!(
                "add the first line and `remove_padding`: {} as fast as {best_way}; with the padding {}.",
                of(removed),
                line.times()
            ),
            (Lines::Both, true) => format!(
                "add both lines and `remove_padding`: {} as fast as {best_way}; with the padding {}, without the second line {}.",
                of(both_removed),
                both.times(),
                of(removed)
            ),
        };
        if self.lacks_family {
            text += " Both lines would give more, but `balance_encoder` does not know this family.";
        } else if self.advice.lines == Lines::First {
            text += " The second line adds nothing worth its code.";
        }
        if best == Way::Grouped {
            text += " (Grouping puts long samples into steps of their own, the lines leave each step its samples.)";
        }
        text
    }

    /// Part of a mean step's work that is the costliest sample's.
    fn largest_share(&self) -> f64 {
        self.largest_ns / (self.bound_ns * f64::from(self.ranks.num_ranks))
    }

    /// When it does not pay, and how far these data are from that.
    fn limits(&self, survey: &Survey) -> String {
        if self.are_alike {
            return "it does not pay here: all samples cost the same, within 1 %.".to_owned();
        }
        let (id, kind) = &survey.largest;
        let shown: String = printable(id).chars().take(ID_LETTERS).collect();
        let name = if shown.is_empty() { "without an id".to_owned() } else { format!("`{shown}`") };
        let largest = format!(
            "{name} ({kind}), has {} of a mean step's work, an even share of a rank is {}",
            percent(self.largest_share()),
            percent(1.0 / f64::from(self.ranks.num_ranks))
        );
        if self.num_giants > 0 {
            let giants = counted(self.num_giants as u64, "giant");
            let have = if self.num_giants == 1 { "has" } else { "have" };
            return format!(
                "it pays less in steps with a giant, because the other ranks wait for it however samples are distributed: {giants} \
                 {have} more work than an even share of a rank; the largest, {largest}."
            );
        }
        format!(
            "it would not pay if all samples were alike, or if one had more work than an even share of a rank; here the largest, \
             {largest}."
        )
    }

    fn as_json(&self, survey: &Survey, basis: &Basis, all: &[Simulated]) -> Value {
        let Setup { num_ranks, batch_size, accumulation, meets, is_padded } = self.ranks;
        let ways: Vec<Value> = all
            .iter()
            .map(|simulated| {
                let steps = &simulated.step_ns;
                json!({
                    "way": simulated.way.key(),
                    "is_dflop": !simulated.way.is_other(),
                    "step_ns_mean": (steps.iter().sum::<f64>() / steps.len() as f64).round() as u64,
                    "over_bound": estimate(simulated.over_bound),
                    "padding_ratio": simulated.padding_ratio,
                })
            })
            .collect();
        json!({
            "family": survey.family,
            "num_samples": survey.kinds.iter().sum::<u64>(),
            "encoder_share": survey.encoder_share(),
            "is_simulated": true,
            "is_estimated": basis.is_estimated(),
            "costs": basis.file(),
            "trained": self.trained,
            "num_ranks": num_ranks,
            "batch_size": batch_size,
            "accumulation": accumulation,
            "meets": meets.to_string(),
            "is_padded": is_padded,
            "num_batches": survey.mixture.batches.len(),
            "bound_ns_mean": self.bound_ns.round() as u64,
            "ways": ways,
            "best_other": self.gains.best.key(),
            "line_ratio": estimate(self.gains.line),
            "both_ratio": estimate(self.gains.both),
            "removed_ratio": self.gains.removed.map(estimate),
            "both_removed_ratio": self.gains.both_removed.map(estimate),
            "advice": self.advice.lines.key(),
            "removes_padding": self.advice.removes_padding,
            "are_alike": self.are_alike,
            "num_giants": self.num_giants,
            "largest": {"id": survey.largest.0, "kind": survey.largest.1, "step_share": self.largest_share()},
            "code": self.code,
        })
    }
}

/// Padding below this part of the tokens is not worth a line of code.
const PADDING_RATIO_MIN: f64 = 1.05;

/// What padding adds, if the user's collation pads, and what helps; `None` where it adds little and nobody asked.
fn padding(all: &[Simulated], advice: Advice, gains: Gains) -> Option<String> {
    let of = |way: Way| all.iter().find(|simulated| simulated.way == way)?.padding_ratio;
    let (chosen, what) = match advice.lines {
        Lines::None => (of(Way::Arrival)?, "a microbatch in arrival order"),
        Lines::First => (of(Way::Line)?, "a microbatch of the first line"),
        Lines::Both => (of(Way::Both)?, "a microbatch of both lines"),
    };
    if let Some(removed) = gains.removed {
        // Without the third line batches are such that they have less of it.
        let (chosen, what) = if advice.removes_padding {
            (of(Way::Arrival)?, "a microbatch in arrival order")
        } else {
            (chosen, what)
        };
        let text = format!("padded, {what} has {} tokens for each real one.", number::number(chosen));
        return Some(if advice.removes_padding {
            format!("{text} `dflop.integrations.remove_padding` computes the real ones alone.")
        } else {
            format!(
                "{text} With `dflop.integrations.remove_padding(model)`, which computes the real ones alone, and without \
                 `is_padded`, the first line is {} as fast as {}.",
                removed.times(),
                gains.best.name()
            )
        });
    }
    (chosen >= PADDING_RATIO_MIN).then(|| {
        let grouped = of(Way::Grouped).map_or_else(String::new, |ratio| {
            format!(" (grouped by length {}, with batches of like samples)", number::number(ratio))
        });
        format!(
            "if your collation pads, {what} has {} tokens for each real one{grouped}: \
             `dflop.integrations.remove_padding(model)` computes the real ones alone. `--padded` simulates every way with padding.",
            number::number(chosen)
        )
    })
}

/// The number with its interval; null where there is none.
fn estimate(found: Estimate) -> Value {
    json!({"mean": found.mean, "low": found.half.map(|_| found.low()), "high": found.half.map(|_| found.high())})
}

/// The arguments of `dflop.costs` that give the costs simulated here.
fn costs_arguments(data: &Path, asked: &args::Advise, trained: Trained) -> Vec<String> {
    let path = |path: &Path| quoted(&path.to_string_lossy());
    let (source, mut arguments) = (&asked.source, vec![path(data)]);
    if asked.costs.is_some() {
        // The function that the file was written by.
        arguments.push("cost=cost".to_owned());
        return arguments;
    }
    if let Some(profile) = &source.model_profile {
        arguments.push(path(profile));
    }
    if let (Some(model), Some(device)) = (&source.model, &source.hardware) {
        arguments.push(format!("model={}", quoted(model)));
        arguments.push(format!("device={}", quoted(device)));
        if source.dtype != "bfloat16" {
            arguments.push(format!("dtype={}", quoted(&source.dtype)));
        }
    }
    if let Some(recipe) = Recipe::ALL.into_iter().find(|recipe| recipe.trained(trained.lora_rank) == trained)
    {
        if recipe != Recipe::Full {
            arguments.push(format!("recipe={}", quoted(recipe.name())));
        }
        if trained.lora_rank > 0 && trained.lora_rank != Recipe::LORA_RANK {
            arguments.push(format!("lora_rank={}", trained.lora_rank));
        }
    }
    arguments
}

/// The samples, their work, and where its times come from: three lines, or little more.
fn mixture_lines(survey: &Survey, basis: &Basis, trained: Trained) -> Vec<String> {
    let num_samples: u64 = survey.kinds.iter().sum();
    let share = |count: u64| whole_percent(count as f64 / num_samples.max(1) as f64);
    let kinds: Vec<String> = SampleKind::ALL
        .iter()
        .zip(survey.kinds)
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| format!("{kind} {}", share(count)))
        .collect();
    let mut work_ns = survey.work_ns();
    work_ns.sort_by(f64::total_cmp);
    let of = |q| statistics::quantile(&work_ns, q).unwrap_or(0.0);
    let (median, largest) = (of(0.5), of(1.0));
    let times = if median > 0.0 {
        format!(" ({} times the median)", number::number(largest / median))
    } else {
        String::new()
    };
    let first =
        format!("{}: {} ({})", printable(&survey.family), counted(num_samples, "sample"), kinds.join(", "));
    let second = format!(
        "a sample: median {}, 95 % up to {}, largest {}{times}; encoder's part {}",
        number::ns(median as u64),
        number::ns(of(0.95) as u64),
        number::ns(largest as u64),
        whole_percent(survey.encoder_share())
    );
    let third = basis.line();
    let fourth = (!trained.is_all()).then(|| format!("trains: {trained}; the rest is frozen"));
    [first, second, third].iter().chain(&fourth).flat_map(|line| wrapped(line)).collect()
}

fn print_wrapped(text: &str) {
    for line in wrapped(text) {
        outln!("{line}");
    }
}

/// The text in lines of a screen; a word that is longer stays whole.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let indent = if lines.len() > 1 { 2 } else { 0 };
        let Some(line) = lines.last_mut() else { break };
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() > COLUMNS - indent {
            lines.push(word.to_owned());
        } else {
            line.push(' ');
            line.push_str(word);
        }
    }
    for line in lines.iter_mut().skip(1) {
        line.insert_str(0, "  ");
    }
    lines
}

/// What a log of step times says alone.
fn of_log(path: &Path, is_json: bool) -> Result<(), Failure> {
    let text = regular::read_to_string(path, super::INPUT_BYTES_MAX)
        .map_err(|error| Failure::new(format!("cannot read `{}`: {error}", path.display()), None))?;
    let waiting = StepTimes::parse(path, &text)?.waiting();
    let Waiting { num_steps, num_ranks, max_over_mean, lost_share, slowest } = &waiting;
    if is_json {
        outln!(
            "{}",
            json!({
                "num_steps": num_steps,
                "num_ranks": num_ranks,
                "max_over_mean": estimate(*max_over_mean),
                "lost_share": lost_share,
                "slowest_rank": slowest.map(|(rank, _)| rank),
                "slowest_rank_steps": slowest.map(|(_, steps)| steps),
            })
        );
        return Ok(());
    }
    outln!("{}, {}, measured", counted(*num_ranks as u64, "rank"), counted(*num_steps as u64, "step"));
    outln!("slowest rank over the mean rank, mean of the steps (95 %): {}", max_over_mean.text());
    outln!("time that ranks wait for the slowest of their step: {} of all", percent(*lost_share));
    if let Some((rank, count)) = slowest {
        outln!("slowest most often: rank {rank}, in {count} of {}", counted(*num_steps as u64, "step"));
    }
    let unknown = "what a log cannot say: whether the samples or the machines make ranks slow, and what even batches would give. \
                   Profile the data with `dflop profile data`, then run `dflop advise` on it.";
    print_wrapped(unknown);
    if *lost_share < 0.005 {
        let even = "nothing to gain, if each time is a rank's own: times that hold the waiting for others are alike on all ranks.";
        print_wrapped(even);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_before_the_screen_does() {
        let text = "word ".repeat(60);
        let lines = wrapped(&text);
        assert_eq!(lines.iter().map(String::len).max(), Some(99));
        assert_eq!(lines.join(" ").split_whitespace().count(), 60);
        assert_eq!(wrapped(&"x".repeat(120)), ["x".repeat(120)]);
    }
}
