//! What a slow step has more than the usual step of its run: all ranks, one rank, one action, or messages.
//!
//! The usual step may itself be far from its prediction, as on a machine that runs slower than its profile. So a step is held
//! against the others, and not against its prediction alone.

use dflop_report::StepView;
use dflop_step::Link;
use dflop_types::statistics::quantile_of;
use dflop_types::{Action, Rank, Span, Timeline};
use std::collections::{BTreeMap, HashMap};

/// Steps that say what is usual, evenly spread.
const STEPS_MAX: usize = 64;
/// So much longer than usual, ranks are called slow.
const SLOW: f64 = 1.15;
/// Less than this part of a step over the usual time is what steps differ by.
const LEAST: f64 = 0.05;

/// The usual step of a run.
#[derive(Debug, Clone)]
pub(super) struct Usual {
    /// Its time over its prediction.
    pub(super) step_ratio: f64,
    /// The same of the median of its actions.
    action_ratio: f64,
    /// The same of each rank's actions: above the others' where a rank is slow throughout the run.
    rank_ratios: BTreeMap<Rank, f64>,
    /// What a rank waits for messages, in nanoseconds.
    transfer_ns: f64,
}

/// What a step has more than the usual one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Cause {
    /// The median of all actions, over their predictions; `usual` is the same of the usual step.
    AllRanks { ratio: f64, usual: f64 },
    /// The median of the rank's actions, over their predictions; `others` is the same of the other ranks.
    Rank { rank: Rank, ratio: f64, others: f64 },
    /// The action of this position on the critical path took so much longer than usual.
    Action { at: usize, more_ns: u64 },
    /// A rank waited so much longer for messages than usual.
    Messages { more_ns: u64 },
}

/// How much longer a step took than the usual one would have, and why.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Blame {
    /// In nanoseconds; 0 where steps differ by as much anyway.
    pub(super) more_ns: u64,
    pub(super) causes: Vec<Cause>,
}

fn both(view: &StepView) -> Option<(&Timeline, &Timeline)> {
    view.measured.as_ref().zip(view.predicted.as_ref()).filter(|(_, predicted)| predicted.makespan_ns > 0)
}

/// Measured over predicted time of each action that was both.
fn action_ratios(measured: &Timeline, predicted: &Timeline) -> Vec<(Rank, Action, f64)> {
    let known: HashMap<(Rank, Action), u64> =
        predicted.spans.iter().map(|span| ((span.rank, span.action), span.duration_ns())).collect();
    let of = |span: &Span| known.get(&(span.rank, span.action)).filter(|ns| **ns > 0).copied();
    let both = measured.spans.iter().filter_map(|span| Some((span, of(span)?)));
    both.map(|(span, ns)| (span.rank, span.action, span.duration_ns() as f64 / ns as f64)).collect()
}

/// The same by rank.
fn ratios(measured: &Timeline, predicted: &Timeline) -> BTreeMap<Rank, Vec<f64>> {
    let mut ratios: BTreeMap<Rank, Vec<f64>> = BTreeMap::new();
    for (rank, _, ratio) in action_ratios(measured, predicted) {
        ratios.entry(rank).or_default().push(ratio);
    }
    ratios
}

/// Of each action, the median of measured over predicted time of the other actions of its rank.
fn others_of_rank(measured: &Timeline, predicted: &Timeline) -> HashMap<(Rank, Action), f64> {
    let mut own: BTreeMap<Rank, Vec<(Action, f64)>> = BTreeMap::new();
    for (rank, action, ratio) in action_ratios(measured, predicted) {
        own.entry(rank).or_default().push((action, ratio));
    }
    let mut others = HashMap::new();
    for (rank, of) in own {
        for &(action, _) in &of {
            let rest = of.iter().filter(|(other, _)| *other != action).map(|(_, ratio)| *ratio);
            others.extend(median(rest).map(|ratio| ((rank, action), ratio)));
        }
    }
    others
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    quantile_of(values.collect(), 0.5)
}

fn transfer_ns(timeline: &Timeline) -> f64 {
    timeline.idle_ns.transfer as f64 / f64::from(timeline.num_ranks.max(1))
}

impl Usual {
    /// That of these steps; `None` where none was both predicted and measured.
    pub(super) fn of(views: &[&StepView]) -> Option<Self> {
        let steps: Vec<(&Timeline, &Timeline)> = views.iter().filter_map(|view| both(view)).collect();
        let every = steps.len().div_ceil(STEPS_MAX).max(1);
        let some = || steps.iter().step_by(every);
        let mut by_rank: BTreeMap<Rank, Vec<f64>> = BTreeMap::new();
        for (rank, of) in some().flat_map(|(measured, predicted)| ratios(measured, predicted)) {
            by_rank.entry(rank).or_default().extend(median(of.into_iter()));
        }
        let rank_ratios = by_rank.into_iter().filter_map(|(rank, of)| Some((rank, median(of.into_iter())?)));
        Some(Self {
            step_ratio: median(steps.iter().map(|(m, p)| m.makespan_ns as f64 / p.makespan_ns as f64))?,
            action_ratio: median(some().filter_map(|(m, p)| median(ratios(m, p).into_values().flatten())))?,
            rank_ratios: rank_ratios.collect(),
            transfer_ns: median(some().map(|(measured, _)| transfer_ns(measured)))?,
        })
    }
}

impl Blame {
    /// Of a step and its critical path; `None` where it was not both predicted and measured.
    pub(super) fn of(view: &StepView, path: &[Link], usual: &Usual) -> Option<Self> {
        let (measured, predicted) = both(view)?;
        let took_ns = measured.makespan_ns as f64;
        let more_ns = took_ns - usual.step_ratio * predicted.makespan_ns as f64;
        if more_ns < LEAST * took_ns {
            return Some(Self { more_ns: 0, causes: Vec::new() });
        }
        let by_rank = ratios(measured, predicted);
        let mut causes = Vec::new();
        let of_all = median(by_rank.values().flatten().copied())?;
        if of_all >= SLOW * usual.action_ratio {
            causes.push(Cause::AllRanks { ratio: of_all, usual: usual.action_ratio });
        }
        // Where all actions of the step are slow alike, or all of this rank, in this step or in every one, this action is not the cause.
        let common = usual.action_ratio.max(of_all);
        let of_others = others_of_rank(measured, predicted);
        let more_of = |link: &Link| {
            let of_rank = usual.rank_ratios.get(&link.span.rank).copied().unwrap_or(common);
            let beside = of_others.get(&(link.span.rank, link.span.action)).copied().unwrap_or(common);
            link.span.duration_ns() as f64 - common.max(of_rank).max(beside) * link.predicted_ns as f64
        };
        let longest = (0..path.len()).max_by(|&a, &b| more_of(&path[a]).total_cmp(&more_of(&path[b])));
        let longest = longest.filter(|&at| more_of(&path[at]) >= more_ns / 2.0);
        causes.extend(longest.map(|at| Cause::Action { at, more_ns: more_of(&path[at]) as u64 }));
        if longest.is_none() {
            causes.extend(slowest_rank(&by_rank, path));
        }
        let waited_ns = transfer_ns(measured) - usual.transfer_ns;
        if waited_ns >= more_ns / 2.0 && causes.is_empty() {
            causes.push(Cause::Messages { more_ns: waited_ns as u64 });
        }
        Some(Self { more_ns: more_ns as u64, causes })
    }
}

/// A rank of the critical path that is slower than the others.
fn slowest_rank(by_rank: &BTreeMap<Rank, Vec<f64>>, path: &[Link]) -> Option<Cause> {
    let medians: Vec<(Rank, f64)> =
        by_rank.iter().filter_map(|(&rank, of)| Some((rank, median(of.iter().copied())?))).collect();
    let (rank, ratio) = medians.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let others = median(medians.iter().filter(|(other, _)| *other != rank).map(|(_, ratio)| *ratio))?;
    let is_on_path = path.iter().any(|link| link.span.rank == rank);
    (is_on_path && ratio >= SLOW * others).then_some(Cause::Rank { rank, ratio, others })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREDICTED_NS: u64 = 100;

    /// Four ranks with eight actions each, one after the other: each takes `ns` of its rank and number.
    fn view(step: u64, ns: impl Fn(u32, u32) -> u64) -> StepView {
        view_of(step, 8, ns)
    }

    fn view_of(step: u64, num_actions: u32, ns: impl Fn(u32, u32) -> u64) -> StepView {
        let timeline = |ns: &dyn Fn(u32, u32) -> u64| {
            let mut spans = Vec::new();
            for rank in 0..4 {
                let mut at = 0;
                for number in 0..num_actions {
                    let action = format!("0F{number}").parse().unwrap();
                    spans.push(Span {
                        rank: Rank(rank),
                        action,
                        start_ns: at,
                        end_ns: at + ns(rank, number),
                    });
                    at += ns(rank, number);
                }
            }
            let makespan_ns = spans.iter().map(|span| span.end_ns).max().unwrap();
            Timeline { num_ranks: 4, makespan_ns, spans, ..Timeline::default() }
        };
        let (measured, predicted) = (Some(timeline(&ns)), Some(timeline(&|_, _| PREDICTED_NS)));
        StepView { step, measured, predicted, ..StepView::default() }
    }

    /// The actions of one rank, which is the path where nobody waits for anybody.
    fn path(view: &StepView, rank: u32) -> Vec<Link> {
        let spans = view.measured.as_ref().unwrap().spans.iter().filter(|span| span.rank.0 == rank);
        spans.map(|&span| Link { span, gap_ns: 0, predicted_ns: PREDICTED_NS }).collect()
    }

    /// What a step is laid to in a run whose usual action takes twice its prediction.
    fn blame(view: &StepView, rank: u32) -> Blame {
        let usual: Vec<StepView> = (0..9).map(|step| self::view(step, |_, _| 200)).collect();
        let usual = Usual::of(&usual.iter().chain([view]).collect::<Vec<_>>()).unwrap();
        assert!((usual.step_ratio - 2.0).abs() < 1e-9);
        Blame::of(view, &path(view, rank), &usual).unwrap()
    }

    #[test]
    fn twice_the_prediction_is_usual_where_every_step_takes_that() {
        assert_eq!(blame(&view(9, |_, _| 204), 0), Blame { more_ns: 0, causes: Vec::new() });
    }

    /// By hand: 8 x 300 is 800 more than 8 x 200.
    #[test]
    fn all_ranks_are_told_from_one_and_from_one_action() {
        let all = blame(&view(9, |_, _| 300), 0);
        assert_eq!(all, Blame { more_ns: 800, causes: vec![Cause::AllRanks { ratio: 3.0, usual: 2.0 }] });
        let one = blame(&view(9, |rank, _| if rank == 2 { 300 } else { 200 }), 2);
        let cause = Cause::Rank { rank: Rank(2), ratio: 3.0, others: 2.0 };
        assert_eq!(one, Blame { more_ns: 800, causes: vec![cause] });
        // Forward 5 of rank 1 takes 1,000 instead of 200.
        let action = blame(&view(9, |rank, number| if (rank, number) == (1, 5) { 1_000 } else { 200 }), 1);
        assert_eq!(action, Blame { more_ns: 800, causes: vec![Cause::Action { at: 5, more_ns: 800 }] });
    }

    /// Steps of one microbatch, a forward and a backward on each rank: the longer of two slow actions has more than half of what
    /// the step took longer, and yet it is not the cause.
    #[test]
    fn a_slow_rank_with_few_actions_is_no_slow_action() {
        let slow = |rank: u32, number: u32| (if rank == 2 { 300 } else { 200 }) + 10 * u64::from(number);
        let usual: Vec<StepView> =
            (0..9).map(|step| view_of(step, 2, |_, number| 200 + 10 * u64::from(number))).collect();
        let one = view_of(9, 2, slow);
        let in_a_step = Usual::of(&usual.iter().collect::<Vec<_>>()).unwrap();
        let blame = Blame::of(&one, &path(&one, 2), &in_a_step).unwrap();
        assert!(matches!(blame.causes[..], [Cause::Rank { rank: Rank(2), .. }]), "{blame:?}");
        // Slow in each step, and in one of them still slower in both actions.
        let always: Vec<StepView> = (0..9).map(|step| view_of(step, 2, slow)).collect();
        let worse = view_of(
            9,
            2,
            |rank, number| if rank == 2 { 400 + 10 * u64::from(number) } else { slow(rank, number) },
        );
        let usual = Usual::of(&always.iter().collect::<Vec<_>>()).unwrap();
        let blame = Blame::of(&worse, &path(&worse, 2), &usual).unwrap();
        assert!(matches!(blame.causes[..], [Cause::Rank { rank: Rank(2), .. }]), "{blame:?}");
    }

    #[test]
    fn messages_are_told_where_no_action_took_longer() {
        let mut waited = view(9, |_, _| 200);
        let measured = waited.measured.as_mut().unwrap();
        measured.makespan_ns += 500;
        measured.idle_ns.transfer = 4 * 400;
        assert_eq!(blame(&waited, 0), Blame { more_ns: 500, causes: vec![Cause::Messages { more_ns: 400 }] });
    }
}
