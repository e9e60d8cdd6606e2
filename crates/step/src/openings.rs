//! Openings: from when on a rank may open the receives of its actions.

use crate::judge::work::feeds;
use dflop_sim::{SimError, Simulator, StepInput};
use dflop_types::{Layout, PipelineOrder, Rank, Schedule};

/// For each action of `rank`, in the order of its list: how many of the rank's own actions come before its receives open.
///
/// A GPU may do nothing else while a receive is open, for example while it loads a kernel. If what is to be received waits
/// for something that the rank has still to do, both ranks then wait for ever; so they do if each of two ranks has opened a
/// receive of what the other does next. So all ranks go by one timeline, in which forwards take one unit of time and
/// backwards two: a receive opens no earlier than the action there that gives the message. Little is lost: the message cannot
/// come earlier by much. `order` counts where the schedule has no lists.
///
/// *Complexity*: O(actions of all ranks + messages).
///
/// # Errors
/// Those of the simulator: a list that does not fit the layout, or lists that make ranks wait in a circle.
pub fn openings(
    layout: &Layout,
    order: PipelineOrder,
    schedule: &Schedule,
    rank: Rank,
) -> Result<Vec<u32>, SimError> {
    let (by_group, num_microbatches) = (layout.by_group(), schedule.llm.len());
    let all = |ns: u64| vec![vec![ns; num_microbatches]; by_group.num_rows() as usize];
    let input = StepInput {
        layout: by_group,
        order,
        num_microbatches: num_microbatches as u32,
        forward_ns: all(1),
        backward_ns: all(2),
        input_ns: all(1),
        weight_ns: all(1),
        feeds: schedule.llm.iter().zip(&schedule.encoder).map(|(llm, encoder)| feeds(llm, encoder)).collect(),
        transfer_ns: 0,
        tail_ns: vec![0; by_group.num_ranks() as usize],
        ready_ns: Vec::new(),
    };
    let mut simulator = if schedule.actions.is_empty() {
        Simulator::new(&input)?
    } else {
        Simulator::with_lists(&input, &schedule.actions)?
    };
    Ok(simulator.openings(layout.group(rank).unwrap_or(rank)))
}
