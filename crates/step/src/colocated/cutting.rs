//! Cutting: the samples of a colocated rank into as few microbatches as its memory allows.

use crate::colocated::memory::{self, Work};
use crate::costs::BatchCosts;
use crate::place::shares;
use crate::place::sharing::spread_quickly;
use crate::scheduler::StepScheduler;
use dflop_schedule::baseline;
use dflop_types::{EncoderShare, SampleIndex};

impl StepScheduler {
    /// The bucket of each sample, given its rank: every rank cuts its samples into microbatches. `None` if a rank would need
    /// more microbatches than the plan has.
    pub(super) fn cut(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        rank_of: &[u32],
        ranks: u32,
    ) -> Option<Vec<u32>> {
        let mut of_rank = vec![Vec::new(); ranks as usize];
        for (at, &rank) in rank_of.iter().enumerate() {
            of_rank[rank as usize].push(at);
        }
        let is_limited = self.settings.memory_budget_bytes.is_some() || self.bucket_tokens_max.is_some();
        let mut bucket = rank_of.to_vec();
        if !is_limited {
            return Some(bucket);
        }
        let fractions = self.memory_fractions(batch, costs.typical, 0);
        for (rank, own) in (0..ranks).zip(&of_rank) {
            let size = |at: usize| match &fractions {
                Some(fractions) => fractions[at],
                None => u64::from(self.shape(batch[at]).llm_tokens),
            };
            let sizes: Vec<u64> = own.iter().map(|&at| size(at)).collect();
            let microbatches = self.fewest_of_rank(batch, costs, own, &sizes)?;
            for (&at, microbatch) in own.iter().zip(microbatches) {
                bucket[at] = microbatch * ranks + rank;
            }
        }
        Some(bucket)
    }

    /// The microbatch of each sample `own` of a rank, with the fewest microbatches that fit; samples are placed largest
    /// first. `None` if the samples do not fit.
    fn fewest_of_rank(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        own: &[usize],
        sizes: &[u64],
    ) -> Option<Vec<u32>> {
        let most = self.settings.num_microbatches.min(own.len().max(1) as u32);
        let cut = |count: u32| {
            let microbatches = baseline::single_cost_lpt(sizes, count);
            let mut positions = vec![Vec::new(); count as usize];
            for (&at, &microbatch) in own.iter().zip(&microbatches) {
                positions[microbatch as usize].push(at);
            }
            let of_one = |positions: &Vec<usize>| GroupMicrobatch {
                llm: positions.iter().map(|&at| batch[at]).collect(),
                encoder: self.divided(batch, costs, positions),
            };
            (microbatches, positions.iter().map(of_one).collect::<Vec<_>>())
        };
        let mut fewest = (1..=most).map(|count| (count, cut(count)));
        let (count, (microbatches, samples)) = fewest.find(|(_, (_, samples))| self.fits_rank(samples))?;
        if self.eased.is_empty() {
            return Some(microbatches);
        }
        // Smaller microbatches recompute less, and pay for more launches.
        let more = (1..4).map(|doublings| count << doublings).take_while(|&count| count <= most);
        let others = more.map(cut).filter(|(_, samples)| self.fits_rank(samples));
        let all = std::iter::once((microbatches, samples)).chain(others);
        all.min_by_key(|(_, samples)| self.rank_ns(samples)).map(|(microbatches, _)| microbatches)
    }

    /// What a rank takes that encodes its own samples, microbatch by microbatch, in nanoseconds.
    fn rank_ns(&self, microbatches: &[GroupMicrobatch]) -> u64 {
        let fixed = memory::fixed(self);
        let of_one = |GroupMicrobatch { llm, encoder }: &GroupMicrobatch| {
            let model = memory::run(self, &Work::new(self, llm, encoder), fixed).model;
            memory::work_ns(self, model, llm, encoder)
        };
        microbatches.iter().map(of_one).fold(0, u64::saturating_add)
    }

    /// Whether a rank with these microbatches keeps the cap on tokens and the memory budget.
    fn fits_rank(&self, microbatches: &[GroupMicrobatch]) -> bool {
        let tokens = |one: &GroupMicrobatch| -> u64 {
            one.llm.iter().map(|&sample| u64::from(self.shape(sample).llm_tokens)).sum()
        };
        if self.bucket_tokens_max.is_some_and(|cap| microbatches.iter().any(|m| tokens(m) > cap)) {
            return false;
        }
        let Some(budget) = self.settings.memory_budget_bytes else { return true };
        let of_rank: Vec<_> = microbatches.iter().map(|one| (&*one.llm, &*one.encoder)).collect();
        memory::peak(self, &of_rank, memory::fixed(self)).total_bytes() <= budget
    }

    /// The shares of the encoder replicas of a tensor group that encodes its own samples, at `positions` of the batch, and no
    /// others: all of them, or where the group has several replicas, an even part for each.
    fn divided(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        positions: &[usize],
    ) -> Vec<Vec<EncoderShare>> {
        let has_segments = |at: &&usize| !self.shape(batch[**at]).encoder_segments.is_empty();
        let own: Vec<usize> = positions.iter().filter(has_segments).copied().collect();
        let share = |(at, parts): (usize, _)| EncoderShare { sample: batch[own[at]], parts };
        let shares = self.divide(costs, &own);
        shares.into_iter().map(|shares| shares.into_iter().map(share).collect()).collect()
    }

    /// Divides samples over the encoder replicas of a tensor group.
    pub(super) fn divide(&self, costs: &BatchCosts, positions: &[usize]) -> shares::Shares {
        let per_group = self.encoders_per_group();
        if per_group == 1 {
            return shares::whole(&vec![0; positions.len()], 1);
        }
        let part_ns: Vec<&shares::PartCosts> = positions.iter().map(|&at| &costs.part_ns[at]).collect();
        spread_quickly(&part_ns, per_group)
    }
}

/// What a tensor group does in one microbatch.
struct GroupMicrobatch {
    /// What its LLM backbone reads.
    llm: Vec<SampleIndex>,
    /// What each of its encoder replicas encodes.
    encoder: Vec<Vec<EncoderShare>>,
}
