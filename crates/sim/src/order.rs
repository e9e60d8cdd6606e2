//! Pipeline orders: the action list of each stage, which the simulator times and the runtime runs.

use crate::error::{SimError, Violation};
use dflop_types::{Action, ActionKind, Layout, PipelineOrder, Rank, StageIndex};

/// The actions of `stage` (of `num_stages`) for `num_microbatches`, in the order in which its rank runs them.
///
/// *GPipe*: all forwards, then all backwards, both from microbatch 0. *1F1B*: stage s of p does
/// min(m, p - 1 - s) forwards to warm up, then one forward and one backward in turn, then the backwards that
/// are left. At most p - s microbatches are in flight. *Zero-bubble*: as 1F1B with the backward split into I and W; stage
/// s runs the W of a microbatch s microbatches after its I. Every rank holds at most p microbatches, as many as the first
/// rank holds under 1F1B. Every replica of a stage runs the same list.
///
/// *Interleaved* is the same as 1F1B here, because each rank has one stage; [`interleaved`] is for several. *Data-aware*
/// lists need durations (`dflop_step::lists::data_aware`); without them the list is that of 1F1B.
///
/// *Complexity*: O(m).
///
/// # Panics
/// If `stage` is not below `num_stages`, or the actions exceed memory.
///
/// # Examples
/// ```
/// use dflop_types::{PipelineOrder, StageIndex};
/// let list = |order| -> Vec<String> {
///     dflop_sim::order::actions(order, StageIndex(1), 3, 4).iter().map(ToString::to_string).collect()
/// };
/// assert_eq!(list(PipelineOrder::OneFOneB).join(" "), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
/// assert_eq!(
///     list(PipelineOrder::ZeroBubble).join(" "),
///     "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"
/// );
/// ```
///
/// # References
/// GPipe: Huang et al., 2019, arXiv 1811.06965. 1F1B without flushes inside the step ("`PipeDream`-Flush"):
/// Narayanan et al., 2021, arXiv 2006.09503, section 2. Zero-bubble: ZB-H1 of Qi et al., 2023, arXiv 2401.10241.
pub fn actions(
    order: PipelineOrder,
    stage: StageIndex,
    num_stages: u32,
    num_microbatches: u32,
) -> Vec<Action> {
    let mut list = Vec::with_capacity(2 * num_microbatches as usize);
    visit(order, stage, num_stages, num_microbatches, |kind, microbatch| {
        list.push(Action { stage, kind, microbatch });
    });
    list
}

/// The actions of `rank` in `layout`, in the pipeline order; `None` past the last rank. In a colocated layout every rank
/// takes one microbatch after another through both components, whatever the order.
///
/// If stages are interleaved, ranks of the LLM backbone run the microbatches in rounds as [`interleaved`] does. An encoder
/// stage has run one more forward at each backward than the stage it feeds.
///
/// # Examples
/// ```
/// use dflop_types::{Layout, PipelineOrder, Rank, Zero};
/// let layout = Layout::colocated(4, Zero::Nothing);
/// let list = dflop_sim::order::of_rank(&layout, PipelineOrder::OneFOneB, Rank(3), 2).unwrap();
/// let list: Vec<_> = list.iter().map(ToString::to_string).collect();
/// assert_eq!(list.join(" "), "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1");
/// ```
pub fn of_rank(
    layout: &Layout,
    order: PipelineOrder,
    rank: Rank,
    num_microbatches: u32,
) -> Option<Vec<Action>> {
    let at = layout.coordinates(rank)?;
    if layout.is_interleaved() && !layout.is_colocated() {
        return Some(of_interleaved(layout, order, at.stage, num_microbatches));
    }
    if !layout.is_colocated() {
        return Some(actions(order, at.stage, layout.num_stages(), num_microbatches));
    }
    let forth = layout.stages(rank).map(|stage| (ActionKind::F, stage));
    let there_and_back: Vec<_> =
        forth.chain(layout.stages(rank).rev().map(|stage| (ActionKind::B, stage))).collect();
    let of_one =
        |microbatch| there_and_back.iter().map(move |&(kind, stage)| Action { stage, kind, microbatch });
    Some((0..num_microbatches).flat_map(of_one).collect())
}

/// Whether the order splits every backward into `I` and `W`.
pub(crate) fn is_split(order: PipelineOrder) -> bool {
    order == PipelineOrder::ZeroBubble
}

/// Calls `see` for each action of the list, in its order; allocates nothing.
pub(crate) fn visit(
    order: PipelineOrder,
    stage: StageIndex,
    num_stages: u32,
    num_microbatches: u32,
    mut see: impl FnMut(ActionKind, u32),
) {
    assert!(stage.0 < num_stages, "stage {stage} is not one of {num_stages}");
    let warm_up = match order {
        PipelineOrder::GPipe => num_microbatches,
        _ => num_microbatches.min(num_stages - 1 - stage.0),
    };
    for microbatch in 0..warm_up {
        see(ActionKind::F, microbatch);
    }
    for microbatch in 0..num_microbatches {
        if warm_up + microbatch < num_microbatches {
            see(ActionKind::F, warm_up + microbatch);
        }
        if !is_split(order) {
            see(ActionKind::B, microbatch);
            continue;
        }
        see(ActionKind::I, microbatch);
        if microbatch >= stage.0 {
            see(ActionKind::W, microbatch - stage.0);
        }
    }
    if is_split(order) {
        for microbatch in num_microbatches.saturating_sub(stage.0)..num_microbatches {
            see(ActionKind::W, microbatch);
        }
    }
}

/// The list of the rank whose first stage is `stage`, in a layout with interleaved stages.
fn of_interleaved(
    layout: &Layout,
    order: PipelineOrder,
    stage: StageIndex,
    num_microbatches: u32,
) -> Vec<Action> {
    let (first_llm, pp) = (layout.encoder.pp, layout.llm.pp);
    let rounds = Rounds { ranks: pp, chunks: layout.llm_interleave, microbatches: num_microbatches };
    let of_llm = |rank| rounds.list(Rank(rank), order == PipelineOrder::GPipe);
    if stage.0 >= first_llm {
        let shift = |action: Action| Action { stage: StageIndex(action.stage.0 + first_llm), ..action };
        return of_llm(stage.0 - first_llm).into_iter().map(shift).collect();
    }
    let num_ahead = first_llm - stage.0;
    let (mut list, mut fed, mut next) = (Vec::with_capacity(2 * num_microbatches as usize), 0, 0);
    for action in of_llm(0).into_iter().filter(|action| action.stage.0 == 0) {
        if action.kind == ActionKind::F {
            fed += 1;
            continue;
        }
        // Before each backward, this stage has run at least as many forwards as the stage it feeds. So the two never wait
        // for each other in a circle.
        let until = num_microbatches.min(fed + num_ahead);
        list.extend((next..until).map(|microbatch| Action { stage, kind: ActionKind::F, microbatch }));
        next = next.max(until);
        list.push(Action { stage, ..action });
    }
    list
}

/// The interleaved 1F1B list of `rank`. The `num_stages` stages are dealt round over p = `num_ranks` ranks: rank r runs the
/// stages r, r + p, r + 2p and so on, which are its v chunks.
///
/// Microbatches are taken in rounds of about p. A rank runs all microbatches of a round through its first chunk, then
/// through its second one, and so on. With one chunk on each rank the list is that of 1F1B. To warm up, rank r runs
/// (v - 1) x microbatches of the first round + 2 (p - 1 - r) forwards.
///
/// *Complexity*: O(m v).
///
/// # Errors
/// [`SimError::Unsound`] if the ranks do not get equally many stages.
///
/// # Panics
/// If `rank` is not below `num_ranks`.
///
/// # Examples
/// ```
/// use dflop_types::Rank;
/// let list = dflop_sim::order::interleaved(Rank(1), 2, 4, 2)?;
/// let list: Vec<_> = list.iter().map(ToString::to_string).collect();
/// assert_eq!(list.join(" "), "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1");
/// # Ok::<(), dflop_sim::SimError>(())
/// ```
///
/// # References
/// Narayanan et al., 2021, arXiv 2104.04473, section 2.2, for rounds of `num_ranks` microbatches. If all rounds are equal
/// but have another number of microbatches, they are those of PyTorch's `ScheduleInterleaved1F1B`.
pub fn interleaved(
    rank: Rank,
    num_ranks: u32,
    num_stages: u32,
    num_microbatches: u32,
) -> Result<Vec<Action>, SimError> {
    let violations = interleaving_violations(num_ranks, num_stages);
    if !violations.is_empty() {
        return Err(SimError::Unsound { subject: "the interleaved stages", violations });
    }
    assert!(rank.0 < num_ranks, "rank {rank} is not one of {num_ranks}");
    if num_stages == num_ranks {
        return Ok(actions(PipelineOrder::OneFOneB, StageIndex(rank.0), num_stages, num_microbatches));
    }
    Ok(Rounds { ranks: num_ranks, chunks: num_stages / num_ranks, microbatches: num_microbatches }
        .list(rank, false))
}

/// The rounds in which microbatches pass ranks with several chunks. They are as even as possible, the longer ones first.
#[derive(Debug, Clone, Copy)]
struct Rounds {
    ranks: u32,
    chunks: u32,
    microbatches: u32,
}

impl Rounds {
    /// First microbatch of each round, and how many it has.
    fn rounds(self) -> impl Iterator<Item = (u32, u32)> {
        let m = self.microbatches;
        let count = (m / self.ranks).max(1);
        let (least, longer) = (m / count, m % count);
        (0..count).map(move |round| (round * least + round.min(longer), least + u32::from(round < longer)))
    }

    /// The actions of `rank`, with stages counted from 0. With `is_gpipe` all forwards come first.
    fn list(self, rank: Rank, is_gpipe: bool) -> Vec<Action> {
        let turns = |kind: ActionKind| {
            let chunk = move |turn| if kind == ActionKind::F { turn } else { self.chunks - 1 - turn };
            let of_round = move |(first, count): (u32, u32)| {
                (0..self.chunks).flat_map(move |turn| {
                    let stage = StageIndex(chunk(turn) * self.ranks + rank.0);
                    (first..first + count).map(move |microbatch| Action { stage, kind, microbatch })
                })
            };
            self.rounds().flat_map(of_round)
        };
        let total = self.microbatches * self.chunks;
        let of_first = self.rounds().next().map_or(0, |(_, count)| count);
        let warm_up = (self.chunks - 1) * of_first + 2 * (self.ranks - 1 - rank.0);
        let warm_up = if is_gpipe { total } else { total.min(warm_up) };
        let mut list = Vec::with_capacity(2 * total as usize);
        let mut forwards = turns(ActionKind::F);
        list.extend(forwards.by_ref().take(warm_up as usize));
        for backward in turns(ActionKind::B) {
            list.extend(forwards.next());
            list.push(backward);
        }
        list
    }
}

/// Why stages cannot be interleaved.
pub(crate) fn interleaving_violations(num_ranks: u32, num_stages: u32) -> Vec<Violation> {
    if num_ranks == 0 {
        return vec![Violation::Zero { path: "ranks".to_owned(), what: "rank" }];
    }
    if num_stages == 0 || !num_stages.is_multiple_of(num_ranks) {
        return vec![Violation::Uneven { count: num_stages, what: "stages", parts: num_ranks, of: "ranks" }];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(order: PipelineOrder, stage: u32, num_stages: u32, num_microbatches: u32) -> String {
        let list = actions(order, StageIndex(stage), num_stages, num_microbatches);
        list.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    }

    /// The lists of small pipelines, worked out by hand.
    #[test]
    fn small_lists() {
        let one_f_one_b = |stage, p, m| text(PipelineOrder::OneFOneB, stage, p, m);
        assert_eq!(one_f_one_b(0, 3, 4), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
        assert_eq!(one_f_one_b(1, 3, 4), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
        assert_eq!(one_f_one_b(2, 3, 4), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
        assert_eq!(one_f_one_b(0, 1, 2), "0F0 0B0 0F1 0B1");
        assert_eq!(one_f_one_b(0, 8, 2), "0F0 0F1 0B0 0B1", "warm-up is capped by the microbatches");
        assert_eq!(one_f_one_b(0, 8, 0), "");
        assert_eq!(text(PipelineOrder::GPipe, 1, 2, 3), "1F0 1F1 1F2 1B0 1B1 1B2");
    }

    proptest! {
        /// Each action stands once, a backward after its forward, and 1F1B holds no more than p - s in
        /// flight.
        #[test]
        fn lists_are_whole_and_bounded(p in 1u32..12, at in 0u32..12, m in 0u32..40, is_gpipe: bool) {
            let stage = at % p;
            let order = if is_gpipe { PipelineOrder::GPipe } else { PipelineOrder::OneFOneB };
            let list = actions(order, StageIndex(stage), p, m);
            prop_assert_eq!(list.len(), 2 * m as usize);
            let (mut forwards, mut backwards) = (0, 0);
            for action in list {
                let next = if action.kind == ActionKind::F { &mut forwards } else { &mut backwards };
                prop_assert_eq!(action.microbatch, *next, "microbatches of a kind come in turn");
                *next += 1;
                prop_assert!(backwards <= forwards);
                let in_flight_max = if is_gpipe { m } else { p - stage };
                prop_assert!(forwards - backwards <= in_flight_max);
            }
        }
    }
}
