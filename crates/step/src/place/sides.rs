//! Samples in their places: turns the bucket of each sample into the microbatches of both components.

use crate::costs::BatchCosts;
use crate::place::shares::Shares;
use crate::scheduler::StepScheduler;
use dflop_types::{EncoderShare, PartRange, SampleIndex, Schedule};

/// Samples of `[microbatch][replica]`.
pub(crate) type Side = Vec<Vec<Vec<SampleIndex>>>;

/// Shares of samples of `[microbatch][encoder replica]`.
pub(crate) type EncoderSide = Vec<Vec<Vec<EncoderShare>>>;

/// Samples in their places on both sides of the boundary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sides {
    pub(crate) llm: Side,
    pub(crate) encoder: EncoderSide,
}

impl StepScheduler {
    /// Samples in their places. The encoder's work is shared out in a way that is quick enough for a search.
    pub(crate) fn place_quickly(&self, batch: &[SampleIndex], costs: &BatchCosts, bucket: &[u32]) -> Sides {
        self.place(batch, bucket, |column| self.share_quickly(costs, column))
    }

    /// Samples in the places that `bucket` names (microbatch * replicas + replica). `share` shares out the encoder's work of
    /// a microbatch.
    pub(crate) fn place(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        share: impl Fn(&[usize]) -> Shares,
    ) -> Sides {
        let mut positions = vec![Vec::new(); self.settings.num_microbatches as usize];
        for (position, &bucket) in bucket.iter().enumerate() {
            positions[(bucket / self.settings.layout.llm.dp) as usize].push(position);
        }
        let mut sides = Sides::default();
        for positions in positions {
            let (llm, encoder) = self.place_column(batch, bucket, &positions, &share);
            sides.llm.push(llm);
            sides.encoder.push(encoder);
        }
        sides
    }

    /// The samples of one microbatch, at `positions` of the batch: first those of each LLM replica, then the shares of each
    /// encoder replica. `share` decides the latter, for the samples that have segments.
    pub(crate) fn place_column(
        &self,
        batch: &[SampleIndex],
        bucket: &[u32],
        positions: &[usize],
        share: impl Fn(&[usize]) -> Shares,
    ) -> (Vec<Vec<SampleIndex>>, Vec<Vec<EncoderShare>>) {
        let layout = self.settings.layout;
        let mut llm = vec![Vec::new(); layout.llm.dp as usize];
        let mut with_segments = Vec::with_capacity(positions.len());
        for &position in positions {
            llm[(bucket[position] % layout.llm.dp) as usize].push(batch[position]);
            if !self.shape(batch[position]).encoder_segments.is_empty() {
                with_segments.push(position);
            }
        }
        let of_replica = |shares: Vec<(usize, Option<PartRange>)>| -> Vec<EncoderShare> {
            let share = |(at, parts)| EncoderShare { sample: batch[with_segments[at]], parts };
            shares.into_iter().map(share).collect()
        };
        let encoder = share(&with_segments).into_iter().map(of_replica).collect();
        let encoder = self.near(&llm, encoder);
        (llm, encoder)
    }

    pub(crate) fn as_schedule(&self, step: u64, batch: &[SampleIndex], sides: Sides) -> Schedule {
        Schedule {
            step,
            llm: sides.llm,
            encoder: sides.encoder,
            label_tokens: batch.iter().map(|&s| u64::from(self.shape(s).label_tokens)).sum(),
            actions: Vec::new(),
            recompute: Vec::new(),
            giants: Vec::new(),
            was_stopped: false,
            predicted_makespan_ns: 0,
            max_load_ns: 0,
            lower_bound_ns: 0,
        }
    }
}
