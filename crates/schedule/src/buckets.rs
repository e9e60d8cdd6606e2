//! An assignment that changes sample by sample: loads, members and the order of the buckets stay up to date.

use crate::sorted_batch::{Pair, Size, SortedBatch, minus, plus, worse};

/// Which sample lies where, and what that makes of the buckets.
///
/// *Invariants*: `load` and `size` are the sums over `members`; `order` holds all buckets, descending by
/// [`Buckets::value`], and `values` those; `log` undoes every move since it was last cleared.
pub(crate) struct Buckets<'a> {
    pub(crate) batch: &'a SortedBatch,
    /// Bucket of each sample.
    pub(crate) bucket: Vec<u32>,
    /// Samples of each bucket, in no order.
    pub(crate) members: Vec<Vec<u32>>,
    /// Place of each sample among the members of its bucket.
    place: Vec<u32>,
    /// Load of each bucket.
    pub(crate) load: Vec<Pair>,
    /// Bytes and tokens of each bucket; 0 where there is no cap.
    pub(crate) size: Vec<Size>,
    /// Buckets, worst first.
    pub(crate) order: Vec<u32>,
    /// Their loads, worst first: what the objective compares, entry by entry.
    pub(crate) values: Vec<i64>,
    /// The load by which each bucket was last placed in `order`.
    placed: Vec<i64>,
    /// (sample, bucket it came from) of every move since the last mark.
    log: Vec<(u32, u32)>,
    /// `order` and `values` at the last mark.
    marked: (Vec<u32>, Vec<i64>),
}

impl<'a> Buckets<'a> {
    /// The assignment `bucket`, one entry a sample. *Complexity*: O(n + m log m).
    pub(crate) fn new(batch: &'a SortedBatch, bucket: Vec<u32>) -> Self {
        let m = batch.num_buckets;
        let (mut members, mut load, mut size) = (vec![Vec::new(); m], vec![[0, 0]; m], vec![[0, 0]; m]);
        let mut place = vec![0; bucket.len()];
        for (sample, &b) in bucket.iter().enumerate() {
            let b = b as usize;
            place[sample] = members[b].len() as u32;
            members[b].push(sample as u32);
            load[b] = plus(load[b], batch.cost[sample]);
            for (size, own) in size[b].iter_mut().zip(batch.size(sample as u32)) {
                *size += own;
            }
        }
        let mut order: Vec<u32> = (0..m as u32).collect();
        order.sort_by_key(|&b| std::cmp::Reverse(worse(load[b as usize])));
        let values: Vec<i64> = order.iter().map(|&b| worse(load[b as usize])).collect();
        let placed = load.iter().map(|&load| worse(load)).collect();
        let marked = (order.clone(), values.clone());
        Self { batch, bucket, members, place, load, size, order, values, placed, log: Vec::new(), marked }
    }

    /// The worse load of a bucket, in nanoseconds.
    pub(crate) fn value(&self, bucket: u32) -> i64 {
        worse(self.load[bucket as usize])
    }

    /// Whether every bucket keeps both caps.
    pub(crate) fn keeps_caps(&self) -> bool {
        let caps = self.batch.caps;
        self.size.iter().all(|size| size[0] <= caps[0] && size[1] <= caps[1])
    }

    /// The worst load of any bucket, in nanoseconds; 0 without samples.
    pub(crate) fn worst(&self) -> i64 {
        self.values.first().copied().unwrap_or(0)
    }

    /// Moves samples, each to a bucket, if it is not there already. *Complexity*: O(log m) each, and a copy of the places that buckets rise or fall.
    pub(crate) fn put(&mut self, moves: impl IntoIterator<Item = (u32, u32)>) {
        let first = self.log.len();
        for (sample, to) in moves {
            let from = self.bucket[sample as usize];
            if from != to {
                self.log.push((sample, from));
                self.shift(sample, to);
            }
        }
        for at in first..self.log.len() {
            let (sample, from) = self.log[at];
            self.settle(from);
            self.settle(self.bucket[sample as usize]);
        }
    }

    /// Forgets how to undo: what is here now is kept.
    pub(crate) fn mark(&mut self) {
        self.log.clear();
        self.marked.0.clone_from(&self.order);
        self.marked.1.clone_from(&self.values);
    }

    /// Back to the last mark.
    pub(crate) fn undo(&mut self) {
        while let Some((sample, back)) = self.log.pop() {
            let from = self.bucket[sample as usize];
            self.shift(sample, back);
            for bucket in [from, back] {
                self.placed[bucket as usize] = self.value(bucket);
            }
        }
        self.order.clone_from(&self.marked.0);
        self.values.clone_from(&self.marked.1);
    }

    /// Moves one sample and leaves the order of the buckets as it was.
    fn shift(&mut self, sample: u32, to: u32) {
        let at = sample as usize;
        let (f, t) = (self.bucket[at] as usize, to as usize);
        let hole = self.place[at] as usize;
        self.members[f].swap_remove(hole);
        if let Some(&moved) = self.members[f].get(hole) {
            self.place[moved as usize] = hole as u32;
        }
        self.place[at] = self.members[t].len() as u32;
        self.members[t].push(sample);
        self.bucket[at] = to;
        let cost = self.batch.cost[at];
        self.load[f] = minus(self.load[f], cost);
        self.load[t] = plus(self.load[t], cost);
        // Without caps all sizes are 0.
        if let Some(size) = self.batch.sizes.get(at) {
            for (column, &size) in size.iter().enumerate() {
                self.size[f][column] -= size;
                self.size[t][column] += size;
            }
        }
    }

    /// Puts one bucket back in its place of `order`.
    fn settle(&mut self, bucket: u32) {
        let (before, after) = (self.placed[bucket as usize], self.value(bucket));
        if before == after {
            return;
        }
        self.placed[bucket as usize] = after;
        // Stands among its equals.
        let mut at = self.values.partition_point(|&value| value > before);
        while self.order[at] != bucket {
            at += 1;
        }
        let to = if after > before {
            let to = self.values[..at].partition_point(|&value| value >= after);
            self.values.copy_within(to..at, to + 1);
            self.order.copy_within(to..at, to + 1);
            to
        } else {
            let to = at + self.values[at + 1..].partition_point(|&value| value > after);
            self.values.copy_within(at + 1..=to, at);
            self.order.copy_within(at + 1..=to, at);
            to
        };
        (self.order[to], self.values[to]) = (bucket, after);
    }
}
