//! A set of samples as bits.

/// The most samples a set can name.
pub(super) const SAMPLES_MAX: usize = 256;

/// A set of samples (or of places in an order), one bit each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Bits([u64; SAMPLES_MAX / 64]);

impl Bits {
    pub(super) const EMPTY: Self = Self([0; SAMPLES_MAX / 64]);

    /// The set of `samples`.
    pub(super) fn of(samples: impl IntoIterator<Item = u32>) -> Self {
        let mut bits = Self::EMPTY;
        for i in samples {
            bits.insert(i as usize);
        }
        bits
    }

    pub(super) fn insert(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }

    pub(super) fn remove(&mut self, i: usize) {
        self.0[i / 64] &= !(1 << (i % 64));
    }

    pub(super) fn has(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    /// What is in this set and not in the other.
    pub(super) fn without(mut self, other: &Self) -> Self {
        for (word, other) in self.0.iter_mut().zip(other.0) {
            *word &= !other;
        }
        self
    }

    /// Whether the other set holds all of this one.
    pub(super) fn is_within(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).all(|(word, other)| word & !other == 0)
    }
}
