//! Ramps: microbatches that are smaller where the pipeline fills and drains.
//!
//! Stages wait while the first microbatch fills the p stages, and again while the last one drains. A small first and
//! a small last microbatch shorten both waits, and the other microbatches grow only a little.
//!
//! The balancer makes all buckets even and knows nothing of ramps. So it also gets phantoms: samples that do not exist. A
//! bucket with a phantom gets that much less real work. The balancer chooses which bucket gets a phantom and is small.
//!
//! ```text
//! t_j       target size of microbatch j: rises from `least` to 1 over the first `front` microbatches, falls over the
//!           last `back` ones
//! phantom   for each microbatch j and replica one of (1 - t_j) x total / sum(t), on both components
//! ```

use crate::settings::StepSettings;
use dflop_schedule::Costs;

/// How many microbatches at each end are smaller, and how small the smallest is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ramp {
    front: u32,
    back: u32,
    /// Target size of the smallest microbatch, as a fraction of a full one.
    least: f64,
}

impl Ramp {
    /// No ramp.
    pub(crate) const EVEN: Self = Self { front: 0, back: 0, least: 1.0 };

    /// The ramps that are worth a try. None if few samples share a bucket, because then no bucket can be given a size.
    pub(crate) fn candidates(settings: &StepSettings, num_samples: usize) -> Vec<Self> {
        let mut ramps = Vec::new();
        let layout = settings.layout;
        let (m, p) = (settings.num_microbatches, layout.encoder.pp + layout.llm.pp);
        if p < 2 || m < 4 || (num_samples as u64) < 3 * u64::from(settings.num_buckets()) {
            return ramps;
        }
        let longest = (p - 1).min(m / 3).max(1);
        let mut lengths = vec![1, longest.div_ceil(2), longest];
        lengths.dedup();
        for length in lengths {
            for least in [0.2, 0.4, 0.7] {
                for (front, back) in [(length, length), (length, 0), (0, length)] {
                    ramps.push(Self { front, back, least });
                }
            }
        }
        ramps
    }

    /// For each smaller microbatch the fraction of a full one that it lacks: `1 - t_j`.
    fn missing(&self) -> impl Iterator<Item = f64> + '_ {
        let side = |length: u32| {
            (0..length).map(move |at| (1.0 - self.least) * f64::from(length - at) / f64::from(length))
        };
        side(self.front).chain(side(self.back))
    }

    /// `costs` with the phantoms of this ramp as further samples, at the end.
    pub(crate) fn with_phantoms(&self, mut costs: Costs, settings: &StepSettings) -> Costs {
        let full = f64::from(settings.num_microbatches) - self.missing().sum::<f64>();
        let mean = |column: &[u64]| {
            let total: f64 = column.iter().map(|&ns| ns as f64).sum();
            total / full / f64::from(settings.layout.llm.dp)
        };
        let (encoder_ns, llm_ns) = (mean(&costs.encoder_ns), mean(&costs.llm_ns));
        for missing in self.missing() {
            for _ in 0..settings.layout.llm.dp {
                costs.encoder_ns.push((missing * encoder_ns) as u64);
                costs.llm_ns.push((missing * llm_ns) as u64);
                for sizes in [&mut costs.bytes, &mut costs.tokens].into_iter().flatten() {
                    sizes.push(0);
                }
            }
        }
        costs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::{ComponentLayout, Layout, PipelineOrder};

    fn settings(llm_dp: u32, num_microbatches: u32) -> StepSettings {
        let layout = Layout::disaggregated(
            ComponentLayout { tp: 1, pp: 1, dp: 1 },
            ComponentLayout { tp: 1, pp: 3, dp: llm_dp },
        );
        StepSettings {
            layout,
            num_microbatches,
            pipeline_order: PipelineOrder::OneFOneB,
            memory_budget_bytes: None,
        }
    }

    #[test]
    fn phantoms_fill_what_the_targets_leave_free() {
        // Four microbatches, one at the front of half size: full ones take 70 / 3.5 = 20, the phantom 10.
        let ramp = Ramp { front: 1, back: 0, least: 0.5 };
        let costs = Costs { encoder_ns: vec![35; 2], llm_ns: vec![7; 10], ..Costs::default() };
        let shaped = ramp.with_phantoms(costs.clone(), &settings(1, 4));
        assert_eq!((&shaped.encoder_ns[2..], &shaped.llm_ns[10..]), (&[10][..], &[10][..]));
        // On two replicas there are two phantoms, each of half that size.
        let shaped = ramp.with_phantoms(costs, &settings(2, 4));
        assert_eq!(shaped.llm_ns[10..], [5, 5]);
    }

    #[test]
    fn a_ramp_of_two_rises_in_even_parts() {
        let ramp = Ramp { front: 2, back: 1, least: 0.5 };
        assert_eq!(ramp.missing().collect::<Vec<_>>(), [0.5, 0.25, 0.5]);
    }

    #[test]
    fn few_samples_have_no_ramps() {
        assert!(Ramp::candidates(&settings(1, 8), 16).is_empty());
        let many = Ramp::candidates(&settings(1, 8), 64);
        assert!(many.len() > 6 && many.iter().all(|r| r.front + r.back > 0));
    }
}
