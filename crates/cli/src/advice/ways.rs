//! The ways to deal out the samples of a step to data-parallel ranks, and how long the ranks take with each.

use super::estimate::Estimate;
use dflop_schedule::baseline::{arrival_order, single_cost_lpt};
use dflop_schedule::{BalanceError, Costs, Cut, DatasetCosts, Limits, Meets, padded};
use std::cmp::Reverse;
use std::collections::HashMap;

/// How a trainer's ranks take their samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) num_ranks: u32,
    /// Samples of a microbatch on a rank, on average.
    pub(crate) batch_size: u32,
    /// Microbatches of a rank in a step.
    pub(crate) accumulation: u32,
    /// What the ranks wait for.
    pub(crate) meets: Meets,
    /// Whether the rows of a microbatch are padded to its longest.
    pub(crate) is_padded: bool,
}

impl Setup {
    /// Microbatches of a step, over all ranks.
    pub(crate) fn num_buckets(self) -> u64 {
        u64::from(self.num_ranks) * u64::from(self.accumulation)
    }

    /// Samples of a step, over all ranks.
    pub(crate) fn global_batch_size(self) -> u64 {
        self.num_buckets().saturating_mul(self.batch_size.into())
    }
}

/// A way to deal out samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Equal counts in the shuffled order, as a distributed sampler gives them.
    Arrival,
    /// Sorted by LLM tokens over many steps, then equal counts: a step has samples of like length.
    Grouped,
    /// The samples of a step spread by LLM tokens, longest first.
    Packed,
    /// The samples of a step cut, longest first, into microbatches of about equal padded tokens: `batch_rebalance` of transformers.
    Rebalanced,
    /// Our first line: the samples of a step by what ranks wait for.
    Line,
    /// The first line where rows are padded, and the layers of the LLM compute no padding.
    Removed,
    /// Both lines: the encoder's work shared out over the ranks, and the LLM's balanced.
    Both,
    /// Both lines where rows are padded, and the layers of the LLM compute no padding.
    BothRemoved,
}

impl Way {
    /// Without padding there is nothing to rebalance by it, nor to remove.
    pub(crate) const ALL: [Self; 5] = [Self::Arrival, Self::Grouped, Self::Packed, Self::Line, Self::Both];
    pub(crate) const PADDED: [Self; 8] = [
        Self::Arrival,
        Self::Grouped,
        Self::Packed,
        Self::Rebalanced,
        Self::Line,
        Self::Both,
        Self::Removed,
        Self::BothRemoved,
    ];

    /// Its name for people.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Arrival => "arrival order",
            Self::Grouped => "grouped by length",
            Self::Packed => "token packing",
            Self::Rebalanced => "batch rebalance",
            Self::Removed => "first, no padding",
            Self::Line => "first line",
            Self::Both => "both lines",
            Self::BothRemoved => "both, no padding",
        }
    }

    /// Its name in JSON.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::Arrival => "arrival",
            Self::Grouped => "grouped",
            Self::Packed => "packed",
            Self::Rebalanced => "rebalanced",
            Self::Removed => "removed",
            Self::Line => "line",
            Self::Both => "both",
            Self::BothRemoved => "both_removed",
        }
    }

    /// Whether dflop is not needed for it.
    pub(crate) const fn is_other(self) -> bool {
        matches!(self, Self::Arrival | Self::Grouped | Self::Packed | Self::Rebalanced)
    }

    /// Whether the encoder's work is shared out.
    const fn is_shared(self) -> bool {
        matches!(self, Self::Both | Self::BothRemoved)
    }

    /// Whether the layers of the LLM compute no padding, though rows are padded.
    const fn removes_padding(self) -> bool {
        matches!(self, Self::Removed | Self::BothRemoved)
    }
}

/// Steps over which [`Way::Grouped`] sorts at a time, at most, and of an epoch a quarter at most: as the length grouping of
/// transformers (`LengthGroupedSampler`, 5.x).
const GROUPED_STEPS: usize = 50;
const GROUPED_PARTS: usize = 4;

/// What is simulated: the costs of all samples, and some global batches.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// With the LLM tokens of each sample.
    pub(crate) costs: DatasetCosts,
    /// The same without the encoder's.
    pub(crate) llm_alone: DatasetCosts,
    /// Encoder work of what can be encoded separately (a tile, a frame), of each sample of the batches that has some.
    pub(crate) units_ns: HashMap<u32, Vec<u64>>,
    /// The samples of each global batch, in arrival order, from the first step of an epoch on.
    pub(crate) batches: Vec<Vec<u32>>,
    /// Global batches of an epoch, at least 1: behind them the samples come again.
    pub(crate) steps_per_epoch: usize,
}

/// The steps of one way.
#[derive(Debug, Clone)]
pub(crate) struct Simulated {
    pub(crate) way: Way,
    /// What each step takes, in nanoseconds.
    pub(crate) step_ns: Vec<f64>,
    /// Its step over the work of its samples divided evenly.
    pub(crate) over_bound: Estimate,
    /// LLM tokens with padding over those without, where the rows of a microbatch are padded to its longest; `None` without
    /// tokens.
    pub(crate) padding_ratio: Option<f64>,
}

impl Mixture {
    /// The same samples, with the costs of each in `costs`; `tokens` must be there.
    pub(crate) fn new(
        costs: Costs,
        units_ns: HashMap<u32, Vec<u64>>,
        batches: Vec<Vec<u32>>,
        steps_per_epoch: usize,
    ) -> Result<Self, BalanceError> {
        let llm_alone = Costs { encoder_ns: vec![0; costs.num_samples()], ..costs.clone() };
        let (costs, llm_alone) = (DatasetCosts::new(costs)?, DatasetCosts::new(llm_alone)?);
        Ok(Self { costs, llm_alone, units_ns, batches, steps_per_epoch })
    }

    fn columns(&self) -> &Costs {
        self.costs.columns()
    }

    fn tokens(&self, sample: u32) -> u64 {
        self.columns().tokens.as_ref().map_or(0, |tokens| tokens[sample as usize])
    }

    /// Work of some samples divided over the ranks, in nanoseconds: no way takes less.
    pub(crate) fn bound_ns(&self, samples: &[u32], ranks: Setup) -> f64 {
        let Costs { encoder_ns, llm_ns, .. } = self.columns();
        let work = samples.iter().map(|&at| encoder_ns[at as usize] as f64 + llm_ns[at as usize] as f64);
        work.sum::<f64>() / f64::from(ranks.num_ranks)
    }

    /// The steps of every way, in the order of [`Way::ALL`] or [`Way::PADDED`]; the batches have some work.
    ///
    /// # Errors
    /// As [`DatasetCosts::buckets`].
    pub(crate) fn simulate(&self, ranks: Setup, seed: u64) -> Result<Vec<Simulated>, BalanceError> {
        let ways = if ranks.is_padded { &Way::PADDED[..] } else { &Way::ALL };
        let mut all = Vec::with_capacity(ways.len());
        for &way in ways {
            let ranks = Setup { is_padded: ranks.is_padded && !way.removes_padding(), ..ranks };
            let sorted = (way == Way::Grouped).then(|| self.grouped());
            let batches = sorted.as_ref().unwrap_or(&self.batches);
            let mut step_ns = Vec::with_capacity(batches.len());
            let (mut padded, mut real) = (0, 0);
            for batch in batches {
                let buckets = self.buckets(way, batch, ranks, seed)?;
                step_ns.push(self.step_ns(way, &buckets, ranks) as f64);
                padded += self.padded_tokens(&buckets);
                real += batch.iter().map(|&sample| self.tokens(sample)).sum::<u64>();
            }
            let bounds: Vec<f64> = batches.iter().map(|batch| self.bound_ns(batch, ranks)).collect();
            let over_bound = Estimate::of_ratio(&step_ns, &bounds);
            let padding_ratio = (real > 0).then(|| padded as f64 / real as f64);
            all.push(Simulated { way, step_ns, over_bound, padding_ratio });
        }
        Ok(all)
    }

    /// The same samples in batches of like length, the longest first.
    fn grouped(&self) -> Vec<Vec<u32>> {
        let mut grouped = Vec::with_capacity(self.batches.len());
        let steps = (self.steps_per_epoch / GROUPED_PARTS).clamp(1, GROUPED_STEPS);
        let epochs = self.batches.chunks(self.steps_per_epoch.max(1));
        for run in epochs.flat_map(|epoch| epoch.chunks(steps)) {
            let mut samples = run.concat();
            samples.sort_by_key(|&sample| Reverse(self.tokens(sample)));
            let mut rest = samples.as_slice();
            for batch in run {
                let (taken, left) = rest.split_at(batch.len());
                grouped.push(taken.to_vec());
                rest = left;
            }
        }
        grouped
    }

    /// LLM tokens of buckets whose rows are as long as the longest of their bucket.
    fn padded_tokens(&self, buckets: &[Vec<u32>]) -> u64 {
        let of = |bucket: &Vec<u32>| {
            let longest = bucket.iter().map(|&sample| self.tokens(sample)).max();
            longest.unwrap_or(0) * bucket.len() as u64
        };
        buckets.iter().map(of).sum()
    }

    /// The samples of each bucket; microbatches of a rank lie a number of ranks apart.
    fn buckets(
        &self,
        way: Way,
        batch: &[u32],
        ranks: Setup,
        seed: u64,
    ) -> Result<Vec<Vec<u32>>, BalanceError> {
        let num_buckets = u32::try_from(ranks.num_buckets()).unwrap_or(u32::MAX);
        let cut = |meets| Cut {
            num_buckets,
            meets,
            num_microbatches: ranks.accumulation,
            bucket_bytes_max: None,
            bucket_tokens_max: None,
            seed,
            is_padded: ranks.is_padded,
        };
        Ok(match way {
            Way::Arrival | Way::Grouped => {
                filled(batch, &arrival_order(batch.len(), num_buckets), num_buckets)
            }
            Way::Packed => self.packed(batch, ranks),
            Way::Rebalanced => self.rebalanced(batch, ranks)?,
            Way::Line | Way::Removed => self.costs.buckets(batch, &cut(ranks.meets))?,
            // To share out the encoder's work of a microbatch, all ranks meet.
            Way::Both | Way::BothRemoved => self.llm_alone.buckets(batch, &cut(Meets::Phase))?,
        })
    }

    /// What the ranks take for the buckets of a batch, in nanoseconds.
    fn step_ns(&self, way: Way, buckets: &[Vec<u32>], ranks: Setup) -> u64 {
        if way.is_shared() {
            return self.shared_ns(buckets, ranks);
        }
        let encoder =
            |bucket: &Vec<u32>| bucket.iter().map(|&at| self.columns().encoder_ns[at as usize]).sum();
        let encoder: Vec<u64> = buckets.iter().map(encoder).collect();
        let llm: Vec<u64> = buckets.iter().map(|bucket| self.llm_ns(bucket, ranks)).collect();
        ranks.meets.wait_ns(&encoder, &llm, ranks.accumulation)
    }

    /// LLM work of a microbatch: with padding each of its samples takes as long as the costliest.
    fn llm_ns(&self, bucket: &[u32], ranks: Setup) -> u64 {
        let each = bucket.iter().map(|&at| self.columns().llm_ns[at as usize]);
        if ranks.is_padded { each.max().unwrap_or(0) * bucket.len() as u64 } else { each.sum() }
    }

    /// Samples spread by LLM tokens, longest first: over the ranks where they meet once a step, else over all microbatches, of
    /// which the fullest run at the same time.
    fn packed(&self, batch: &[u32], ranks: Setup) -> Vec<Vec<u32>> {
        let spread = |samples: &[u32], count: u32| {
            let tokens: Vec<u64> = samples.iter().map(|&sample| self.tokens(sample)).collect();
            filled(samples, &single_cost_lpt(&tokens, count), count)
        };
        if ranks.meets == Meets::Step {
            let of_ranks = spread(batch, ranks.num_ranks);
            let mut buckets = vec![Vec::new(); ranks.num_buckets() as usize];
            for (rank, mut samples) in of_ranks.into_iter().enumerate() {
                // Without padding the cut of a rank's samples into microbatches changes no wait. With it, like lengths together.
                samples.sort_by_key(|&sample| Reverse(self.tokens(sample)));
                let mut rest = samples.as_slice();
                for microbatch in 0..ranks.accumulation as usize {
                    let (taken, left) =
                        rest.split_at(rest.len() / (ranks.accumulation as usize - microbatch));
                    buckets[microbatch * ranks.num_ranks as usize + rank] = taken.to_vec();
                    rest = left;
                }
            }
            return buckets;
        }
        let mut buckets = spread(batch, u32::try_from(ranks.num_buckets()).unwrap_or(u32::MAX));
        buckets.sort_by_cached_key(|bucket| {
            Reverse(bucket.iter().map(|&sample| self.tokens(sample)).sum::<u64>())
        });
        buckets
    }

    /// As `batch_rebalance` of transformers, by its model of costs and the best cut there is by it (its own search is a climb):
    /// the costliest microbatches at the same time.
    fn rebalanced(&self, batch: &[u32], ranks: Setup) -> Result<Vec<Vec<u32>>, BalanceError> {
        // Tokens and a thousandth of their square.
        let cost = |&sample: &u32| 1_000 * self.tokens(sample) + self.tokens(sample).pow(2);
        let llm_ns: Vec<u64> = batch.iter().map(cost).collect();
        let costs = Costs { encoder_ns: vec![0; batch.len()], llm_ns, ..Costs::default() };
        let num_buckets = u32::try_from(ranks.num_buckets()).unwrap_or(u32::MAX);
        let limits = Limits::new(batch.len(), num_buckets);
        Ok(filled(batch, &padded(&costs, &limits, Meets::Phase, ranks.accumulation)?, num_buckets))
    }

    /// A step where each microbatch's encoder work is shared out by units over all ranks, in nanoseconds.
    fn shared_ns(&self, buckets: &[Vec<u32>], ranks: Setup) -> u64 {
        let num_ranks = ranks.num_ranks;
        let of_microbatch = |microbatch: &[Vec<u32>]| -> u64 {
            let samples = || microbatch.iter().flatten();
            let units: Vec<u64> =
                samples().filter_map(|sample| self.units_ns.get(sample)).flatten().copied().collect();
            let mut shares = vec![0; num_ranks as usize];
            for (&unit, rank) in units.iter().zip(single_cost_lpt(&units, num_ranks)) {
                shares[rank as usize] += unit;
            }
            let llm = microbatch.iter().map(|bucket| self.llm_ns(bucket, ranks));
            shares.into_iter().max().unwrap_or(0) + llm.max().unwrap_or(0)
        };
        buckets.chunks(num_ranks as usize).map(of_microbatch).sum()
    }
}

/// The samples of each bucket.
fn filled(samples: &[u32], bucket_of: &[u32], num_buckets: u32) -> Vec<Vec<u32>> {
    let mut buckets = vec![Vec::new(); num_buckets as usize];
    for (&sample, &bucket) in samples.iter().zip(bucket_of) {
        buckets[bucket as usize].push(sample);
    }
    buckets
}

/// Units of a sample, at most: of more, so many even ones are taken.
const UNITS_MAX: u32 = 4_096;

/// The work of each unit of a sample that costs the encoder `encoder_ns`: in proportion to its tokens, given as (count, tokens)
/// of each run of units.
pub(crate) fn units_ns(encoder_ns: u64, segments: &[(u32, u32)]) -> Vec<u64> {
    let count: u64 = segments.iter().map(|&(count, _)| u64::from(count)).sum();
    if count > UNITS_MAX.into() {
        return units_ns(encoder_ns, &[(UNITS_MAX, 1)]);
    }
    let total: u128 = segments.iter().map(|&(count, tokens)| u128::from(count) * u128::from(tokens)).sum();
    let mut units = Vec::new();
    let (mut before, mut given) = (0_u128, 0_u64);
    for &(count, tokens) in segments {
        for _ in 0..count {
            before += u128::from(tokens);
            // Rounded sums: the units add up to the sample's cost.
            let upto = (u128::from(encoder_ns) * before / total.max(1)) as u64;
            units.push(upto - given);
            given = upto;
        }
    }
    units
}

#[cfg(test)]
mod tests {
    use super::super::gains::{Advice, Gains, Lines};
    use super::*;

    const TWO: Setup =
        Setup { num_ranks: 2, batch_size: 2, accumulation: 1, meets: Meets::Step, is_padded: false };

    fn mixture(encoder_ns: &[u64], llm_ns: &[u64], tokens: &[u64], unit_ns: u64) -> Mixture {
        let units =
            (0..).zip(encoder_ns).map(|(sample, &ns)| (sample, vec![unit_ns; (ns / unit_ns) as usize]));
        let costs = Costs {
            encoder_ns: encoder_ns.to_vec(),
            llm_ns: llm_ns.to_vec(),
            tokens: Some(tokens.to_vec()),
            bytes: None,
        };
        let batch = (0..encoder_ns.len() as u32).collect();
        Mixture::new(costs, units.collect(), vec![batch], 1).unwrap()
    }

    fn ratios(mixture: &Mixture, ranks: Setup) -> Vec<f64> {
        let all = mixture.simulate(ranks, 0).unwrap();
        all.iter().map(|simulated| simulated.over_bound.mean).collect()
    }

    /// Work 8, 6, 4, 2 on two ranks, 10 at best. Arrival gives 8 + 6. Of 5, 1, 4, 3 tokens the longest two, 8 and 4, stand
    /// together when grouped; packed, 5 | 4 then 5 | 4 + 3 then 5 + 1 | 7, which is 8 + 6 again. The line finds 8 + 2.
    /// In phases (encoder 6 2 0 0, LLM 2 4 4 2) it waits for 6 + 6 in its best pairs, {8, 4} and {6, 2}, as grouping does.
    /// Four units of 2 are 4 a rank, and LLM alone is 6 a rank: both lines take 10.
    #[test]
    fn four_samples_by_hand() {
        let four = mixture(&[6, 2, 0, 0], &[2, 4, 4, 2], &[5, 1, 4, 3], 2);
        assert_eq!(ratios(&four, TWO), [1.4, 1.2, 1.4, 1.0, 1.0]);
        let phase = Setup { meets: Meets::Phase, ..TWO };
        assert_eq!(ratios(&four, phase), [1.4, 1.2, 1.4, 1.2, 1.0]);

        // Padded to its longest, {5, 1} {4, 3} has 18 tokens, {5, 4} {3, 1} has 16, and the line's {5, 3} {1, 4} 18.
        let all = four.simulate(TWO, 0).unwrap();
        let padded: Vec<f64> =
            all.iter().filter_map(|way| Some((way.padding_ratio? * 13.0).round())).collect();
        assert_eq!(padded[..4], [18.0, 16.0, 18.0, 18.0]);

        // With padding, a bucket of two samples takes twice its larger LLM work. In arrival order the ranks take 8 + 8 and 8, grouped
        // 6 + 8 and 2 + 8. The first line puts the LLM works 4, 4 and 2, 2 together: the ranks take 2 + 8 and 6 + 4. With both
        // lines each rank takes 4 on the encoder, and then the slower one 8 on the LLM.
        let found = ratios(&four, Setup { is_padded: true, ..TWO });
        // Rebalanced by tokens, 5 and 4 | 3 and 1, is grouped's cut; without padding the line takes 10.
        // Both lines without padding take 4 on the encoder and 6 on the LLM.
        assert_eq!(found, [1.6, 1.4, 1.6, 1.4, 1.0, 1.2, 1.0, 1.0]);

        let gains = |ranks| Gains::of(&four.simulate(ranks, 0).unwrap());
        let (step, phase) = (gains(TWO), gains(phase));
        assert_eq!((step.best, step.line.mean, step.both.mean), (Way::Grouped, 1.2, 1.2));
        assert_eq!((phase.line.mean, phase.both.mean), (1.0, 1.2));
        // The second line adds nothing to the first where ranks meet once a step, and is all there is in phases.
        let advised = |gains: &Gains, has_second_line| gains.advice(has_second_line).lines;
        assert_eq!((advised(&step, true), advised(&phase, true)), (Lines::First, Lines::Both));
        assert_eq!((advised(&step, false), advised(&phase, false)), (Lines::First, Lines::None));
        assert!(!step.advice(true).removes_padding && !phase.advice(true).removes_padding);
    }

    /// One rank-step of two microbatches is one sum where ranks meet once, and two waits where they meet in each.
    #[test]
    fn accumulated_microbatches_count_together_where_ranks_meet_once() {
        // Arrival: microbatch 0 has 4 | 2, microbatch 1 has 1 | 3: sums 5 | 5, in phases 4 + 3.
        let four = mixture(&[0; 4], &[4, 2, 1, 3], &[4, 2, 1, 3], 1);
        let ranks = Setup { batch_size: 1, accumulation: 2, ..TWO };
        assert_eq!(ratios(&four, ranks)[..1], [1.0]);
        // Grouped and packed pair 4 with 3 and 2 with 1: 4 + 2.
        let found = ratios(&four, Setup { meets: Meets::Phase, ..ranks });
        assert_eq!(found[..3], [7.0 / 5.0, 6.0 / 5.0, 6.0 / 5.0]);
    }

    #[test]
    fn equal_samples_are_even_in_every_way() {
        for meets in [Meets::Step, Meets::Phase] {
            for accumulation in [1, 2] {
                let equal = mixture(&[2; 16], &[3; 16], &[7; 16], 1);
                let ranks = Setup { num_ranks: 4, batch_size: 4 / accumulation, accumulation, meets, ..TWO };
                assert_eq!(ratios(&equal, ranks), [1.0; 5], "{ranks:?}");
                assert_eq!(Gains::of(&equal.simulate(ranks, 0).unwrap()).advice(true), Advice::NOTHING);
            }
        }
    }

    /// Grouping sorts over a quarter of an epoch, so its steps are not those of the others: 1 and 9, then 9 and 1, become 9 9
    /// and 1 1. In an epoch of four steps each is sorted alone, and so are steps of different epochs.
    #[test]
    fn grouping_moves_samples_between_steps() {
        let mut four = mixture(&[0; 4], &[1, 9, 9, 1], &[1, 9, 9, 1], 1);
        four.batches = vec![vec![0, 1], vec![2, 3]];
        for (steps_per_epoch, steps) in [(8, [9.0, 1.0]), (4, [9.0, 9.0]), (1, [9.0, 9.0])] {
            four.steps_per_epoch = steps_per_epoch;
            let all = four.simulate(Setup { batch_size: 1, ..TWO }, 0).unwrap();
            assert_eq!((all[0].over_bound.mean, &all[1].step_ns[..]), (1.8, &steps[..]));
        }
    }

    #[test]
    fn units_add_up_to_their_sample() {
        assert_eq!(units_ns(12, &[(2, 1), (1, 4)]), [2, 2, 8]);
        assert_eq!(units_ns(10, &[(3, 5)]), [3, 3, 4]);
        assert!(units_ns(5, &[]).is_empty());
        let many = units_ns(1 << 20, &[(u32::MAX, 7), (u32::MAX, 1)]);
        assert_eq!((many.len(), many.iter().sum::<u64>(), many.iter().max()), (4_096, 1 << 20, Some(&256)));
    }
}
