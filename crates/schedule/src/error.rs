//! Why no assignment can be given, and what to do about it.

use dflop_types::Hint;
use thiserror::Error;

/// Why samples cannot be put into buckets.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BalanceError {
    /// There is nothing to put samples into.
    #[error("cannot schedule {num_samples} samples: `num_buckets` is 0, at least 1 is needed")]
    ZeroBuckets {
        /// Samples that were given.
        num_samples: usize,
    },
    /// Two columns of the costs have different lengths.
    #[error("costs disagree: `encoder_ns` has {encoder} samples, `{other}` has {found}, they must be equal")]
    Lengths {
        /// Length of `encoder_ns`.
        encoder: usize,
        /// The column that differs: `llm_ns`, `bytes`, `tokens` or `bucket`.
        other: &'static str,
        /// Its length.
        found: usize,
    },
    /// A bucket cap without sizes to hold it against.
    #[error("cannot keep `bucket_{unit}_max` {cap}: `{unit}` is missing, each sample needs its {unit}")]
    NoSizes {
        /// What is capped: `bytes` or `tokens`.
        unit: &'static str,
        /// The cap, in that unit.
        cap: u64,
    },
    /// Without a cap any number of buckets would do.
    #[error(
        "cannot choose a number of buckets for {num_samples} samples: there is no cap, `bucket_tokens_max` or `bucket_bytes_max` is needed"
    )]
    NoCap {
        /// Samples that were given.
        num_samples: usize,
    },
    /// More buckets or samples than 32-bit indices can name.
    #[error("too many {what}: {found}, at most {limit} are supported")]
    TooMany {
        /// `samples` or `buckets`.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// The most there may be.
        limit: u64,
    },
    /// The sum of a column does not fit the arithmetic.
    #[error("sum of `{column}` is too large: over {limit} at sample {sample}, the sum must not pass it")]
    Overflow {
        /// `encoder_ns`, `llm_ns`, their sum, `bytes` or `tokens`.
        column: &'static str,
        /// The sample at which the running sum passed the limit.
        sample: usize,
        /// The largest sum, [`crate::TOTAL_MAX`].
        limit: u64,
    },
    /// The sum of the largest costs, which may come to stand in one global batch, does not fit the arithmetic.
    #[error(
        "costs are too large: `{column}` of the {num_samples} largest samples is {sum}, that of a global batch must not pass {limit}"
    )]
    BatchOverflow {
        /// What is added up.
        column: &'static str,
        /// Samples of a global batch.
        num_samples: usize,
        /// The sum over as many of the largest.
        sum: u128,
        /// The largest sum, [`crate::TOTAL_MAX`].
        limit: u64,
    },
    /// Ranks would take different numbers of buckets.
    #[error(
        "`num_buckets` is {num_buckets}, must be a multiple of the {num_microbatches} microbatches of a rank"
    )]
    Undivided {
        /// Buckets of all ranks.
        num_buckets: u32,
        /// Buckets that a rank takes in a step.
        num_microbatches: u32,
    },
    /// One sample alone is over the cap of a bucket.
    #[error("sample {sample} needs {size} {unit}, a bucket holds at most {cap}")]
    SampleOverCap {
        /// Position of the sample in the costs.
        sample: usize,
        /// What is capped: `bytes` or `tokens`.
        unit: &'static str,
        /// What the sample needs, in that unit.
        size: u64,
        /// The cap, in that unit.
        cap: u64,
    },
    /// No assignment keeps the cap, and this is certain.
    #[error(
        "{num_samples} samples need at least {needed} {unit} in the fullest of {num_buckets} buckets, a bucket holds at most {cap}"
    )]
    CapsInfeasible {
        /// Samples that were given.
        num_samples: usize,
        /// What is capped: `bytes` or `tokens`.
        unit: &'static str,
        /// A lower bound of the fullest bucket, in that unit.
        needed: u64,
        /// Buckets that were given.
        num_buckets: u32,
        /// The cap, in that unit.
        cap: u64,
    },
    /// No assignment that keeps the cap was found; there may be one.
    #[error(
        "no packing found: {num_samples} samples into {num_buckets} buckets of {cap} {unit}, the fullest had {best} at best"
    )]
    NoPacking {
        /// Samples that were given.
        num_samples: usize,
        /// Buckets that were given.
        num_buckets: u32,
        /// What is capped: `bytes` or `tokens`. With both, the cap that the best packing found breaks by more.
        unit: &'static str,
        /// The cap, in that unit.
        cap: u64,
        /// The fullest bucket of the best packing found, in that unit.
        best: u64,
    },
    /// An assignment names a bucket that is not there.
    #[error("sample {sample} is put into bucket {bucket}, there are {num_buckets} buckets, counted from 0")]
    NoSuchBucket {
        /// Position of the sample in the costs.
        sample: usize,
        /// The bucket it names.
        bucket: u32,
        /// Buckets that were given.
        num_buckets: u32,
    },
    /// An assignment puts more into a bucket than it holds.
    #[error("bucket {bucket} has {size} {unit}, a bucket holds at most {cap}")]
    BucketOverCap {
        /// The bucket.
        bucket: usize,
        /// What is capped: `bytes` or `tokens`.
        unit: &'static str,
        /// What it was given, in that unit.
        size: u64,
        /// The cap, in that unit.
        cap: u64,
    },
}

impl Hint for BalanceError {
    fn hint(&self) -> Option<String> {
        let text = match self {
            Self::ZeroBuckets { .. } => "set `num_buckets` to at least 1",
            Self::Lengths { .. } => "give each sample one value in every column",
            Self::NoSizes { unit, .. } => {
                return Some(format!("fill `{unit}`, or leave `bucket_{unit}_max` out"));
            }
            Self::NoCap { .. } => "give `num_buckets`, or a cap",
            Self::Undivided { .. } => "give each rank as many microbatches as any other, at least 1",
            Self::TooMany { .. } => "schedule one global batch at a time",
            Self::Overflow { .. } | Self::BatchOverflow { .. } => {
                "give times in nanoseconds and sizes in bytes, without sentinels for infinity"
            }
            Self::SampleOverCap { unit, .. } => {
                return Some(format!("raise `bucket_{unit}_max`, or split or leave out this sample"));
            }
            Self::CapsInfeasible { unit, .. } | Self::NoPacking { unit, .. } => {
                return Some(format!(
                    "raise `num_buckets` or `bucket_{unit}_max`, or take fewer samples a step"
                ));
            }
            Self::NoSuchBucket { .. } | Self::BucketOverCap { .. } => return None,
        };
        Some(text.to_owned())
    }
}
