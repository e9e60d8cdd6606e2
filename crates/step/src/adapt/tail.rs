//! Tail: what comes after the actions of a step (reduction and optimizer), by what the last steps took.
//!
//! Two readings of the same steps. Either all ranks meet after the last action of all, as they do to clip gradients, and the
//! tail is common to them. Or each component meets for itself, and the one that ends first may have the longer tail:
//!
//! ```text
//! of all          makespan - end of the last action                              the same in each step
//! of components   makespan - latest of (end of a component + its predicted tail)  the same in each step
//! ```
//!
//! The one that stays nearer to its median over the last steps is taken.

use dflop_sim::StepInput;
use dflop_types::Span;

/// What came after the actions of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tail {
    /// From the end of the last action to the end of the step, in nanoseconds.
    pub of_all_ns: u64,
    /// Beyond the tails that are predicted of each rank after the last action of its component, in nanoseconds; negative
    /// where they take less. `None` in checkpoints of earlier versions.
    pub of_components_ns: Option<i64>,
}

impl Tail {
    /// Of a step with these spans; `input` has the predicted tails.
    pub(crate) fn new(input: &StepInput, spans: &[Span], makespan_ns: u64) -> Self {
        let layout = input.layout;
        // Ranks of the encoder come first; colocated ranks are all of one component.
        let num_encoder_ranks =
            if layout.is_colocated() { 0 } else { (layout.encoder.pp * layout.encoder.dp) as usize };
        let component = |rank: usize| usize::from(rank >= num_encoder_ranks);
        let mut end_ns = [0; 2];
        for span in spans {
            let of = component(span.rank.index());
            end_ns[of] = span.end_ns.max(end_ns[of]);
        }
        let ends = input.tail_ns.iter().enumerate();
        let predicted_ns =
            ends.map(|(rank, ns)| end_ns[component(rank)].saturating_add(*ns)).max().unwrap_or(0);
        let beyond_ns = i128::from(makespan_ns) - i128::from(predicted_ns);
        Self {
            of_all_ns: makespan_ns.saturating_sub(end_ns[0].max(end_ns[1])),
            of_components_ns: i64::try_from(beyond_ns).ok(),
        }
    }
}

/// Puts what the last steps took in place of the predicted tails; leaves these before the first step.
pub(crate) fn apply(tails: &[Tail], tail_ns: &mut [u64]) {
    if tails.is_empty() {
        return;
    }
    let (all_ns, of_all) = middle(tails.iter().map(|tail| i128::from(tail.of_all_ns)).collect());
    let by_component: Option<Vec<i128>> =
        tails.iter().map(|tail| tail.of_components_ns.map(i128::from)).collect();
    match by_component.map(middle).filter(|(_, spread)| *spread < of_all) {
        Some((beyond_ns, _)) => tail_ns.iter_mut().for_each(|ns| *ns = whole(i128::from(*ns) + beyond_ns)),
        None => tail_ns.fill(whole(all_ns)),
    }
}

/// Nanoseconds that a tail can take: none below 0.
fn whole(ns: i128) -> u64 {
    u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
}

/// The median, and the sum of the distances from it.
fn middle(mut numbers: Vec<i128>) -> (i128, i128) {
    numbers.sort_unstable();
    let median = numbers[numbers.len() / 2];
    (median, numbers.iter().map(|number| (number - median).abs()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{ComponentLayout, Layout, PipelineOrder, Rank};

    /// The encoder ends `gap` after the LLM, which is to take 40 longer than predicted after that.
    #[test]
    fn a_component_that_ends_first_may_have_the_longer_tail() {
        let degrees = |pp| ComponentLayout { tp: 1, pp, dp: 1 };
        let input = StepInput {
            layout: Layout::disaggregated(degrees(1), degrees(2)),
            order: PipelineOrder::OneFOneB,
            num_microbatches: 1,
            forward_ns: Vec::new(),
            backward_ns: Vec::new(),
            input_ns: Vec::new(),
            weight_ns: Vec::new(),
            feeds: Vec::new(),
            transfer_ns: 0,
            tail_ns: vec![10, 100, 100],
            ready_ns: Vec::new(),
        };
        let tail = |gap: u64| {
            let span = |rank, action: &str, end_ns| Span {
                rank: Rank(rank),
                action: action.parse().unwrap(),
                start_ns: 0,
                end_ns,
            };
            let spans = [span(0, "0B0", 1_000 + gap), span(1, "1B0", 1_000), span(2, "2B0", 900)];
            Tail::new(&input, &spans, 1_000 + 100 + 40)
        };
        assert_eq!(tail(30), Tail { of_all_ns: 110, of_components_ns: Some(40) });
        let mut tail_ns = input.tail_ns.clone();
        apply(&[tail(30), tail(60), tail(5)], &mut tail_ns);
        assert_eq!(tail_ns, [50, 140, 140]);
    }

    fn applied(tails: &[(u64, Option<i64>)]) -> [u64; 3] {
        let tails: Vec<Tail> =
            tails.iter().map(|&(of_all_ns, of_components_ns)| Tail { of_all_ns, of_components_ns }).collect();
        let mut tail_ns = [10, 40, 40];
        apply(&tails, &mut tail_ns);
        tail_ns
    }

    #[test]
    fn the_reading_that_stays_is_taken() {
        assert_eq!(applied(&[]), [10, 40, 40]);
        // Where both stay, or the first more, ranks have one tail.
        assert_eq!(applied(&[(25, Some(5)), (25, Some(5))]), [25; 3]);
        assert_eq!(applied(&[(25, Some(5)), (26, Some(-9)), (26, Some(7))]), [26; 3]);
        // The component that ends first has the longer tail: what follows the last action depends on how much earlier.
        assert_eq!(applied(&[(25, Some(-2)), (35, Some(-1)), (12, Some(-2))]), [8, 38, 38]);
        assert_eq!(applied(&[(25, Some(-20)), (35, Some(-20))]), [0, 20, 20]);
        // A checkpoint of an earlier version.
        assert_eq!(applied(&[(25, None), (35, Some(0)), (12, Some(0))]), [25; 3]);
    }
}
