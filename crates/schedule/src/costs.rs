//! What the samples of a batch cost.

use crate::error::BalanceError;

/// The largest sum of a column: 2^60, in nanoseconds 36 years.
///
/// Below it no sum, difference or doubled sum of loads can wrap, so the search needs no checks of its own.
pub const TOTAL_MAX: u64 = 1 << 60;

/// What each sample of one global batch costs, one column a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Costs {
    /// Time of each sample on the encoder, forward and backward, in nanoseconds; 0 for text.
    pub encoder_ns: Vec<u64>,
    /// Time of each sample on the LLM backbone, forward and backward, in nanoseconds.
    pub llm_ns: Vec<u64>,
    /// Memory of each sample, in bytes; needed only where [`Limits::bucket_bytes_max`](crate::Limits::bucket_bytes_max) is set.
    pub bytes: Option<Vec<u64>>,
    /// Tokens of each sample; needed only where [`Limits::bucket_tokens_max`](crate::Limits::bucket_tokens_max) is set.
    pub tokens: Option<Vec<u64>>,
}

impl Costs {
    /// Samples in the batch.
    pub fn num_samples(&self) -> usize {
        self.encoder_ns.len()
    }

    /// The costs of some samples, in their order.
    pub(crate) fn gather(&self, samples: &(impl Iterator<Item = usize> + Clone)) -> Self {
        let of = |column: &Vec<u64>| samples.clone().map(|sample| column[sample]).collect::<Vec<u64>>();
        Self {
            encoder_ns: of(&self.encoder_ns),
            llm_ns: of(&self.llm_ns),
            bytes: self.bytes.as_ref().map(of),
            tokens: self.tokens.as_ref().map(of),
        }
    }

    /// `Ok` if the columns agree in length and no sum passes [`TOTAL_MAX`].
    ///
    /// # Errors
    /// [`BalanceError::Lengths`], [`BalanceError::TooMany`], [`BalanceError::Overflow`].
    pub fn check(&self) -> Result<(), BalanceError> {
        self.check_lengths()?;
        for (column, values) in self.named() {
            let mut total = 0_u64;
            for (sample, &value) in values.into_iter().flatten().enumerate() {
                total = total.saturating_add(value);
                if total > TOTAL_MAX {
                    return Err(BalanceError::Overflow { column, sample, limit: TOTAL_MAX });
                }
            }
        }
        Ok(())
    }

    /// The columns by their names.
    fn named(&self) -> [(&'static str, Option<&Vec<u64>>); 4] {
        [
            ("encoder_ns", Some(&self.encoder_ns)),
            ("llm_ns", Some(&self.llm_ns)),
            ("bytes", self.bytes.as_ref()),
            ("tokens", self.tokens.as_ref()),
        ]
    }

    /// `Ok` if the columns agree in length, and 32 bits can name each sample.
    pub(crate) fn check_lengths(&self) -> Result<(), BalanceError> {
        let num_samples = self.num_samples();
        if u32::try_from(num_samples).is_err() {
            let limit = u64::from(u32::MAX);
            return Err(BalanceError::TooMany { what: "samples", found: num_samples as u64, limit });
        }
        for (column, values) in self.named() {
            let Some(values) = values else { continue };
            if values.len() != num_samples {
                return Err(BalanceError::Lengths {
                    encoder: num_samples,
                    other: column,
                    found: values.len(),
                });
            }
        }
        Ok(())
    }
}
