//! Openings: from when on a rank may open the receives of its actions.

use crate::judge::work::{feeds, holders};
use dflop_sim::{Opening, SimError, Simulator, StepInput};
use dflop_types::{Layout, PipelineOrder, Rank, Schedule};

/// For each action of `rank`, in the order of its list, the messages from other ranks with their openings.
///
/// A GPU may do nothing else while a receive is open or a message is on its way, for example while it loads a kernel. If what
/// is to be received waits for something that the rank has still to do, both ranks then wait for ever. So they do if each of two
/// ranks has opened a receive of what the other does next, and if each has sent what the other has not opened. So all ranks go by
/// one timeline, in which forwards take one unit of time and backwards two: a receive opens when the action starts there that
/// gives the message. No earlier, as the message cannot come earlier by much; and no later, as the sender may wait for it. `order`
/// counts where the schedule has no lists.
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
) -> Result<Vec<Vec<Opening>>, SimError> {
    Ok(timeline(layout, order, schedule)?.openings(layout.group(rank).unwrap_or(rank)))
}

/// `[rank][action]`: how many actions of the rank come before the first receive of this action opens.
///
/// # Errors
/// As [`openings`].
pub(crate) fn first_openings(
    layout: &Layout,
    order: PipelineOrder,
    schedule: &Schedule,
) -> Result<Vec<Vec<u32>>, SimError> {
    Ok(timeline(layout, order, schedule)?.first_openings())
}

/// The timeline that all ranks go by.
fn timeline(layout: &Layout, order: PipelineOrder, schedule: &Schedule) -> Result<Simulator, SimError> {
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
        feeds: schedule
            .llm
            .iter()
            .zip(&schedule.encoder)
            .map(|(llm, encoder)| feeds(&holders(llm), encoder, by_group.encoder.dp))
            .collect(),
        transfer_ns: 0,
        tail_ns: vec![0; by_group.num_ranks() as usize],
        ready_ns: Vec::new(),
    };
    if schedule.actions.is_empty() {
        Simulator::new(&input)
    } else {
        Simulator::with_lists(&input, &schedule.actions)
    }
}
