//! The least number that is enough, by halving.

/// The least number from `low` on that `is_enough`; `high` where none below it is.
///
/// Exact where each number above one that is enough is enough, too. Elsewhere the number below the answer was seen to
/// be too small, unless the answer is `low`.
pub(crate) fn least(low: u64, high: u64, is_enough: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (low, high);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}
