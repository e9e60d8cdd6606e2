//! Live: what the last steps of a run say of the machine, for plans of other layouts.
//!
//! A correction belongs to one layout. What it has learned of hardware and data does not, and is taken apart:
//!
//! ```text
//! times of a component = median of its rows, by kind of action     -> the curves of a renewed model profile
//! slowness of a rank   = its rows against the median row           -> wherever another layout puts the rank
//! excess of a bin      = as it is                                  -> samples of these sizes in any layout
//! ```

use crate::adapt::adjustment::{Adjustment, RowFactor, ShapeFactor, rows_of};
use crate::adapt::bins::{ENCODER, LLM};
use crate::adapt::correction::Correction;
use crate::adapt::rows::median;
use crate::scheduler::StepScheduler;
use dflop_types::{
    Layout, MeasuredCurve, ModelProfile, ModuleProfile, Rank, Renewal, RenewedTimes, StageIndex,
};

/// A rank nearer than this to its peers is as fast as they are.
const EQUAL: f64 = 0.05;

/// What the last eight steps of a run took of the predicted times.
#[derive(Debug, Clone, PartialEq)]
pub struct Live {
    /// Of the encoder's ranks: the median over them.
    pub encoder: RowFactor,
    /// Of the LLM backbone's.
    pub llm: RowFactor,
    /// Each rank of the run's layout against the usual one of its component; 1 where it is as fast.
    pub slowness: Vec<f64>,
    /// By size of the encoder's samples, beyond that of the component.
    pub encoder_shapes: Vec<ShapeFactor>,
    /// By size of the LLM backbone's.
    pub llm_shapes: Vec<ShapeFactor>,
}

impl StepScheduler {
    /// What a correction of this scheduler's layout says of the machine and the data.
    pub fn live(&self, correction: &Correction) -> Live {
        let Adjustment { encoder, llm, rows } = correction.adjustment(self);
        let layout = self.settings().layout;
        let typical = correction.typical(self);
        let row_of = |rows: &[RowFactor], row: usize| rows.get(row).copied().unwrap_or(RowFactor::ONE);
        let middle = |rows: &[RowFactor], of: fn(&RowFactor) -> f64| {
            median(&mut rows.iter().map(of).collect::<Vec<f64>>()).unwrap_or(1.0)
        };
        let of_component = [ENCODER, LLM].map(|component| {
            let all: Vec<usize> = rows_of(&layout, component).into_iter().flatten().collect();
            let taken: Vec<RowFactor> = all.iter().map(|&row| row_of(&typical, row)).collect();
            let usual = RowFactor {
                forward: middle(&taken, |row| row.forward),
                backward: middle(&taken, |row| row.backward),
                input: middle(&taken, |row| row.input),
                weight: middle(&taken, |row| row.weight),
            };
            // Whether a rank is slower than its peers is asked of what is no chance.
            let sure: Vec<RowFactor> = all.iter().map(|&row| row_of(&rows, row)).collect();
            (usual, middle(&sure, RowFactor::of_all))
        });
        let slowness = (0..layout.num_ranks()).map(|rank| {
            let Some(at) = layout.coordinates(Rank(rank)) else { return 1.0 };
            let of_stage = layout.stages(Rank(rank)).map(|stage| {
                let component = if stage.0 < layout.encoder.pp { ENCODER } else { LLM };
                row_of(&rows, layout.row(at.replica, stage)).of_all() / of_component[component].1
            });
            let taken: Vec<f64> = of_stage.collect();
            let mean = taken.iter().sum::<f64>() / taken.len().max(1) as f64;
            if (mean - 1.0).abs() < EQUAL { 1.0 } else { mean }
        });
        let slowness = slowness.collect();
        let [(of_encoder, _), (of_llm, _)] = of_component;
        Live { encoder: of_encoder, llm: of_llm, slowness, encoder_shapes: encoder, llm_shapes: llm }
    }
}

impl Live {
    /// The profile with the times of this run: each module takes the factors of its component. `num_steps` were looked at,
    /// the last was `last_step`.
    ///
    /// Memory, links, reduction and optimizer stay; what is by rank and by shape bin is no matter of a profile, see
    /// [`Live::adjustment`].
    #[must_use]
    pub fn renewed(&self, profile: &ModelProfile, num_steps: u64, last_step: u64) -> ModelProfile {
        let mut renewed = profile.clone();
        let of_modules = |modules: &mut std::collections::BTreeMap<String, ModuleProfile>| {
            for (name, module) in modules {
                let is_encoder = ModelProfile::is_of_encoder(name);
                renew(module, if is_encoder { &self.encoder } else { &self.llm });
            }
        };
        of_modules(&mut renewed.modules);
        for variant in &mut renewed.variants {
            of_modules(&mut variant.modules);
        }
        let permille = |factor: f64| (1_000.0 * factor).round() as u32;
        let times = |of: &RowFactor| RenewedTimes {
            forward_permille: permille(of.forward),
            backward_permille: permille(of.backward),
            input_permille: permille(of.input),
            weight_permille: permille(of.weight),
        };
        renewed.renewed =
            Some(Renewal { num_steps, last_step, encoder: times(&self.encoder), llm: times(&self.llm) });
        renewed
    }

    /// What a layout on the same ranks is scheduled with beside the renewed profile: slow ranks where it puts them, and sizes
    /// of samples. A tensor group is as slow as its slowest rank; ranks that the run did not have are as fast as the usual one.
    pub fn adjustment(&self, layout: &Layout) -> Adjustment {
        let of_rank = |rank: u32| self.slowness.get(rank as usize).copied().unwrap_or(1.0);
        let mut rows = vec![RowFactor::ONE; layout.num_rows() as usize];
        for component in [ENCODER, LLM] {
            let first = if component == ENCODER { 0 } else { layout.encoder.pp };
            for (stage, replicas) in (first..).zip(rows_of(layout, component)) {
                for (replica, row) in (0..).zip(replicas) {
                    let group = layout.ranks_of_group(layout.by_group().rank(replica, StageIndex(stage)));
                    let slowest = group.map(|rank| of_rank(rank.0)).fold(0.0, f64::max);
                    rows[row] =
                        RowFactor { forward: slowest, backward: slowest, input: slowest, weight: slowest };
                }
            }
        }
        if rows.iter().all(|row| *row == RowFactor::ONE) {
            rows.clear();
        }
        Adjustment { encoder: self.encoder_shapes.clone(), llm: self.llm_shapes.clone(), rows }
    }
}

/// Multiplies the times of a module.
fn renew(module: &mut ModuleProfile, of: &RowFactor) {
    let times = |ns: u64, factor: f64| (ns as f64 * factor).round() as u64;
    let curve = |curve: &mut MeasuredCurve| {
        for point in &mut curve.points {
            point.forward_ns = times(point.forward_ns, of.forward);
            point.backward_ns = times(point.backward_ns, of.backward);
            point.input_ns = times(point.input_ns, of.input);
            point.weight_ns = times(point.weight_ns, of.weight);
            point.spread_ns = times(point.spread_ns, of.of_all());
        }
    };
    curve(&mut module.linear);
    curve(&mut module.attention);
    for point in module.recompute.values_mut().flatten() {
        // What is computed again is a forward.
        point.extra_ns = times(point.extra_ns, of.forward);
    }
}
