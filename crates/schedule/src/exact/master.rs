//! The linear program of the bound, solved by a library made for it.

use good_lp::{Expression, Solution, SolverModel, Variable, microlp, variable, variables};

/// The worth of each sample, from 0 to 1, with the largest sum such that none of `sets` is worth more than 1, and
/// that sum; `None` if the solver found no answer.
///
/// Floats: what is concluded from them is proven in integers by the caller.
pub(super) fn worths(num_samples: usize, sets: &[&[u32]]) -> Option<(f64, Vec<f64>)> {
    let mut names = variables!();
    let worth: Vec<Variable> = (0..num_samples).map(|_| names.add(variable().min(0.0).max(1.0))).collect();
    let goal: Expression = worth.iter().sum();
    let mut model = names.maximise(goal).using(microlp);
    for set in sets {
        let sum: Expression = set.iter().map(|&i| worth[i as usize]).sum();
        model.add_constraint(sum.leq(1.0));
    }
    let found = model.solve().ok()?;
    let worth: Vec<f64> = worth.into_iter().map(|name| found.value(name).clamp(0.0, 1.0)).collect();
    Some((worth.iter().sum(), worth))
}
