//! The critical path of a measured step: a chain of actions in which each waits for the one before it. This chain made the
//! step as long as it was.

use crate::error::StepError;
use crate::scheduler::StepScheduler;
use dflop_types::{Action, ActionKind, Layout, Schedule, Span, StageIndex, Timeline};
use std::collections::BTreeMap;

/// One action of a critical path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The action.
    pub span: Span,
    /// From the end of the action before it on the path to its start, in nanoseconds: a message under way, or time that no
    /// span explains.
    pub gap_ns: u64,
    /// The predicted time of the action, in nanoseconds.
    pub predicted_ns: u64,
}

/// Whether the action is a backward (B, or the I of a split one) and not a forward. `None` for a W, for which no other rank
/// waits.
fn side(kind: ActionKind) -> Option<bool> {
    match kind {
        ActionKind::F => Some(false),
        ActionKind::B | ActionKind::I => Some(true),
        ActionKind::W => None,
    }
}

impl StepScheduler {
    /// The actions that made a step as long as it was, the first one first. `timeline` is that of `schedule`, measured or
    /// simulated.
    ///
    /// The path is found backwards from the action that ended last. An action waits for the one before it on its rank, and
    /// for those whose output it takes (from another rank: plus the time of a message). The last of these is the action
    /// before it on the path. If the two overlap, because the clocks of two machines differ, the gap is 0.
    ///
    /// # Errors
    /// As [`StepScheduler::step_input`].
    pub fn critical_path(&self, schedule: &Schedule, timeline: &Timeline) -> Result<Vec<Link>, StepError> {
        let input = self.step_input(schedule)?;
        let layout = input.layout;
        let mut by_place: BTreeMap<(usize, bool, u32), usize> = BTreeMap::new();
        let mut before_on_rank: BTreeMap<usize, usize> = BTreeMap::new();
        let mut order: Vec<usize> = (0..timeline.spans.len()).collect();
        order.sort_by_key(|&at| (timeline.spans[at].rank, timeline.spans[at].start_ns, at));
        for pair in order.windows(2) {
            if timeline.spans[pair[0]].rank == timeline.spans[pair[1]].rank {
                before_on_rank.insert(pair[1], pair[0]);
            }
        }
        for (at, span) in timeline.spans.iter().enumerate() {
            if let Some(is_backward) = side(span.action.kind) {
                let row = input.row(span.rank, span.action.stage);
                by_place.insert((row, is_backward, span.action.microbatch), at);
            }
        }
        let predicted_ns = |span: &Span| {
            let rows = match span.action.kind {
                ActionKind::F => &input.forward_ns,
                ActionKind::B => &input.backward_ns,
                ActionKind::I => &input.input_ns,
                ActionKind::W => &input.weight_ns,
            };
            let row = input.row(span.rank, span.action.stage);
            rows.get(row).and_then(|times| times.get(span.action.microbatch as usize)).copied().unwrap_or(0)
        };
        let mut path = Vec::new();
        let mut at = (0..timeline.spans.len()).max_by_key(|&at| (timeline.spans[at].end_ns, at));
        while let Some(here) = at {
            let span = timeline.spans[here];
            let needed = sources(&layout, &input.feeds, &span);
            // Without a sample nothing is sent.
            let forward_ns =
                predicted_ns(&Span { action: Action { kind: ActionKind::F, ..span.action }, ..span });
            let sent_ns = if forward_ns > 0 { input.transfer_ns } else { 0 };
            let given = needed.iter().filter_map(|place| by_place.get(place));
            let candidates = given.chain(before_on_rank.get(&here)).copied();
            // An action that started later was not waited for, whatever the lists say. So the path always goes back in time,
            // and it ends.
            let before = candidates
                .filter(|&other| (timeline.spans[other].start_ns, other) < (span.start_ns, here))
                .max_by_key(|&other| (ready_ns(&timeline.spans[other], &span, sent_ns), other));
            let ended_ns = before.map_or(0, |before| timeline.spans[before].end_ns);
            path.push(Link {
                span,
                gap_ns: span.start_ns.saturating_sub(ended_ns),
                predicted_ns: predicted_ns(&span),
            });
            at = before;
        }
        path.reverse();
        Ok(path)
    }
}

/// When `span` may use the output of `before`, in nanoseconds. From another rank the output comes as a message.
fn ready_ns(before: &Span, span: &Span, transfer_ns: u64) -> u64 {
    before.end_ns + if before.rank == span.rank { 0 } else { transfer_ns }
}

/// The actions whose outputs `span` takes, each as its row, whether it is a backward, and its microbatch.
fn sources(layout: &Layout, feeds: &[Vec<Vec<u32>>], span: &Span) -> Vec<(usize, bool, u32)> {
    let Some(is_backward) = side(span.action.kind) else { return Vec::new() };
    let (stage, microbatch) = (span.action.stage.0, span.action.microbatch);
    let Some(place) = layout.coordinates(span.rank) else { return Vec::new() };
    let first_llm = layout.encoder.pp;
    let row = |replica: u32, stage: u32| layout.row(replica, StageIndex(stage));
    let fed = |encoder: u32, llm: u32| {
        let of_microbatch = feeds.get(microbatch as usize);
        let of_encoder = of_microbatch.and_then(|replicas| replicas.get(encoder as usize));
        of_encoder.is_some_and(|fed| fed.binary_search(&llm).is_ok())
    };
    if !is_backward {
        return if stage == 0 {
            Vec::new()
        } else if stage == first_llm {
            let encoders = (0..layout.encoder.dp).filter(|&encoder| fed(encoder, place.replica));
            encoders.map(|encoder| (row(encoder, stage - 1), false, microbatch)).collect()
        } else {
            vec![(row(place.replica, stage - 1), false, microbatch)]
        };
    }
    let own = (row(place.replica, stage), false, microbatch);
    let above = if stage + 1 == layout.num_stages() {
        Vec::new()
    } else if stage + 1 == first_llm {
        let llms = (0..layout.llm.dp).filter(|&llm| fed(place.replica, llm));
        llms.map(|llm| (row(llm, stage + 1), true, microbatch)).collect()
    } else {
        vec![(row(place.replica, stage + 1), true, microbatch)]
    };
    above.into_iter().chain([own]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::fixture;
    use crate::settings::StepSettings;
    use dflop_cost::CostModel;
    use dflop_types::{ComponentLayout, PipelineOrder, SampleIndex, Zero};

    /// The path of a simulated step explains every nanosecond: its actions and its messages add up to the end of the last
    /// action.
    #[test]
    fn the_path_of_a_simulated_step_has_no_hole() {
        let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
        let layouts = [
            Layout::disaggregated(degrees(1, 1), degrees(1, 1)),
            Layout::disaggregated(degrees(1, 2), degrees(3, 2)),
            Layout::disaggregated(degrees(1, 3), degrees(2, 1)),
            Layout::colocated(3, Zero::Nothing),
        ];
        for layout in layouts {
            for pipeline_order in [PipelineOrder::OneFOneB, PipelineOrder::GPipe] {
                let settings =
                    StepSettings { layout, num_microbatches: 4, pipeline_order, memory_budget_bytes: None };
                let model = CostModel::new(&fixture::model_profile()).unwrap();
                let scheduler = StepScheduler::new(settings, model, fixture::shapes(32, 5), 0).unwrap();
                let samples: Vec<SampleIndex> = (0..24).map(SampleIndex).collect();
                let schedule = scheduler.schedule(0, &samples, Arm::AWARE).unwrap();
                let timeline = scheduler.simulate(&schedule).unwrap();
                let transfer_ns = scheduler.step_input(&schedule).unwrap().transfer_ns;
                let path = scheduler.critical_path(&schedule, &timeline).unwrap();
                let last_ns = timeline.spans.iter().map(|span| span.end_ns).max().unwrap();
                let sum: u64 = path.iter().map(|link| link.gap_ns + link.span.duration_ns()).sum();
                assert_eq!(sum, last_ns, "{layout} {pipeline_order}");
                for link in &path {
                    assert!(link.gap_ns == 0 || link.gap_ns == transfer_ns, "{layout}: {link:?}");
                    assert_eq!(link.predicted_ns, link.span.duration_ns());
                }
                assert_eq!(path[0].span.start_ns, 0);
            }
        }
    }

    /// An action that takes 50 times as long is on the path.
    #[test]
    fn a_slow_action_is_on_the_path() {
        let degrees = |pp, dp| ComponentLayout { tp: 1, pp, dp };
        let layout = Layout::disaggregated(degrees(1, 2), degrees(2, 2));
        let settings = StepSettings {
            layout,
            num_microbatches: 4,
            pipeline_order: PipelineOrder::OneFOneB,
            memory_budget_bytes: None,
        };
        let model = CostModel::new(&fixture::model_profile()).unwrap();
        let scheduler = StepScheduler::new(settings, model, fixture::shapes(32, 5), 0).unwrap();
        let samples: Vec<SampleIndex> = (0..24).map(SampleIndex).collect();
        let schedule = scheduler.schedule(0, &samples, Arm::AWARE).unwrap();
        let mut input = scheduler.step_input(&schedule).unwrap();
        input.forward_ns[1][2] *= 50;
        let timeline = dflop_sim::simulate_step(&input).unwrap();
        let path = scheduler.critical_path(&schedule, &timeline).unwrap();
        let longest = path.iter().max_by_key(|link| link.span.duration_ns()).unwrap();
        assert_eq!((longest.span.rank.0, longest.span.action.to_string()), (1, "0F2".to_owned()));
        assert!(longest.span.duration_ns() > 40 * longest.predicted_ns);
    }
}
