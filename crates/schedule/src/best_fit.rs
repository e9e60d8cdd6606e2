//! Sizes put into buckets under hard caps, largest first.

use crate::sorted_batch::Size;
use std::collections::BTreeSet;

/// Bucket of each of `sizes` such that none holds more than `caps`: largest first, each into the fullest bucket that has room.
///
/// A size counts by the cap that it takes the larger part of. `None` where a size finds no room; there may be another
/// packing. *Complexity*: O(n log n + n log m), with both caps O(n m).
///
/// *References*: Johnson, "Near-optimal bin packing algorithms", 1973, for one cap.
pub(crate) fn best_fit(sizes: &[Size], caps: Size, num_buckets: usize) -> Option<Vec<u32>> {
    let part = |size: &Size| {
        let of = |c: usize| if caps[c] == u64::MAX { 0.0 } else { size[c] as f64 / caps[c].max(1) as f64 };
        of(0).max(of(1))
    };
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by(|&a, &b| part(&sizes[b]).total_cmp(&part(&sizes[a])));
    let mut bucket = vec![0; sizes.len()];
    let mut room = vec![caps; num_buckets];
    let capped: Vec<usize> = (0..2).filter(|&c| caps[c] < u64::MAX).collect();
    if let [c] = capped[..] {
        let mut by_room: BTreeSet<(u64, usize)> = (0..num_buckets).map(|b| (caps[c], b)).collect();
        for sample in order {
            let size = sizes[sample][c];
            let &(left, b) = by_room.range((size, 0)..).next()?;
            by_room.remove(&(left, b));
            by_room.insert((left - size, b));
            bucket[sample] = b as u32;
        }
        return Some(bucket);
    }
    for sample in order {
        let size = sizes[sample];
        let fits = |b: &usize| (0..2).all(|c| size[c] <= room[*b][c]);
        let b = (0..num_buckets).filter(fits).min_by(|&a, &b| part(&room[a]).total_cmp(&part(&room[b])))?;
        room[b] = [0, 1].map(|c: usize| if caps[c] == u64::MAX { room[b][c] } else { room[b][c] - size[c] });
        bucket[sample] = b as u32;
    }
    Some(bucket)
}
