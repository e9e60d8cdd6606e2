//! What linear attention does along the tokens: a short convolution, and the recurrence (gated delta rule) in chunks of 64
//! tokens: Yang, Kautz, Hatamizadeh, Gated Delta Networks, ICLR 2025, section 3.

use crate::work::{Phase, Work};

/// A causal convolution of each column with weights of its own, and an activation behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// Columns.
    pub width: u64,
    /// Tokens that are read for each.
    pub kernel: u64,
    /// Whether an activation function stands behind it.
    pub has_activation: bool,
}

impl Convolution {
    /// The columns of one of `degree` ranks, in whole heads where [`DeltaRule::cut`] gives some.
    pub(super) fn cut(self, degree: u64) -> Option<Self> {
        self.width.is_multiple_of(degree).then(|| Self { width: self.width / degree, ..self })
    }

    /// Work of one phase: the rows before the first and behind the last are computed too, from zeros.
    pub(super) fn work(self, segments: &[u64], phase: Phase, size: u64) -> Work {
        let rows: u64 = segments.iter().map(|tokens| tokens + self.kernel - 1).sum();
        // It reads and writes, and so does the activation; what they read is kept for the backward.
        let (moves, kernels) = match phase {
            Phase::Forward if self.has_activation => (4, 2),
            Phase::Forward => (2, 1),
            Phase::Input if self.has_activation => (6, 3),
            Phase::Input => (3, 2),
            Phase::Weight => (2, 2),
        };
        let values = u128::from(rows) * u128::from(self.width);
        let flops = 2 * values * u128::from(self.kernel);
        Work { flops, bytes: values * u128::from(moves * size), kernels }
    }
}

/// Tokens of a chunk, in transformers' reference and in flash-linear-attention.
const CHUNK: u64 = 64;

/// The recurrence of one layer: each head has a state of `key_size` x `value_size` values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRule {
    /// Heads of queries and of keys.
    pub num_key_heads: u64,
    /// Heads of values, each with a state.
    pub num_value_heads: u64,
    /// Width of a head of queries or keys.
    pub key_size: u64,
    /// Width of a head of values.
    pub value_size: u64,
}

impl DeltaRule {
    /// The heads of one of `degree` ranks: of keys, with those of values that read them.
    pub(super) fn cut(self, degree: u64) -> Option<Self> {
        let (num_key_heads, num_value_heads) = (self.num_key_heads / degree, self.num_value_heads / degree);
        let is_divided = self.num_key_heads.is_multiple_of(degree);
        is_divided.then_some(Self { num_key_heads, num_value_heads, ..self })
    }

    /// Values of queries, keys and values of a row.
    pub(super) const fn qkv_width(&self) -> u64 {
        2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size
    }

    /// Values that the kernels hold of a row for a while: keys and values with their corrections, and its share of the states.
    pub(super) const fn state_width(&self) -> u64 {
        let heads = 2 * self.key_size + 3 * self.value_size + CHUNK;
        self.num_value_heads * (heads + self.key_size * self.value_size / CHUNK)
    }

    /// Products of one chunk and head as `torch.utils.flop_counter` counts them in transformers' reference, which solves
    /// its two triangular systems uncounted.
    const fn chunk_flops(&self, phase: Phase) -> u64 {
        let (keys, values) = (self.key_size, self.value_size);
        let squares = 2 * CHUNK * CHUNK;
        let states = 2 * CHUNK * keys * values;
        match phase {
            // Keys with keys and with queries, scores with values; corrections, queries and keys with the state.
            Phase::Forward => squares * (2 * keys + values) + 3 * states,
            // Two products for each, and one for each system.
            Phase::Input => 2 * (squares * (2 * keys + values) + 3 * states) + squares * (keys + values),
            Phase::Weight => 0,
        }
    }

    /// Operations over segments. The first state of each is zeros and its last is not read, so neither has a gradient: four
    /// products less.
    pub(super) fn flops(&self, segments: &[u64], phase: Phase) -> u128 {
        let chunks: u64 = segments.iter().map(|tokens| tokens.div_ceil(CHUNK)).sum();
        let full = u128::from(chunks * self.num_value_heads) * u128::from(self.chunk_flops(phase));
        let without = match phase {
            Phase::Input => segments.iter().filter(|tokens| **tokens > 0).count() as u64,
            Phase::Forward | Phase::Weight => 0,
        };
        let product = 2 * CHUNK * self.key_size * self.value_size;
        full - u128::from(without * self.num_value_heads * 4 * product)
    }

    /// Work of one phase. Values moved are those of flash-linear-attention's kernels: keys, values, their corrections and a
    /// state for each chunk, written and read between the kernels; a backward makes them anew and moves twice as many again.
    pub(super) fn work(&self, segments: &[u64], phase: Phase, size: u64) -> Work {
        let (times, kernels) = match phase {
            Phase::Forward => (1, 7),
            Phase::Input => (3, 14),
            Phase::Weight => return Work::default(),
        };
        let of_head = 11 * self.key_size + 6 * self.value_size + 3 * CHUNK;
        let states = 2 * self.key_size * self.value_size / CHUNK;
        let rows: u64 = segments.iter().sum();
        let values = u128::from(rows * times) * u128::from(self.num_value_heads * (of_head + states));
        Work { flops: self.flops(segments, phase), bytes: values * u128::from(size), kernels }
    }

    /// Bytes of a row that flash-linear-attention keeps: queries and keys as they came and normalised, values, the solved
    /// systems of the chunks, decays in float32, their sums and the scales of the norms.
    pub(super) const fn kept_bytes(&self, size: u64) -> u64 {
        let normalised = 2 * self.num_key_heads * self.key_size;
        let of_heads = self.num_value_heads * (CHUNK + 1);
        (self.qkv_width() + normalised + of_heads) * size
            + 4 * (self.num_value_heads + 2 * self.num_key_heads)
    }
}
