//! Plain data parallelism: what most people run today, and so what a plan has to beat.
//!
//! Every rank holds the whole model. The samples of a global batch are packed by LLM tokens, onto ranks and then into
//! microbatches, and the ranks wait for each other once a step. A colocated layout under `train.schedule: tokens` trains
//! this way.

use dflop_cost::{CostModel, RankMicrobatch};
use dflop_schedule::baseline::single_cost_lpt;
use dflop_types::{MicrobatchShape, Refusal, SampleIndex, SampleShape};

/// Data parallelism over all ranks, packed by LLM tokens.
#[derive(Debug, Clone, Copy)]
pub struct DataParallel<'a> {
    /// The cost model, the same as that of a plan.
    pub model: &'a CostModel,
    /// Shapes of the data profile, by sample index.
    pub shapes: &'a [SampleShape],
    /// Ranks, each with the whole model; at least 1.
    pub num_ranks: u32,
    /// Whether the optimizer states are cut over all ranks, as ZeRO-1 does it.
    pub shards_states: bool,
    /// Bytes one rank may use; `None`: nothing is held against it.
    pub memory_budget_bytes: Option<u64>,
    /// The most LLM tokens of a microbatch; `None`: no cap.
    pub bucket_tokens_max: Option<u64>,
}

/// One step of data parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataParallelStep {
    /// From the first forward to the end of the optimizer, in nanoseconds.
    pub makespan_ns: u64,
    /// Microbatches of each rank, one after the other.
    pub num_microbatches: u32,
    /// What the fullest rank needs, in bytes.
    pub needed_bytes: u64,
}

impl DataParallel<'_> {
    /// The name of this baseline in tables, where it stands beside the arms.
    pub const fn name(&self) -> &'static str {
        if self.shards_states { "data-parallel-sharded" } else { "data-parallel" }
    }

    /// The step of a global batch, or why it cannot run. Samples are indices of the shapes.
    ///
    /// ```text
    /// step = max over ranks of (sum over its microbatches of encoder F + B, LLM F + B) + reduction + optimizer
    /// ```
    ///
    /// Samples are packed longest first by LLM tokens (LPT), over ranks and then over the microbatches of each. 1, 2, 4, ...
    /// microbatches are tried, and the fewest that fit are taken. Fewer are never slower, because each microbatch pays for
    /// its own kernel launches.
    ///
    /// # Errors
    /// [`Refusal`] if a sample does not fit even as a microbatch of its own.
    pub fn step(&self, batch: &[SampleIndex]) -> Result<DataParallelStep, Refusal> {
        let of_rank = self.packed(batch, self.num_ranks);
        let most = of_rank.iter().map(Vec::len).max().unwrap_or(0).max(1) as u32;
        let mut count = 1;
        loop {
            let microbatches: Vec<Vec<RankMicrobatch>> = of_rank
                .iter()
                .map(|samples| self.packed(samples, count).iter().map(|samples| self.pack(samples)).collect())
                .collect();
            match self.check(&microbatches) {
                Ok(needed_bytes) => {
                    return Ok(DataParallelStep {
                        makespan_ns: self.makespan_ns(&microbatches),
                        num_microbatches: count,
                        needed_bytes,
                    });
                }
                Err(refusal) if count == most => return Err(refusal),
                Err(_) => count = (2 * count).min(most),
            }
        }
    }

    /// The samples in `count` buckets, longest first by LLM tokens.
    fn packed(&self, samples: &[SampleIndex], count: u32) -> Vec<Vec<SampleIndex>> {
        let tokens: Vec<u64> =
            samples.iter().map(|&sample| u64::from(self.shapes[sample.index()].llm_tokens)).collect();
        let mut buckets = vec![Vec::new(); count as usize];
        for (&sample, bucket) in samples.iter().zip(single_cost_lpt(&tokens, count)) {
            buckets[bucket as usize].push(sample);
        }
        buckets
    }

    fn pack(&self, samples: &[SampleIndex]) -> RankMicrobatch {
        let shapes = || samples.iter().map(|&sample| &self.shapes[sample.index()]);
        RankMicrobatch {
            shape: MicrobatchShape::pack(shapes()),
            feature_tokens: shapes().map(|shape| u64::from(shape.feature_tokens)).sum(),
        }
    }

    /// What the fullest rank needs, in bytes; the refusal if that is over the budget or a microbatch has too many tokens.
    fn check(&self, microbatches: &[Vec<RankMicrobatch>]) -> Result<u64, Refusal> {
        let all = || microbatches.iter().flatten();
        let needed_tokens = all().map(|m| m.shape.total_llm_tokens()).max().unwrap_or(0);
        if let Some(bucket_tokens_max) = self.bucket_tokens_max.filter(|&cap| needed_tokens > cap) {
            return Err(Refusal::BucketTokens { needed_tokens, bucket_tokens_max });
        }
        let peak = |m: &RankMicrobatch| self.model.whole_peak(m, self.sharding_degree()).total_bytes();
        let needed_bytes = all().map(peak).max().unwrap_or(0);
        match self.memory_budget_bytes {
            Some(budget_bytes) if needed_bytes > budget_bytes => {
                Err(Refusal::Memory { needed_bytes, budget_bytes })
            }
            _ => Ok(needed_bytes),
        }
    }

    fn makespan_ns(&self, microbatches: &[Vec<RankMicrobatch>]) -> u64 {
        let stage = self.model.whole_stage();
        let work_ns = |m: &RankMicrobatch| {
            let llm = self.model.llm_stage(&m.shape, stage.num_layers, stage.is_first, stage.is_last);
            self.model.encoder(&m.shape).total_ns().saturating_add(llm.total_ns())
        };
        let rank_ns =
            |of_rank: &Vec<RankMicrobatch>| of_rank.iter().map(work_ns).fold(0, u64::saturating_add);
        let longest_ns = microbatches.iter().map(rank_ns).max().unwrap_or(0);
        longest_ns.saturating_add(self.model.whole_tail(self.num_ranks, self.sharding_degree()).ns)
    }

    const fn sharding_degree(&self) -> u32 {
        if self.shards_states { self.num_ranks } else { 1 }
    }
}
