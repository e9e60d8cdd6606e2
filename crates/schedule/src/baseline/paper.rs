//! The paper's scheduler: an integer program for the worst load, and LPT where it does not converge in time.

use super::single_cost_lpt;
use crate::costs::Costs;
use good_lp::solvers::SolutionStatus;
use good_lp::{Expression, Solution, SolverModel, WithMipGap, WithTimeLimit, microlp, variable, variables};

/// The most binary variables (samples times buckets) the solver is given; of more LPT answers at once.
///
/// Far beyond what converges: microlp 0.6 solves 16 samples in 4 buckets in 4 s, and neither 20 in 4 nor 16 in 8 in
/// 15 s (one of two shared cores of an AMD EPYC, 2026-11-21).
pub const BINARIES_MAX: usize = 4_096;

/// The relative gap at which the solver calls an answer optimal: what commercial solvers begin with.
const CONVERGED_GAP: f32 = 1e-4;

/// What became of the paper's integer program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SolverEnd {
    /// Solved, to a relative gap of 1e-4: the assignment is the solver's.
    Converged,
    /// The time limit passed, or the solver gave up: the assignment is LPT's.
    NotConverged,
    /// More than [`BINARIES_MAX`] variables: the solver was not asked, the assignment is LPT's.
    TooLarge,
}

impl SolverEnd {
    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Converged => "ilp",
            Self::NotConverged => "lpt, the solver did not converge",
            Self::TooLarge => "lpt, too large for the solver",
        }
    }
}

/// Bucket of each sample as the paper assigns it, and what became of its integer program.
///
/// ```text
/// minimise C   where   sum_j x_ij = 1,   sum_i e_i x_ij <= C,   sum_i l_i x_ij <= C,   x_ij in {0, 1}
/// ```
///
/// Where the solver has not converged within `solver_ms` milliseconds, LPT: samples by descending duration,
/// each into the least loaded bucket. The paper names one duration there; we take encoder and LLM together.
/// With 0 milliseconds it is LPT alone. The limit is the solver's own wall clock: answers may differ between
/// machines, but for sizes that converge at once or are over [`BINARIES_MAX`]. All zeros if there are no
/// buckets. `costs` must have been checked ([`Costs::check`]).
///
/// *Complexity*: exponential in n m up to the limit; LPT O(n log n + n log m).
///
/// *References*: arXiv 2603.25120, section "Scheduler", for both. Their solver is another.
pub fn paper(costs: &Costs, num_buckets: u32, solver_ms: u32) -> (Vec<u32>, SolverEnd) {
    let binaries = costs.num_samples().saturating_mul(num_buckets as usize);
    let end = if binaries > BINARIES_MAX {
        SolverEnd::TooLarge
    } else if let Some(bucket) = solve(costs, num_buckets, solver_ms) {
        return (bucket, SolverEnd::Converged);
    } else {
        SolverEnd::NotConverged
    };
    let both: Vec<u64> = costs
        .encoder_ns
        .iter()
        .zip(&costs.llm_ns)
        .map(|(encoder, llm)| encoder.saturating_add(*llm))
        .collect();
    (single_cost_lpt(&both, num_buckets), end)
}

/// The solver's assignment, if it converges within `solver_ms`.
fn solve(costs: &Costs, num_buckets: u32, solver_ms: u32) -> Option<Vec<u32>> {
    let (n, m) = (costs.num_samples(), num_buckets as usize);
    if n == 0 || m == 0 || solver_ms == 0 {
        return (n == 0).then(Vec::new);
    }
    let columns = [&costs.encoder_ns, &costs.llm_ns];
    // Costs as shares of the larger mean load: nanoseconds would leave the solver's tolerances behind.
    let mean = columns.map(|column| column.iter().sum::<u64>()).into_iter().max()? as f64 / m as f64;
    if mean == 0.0 {
        return Some(super::arrival_order(n, num_buckets));
    }
    let mut variables = variables!();
    let worst = variables.add(variable().min(0));
    let binaries = variables.add_vector(variable().binary(), n * m);
    let mut model = variables.minimise(worst).using(microlp);
    for sample in binaries.chunks(m) {
        model.add_constraint(sample.iter().sum::<Expression>().eq(1));
    }
    for column in columns {
        for bucket in 0..m {
            let load: Expression = (column.iter().zip(binaries.chunks(m)))
                .filter(|&(&cost, _)| cost > 0)
                .map(|(&cost, sample)| sample[bucket] * (cost as f64 / mean))
                .sum();
            model.add_constraint(load.leq(worst));
        }
    }
    let solution =
        model.with_mip_gap(CONVERGED_GAP).ok()?.with_time_limit(f64::from(solver_ms) / 1e3).solve().ok()?;
    if matches!(solution.status(), SolutionStatus::TimeLimit) {
        return None;
    }
    let chosen = |sample: &[good_lp::Variable]| {
        (0..num_buckets)
            .zip(sample)
            .find(|&(_, &binary)| solution.value(binary) > 0.5)
            .map(|(bucket, _)| bucket)
    };
    binaries.chunks(m).map(chosen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(encoder_ns: &[u64], llm_ns: &[u64]) -> Costs {
        Costs { encoder_ns: encoder_ns.to_vec(), llm_ns: llm_ns.to_vec(), ..Costs::default() }
    }

    #[test]
    fn the_program_sees_both_resources() {
        // By the sum all are alike; only (9, 1) with (1, 9) gives 10.
        let (bucket, end) = paper(&costs(&[9, 9, 1, 1], &[1, 1, 9, 9]), 2, 10_000);
        assert_eq!(end, SolverEnd::Converged);
        assert!(bucket[0] != bucket[1] && bucket[2] != bucket[3], "{bucket:?}");
    }

    #[test]
    fn without_time_or_over_the_size_it_is_lpt() {
        // 5 + 4 and 3 + 2 + 1 + 1 by descending duration: 5 | 4, 3 to the 4, 2 to the 5, 1 and 1 to either.
        let few = costs(&[2, 2, 1, 1, 0, 0], &[3, 2, 2, 1, 1, 1]);
        assert_eq!(paper(&few, 2, 0), (vec![0, 1, 1, 0, 0, 1], SolverEnd::NotConverged));
        let many = costs(&vec![0; BINARIES_MAX + 1], &vec![1; BINARIES_MAX + 1]);
        let (bucket, end) = paper(&many, 1, u32::MAX);
        assert_eq!((bucket.len(), end), (BINARIES_MAX + 1, SolverEnd::TooLarge));
    }

    #[test]
    fn edges_have_answers() {
        assert_eq!(paper(&costs(&[], &[]), 3, 100), (vec![], SolverEnd::Converged));
        assert_eq!(paper(&costs(&[0; 3], &[0; 3]), 3, 100), (vec![0, 1, 2], SolverEnd::Converged));
        assert_eq!(paper(&costs(&[0; 2], &[4, 5]), 1, 10_000), (vec![0, 0], SolverEnd::Converged));
        assert_eq!(paper(&costs(&[1, 1], &[4, 5]), 0, 100).0, [0, 0]);
    }
}
