//! Outliers: how much longer the heaviest samples of a dataset make a step, and which samples fit on no rank.

use crate::scheduler::StepScheduler;
use dflop_types::{Component, MicrobatchShape, SampleIndex, SampleShape};

/// A sample that is heavy under this plan. Its times and bytes are those of a microbatch with this sample alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outlier {
    /// The sample.
    pub sample: SampleIndex,
    /// Forward and backward on an encoder replica, on the stage that takes longest, in nanoseconds.
    pub encoder_ns: u64,
    /// Forward and backward on the LLM rank that takes longest, in nanoseconds.
    pub llm_ns: u64,
    /// The component of the rank that this sample fills most.
    pub component: Component,
    /// What that rank needs with this sample alone, in bytes.
    pub needed_bytes: u64,
}

/// The outliers of a dataset under a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outliers {
    /// The samples whose time is longest, compared with that of an even microbatch; the worst first.
    pub heaviest: Vec<Outlier>,
    /// Time of an even microbatch on an encoder replica, in nanoseconds: as if every sample were the mean one.
    pub even_encoder_ns: u64,
    /// Time of an even microbatch on the LLM rank that takes longest, in nanoseconds.
    pub even_llm_ns: u64,
    /// Number of samples that alone take longer than an even microbatch, on either component. No packing hides them.
    pub num_longer: u64,
    /// Samples that alone are over the memory budget, the largest first; at most as many as `heaviest`.
    pub unfit: Vec<Outlier>,
    /// Number of all samples that alone are over the memory budget.
    pub num_unfit: u64,
}

impl StepScheduler {
    /// The outliers of the data profile for steps of `global_batch_size` samples. At most `most` samples are named.
    ///
    /// *Complexity*: O(n log n) in the samples.
    pub fn outliers(&self, global_batch_size: u32, most: usize) -> Outliers {
        let mut all: Vec<Outlier> = (0..)
            .zip(self.shapes.iter())
            .map(|(index, shape)| self.outlier(SampleIndex(index), shape))
            .collect();
        if all.is_empty() {
            return Outliers::default();
        }
        let layout = self.settings.layout;
        let buckets = |replicas: u32| f64::from(self.settings.num_microbatches) * f64::from(replicas.max(1));
        let even = |sum: f64, replicas: u32| {
            let of_step = sum / all.len() as f64 * f64::from(global_batch_size);
            (of_step / buckets(replicas)).round() as u64
        };
        // Microbatches are counted on each LLM replica; the encoder's replicas share all of them.
        let encoder_ns: f64 = all.iter().map(|o| o.encoder_ns as f64).sum();
        let llm_ns: f64 = all.iter().map(|o| o.llm_ns as f64).sum();
        let (even_encoder_ns, even_llm_ns) =
            (even(encoder_ns, self.num_encoders()), even(llm_ns, layout.llm.dp));
        let weight = |o: &Outlier| {
            let part = |ns: u64, even: u64| ns as f64 / even.max(1) as f64;
            part(o.encoder_ns, even_encoder_ns).max(part(o.llm_ns, even_llm_ns))
        };
        let num_longer = all.iter().filter(|o| weight(o) > 1.0).count() as u64;
        let budget = self.settings.memory_budget_bytes.unwrap_or(u64::MAX);
        let mut unfit: Vec<Outlier> = all.iter().filter(|o| o.needed_bytes > budget).copied().collect();
        unfit.sort_by_key(|o| (std::cmp::Reverse(o.needed_bytes), o.sample));
        let num_unfit = unfit.len() as u64;
        unfit.truncate(most);
        all.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(a.sample.cmp(&b.sample)));
        all.truncate(most);
        Outliers { heaviest: all, even_encoder_ns, even_llm_ns, num_longer, unfit, num_unfit }
    }

    fn outlier(&self, sample: SampleIndex, shape: &SampleShape) -> Outlier {
        let alone = MicrobatchShape::pack([shape]);
        let sum = |p: dflop_cost::Prediction| p.forward_ns.saturating_add(p.backward_ns);
        let encoder_stages = self.encoder_stages.iter().filter(|_| !shape.encoder_segments.is_empty());
        let encoder_ns = encoder_stages.map(|&s| sum(self.model.encoder_stage(&alone, s))).max().unwrap_or(0);
        // All chunks of a rank together: it runs them one after the other.
        let ranks = self.rank_layers().into_iter();
        let llm_ns = ranks
            .map(|s| sum(self.model.llm_stage(&alone, s.num_layers, s.is_first, s.is_last)))
            .max()
            .unwrap_or(0);
        let (component, needed_bytes) = self.alone(shape);
        Outlier { sample, encoder_ns, llm_ns, component, needed_bytes }
    }
}
