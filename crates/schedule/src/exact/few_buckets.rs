//! Better assignments of large batches: the exact search on a few buckets at a time, the worst among them.

use super::{Outcome, Solver, is_open};
use crate::buckets::Buckets;
use crate::costs::Costs;
use crate::limits::Limits;
use crate::random::{below, generator};
use crate::sorted_batch::SortedBatch;

/// Buckets taken at a time: their samples are settled within some 10 ms.
const BUCKETS: usize = 8;

/// Draws of other buckets beside the worst one that may fail in a row.
const PATIENCE: usize = 12;

/// Work of one draw.
const WORK: u64 = 4_000_000;

impl Solver<'_, '_, '_> {
    /// Improves the assignment until `reserve` of the work is left, the bound is met, or no draw helps any more.
    pub(super) fn polish(&mut self, reserve: u64) {
        let batch = self.buckets.batch;
        if batch.num_buckets <= BUCKETS {
            return;
        }
        let start = self.best.as_ref().map(|sets| self.assignment(sets));
        let mut buckets = Buckets::new(batch, start.unwrap_or_else(|| self.buckets.bucket.clone()));
        let mut random = generator(0);
        let mut num_failed = 0;
        while is_open(self.low, self.high)
            && num_failed < PATIENCE
            && self.work.is_left()
            && self.work.left() > reserve
        {
            let mut order = buckets.order.clone();
            for place in 1..BUCKETS {
                let other = place + below(&mut random, order.len() - place);
                order.swap(place, other);
            }
            let before = buckets.worst();
            let Some(moved) = self.settle_few(&buckets, &order[..BUCKETS]) else {
                num_failed += 1;
                continue;
            };
            buckets.put(moved);
            num_failed = if buckets.worst() < before { 0 } else { num_failed + 1 };
        }
        if buckets.worst() < self.high {
            self.high = buckets.worst();
            let mut sets = vec![Vec::new(); batch.num_buckets];
            for (at, &i) in (0..).zip(&self.sample) {
                sets[buckets.bucket[i as usize] as usize].push(at);
            }
            self.best = Some(sets);
        }
    }

    /// New buckets for the samples of these buckets, whose worst bucket is better than the worst of the old ones.
    fn settle_few(&mut self, buckets: &Buckets, chosen: &[u32]) -> Option<Vec<(u32, u32)>> {
        let batch = self.buckets.batch;
        let samples: Vec<u32> =
            chosen.iter().flat_map(|&b| buckets.members[b as usize].iter().copied()).collect();
        let column = |of: &dyn Fn(u32) -> u64| samples.iter().map(|&i| of(i)).collect();
        let costs = Costs {
            encoder_ns: column(&|i| batch.cost[i as usize][0].cast_unsigned()),
            llm_ns: column(&|i| batch.cost[i as usize][1].cast_unsigned()),
            bytes: Some(column(&|i| batch.size(i)[0])),
            tokens: Some(column(&|i| batch.size(i)[1])),
        };
        let cap = |at: usize| Some(batch.caps[at]).filter(|&cap| cap < u64::MAX);
        let limits = Limits {
            bucket_bytes_max: cap(0),
            bucket_tokens_max: cap(1),
            ..Limits::new(0, chosen.len() as u32)
        };
        let part = SortedBatch::new(&costs, &limits);
        let own = |&origin: &u32| {
            let bucket = buckets.bucket[samples[origin as usize] as usize];
            chosen.iter().position(|&b| b == bucket).unwrap_or(0) as u32
        };
        let start = Buckets::new(&part, part.origin.iter().map(own).collect());
        let work = self.work.split(WORK);
        let mut solver = Solver::new(&start, self.low, work);
        let Outcome { bucket, .. } = solver.close();
        let left = solver.work.left();
        self.work.give_back(left);
        let found = part.by_caller_order(&bucket?);
        Some(samples.into_iter().zip(found.into_iter().map(|b| chosen[b as usize])).collect())
    }
}
