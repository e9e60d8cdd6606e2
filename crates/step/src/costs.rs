//! What each sample of a batch costs on both components, and the loads of buckets, which are sums of such costs.

use crate::adapt::bins::{ENCODER, LLM};
use crate::error::StepError;
use crate::place::shares::PartCosts;
use crate::scheduler::StepScheduler;
use dflop_cost::{EncoderLayers, StageLayers, Typical};
use dflop_schedule::Costs;
use dflop_types::SampleIndex;

/// What one batch costs, sample by sample. Times of both components can be compared ([`StepScheduler::costs`]).
pub(crate) struct BatchCosts {
    pub(crate) costs: Costs,
    /// Time of each sample on an encoder replica, in nanoseconds. The samples of a microbatch are shared out over encoder
    /// replicas by these times.
    pub(crate) encoder_ns: Vec<u64>,
    /// The same time, for each part of each sample.
    pub(crate) part_ns: Vec<PartCosts>,
    pub(crate) typical: Typical,
}

/// What whole samples of a batch cost.
struct OfSamples {
    costs: Costs,
    /// Time of each sample on an encoder replica before corrections, in nanoseconds.
    sample_ns: Vec<u64>,
    typical: Typical,
    /// The encoder stage that takes longest.
    busiest: EncoderLayers,
}

impl StepScheduler {
    /// The costs of a batch's samples, scaled so that times of both components can be compared.
    ///
    /// The LLM load of a bucket is its time on the busiest stage of an LLM replica. A microbatch has one bucket on each LLM
    /// replica, and all encoder replicas encode them together. So the encoder load of a bucket is its part of the time that
    /// the microbatch takes on the busiest stage of an encoder replica.
    ///
    /// ```text
    /// llm_i     = F + B of sample i on the LLM stage with the most work
    /// encoder_i = (F + B of sample i on the encoder stage with the most work) * llm replicas / encoder replicas
    /// ```
    pub(crate) fn costs(&self, batch: &[SampleIndex]) -> Result<BatchCosts, StepError> {
        self.costs_in(batch, self.settings.num_microbatches)
    }

    /// As [`StepScheduler::costs`], for another number of microbatches. It decides how large a microbatch is, and the cost of
    /// a sample depends a little on that.
    pub(crate) fn costs_in(
        &self,
        batch: &[SampleIndex],
        num_microbatches: u32,
    ) -> Result<BatchCosts, StepError> {
        let OfSamples { costs, sample_ns, typical, busiest } = self.of_samples(batch, num_microbatches)?;
        let part_ns = batch
            .iter()
            .zip(&sample_ns)
            .map(|(&s, &sample_ns)| {
                let parts = self.part_costs(self.shape(s), sample_ns, typical, busiest).into_iter();
                parts.map(|(count, ns)| (count, self.corrected(ENCODER, s, ns))).collect()
            })
            .collect();
        let encoder_ns = batch.iter().zip(sample_ns).map(|(&s, ns)| self.corrected(ENCODER, s, ns)).collect();
        Ok(BatchCosts { costs, encoder_ns, part_ns, typical })
    }

    /// The costs of [`StepScheduler::costs_in`] alone: the times of parts take longer to find than all others.
    pub(crate) fn sample_costs_in(
        &self,
        batch: &[SampleIndex],
        num_microbatches: u32,
    ) -> Result<(Costs, Typical), StepError> {
        self.of_samples(batch, num_microbatches).map(|of| (of.costs, of.typical))
    }

    fn of_samples(&self, batch: &[SampleIndex], num_microbatches: u32) -> Result<OfSamples, StepError> {
        let typical = self.typical_in(batch, num_microbatches)?;
        let (llm_dp, encoder_dp) = (u64::from(self.settings.layout.llm.dp), u64::from(self.num_encoders()));
        let stage_ns = |stage: &StageLayers| -> Vec<u64> {
            let of_sample = |&s: &SampleIndex| {
                let ns = self.balanced_model().sample_stage_ns(self.shape(s), typical, *stage);
                self.corrected(LLM, s, ns)
            };
            batch.iter().map(of_sample).collect()
        };
        // Stages with equal layers have equal costs, so one of them is enough.
        let mut different: Vec<&StageLayers> = Vec::new();
        for stage in &self.stages {
            if !different.contains(&stage) {
                different.push(stage);
            }
        }
        let llm_ns = different
            .into_iter()
            .map(stage_ns)
            .max_by_key(|costs| costs.iter().map(|&ns| u128::from(ns)).sum::<u128>())
            .unwrap_or_default();
        let busiest = self.busiest_encoder_stage(batch, typical);
        let sample_ns: Vec<u64> = batch
            .iter()
            .map(|&s| self.balanced_model().sample_encoder_stage_ns(self.shape(s), typical, busiest))
            .collect();
        let scaled = |(&s, &ns): (&SampleIndex, &u64)| {
            self.corrected(ENCODER, s, ns).saturating_mul(llm_dp) / encoder_dp
        };
        let encoder_ns = batch.iter().zip(&sample_ns).map(scaled).collect();
        let costs = Costs { encoder_ns, llm_ns, bytes: None, tokens: self.capped_tokens(batch) };
        Ok(OfSamples { costs, sample_ns, typical, busiest })
    }

    /// The size of a microbatch where a batch fills so many of each replica.
    pub(crate) fn typical_in(
        &self,
        batch: &[SampleIndex],
        num_microbatches: u32,
    ) -> Result<Typical, StepError> {
        let num_samples = self.shapes.len();
        if let Some(&sample) = batch.iter().find(|s| s.index() >= num_samples) {
            return Err(StepError::UnknownSample { sample, num_samples });
        }
        let (llm_dp, encoder_dp) = (u64::from(self.settings.layout.llm.dp), u64::from(self.num_encoders()));
        let filled = |replicas: u64| (u64::from(num_microbatches) * replicas).min(batch.len() as u64).max(1);
        let (mut encoder_tokens, mut llm_tokens, mut label_tokens) = ([0; 2], 0, 0);
        for shape in batch.iter().map(|&sample| self.shape(sample)) {
            for (sum, tokens) in encoder_tokens.iter_mut().zip(shape.tower_tokens()) {
                *sum += tokens;
            }
            llm_tokens += u64::from(shape.llm_tokens);
            label_tokens += u64::from(shape.label_tokens);
        }
        Ok(Typical {
            encoder_tokens: encoder_tokens.map(|tokens: u64| tokens / filled(encoder_dp)),
            llm_tokens: llm_tokens / filled(llm_dp),
            label_tokens: label_tokens / filled(llm_dp),
        })
    }

    /// The cost of a sample on a component, corrected by what measured steps showed.
    fn corrected(&self, component: usize, sample: SampleIndex, ns: u64) -> u64 {
        match &self.adjusted {
            None => ns,
            Some(adjusted) => adjusted.sample_ns(component, self.shape(sample), ns),
        }
    }

    /// The encoder stage on which all samples of a batch together take longest.
    fn busiest_encoder_stage(&self, batch: &[SampleIndex], typical: Typical) -> EncoderLayers {
        let sum_ns = |stage: &EncoderLayers| -> u128 {
            let ns = |&s| {
                u128::from(self.balanced_model().sample_encoder_stage_ns(self.shape(s), typical, *stage))
            };
            batch.iter().map(ns).sum()
        };
        match self.encoder_stages[..] {
            [stage] => stage,
            ref stages => *stages.iter().max_by_key(|stage| sum_ns(stage)).expect("at least one stage"),
        }
    }
}

/// The load of each bucket in nanoseconds: on the encoder, and on the LLM backbone.
pub(crate) fn loads(costs: &Costs, bucket: &[u32], num_buckets: u32) -> (Vec<u64>, Vec<u64>) {
    let sum = |cost_ns: &[u64]| {
        let mut load_ns = vec![0u64; num_buckets as usize];
        for (&bucket, &ns) in bucket.iter().zip(cost_ns) {
            load_ns[bucket as usize] = load_ns[bucket as usize].saturating_add(ns);
        }
        load_ns
    };
    (sum(&costs.encoder_ns), sum(&costs.llm_ns))
}
