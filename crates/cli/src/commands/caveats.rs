//! What is not certain about the plans of several searches, said once for all of them.

use dflop_plan::{Caveats, Outcome};
use dflop_types::{counted, thousands};

/// Says on stderr what is not certain about the best plans of these searches: each sentence once, counts over all of them.
pub(super) fn say<'a>(outcomes: impl Iterator<Item = &'a Outcome>) {
    let found = outcomes.filter_map(|outcome| Some((outcome.caveats, outcome.ranked.first()?.prediction)));
    let all = found.reduce(|(caveats, mut sum), (other, prediction)| {
        let caveats = Caveats {
            is_estimated: caveats.is_estimated || other.is_estimated,
            needs_kernels: caveats.needs_kernels || other.needs_kernels,
            is_network_measured: caveats.is_network_measured && other.is_network_measured,
            is_reduction_measured: caveats.is_reduction_measured && other.is_reduction_measured,
            has_experts: caveats.has_experts || other.has_experts,
            deals_out_experts: caveats.deals_out_experts || other.deals_out_experts,
            num_repaired_points: caveats.num_repaired_points.max(other.num_repaired_points),
        };
        sum.num_predictions += prediction.num_predictions;
        sum.num_extrapolated += prediction.num_extrapolated;
        sum.extrapolated_ratio = sum.num_extrapolated as f64 / sum.num_predictions.max(1) as f64;
        (caveats, sum)
    });
    for note in all.iter().flat_map(|(caveats, sum)| caveats.notes(sum)) {
        talk!("note: {note}");
    }
}

/// Says that a step takes all samples there are, as they are fewer than asked for.
pub(super) fn say_fewer(num_samples: u64, asked: u32) {
    talk!(
        "note: the data has {}, fewer than `train.global_batch_size` {}: every step takes all of them",
        counted(num_samples, "sample"),
        thousands(u64::from(asked))
    );
}

/// Says that some of these searches judged their plans on more samples than the data has.
pub(super) fn say_repeated() {
    talk!(
        "note: the global batches of some rows need more samples than the data has: there samples come more than once"
    );
}
