//! The shortest steps of a race so far: above them a candidate is out of it.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// What `of` says of each item, in the order of the items. Each free thread takes the next item, so that the first ones are done
/// first, and what is found there bounds the others.
pub(crate) fn in_turn<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let take = || {
        let at = next.fetch_add(1, Relaxed);
        items.get(at).map(|item| (at, of(item)))
    };
    let by_thread = rayon::broadcast(|_| std::iter::from_fn(take).collect::<Vec<(usize, R)>>());
    let mut all: Vec<(usize, R)> = by_thread.into_iter().flatten().collect();
    all.sort_unstable_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, answer)| answer).collect()
}

/// The shortest mean steps so far. Whatever the order in which candidates are looked at, those that are left out because of
/// [`Leaders::limit_ns`] are none of the shortest in the end.
pub(crate) struct Leaders {
    most: usize,
    prunes: bool,
    /// At most `most`, ascending, in nanoseconds.
    shortest: Mutex<Vec<u64>>,
}

impl Leaders {
    /// The `most` shortest are wanted. With `prunes` false there is no limit.
    pub(crate) const fn new(most: usize, prunes: bool) -> Self {
        Self { most, prunes, shortest: Mutex::new(Vec::new()) }
    }

    /// What takes longer than this is none of the shortest, in nanoseconds. What takes as long may be one.
    pub(crate) fn limit_ns(&self) -> u64 {
        let shortest = self.shortest.lock().unwrap_or_else(PoisonError::into_inner);
        let last = self.most.checked_sub(1).and_then(|last| shortest.get(last));
        last.filter(|_| self.prunes).copied().unwrap_or(u64::MAX)
    }

    /// Whether any candidate fits.
    pub(crate) fn has_some(&self) -> bool {
        !self.shortest.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Adds the step of a candidate that fits.
    pub(crate) fn add(&self, step_ns: u64) {
        let mut shortest = self.shortest.lock().unwrap_or_else(PoisonError::into_inner);
        let place = shortest.partition_point(|&ns| ns <= step_ns);
        shortest.insert(place, step_ns);
        shortest.truncate(self.most);
    }
}
