//! Samples whose members do not stand beside each other: `WebDataset` makes two samples of them, each a part of one.

use super::sample::{Sample, is_text};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// Keys of a shard that are remembered, at most: 2 MB. Of later ones it is not told what is wrong with them.
const KEYS_MAX: usize = 1 << 16;

/// The samples of the shard under way, by the hash of their key.
#[derive(Debug, Default)]
pub(super) struct Earlier {
    samples: HashMap<u64, Parts>,
}

/// Which members a sample has.
#[derive(Debug, Clone, Copy)]
struct Parts {
    start: u64,
    /// A bit for each name behind the key: two names may share one.
    bits: u64,
    has_text: bool,
}

impl Earlier {
    /// Says of `sample` that it is a part of an earlier one: of the same key, with other members, and one of both without
    /// text, which alone would be a bad sample anyway. A key that comes twice with all of its members is two samples.
    pub(super) fn compare(&mut self, sample: &mut Sample) {
        let parts = Parts {
            start: sample.start,
            bits: sample.members.iter().fold(0, |bits, member| bits | 1 << (hash(&member.suffix) % 64)),
            has_text: sample.members.iter().any(|member| is_text(&member.suffix)),
        };
        match self.samples.get(&hash(&sample.key)) {
            Some(earlier) if earlier.bits & parts.bits == 0 && !(earlier.has_text && parts.has_text) => {
                sample.stands_apart(earlier.start);
            }
            None if self.samples.len() < KEYS_MAX => {
                self.samples.insert(hash(&sample.key), parts);
            }
            Some(_) | None => {}
        }
    }
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
