//! Refinement: single samples change places as long as that shortens the simulated step.
//!
//! Balanced buckets are not the shortest step. A small first microbatch fills the pipeline sooner, a small
//! last one drains it sooner, and a long encoder part can hide behind a long LLM part of the microbatch
//! before. Only the simulator sees that.

use crate::batches::below;
use crate::error::PlanError;
use crate::memory::SHARE_ONE;
use crate::predict::{self, Column};
use crate::step::{BatchCosts, StepScheduler, loads};
use dflop_sim::Simulator;
use dflop_types::SampleIndex;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Actions that all trials may time together; a trial also costs as much as [`TRIAL_ACTIONS`] beside its own.
const ACTIONS_MAX: u64 = 400_000;
const TRIAL_ACTIONS: u64 = 500;

/// Trials in a row, per sample, that win nothing, after which the search leaves the best places by a few
/// random moves.
const PATIENCE: u64 = 3;

/// Where the samples are, and what that takes.
#[derive(Clone)]
struct Places {
    bucket: Vec<u32>,
    columns: Vec<Column>,
    judgement: Judgement,
}

/// What places are worth, less being better: the simulated makespan in nanoseconds, then the sum of the
/// squared loads of all buckets.
///
/// The second decides between steps of equal length. Without it the search leaves uneven what a longer action
/// elsewhere happens to hide, and then a little noise shows it.
type Judgement = (u64, u128);

impl StepScheduler {
    /// Places of the samples, microbatch * replicas + replica, that the simulator finds no slower than
    /// `bucket`.
    ///
    /// A move takes a random sample to a random place, or exchanges two samples; it is kept if the step is no
    /// longer, and if no place holds more than its share of the memory, where `shares` are given. Equal steps
    /// are kept too, so that the search walks along plateaus; after many failures it goes on from near the
    /// best.
    pub(crate) fn refine(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        shares: Option<&[u64]>,
        bucket: Vec<u32>,
        seed: u64,
    ) -> Result<Vec<u32>, PlanError> {
        let num_buckets = self.settings.num_buckets();
        if num_buckets < 2 || batch.is_empty() {
            return Ok(bucket);
        }
        let columns = (0..self.settings.num_microbatches).map(|at| self.column_at(batch, costs, &bucket, at));
        let mut current = Places { columns: columns.collect(), bucket, judgement: (0, 0) };
        current.judgement = self.judge(costs, &current.bucket, &current.columns)?;
        let mut best = current.clone();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut failures = 0;
        for _ in 0..ACTIONS_MAX / (TRIAL_ACTIONS + self.num_actions()) {
            let is_shaken = failures >= PATIENCE * batch.len() as u64;
            let num_moves = if is_shaken { 3 } else { 1 };
            let mut next = if is_shaken { best.bucket.clone() } else { current.bucket.clone() };
            for _ in 0..num_moves {
                change(&mut next, num_buckets, &mut random);
            }
            if shares.is_some_and(|shares| !is_within(shares, &next, num_buckets)) {
                failures += 1;
                continue;
            }
            let columns = if is_shaken { &best } else { &current }.columns.clone();
            let next = self.moved(batch, costs, if is_shaken { &best } else { &current }, next, columns)?;
            if is_shaken || next.judgement <= current.judgement {
                failures = if is_shaken || next.judgement < current.judgement { 0 } else { failures + 1 };
                current = next;
            } else {
                failures += 1;
            }
            if current.judgement < best.judgement {
                best.clone_from(&current);
            }
        }
        Ok(best.bucket)
    }

    /// The places `bucket`, with only those microbatches predicted anew that differ from `from`.
    fn moved(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        from: &Places,
        bucket: Vec<u32>,
        mut columns: Vec<Column>,
    ) -> Result<Places, PlanError> {
        let replicas = self.settings.layout.llm.dp;
        let differing = from.bucket.iter().zip(&bucket).filter(|(before, after)| before != after);
        let mut touched: Vec<u32> =
            differing.flat_map(|(before, after)| [before / replicas, after / replicas]).collect();
        touched.sort_unstable();
        touched.dedup();
        for at in touched {
            columns[at as usize] = self.column_at(batch, costs, &bucket, at);
        }
        let judgement = self.judge(costs, &bucket, &columns)?;
        Ok(Places { bucket, columns, judgement })
    }

    fn column_at(&self, batch: &[SampleIndex], costs: &BatchCosts, bucket: &[u32], at: u32) -> Column {
        let replicas = self.settings.layout.llm.dp;
        let positions: Vec<usize> =
            (0..bucket.len()).filter(|&position| bucket[position] / replicas == at).collect();
        let (llm, encoder) =
            self.place_column(batch, bucket, &positions, |column| self.share_quickly(costs, column));
        predict::column(self, &llm, &encoder)
    }

    fn judge(&self, costs: &BatchCosts, bucket: &[u32], columns: &[Column]) -> Result<Judgement, PlanError> {
        let makespan_ns = Simulator::new(&predict::assemble(self, columns).input)?.makespan_ns();
        let (encoder_ns, llm_ns) = loads(&costs.costs, bucket, self.settings.num_buckets());
        let squares = encoder_ns.iter().chain(&llm_ns).map(|&ns| u128::from(ns) * u128::from(ns));
        Ok((makespan_ns, squares.fold(0, u128::saturating_add)))
    }
}

/// Takes one sample to another place, or exchanges two samples of different places.
fn change(bucket: &mut [u32], num_buckets: u32, random: &mut ChaCha8Rng) {
    let mut draw = |end: u64| below(random, end);
    let one = draw(bucket.len() as u64) as usize;
    let other = draw(bucket.len() as u64) as usize;
    if draw(2) == 0 || bucket[one] == bucket[other] {
        let step = 1 + draw(u64::from(num_buckets) - 1) as u32;
        bucket[one] = ((u64::from(bucket[one]) + u64::from(step)) % u64::from(num_buckets)) as u32;
    } else {
        bucket.swap(one, other);
    }
}

/// Whether no place holds more than a bucket may.
fn is_within(shares: &[u64], bucket: &[u32], num_buckets: u32) -> bool {
    let mut held = vec![0u64; num_buckets as usize];
    for (&share, &bucket) in shares.iter().zip(bucket) {
        held[bucket as usize] += share;
    }
    held.iter().all(|&share| share <= SHARE_ONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_moves_one_sample_or_exchanges_two() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let start: Vec<u32> = (0..12).map(|i| i % 4).collect();
        let mut kinds = [0; 2];
        for _ in 0..500 {
            let mut bucket = start.clone();
            change(&mut bucket, 4, &mut random);
            assert!(bucket.iter().all(|&b| b < 4));
            let moved = start.iter().zip(&bucket).filter(|(a, b)| a != b).count();
            kinds[moved - 1] += 1;
        }
        assert!(kinds[0] > 100 && kinds[1] > 100, "{kinds:?}");
    }

    #[test]
    fn no_place_holds_more_than_its_share() {
        let shares = [SHARE_ONE / 2, SHARE_ONE / 2, SHARE_ONE / 2];
        assert!(is_within(&shares, &[0, 0, 1], 2));
        assert!(!is_within(&shares, &[1, 1, 1], 2));
    }
}
