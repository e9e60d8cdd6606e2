//! Why the slowest steps of a run were slow, in words: for `dflop report`.

use super::blame::{Blame, Cause, Usual};
use crate::Failure;
use crate::measured::{StepMetrics, StepSchedule};
use dflop_report::{PathLink, SlowStep, StepView};
use dflop_step::{Link, StepScheduler};
use dflop_types::{ActionKind, Component, DataProfile, SampleIndex, SampleKind, Timeline, number};
use std::fmt::Write as _;

/// Steps that are explained.
const NUM_SLOW: usize = 3;
/// Steps before the first that is explained: in it ranks connect.
const NUM_FIRST: usize = 1;

/// The steps that took longest against their prediction, the worst first.
pub(super) fn slow_steps(
    scheduler: &StepScheduler,
    data: &DataProfile,
    views: &[&StepView],
    logged: &[StepSchedule],
    metrics: &[StepMetrics],
) -> Result<Vec<SlowStep>, Failure> {
    let over = |view: &StepView| {
        let ns = |timeline: &Option<Timeline>| timeline.as_ref().map_or(0, |t| t.makespan_ns) as f64;
        let predicted = ns(&view.predicted);
        if predicted > 0.0 { ns(&view.measured) / predicted } else { 0.0 }
    };
    let mut order: Vec<&StepView> =
        views.iter().copied().skip(NUM_FIRST.min(views.len().saturating_sub(1))).collect();
    order.sort_by(|a, b| over(b).total_cmp(&over(a)).then(a.step.cmp(&b.step)));
    let usual = Usual::of(&order);
    let mut slow = Vec::new();
    for view in order.into_iter().take(NUM_SLOW) {
        let its = |s: &&StepSchedule| s.schedule.step == view.step && s.arm == view.arm;
        let (Some(line), Some(timeline)) = (logged.iter().find(its), &view.measured) else { continue };
        let path = scheduler.critical_path(&line.schedule, timeline)?;
        let blame = usual.as_ref().and_then(|usual| Blame::of(view, &path, usual));
        let told = Told { scheduler, data, line, view, timeline, path: &path, usual: usual.as_ref(), blame };
        let wait_ns =
            metrics.iter().find(|m| m.step == view.step && m.arm == view.arm).map_or(0, |m| m.data_wait_ns);
        slow.push(SlowStep {
            step: view.step,
            arm: view.arm.clone(),
            makespan_ns: timeline.makespan_ns,
            words: told.words(wait_ns),
            path: path.iter().map(|link| told.link(link)).collect(),
        });
    }
    Ok(slow)
}

struct Told<'a> {
    scheduler: &'a StepScheduler,
    data: &'a DataProfile,
    line: &'a StepSchedule,
    view: &'a StepView,
    timeline: &'a Timeline,
    path: &'a [Link],
    usual: Option<&'a Usual>,
    blame: Option<Blame>,
}

impl Told<'_> {
    fn words(&self, data_wait_ns: u64) -> Vec<String> {
        let mut words = Vec::new();
        let makespan_ns = self.timeline.makespan_ns;
        let part = |ns: u64| number::percent(ns as f64 / makespan_ns.max(1) as f64);
        let predicted_ns = self.view.predicted.as_ref().map_or(0, |t| t.makespan_ns);
        let mut first =
            format!("It took {}, {} were predicted", number::ns(makespan_ns), number::ns(predicted_ns));
        let usual = self.usual.filter(|_| predicted_ns > 0);
        let _ = match usual {
            Some(usual) => write!(
                first,
                ": {} the prediction, where the usual step of this run takes {}.",
                number::times(makespan_ns as f64 / predicted_ns as f64),
                number::times(usual.step_ratio)
            ),
            None => write!(first, "."),
        };
        if data_wait_ns > makespan_ns / 20 {
            let _ = write!(first, " Before it all ranks waited {} for samples.", number::ns(data_wait_ns));
        }
        words.push(first);
        let more_ns = |link: &Link| link.span.duration_ns().saturating_sub(link.predicted_ns);
        let did = |kind: ActionKind| if kind == ActionKind::F { "forward" } else { "backward" };
        let told = |link: &Link| {
            let (action, samples) = (link.span.action, self.largest(link));
            let what = samples.map_or_else(String::new, |sample| format!("; its largest sample is {sample}"));
            format!(
                "{} ran the {} of microbatch {} for {} ({} predicted){what}",
                self.place(link),
                did(action.kind),
                action.microbatch,
                number::ns(link.span.duration_ns()),
                number::ns(link.predicted_ns),
            )
        };
        words.extend(self.causes(&told));
        let longest = self.path.iter().max_by_key(|link| link.span.duration_ns());
        let late = self.path.iter().max_by_key(|link| more_ns(link));
        let late = late.filter(|link| more_ns(link) > makespan_ns / 50);
        // An action that was told as the cause is not told again.
        let is_told = |link: &Link| self.blamed().is_some_and(|blamed| blamed.span == link.span);
        if let Some(longest) = longest.filter(|link| !is_told(link)) {
            let both = late.filter(|late| late.span == longest.span);
            let behind = both.map_or("", |_| " and furthest behind its prediction");
            words.push(format!("Longest on the critical path{behind}: {}.", told(longest)));
        }
        if let Some(late) =
            late.filter(|link| !is_told(link) && longest.is_none_or(|one| one.span != link.span))
        {
            let more = number::ns(more_ns(late));
            words.push(format!("Furthest behind its prediction, by {more}: {}.", told(late)));
        }
        let by_rank = |rank: u32| -> u64 {
            self.path.iter().filter(|l| l.span.rank.0 == rank).map(|l| l.span.duration_ns()).sum()
        };
        let busiest = self.path.iter().max_by_key(|link| (by_rank(link.span.rank.0), link.span.rank));
        if let Some(busiest) = busiest {
            let on_rank = part(by_rank(busiest.span.rank.0));
            let under_way = part(self.path.iter().map(|link| link.gap_ns).sum());
            words.push(format!(
                "The others waited most for {}: it has {on_rank} of the step's time on the path. Messages, and what no action \
                 explains, have {under_way}.",
                self.rank(busiest)
            ));
        }
        words
    }

    /// The action of the critical path that most of the step's longer time is laid to.
    fn blamed(&self) -> Option<&Link> {
        let causes = &self.blame.as_ref()?.causes;
        causes.iter().find_map(|cause| match cause {
            Cause::Action { at, .. } => self.path.get(*at),
            _ => None,
        })
    }

    /// Why the step took longer than the usual one, and what to look at, a sentence or two for each cause.
    fn causes(&self, told: &dyn Fn(&Link) -> String) -> Vec<String> {
        let Some(blame) = &self.blame else { return Vec::new() };
        if blame.more_ns == 0 {
            return vec!["Against its prediction it took no longer than the usual step.".to_owned()];
        }
        let more = number::ns(blame.more_ns);
        let say = |cause: &Cause| match *cause {
            Cause::AllRanks { ratio, usual } => format!(
                "All ranks were slow: half of all actions took at least {} their predicted time, in the usual step {}. No sample explains \
                 that: look for other work on the machines, or lower clock rates.",
                number::times(ratio),
                number::times(usual)
            ),
            Cause::Rank { rank, ratio, others } => format!(
                "Rank {rank} was slow: half of its actions took at least {} their predicted time, those of the other ranks {}. Look at its \
                 device, and for other work on its machine.",
                number::times(ratio),
                number::times(others)
            ),
            Cause::Action { at, more_ns } => format!(
                "Of the {more} that it took longer than usual, one action has {}: {}. Something held this rank up at that moment, for example \
                 another process; it is the sample only if others of its size are slow too, see \"Error by size of sample\".",
                number::ns(more_ns),
                self.path.get(at).map_or_else(String::new, told)
            ),
            Cause::Messages { more_ns } => format!(
                "Of the {more} that it took longer than usual, a rank waited {} for messages: look at the network between the ranks of the \
                 path below.",
                number::ns(more_ns)
            ),
        };
        let said: Vec<String> = blame.causes.iter().map(say).collect();
        if said.is_empty() {
            return vec![format!(
                "It took {more} longer than usual; no single rank, action or message explains most of it."
            )];
        }
        said
    }

    /// The rank that ran an action, and which of its components that is of.
    fn place(&self, link: &Link) -> String {
        let layout = self.scheduler.settings().layout;
        match layout.coordinates(link.span.rank) {
            Some(at) if at.component == Component::Both => {
                let component = if link.span.action.stage.0 < layout.encoder.pp { "encoder" } else { "LLM" };
                format!("rank {} ({component}, replica {})", link.span.rank, at.replica)
            }
            _ => self.rank(link),
        }
    }

    /// The rank of an action, and what it holds.
    fn rank(&self, link: &Link) -> String {
        let rank = link.span.rank;
        let place = self.scheduler.settings().layout.coordinates(rank);
        let name = place.map_or_else(String::new, |at| match at.component {
            Component::Encoder => format!(" (encoder, replica {})", at.replica),
            // Of a rank with several stages that one which the action is of.
            Component::Llm => format!(" (LLM stage {}, replica {})", link.span.action.stage.0, at.replica),
            Component::Both => format!(" (replica {})", at.replica),
        });
        format!("rank {rank}{name}")
    }

    /// The sample with most tokens in an action, in words.
    fn largest(&self, link: &Link) -> Option<String> {
        let layout = self.scheduler.settings().layout;
        let replica = layout.coordinates(link.span.rank)?.replica as usize;
        let (schedule, microbatch) = (&self.line.schedule, link.span.action.microbatch as usize);
        let is_encoder = link.span.action.stage.0 < layout.encoder.pp;
        let tokens = |sample: SampleIndex| {
            let shape = &self.data.samples[sample.index()].shape;
            if is_encoder { shape.encoder_tokens() } else { u64::from(shape.llm_tokens) }
        };
        let samples: Vec<SampleIndex> = if is_encoder {
            // Where the ranks of a group hold whole encoders, each has shares of its own.
            let per_group = layout.encoders_per_group() as usize;
            let of_group = schedule.encoder.get(microbatch)?.chunks(per_group).nth(replica)?;
            of_group.iter().flatten().map(|share| share.sample).collect()
        } else {
            schedule.llm.get(microbatch)?.get(replica)?.clone()
        };
        let largest = samples.into_iter().max_by_key(|&sample| (tokens(sample), sample))?;
        let sample = self.data.samples.get(largest.index())?;
        let segments: u64 = sample.shape.encoder_segments.iter().map(|s| u64::from(s.count)).sum();
        let kind = match sample.kind {
            SampleKind::Video => format!("a video of {}", number::counted(segments, "segment")),
            kind => kind.to_string().replace('_', " "),
        };
        let of = if is_encoder { "encoder tokens" } else { "LLM tokens" };
        Some(format!("`{}`, {kind}, {} {of}", sample.id, number::thousands(tokens(largest))))
    }

    fn link(&self, link: &Link) -> PathLink {
        PathLink {
            action: link.span.action.to_string(),
            rank: link.span.rank.0,
            is_forward: link.span.action.kind == ActionKind::F,
            start_ns: link.span.start_ns,
            end_ns: link.span.end_ns,
            predicted_ns: link.predicted_ns,
            gap_ns: link.gap_ns,
            samples: self.largest(link).unwrap_or_default(),
        }
    }
}
