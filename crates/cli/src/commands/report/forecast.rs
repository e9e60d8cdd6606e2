//! Timelines of a plan of which nothing was trained yet: one global batch in it, simulated.

use super::planned::Planned;
use crate::Failure;
use dflop_plan::refusal;
use dflop_report::StepView;
use dflop_step::batches::GlobalBatches;
use dflop_step::{Arm, StepScheduler};
use dflop_types::{DataProfile, Plan};

/// Runners-up that are drawn.
const RUNNERS_UP: usize = 2;

/// Samples in a batch beyond which the first schedule that is found is drawn: the whole search would take minutes.
const SEARCHED_MAX: usize = 1_024;

/// The first global batch of the run under the plan, in arrival order and balanced, and balanced under the first runners-up
/// of other layouts. What does not fit has no timeline.
pub(super) fn views(planned: &Planned, data: &DataProfile) -> Result<Vec<StepView>, Failure> {
    let plan = &planned.plan;
    let (Some(model), Some(searched)) = (&planned.model, plan.searched) else { return Ok(Vec::new()) };
    let size = plan.global_batch_size.min(data.samples.len() as u32);
    // A plan of an earlier version does not say which ranks share a node.
    if size == 0 || searched.ranks_per_node.is_none() {
        return Ok(Vec::new());
    }
    let batch = GlobalBatches::new(data.samples.len() as u32, size, plan.seed)?.batch(0);
    let mut wanted = vec![
        (plan.best, Arm::BLIND, Arm::BLIND.to_string()),
        (plan.best, Arm::AWARE, Arm::AWARE.to_string()),
    ];
    let mut layouts = vec![plan.best.layout];
    for (at, other) in plan.runners_up.iter().enumerate() {
        if layouts.len() <= RUNNERS_UP && !layouts.contains(&other.layout) {
            layouts.push(other.layout);
            wanted.push((*other, Arm::AWARE, format!("runner-up {}: {}", at + 1, other.layout)));
        }
    }
    let mut views = Vec::new();
    for (of, arm, name) in wanted {
        let of_plan = Plan { best: of, ..plan.clone() };
        let scheduler =
            StepScheduler::of_plan(&of_plan, data, model, searched.memory_budget_bytes, plan.seed)?;
        let scheduler = scheduler.on_nodes(searched.ranks_per_node)?;
        match scheduler.schedule_until(0, &batch, arm, &|| batch.len() > SEARCHED_MAX) {
            Ok(schedule) => views.push(StepView {
                arm: name,
                layout: Some(of.layout),
                predicted: Some(scheduler.simulate(&schedule)?),
                ..StepView::default()
            }),
            Err(error) if refusal(&error).is_some() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(views)
}
