//! The costs of a whole dataset, held once, and the buckets of any global batch of it.

use crate::costs::{Costs, TOTAL_MAX};
use crate::error::BalanceError;
use crate::limits::Limits;
use crate::meets::{Meets, NEAR, schedule_for};
use crate::packing::{filled, fitting};
use crate::padded::{fitting_padded, padded};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::sync::OnceLock;

/// What the largest cost is scaled to where costs are no integers: nine digits.
const LARGEST_SCALED: f64 = 1e9;

/// Moves for a batch that a sampler balances while a trainer waits, where ranks meet once a step: 1 ms. One sum is even after
/// far fewer.
const STEP_MOVES_MAX: u64 = 60_000;

/// What each sample of a dataset costs, one column a resource.
///
/// *Invariants*: all columns have one length, below 2^32.
#[derive(Debug, Clone, Default)]
pub struct DatasetCosts {
    columns: Costs,
    digest: OnceLock<String>,
}

/// How a global batch is cut into buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Buckets of all ranks.
    pub num_buckets: u32,
    /// What ranks wait for.
    pub meets: Meets,
    /// Buckets that a rank takes in a step.
    pub num_microbatches: u32,
    /// The most bytes of a bucket; `None` for no cap.
    pub bucket_bytes_max: Option<u64>,
    /// The most tokens of a bucket; `None` for no cap.
    pub bucket_tokens_max: Option<u64>,
    /// Of ties and exchanges.
    pub seed: u64,
    /// Whether the rows of a bucket are padded to its longest sample.
    pub is_padded: bool,
}

impl Cut {
    /// The limits of the search. In a pipeline they are those of `dflop.balance`.
    fn limits(&self, num_samples: usize) -> Limits {
        let limits = match self.meets {
            Meets::Pipeline => Limits::patient(num_samples, self.num_buckets),
            Meets::Phase => Limits::new(num_samples, self.num_buckets),
            Meets::Step => {
                let max_moves =
                    Limits::default_moves(num_samples).min(STEP_MOVES_MAX.max(50 * num_samples as u64));
                Limits { max_moves, ..Limits::new(num_samples, self.num_buckets) }
            }
        };
        let Self { bucket_bytes_max, bucket_tokens_max, seed, .. } = *self;
        Limits { bucket_bytes_max, bucket_tokens_max, seed, ..limits }
    }
}

impl DatasetCosts {
    /// The costs in `columns`.
    ///
    /// # Errors
    /// [`BalanceError::Lengths`], [`BalanceError::TooMany`].
    pub fn new(columns: Costs) -> Result<Self, BalanceError> {
        columns.check_lengths()?;
        Ok(Self { columns, digest: OnceLock::new() })
    }

    /// The columns.
    pub const fn columns(&self) -> &Costs {
        &self.columns
    }

    /// Samples of the dataset.
    pub fn num_samples(&self) -> usize {
        self.columns.num_samples()
    }

    /// `Ok` if every global batch of `num_samples` samples can be cut so.
    ///
    /// *Complexity*: O(number of samples).
    ///
    /// # Errors
    /// [`BalanceError::BatchOverflow`] where the largest costs sum to more than the arithmetic takes, whichever batch they
    /// come to stand in; [`BalanceError::NoSizes`], [`BalanceError::SampleOverCap`] and those of [`Limits::check`].
    pub fn check(&self, cut: &Cut, num_samples: usize) -> Result<(), BalanceError> {
        let Costs { encoder_ns, llm_ns, bytes, tokens } = &self.columns;
        cut.limits(num_samples).check(&self.columns)?;
        // Padded, any sample may take as long as the longest.
        let longest = llm_ns.iter().copied().max().filter(|_| cut.is_padded).unwrap_or(0);
        let both = encoder_ns
            .iter()
            .zip(llm_ns)
            .map(|(encoder, llm)| u128::from(*encoder) + u128::from((*llm).max(longest)));
        check_largest("encoder_ns + llm_ns", both, num_samples)?;
        for (column, values) in [("bytes", bytes), ("tokens", tokens)] {
            check_largest(
                column,
                values.as_deref().unwrap_or_default().iter().map(|&value| value.into()),
                num_samples,
            )?;
        }
        Ok(())
    }

    /// The samples of each bucket of the global batch of `samples`, none of them empty where there are samples enough.
    ///
    /// Bucket `b` is the microbatch `b / num_ranks` of rank `b % num_ranks`. In a pipeline and in phases the heaviest come first.
    /// Where rows are padded, each bucket counts as [`padded`] says, and its caps hold for the padded rows.
    ///
    /// # Errors
    /// As [`schedule_for`].
    pub fn buckets(&self, samples: &[u32], cut: &Cut) -> Result<Vec<Vec<u32>>, BalanceError> {
        let costs = self.gather(samples);
        let of_dataset = |mut buckets: Vec<Vec<u32>>| {
            for sample in buckets.iter_mut().flatten() {
                *sample = samples[*sample as usize];
            }
            buckets
        };
        if cut.is_padded {
            let bucket = padded(&costs, &cut.limits(samples.len()), cut.meets, cut.num_microbatches)?;
            return Ok(of_dataset(filled(&costs, &bucket, cut.num_buckets)));
        }
        let near = if cut.meets == Meets::Pipeline { 0 } else { NEAR };
        let limits = cut.limits(samples.len());
        let found = schedule_for(&costs, &limits, cut.meets, cut.num_microbatches, near, &|| false)?;
        let mut buckets = filled(&costs, &found.bucket, cut.num_buckets);
        if cut.meets == Meets::Pipeline {
            let cost = |&at: &u32| costs.encoder_ns[at as usize] + costs.llm_ns[at as usize];
            buckets.sort_by_cached_key(|bucket| std::cmp::Reverse(bucket.iter().map(cost).sum::<u64>()));
        }
        Ok(of_dataset(buckets))
    }

    /// How many of the first of `samples` fit one global batch under the caps of `cut`.
    ///
    /// # Errors
    /// As [`fitting`].
    pub fn fitting(&self, samples: &[u32], cut: &Cut) -> Result<usize, BalanceError> {
        let way = if cut.is_padded { fitting_padded } else { fitting };
        way(&self.gather(samples), &cut.limits(samples.len()))
    }

    /// SHA-256 over all columns, in hexadecimal: equal for equal costs alone.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| {
            let Costs { encoder_ns, llm_ns, bytes, tokens } = &self.columns;
            let mut hash = Sha256::new();
            hash.update((encoder_ns.len() as u64).to_le_bytes());
            let mut block = Vec::new();
            for (name, column) in
                [("e", Some(encoder_ns)), ("l", Some(llm_ns)), ("b", bytes.as_ref()), ("t", tokens.as_ref())]
            {
                let Some(column) = column else { continue };
                hash.update(name);
                for values in column.chunks(1 << 16) {
                    block.clear();
                    block.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                    hash.update(&block);
                }
            }
            hash.finalize().iter().fold(String::new(), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            })
        })
    }

    /// The costs of some samples.
    fn gather(&self, samples: &[u32]) -> Costs {
        self.columns.gather(&samples.iter().map(|&sample| sample as usize))
    }
}

/// `Ok` if the sum of the `num_samples` largest values fits the arithmetic.
fn check_largest(
    column: &'static str,
    values: impl ExactSizeIterator<Item = u128> + Clone,
    num_samples: usize,
) -> Result<(), BalanceError> {
    let Some(largest) = values.clone().max() else { return Ok(()) };
    let count = num_samples.clamp(1, values.len());
    // Nearly always that is all there is to look at.
    if largest * count as u128 <= u128::from(TOTAL_MAX) {
        return Ok(());
    }
    let mut values: Vec<u128> = values.collect();
    values.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    let sum: u128 = values[..count].iter().sum();
    if sum <= u128::from(TOTAL_MAX) {
        return Ok(());
    }
    Err(BalanceError::BatchOverflow { column, num_samples: count, sum, limit: TOTAL_MAX })
}

/// Turns costs that are not integers into integers of one unit: the largest of both columns becomes 10^9.
///
/// Zeros where all costs are 0.
pub fn scaled(encoder: Vec<f64>, llm: Vec<f64>) -> [Vec<u64>; 2] {
    let largest = encoder.iter().chain(&llm).copied().fold(0.0, f64::max);
    let unit = if largest > 0.0 { largest } else { 1.0 };
    // Divide first: the product of large costs would pass the largest float.
    [encoder, llm].map(|column| {
        column.into_iter().map(|cost| (cost / unit * LARGEST_SCALED).round_ties_even() as u64).collect()
    })
}

/// Costs of samples of which only token counts are known: encoder and LLM weigh the same over the dataset.
///
/// Attention's squares are not in them.
pub fn of_tokens(encoder_tokens: &[u64], llm_tokens: &[u64]) -> [Vec<u64>; 2] {
    let sum = |column: &[u64]| column.iter().map(|&tokens| tokens as f64).sum::<f64>();
    let (encoder, llm) = (sum(encoder_tokens), sum(llm_tokens));
    let scale = if encoder > 0.0 { llm / encoder } else { 1.0 };
    let column = |tokens: &[u64], scale: f64| tokens.iter().map(|&tokens| tokens as f64 * scale).collect();
    scaled(column(encoder_tokens, scale), column(llm_tokens, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(num_buckets: u32, meets: Meets) -> Cut {
        let (bucket_bytes_max, bucket_tokens_max) = (None, None);
        Cut {
            num_buckets,
            meets,
            num_microbatches: 1,
            bucket_bytes_max,
            bucket_tokens_max,
            seed: 0,
            is_padded: false,
        }
    }

    fn dataset(encoder_ns: &[u64], llm_ns: &[u64]) -> DatasetCosts {
        let columns = Costs { encoder_ns: encoder_ns.to_vec(), llm_ns: llm_ns.to_vec(), ..Costs::default() };
        DatasetCosts::new(columns).unwrap()
    }

    #[test]
    fn buckets_name_samples_of_the_dataset() {
        let dataset = dataset(&[0; 8], &[9, 9, 9, 4, 3, 2, 1, 9]);
        for meets in [Meets::Step, Meets::Phase, Meets::Pipeline] {
            let buckets = dataset.buckets(&[6, 4, 3, 5], &cut(2, meets)).unwrap();
            let mut sorted: Vec<Vec<u32>> = buckets;
            for bucket in &mut sorted {
                bucket.sort_unstable();
            }
            sorted.sort();
            assert_eq!(sorted, [vec![3, 6], vec![4, 5]], "{meets}");
        }
    }

    #[test]
    fn costs_that_a_batch_cannot_add_up_are_refused_at_once() {
        // Two of three in any batch: 2^59 + 2^59 fits, and so does one giant beside nothing.
        let half = 1 << 59;
        let fits = dataset(&[0; 3], &[half, half, 1]);
        assert_eq!(fits.check(&cut(2, Meets::Step), 2), Ok(()));
        let over = BalanceError::BatchOverflow {
            column: "encoder_ns + llm_ns",
            num_samples: 3,
            sum: u128::from(2 * half + 1),
            limit: TOTAL_MAX,
        };
        assert_eq!(fits.check(&cut(2, Meets::Step), 3), Err(over));
        assert!(dataset(&[u64::MAX], &[u64::MAX]).check(&cut(1, Meets::Step), 1).is_err());
    }

    #[test]
    fn the_digest_is_of_all_columns() {
        let one = dataset(&[1, 2], &[3, 4]);
        assert_eq!(one.digest(), dataset(&[1, 2], &[3, 4]).digest());
        assert_ne!(one.digest(), dataset(&[1, 2], &[4, 3]).digest());
        assert_ne!(one.digest(), dataset(&[3, 4], &[1, 2]).digest());
        let tokens = Costs { tokens: Some(vec![1, 1]), ..one.columns().clone() };
        assert_ne!(one.digest(), DatasetCosts::new(tokens).unwrap().digest());
    }

    #[test]
    fn the_largest_cost_has_nine_digits() {
        assert_eq!(
            scaled(vec![0.0, 0.25], vec![0.5, 0.125]),
            [[0, 500_000_000], [1_000_000_000, 250_000_000]]
        );
        assert_eq!(scaled(vec![0.0], vec![0.0]), [[0], [0]]);
        assert_eq!(scaled(vec![f64::MAX], vec![0.0]), [[1_000_000_000], [0]]);
        // 6 tokens of the encoder weigh as much as 3 of the LLM.
        assert_eq!(of_tokens(&[6, 0], &[1, 2]), [[1_000_000_000, 0], [333_333_333, 666_666_667]]);
    }
}
