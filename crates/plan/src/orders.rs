//! Orders of actions. Which layout is best hardly depends on the order, but its step does: so all candidates are judged under
//! one order, and the best pipelines once more under the others.

use crate::error::PlanError;
use crate::found::Found;
use crate::input::SearchInput;
use crate::judge::judge_one;
use crate::models::Models;
use crate::run_memory::Held;
use crate::space::Candidate;
use dflop_types::{PipelineOrder, RankedPlan};

/// Pipelines that are judged under the other orders.
const TRIED_MAX: usize = 2;

/// Samples in one batch beyond which making lists would take longer than the rest of the search.
const LISTS_SAMPLES_MAX: usize = 1_024;

/// Judges the best pipelines of `found` under the orders that they were not judged under, where none is asked for. Those that
/// fit join `found`. The answer is how many candidates that were.
///
/// An order changes how long ranks are idle, not what they compute. So a pipeline is tried only if it would be the best plan
/// without any idle time. Interleaved stages have no split backward. Action lists of more than [`LISTS_SAMPLES_MAX`] samples take too long.
///
/// # Errors
/// As [`crate::search()`].
pub(crate) fn try_orders(
    input: &SearchInput<'_>,
    models: &Models,
    held: &Held<'_>,
    found: &mut Found,
) -> Result<u64, PlanError> {
    let is_large = held.batches.iter().any(|batch| batch.len() > LISTS_SAMPLES_MAX);
    let Some(best) = found.ranked.first().filter(|_| input.order.is_none() && !is_large) else {
        return Ok(0);
    };
    let best_ns = found.value_ns(best) as f64;
    let busy_ns = |plan: &RankedPlan| {
        found.value_ns(plan) as f64 * (1.0 - plan.prediction.bubble_ratio.clamp(0.0, 1.0))
    };
    let pipelines = found.ranked.iter().filter(|plan| !plan.layout.is_colocated());
    let tried: Vec<Candidate> =
        pipelines.filter(|plan| busy_ns(plan) < best_ns).take(TRIED_MAX).map(Candidate::from).collect();
    let (mut num_tried, no_bounds_ns) = (0, vec![0; held.batches.len()]);
    for candidate in tried {
        for order in [PipelineOrder::DataAware, PipelineOrder::ZeroBubble] {
            let is_split = order == PipelineOrder::ZeroBubble;
            let can_split = candidate.layout.llm_interleave == 1 && models.of(&candidate).has_split();
            if candidate.order == order || is_split && !can_split || (input.halt)() {
                continue;
            }
            num_tried += 1;
            let other = Candidate { order, ..candidate };
            let rejection = judge_one(input, models, &other, &no_bounds_ns, held, found)?;
            found.rejections.extend(rejection);
        }
    }
    Ok(num_tried)
}
