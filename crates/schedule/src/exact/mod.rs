//! Proofs, and better assignments, where few samples share a bucket.
//!
//! A set of samples is feasible at capacity C if its encoder and LLM sums are at most C and its sizes keep the
//! caps. Give each sample i a worth `u_i` >= 0 such that no feasible set is worth more than V. If m feasible sets
//! `S_1`, .. `S_m` hold all samples, then
//!
//! ```text
//! sum_i u_i  <=  sum_j u(S_j)  <=  m V
//! ```
//!
//! so sum u > m V proves that no assignment has all loads at most C. The best worths are the dual of Gilmore and
//! Gomory's linear program: cutting planes (`master`) with a knapsack that finds the sets that are worth too much
//! (`price`). The linear program is solved in floats; then the worths are rounded down to integers, for which the
//! knapsack finds V, and the proof is of integers alone.
//!
//! Where the worths prove nothing, each of the m sets is still worth at least sum u - (m - 1) V. Those sets are
//! listed, and a search (`cover`) finds m of them that hold all samples, or proves that there are none.
//!
//! Where a batch is too large for that, exchanges come first, and then the same search on a few buckets at a time
//! (`few_buckets`); the bound is that of the whole batch all the same.
//!
//! *References*: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961; Baldacci,
//! Christofides and Mingozzi 2008 for listing all columns within the slack.

mod best;
mod bits;
mod cover;
mod dual;
mod few_buckets;
mod listing;
mod master;
mod price;
mod work;

use crate::buckets::Buckets;
use crate::costs::TOTAL_MAX;
use crate::sorted_batch::SortedBatch;
use crate::stop::Stop;
use cover::Cover;
use listing::Listing;
use master::Master;
use work::Work;

/// Two loads, bytes and tokens.
const RESOURCES: usize = 4;

/// What a sample or a set takes of each.
type Weight = [i64; RESOURCES];

/// A worth of 1 in integers.
const ONE: i64 = 1 << 30;

/// Samples beyond which a second seldom raises the bound (of 256 in 64 never, in five batches) and exchanges use it
/// better.
const SAMPLES_MAX: usize = 160;

const _: () = assert!(SAMPLES_MAX <= bits::SAMPLES_MAX, "the search takes more samples than a set can name");

/// Samples beyond which exchanges find better assignments than covers do.
const LISTED_SAMPLES_MAX: usize = 64;

/// The part of the work, one in this many, that large batches get in exchanges before the exact search.
const MOVES_SHARE: u64 = 6;

/// The part of the work, one in this many, that goes to parts of a large batch.
const POLISH_SHARE: u64 = 8;

/// A gap below one in this many is left alone: no step would show it.
const PRECISION: i64 = 1_000_000;

/// What the exact search found.
pub(crate) struct Outcome {
    /// No assignment has a smaller worst load.
    pub(crate) bound: i64,
    /// A better assignment, by the samples of the batch.
    pub(crate) bucket: Option<Vec<u32>>,
}

/// Whether the batch is small enough: few samples, and few of them a bucket; with more, too many sets are nearly full, and
/// the knapsack takes seconds.
pub(crate) fn can_take(batch: &SortedBatch) -> bool {
    let (n, m) = (batch.num_samples(), batch.num_buckets);
    m > 1 && n <= SAMPLES_MAX && batch.are_few()
}

/// The part of `work` that goes to exchanges first, for batches whose lists are too long to find better assignments by covers.
pub(crate) fn moves_before(batch: &SortedBatch, work: u64) -> u64 {
    if is_large(batch) { work / MOVES_SHARE } else { 0 }
}

fn is_large(batch: &SortedBatch) -> bool {
    batch.num_samples() > LISTED_SAMPLES_MAX
}

/// Whether there is a gap worth closing between a bound and a worst load, in nanoseconds.
pub(crate) fn is_open(bound: i64, reached: i64) -> bool {
    reached - bound > bound / PRECISION
}

/// A better bound and a better assignment than those given, where `work` nodes reach.
pub(crate) fn improve(buckets: &Buckets, bound: i64, work: u64, stop: &Stop) -> Outcome {
    let mut solver = Solver::new(buckets, bound, Work::new(work, stop));
    if is_large(buckets.batch) {
        solver.polish(work - work / POLISH_SHARE);
    }
    solver.close()
}

struct Solver<'a, 'p, 's> {
    buckets: &'a Buckets<'p>,
    /// The samples that weigh anything, by their position in the batch.
    sample: Vec<u32>,
    /// Their weights.
    weight: Vec<Weight>,
    /// Most bytes and tokens of a bucket.
    caps: [i64; 2],
    master: Master,
    /// Room for a knapsack's table.
    table: Vec<i32>,
    /// The best worths at the last capacity, such that no set is worth more than 1; all 0 before the first.
    worth: Vec<f64>,
    /// Their sum.
    worth_sum: f64,
    work: Work<'s>,
    /// No assignment has a worst load below this.
    low: i64,
    /// The worst load that is reached.
    high: i64,
    /// The sets that reach it, if found here.
    best: Option<Vec<Vec<u32>>>,
}

impl<'a, 'p, 's> Solver<'a, 'p, 's> {
    fn new(buckets: &'a Buckets<'p>, bound: i64, work: Work<'s>) -> Self {
        let batch = buckets.batch;
        let signed = |size: u64| i64::try_from(size).unwrap_or(i64::MAX).min(2 * TOTAL_MAX.cast_signed());
        let weight_of = |&i: &u32| {
            let ([encoder, llm], [bytes, tokens]) = (batch.cost[i as usize], batch.size(i));
            [encoder, llm, signed(bytes), signed(tokens)]
        };
        let counts = |i: &u32| weight_of(i) != [0; RESOURCES];
        let sample: Vec<u32> = (0..batch.num_samples() as u32).filter(counts).collect();
        let weight: Vec<Weight> = sample.iter().map(weight_of).collect();
        let (high, num_samples) = (buckets.worst(), weight.len());
        let mut solver = Self {
            buckets,
            sample,
            weight,
            caps: batch.caps.map(signed),
            master: Master::new(num_samples),
            table: Vec::new(),
            worth: vec![0.0; num_samples],
            worth_sum: 0.0,
            work,
            low: bound,
            high,
            best: None,
        };
        let mut sets = vec![Vec::new(); batch.num_buckets];
        for (at, &i) in (0..).zip(&solver.sample) {
            sets[buckets.bucket[i as usize] as usize].push(at);
        }
        for (light, heavy) in neighbours(&solver.weight) {
            solver.master.exchange(light, heavy);
        }
        for set in sets.into_iter().filter(|set| !set.is_empty()) {
            solver.learn(set);
        }
        solver
    }

    fn num_buckets(&self) -> usize {
        self.buckets.batch.num_buckets
    }

    fn room(&self, capacity: i64) -> Weight {
        [capacity, capacity, self.caps[0], self.caps[1]]
    }

    /// The worse load of a set, in nanoseconds.
    fn load(&self, set: &[u32]) -> i64 {
        let sum = sum_of(&self.weight, set);
        sum[0].max(sum[1])
    }

    fn learn(&mut self, set: Vec<u32>) {
        self.master.add(set, 1.0);
    }

    /// Closes the gap; what was found.
    fn close(&mut self) -> Outcome {
        self.raise();
        self.settle();
        let bucket = self.best.take().map(|sets| self.assignment(&sets));
        Outcome { bound: self.low, bucket }
    }

    /// Closes the gap from below by proofs and from above by better assignments, while there is work left.
    fn settle(&mut self) {
        let mut step = ((self.high - self.low) / 8).max(1);
        let (mut capacity, mut is_proving) = (self.low + (self.high - self.low) / 16, true);
        while is_open(self.low, self.high) && capacity < self.high && self.work.is_left() {
            match self.refutes(capacity, true) {
                Some(true) => self.low = capacity + 1,
                Some(false) => {}
                None => return,
            }
            if self.low <= capacity {
                let Some(listing) = self.list(capacity) else { return };
                let before = self.high;
                match self.choose(&listing, capacity, self.work.left() / 4) {
                    Cover::None if listing.is_whole => self.low = self.low.max(capacity + 1),
                    Cover::Found(_) if listing.is_whole => return self.finish(&listing),
                    _ => {}
                }
                is_proving &= self.low > capacity;
                if self.high < before {
                    step = ((self.high - self.low) / 8).max(1);
                    capacity = self.low;
                }
            }
            capacity = if is_proving {
                (capacity + step).min(self.high - 1).max(self.low)
            } else {
                capacity + ((self.high - capacity) / 2).max(1)
            };
            step = step.saturating_mul(2);
        }
    }

    /// Finds the best assignment of a listing that has one and lacks nothing.
    fn finish(&mut self, listing: &Listing) {
        while self.low < self.high && self.work.is_left() {
            let middle = self.low + (self.high - self.low) / 2;
            match self.choose(listing, middle, self.work.left() / 4) {
                Cover::None => self.low = middle + 1,
                Cover::Found(_) => {}
                Cover::Unknown => return,
            }
        }
    }

    /// The buckets of `sets`; samples that weigh nothing go where the fewest are.
    fn assignment(&self, sets: &[Vec<u32>]) -> Vec<u32> {
        let mut bucket = vec![u32::MAX; self.buckets.bucket.len()];
        let mut count = vec![0_usize; self.num_buckets()];
        for (b, set) in sets.iter().enumerate() {
            count[b] = set.len();
            for &at in set {
                bucket[self.sample[at as usize] as usize] = b as u32;
            }
        }
        for bucket in bucket.iter_mut().filter(|bucket| **bucket == u32::MAX) {
            let least = (0..count.len()).min_by_key(|&b| count[b]).unwrap_or(0);
            count[least] += 1;
            *bucket = least as u32;
        }
        bucket
    }
}

/// Whether a sample or set fits into what room there is.
fn fits(weight: &Weight, room: &Weight) -> bool {
    weight.iter().zip(room).all(|(weight, room)| weight <= room)
}

/// What the samples of a set take together.
fn sum_of(weight: &[Weight], set: &[u32]) -> Weight {
    set.iter().fold([0; RESOURCES], |mut sum, &i| {
        for (sum, weight) in sum.iter_mut().zip(weight[i as usize]) {
            *sum += weight;
        }
        sum
    })
}

/// Pairs of samples of which the first weighs no more than the second, with none between the two.
fn neighbours(weight: &[Weight]) -> Vec<(u32, u32)> {
    let is_lighter = |i: usize, j: usize| fits(&weight[i], &weight[j]) && (weight[i] != weight[j] || i < j);
    let n = weight.len();
    let mut pairs = Vec::new();
    for heavy in 0..n {
        let lighter: Vec<usize> = (0..n).filter(|&i| is_lighter(i, heavy)).collect();
        let next = lighter.iter().filter(|&&i| !lighter.iter().any(|&between| is_lighter(i, between)));
        pairs.extend(next.map(|&light| (light as u32, heavy as u32)));
    }
    pairs
}
