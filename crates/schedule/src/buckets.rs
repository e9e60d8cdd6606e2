//! An assignment that changes sample by sample: loads, members and the order of the buckets stay up to date.

use crate::problem::{Pair, Problem, Size, minus, plus, worse};

/// Which sample lies where, and what that makes of the buckets.
///
/// *Invariants*: `load` and `size` are the sums over `members`; `order` holds all buckets, descending by
/// [`Buckets::value`]; `log` undoes every move since it was last cleared.
pub(crate) struct Buckets<'a> {
    pub(crate) problem: &'a Problem,
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
    /// Place of each bucket in `order`.
    position: Vec<u32>,
    /// (sample, bucket it came from) of every move since the last mark.
    log: Vec<(u32, u32)>,
}

impl<'a> Buckets<'a> {
    /// The assignment `bucket`, one entry a sample. *Complexity*: O(n + m log m).
    pub(crate) fn new(problem: &'a Problem, bucket: Vec<u32>) -> Self {
        let m = problem.num_buckets;
        let (mut members, mut load, mut size) = (vec![Vec::new(); m], vec![[0, 0]; m], vec![[0, 0]; m]);
        let mut place = vec![0; bucket.len()];
        for (sample, &b) in bucket.iter().enumerate() {
            let b = b as usize;
            place[sample] = members[b].len() as u32;
            members[b].push(sample as u32);
            load[b] = plus(load[b], problem.cost[sample]);
            for (size, own) in size[b].iter_mut().zip(problem.size(sample as u32)) {
                *size += own;
            }
        }
        let mut order: Vec<u32> = (0..m as u32).collect();
        order.sort_by_key(|&b| std::cmp::Reverse(worse(load[b as usize])));
        let mut position = vec![0; m];
        for (at, &b) in order.iter().enumerate() {
            position[b as usize] = at as u32;
        }
        Self { problem, bucket, members, place, load, size, order, position, log: Vec::new() }
    }

    /// The worse load of a bucket, in nanoseconds.
    pub(crate) fn value(&self, bucket: u32) -> i64 {
        worse(self.load[bucket as usize])
    }

    /// Whether every bucket keeps both caps.
    pub(crate) fn keeps_caps(&self) -> bool {
        let caps = self.problem.caps;
        self.size.iter().all(|size| size[0] <= caps[0] && size[1] <= caps[1])
    }

    /// The loads of all buckets, worst first: what the objective compares, entry by entry.
    pub(crate) fn values(&self) -> impl Iterator<Item = i64> + '_ {
        self.order.iter().map(|&b| self.value(b))
    }

    /// The worst load of any bucket, in nanoseconds; 0 without samples.
    pub(crate) fn worst(&self) -> i64 {
        self.values().next().unwrap_or(0)
    }

    /// Moves one sample. *Complexity*: O(1), and the places the two buckets rise or fall.
    pub(crate) fn put(&mut self, sample: u32, to: u32) {
        let from = self.bucket[sample as usize];
        self.log.push((sample, from));
        self.shift(sample, from, to);
        self.settle(from);
        self.settle(to);
    }

    /// Forgets how to undo: what is here now is kept.
    pub(crate) fn mark(&mut self) {
        self.log.clear();
    }

    /// Back to the last mark.
    pub(crate) fn undo(&mut self) {
        while let Some((sample, back)) = self.log.pop() {
            let from = self.bucket[sample as usize];
            self.shift(sample, from, back);
            self.settle(from);
            self.settle(back);
        }
    }

    fn shift(&mut self, sample: u32, from: u32, to: u32) {
        let (at, f, t) = (sample as usize, from as usize, to as usize);
        let hole = self.place[at] as usize;
        self.members[f].swap_remove(hole);
        if let Some(&moved) = self.members[f].get(hole) {
            self.place[moved as usize] = hole as u32;
        }
        self.place[at] = self.members[t].len() as u32;
        self.members[t].push(sample);
        self.bucket[at] = to;
        let cost = self.problem.cost[at];
        self.load[f] = minus(self.load[f], cost);
        self.load[t] = plus(self.load[t], cost);
        // Without caps all sizes are 0.
        if let Some(size) = self.problem.sizes.get(at) {
            for (column, &size) in size.iter().enumerate() {
                self.size[f][column] -= size;
                self.size[t][column] += size;
            }
        }
    }

    /// Puts one bucket back in its place of `order`.
    fn settle(&mut self, bucket: u32) {
        let value = self.value(bucket);
        let mut at = self.position[bucket as usize] as usize;
        while at > 0 && self.value(self.order[at - 1]) < value {
            self.order[at] = self.order[at - 1];
            self.position[self.order[at] as usize] = at as u32;
            at -= 1;
        }
        while at + 1 < self.order.len() && self.value(self.order[at + 1]) > value {
            self.order[at] = self.order[at + 1];
            self.position[self.order[at] as usize] = at as u32;
            at += 1;
        }
        self.order[at] = bucket;
        self.position[bucket as usize] = at as u32;
    }
}
