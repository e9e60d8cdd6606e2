//! Buckets in the order in which they lean to the encoder, in which the least loaded one is found without a look at all.
//!
//! A bucket leans by its encoder load minus its LLM load. With a sample on top, the encoder is the worse resource of all
//! buckets from some place of that order on, and the LLM of all before it. So the least worse load is the least encoder load
//! of the ones or the least LLM load of the others.

use crate::sorted_batch::{Pair, Size, plus, worse};

/// What a bucket is chosen by, the least first: its load on one resource, both loads, samples, number.
type Key = (i64, i64, usize, u32);

/// A run has at least so many buckets at first, if there are so many in all.
const RUN_MIN: usize = 16;

/// Buckets next to each other in the order.
struct Run {
    buckets: Vec<u32>,
    /// By resource: the least key of a bucket.
    least: [Key; 2],
}

/// Buckets with what they hold, in runs of that order.
pub(crate) struct Leaning {
    load: Vec<Pair>,
    count: Vec<usize>,
    held: Vec<Size>,
    /// Buckets that a run has at first.
    length: usize,
    runs: Vec<Run>,
}

impl Leaning {
    /// Buckets with these loads, samples and sizes.
    pub(crate) fn new(load: Vec<Pair>, count: Vec<usize>, held: Vec<Size>) -> Self {
        let length = load.len().isqrt().max(RUN_MIN);
        let mut all = Self { load, count, held, length, runs: Vec::new() };
        all.cut((0..all.load.len() as u32).collect());
        all
    }

    /// The bucket with room for `size` whose worse load is least with `cost` on top; of equals that with the smaller sum, then
    /// with fewer samples, then with the lower number. `None` if none has room.
    ///
    /// *Complexity*: O(sqrt m) for m buckets where the least loaded ones have room, else O(m).
    pub(crate) fn least(&self, cost: Pair, size: Size, caps: Size) -> Option<u32> {
        let room = [caps[0] - size[0], caps[1] - size[1]];
        let has_room = |b: u32| {
            let held = self.held[b as usize];
            held[0] <= room[0] && held[1] <= room[1]
        };
        let border = cost[1].wrapping_sub(cost[0]);
        let mixed = self.runs.partition_point(|run| self.last_leans(run) < border);
        let mut best: Option<Key> = None;
        for (at, run) in self.runs.iter().enumerate() {
            // In the run with the border either may be the worse one: no bucket is better than the worse of the least loads.
            let with = |resource: usize| run.least[resource].0.wrapping_add(cost[resource]);
            let resource = if at == mixed { usize::from(with(1) > with(0)) } else { usize::from(at < mixed) };
            let (_, sum, count, b) = run.least[resource];
            let value = with(resource);
            if best.is_some_and(|best| value > best.0) {
                continue;
            }
            if at != mixed && has_room(b) {
                let key = (value, sum, count, b);
                best = Some(best.map_or(key, |best| best.min(key)));
                continue;
            }
            for &b in &run.buckets {
                let after = plus(self.load[b as usize], cost);
                if best.is_some_and(|best| worse(after) > best.0) || !has_room(b) {
                    continue;
                }
                let (_, sum, count, b) = self.key(b, 0);
                let key = (worse(after), sum, count, b);
                best = Some(best.map_or(key, |best| best.min(key)));
            }
        }
        best.map(|(.., b)| b)
    }

    /// Adds a sample to a bucket.
    pub(crate) fn add(&mut self, b: u32, cost: Pair, size: Size) {
        let at = b as usize;
        let from = self.run_of(b);
        self.runs[from].buckets.retain(|&other| other != b);
        if self.runs[from].buckets.is_empty() {
            self.runs.remove(from);
        } else {
            self.runs[from].least = self.least_of(&self.runs[from].buckets);
        }
        self.load[at] = plus(self.load[at], cost);
        self.count[at] += 1;
        self.held[at] = [self.held[at][0] + size[0], self.held[at][1] + size[1]];
        if self.runs.is_empty() {
            return self.cut(vec![b]);
        }
        let to = self.run_of(b).min(self.runs.len() - 1);
        let place = self.runs[to].buckets.partition_point(|&other| self.leans(other) < self.leans(b));
        self.runs[to].buckets.insert(place, b);
        for resource in [0, 1] {
            self.runs[to].least[resource] = self.runs[to].least[resource].min(self.key(b, resource));
        }
        if self.runs[to].buckets.len() > 2 * self.length {
            let half = self.runs[to].buckets.split_off(self.length);
            self.runs[to].least = self.least_of(&self.runs[to].buckets);
            self.runs.insert(to + 1, Run { least: self.least_of(&half), buckets: half });
        }
        if self.runs.len() > 4 * (self.load.len() / self.length + 1) {
            let all = std::mem::take(&mut self.runs);
            self.cut(all.into_iter().flat_map(|run| run.buckets).collect());
        }
    }

    /// Orders these buckets and cuts them into runs.
    fn cut(&mut self, mut buckets: Vec<u32>) {
        buckets.sort_by_key(|&b| self.leans(b));
        let run = |buckets: &[u32]| Run { buckets: buckets.to_vec(), least: self.least_of(buckets) };
        self.runs = buckets.chunks(self.length).map(run).collect();
    }

    /// The run that has a bucket, or to which it belongs; one past the last if it leans further than all.
    fn run_of(&self, b: u32) -> usize {
        let own = self.leans(b);
        self.runs.partition_point(|run| run.buckets.last().is_some_and(|&last| self.leans(last) < own))
    }

    /// By how much a bucket leans to the encoder, and its number: no two buckets are equal.
    fn leans(&self, b: u32) -> (i64, u32) {
        let [encoder, llm] = self.load[b as usize];
        (encoder.wrapping_sub(llm), b)
    }

    fn last_leans(&self, run: &Run) -> i64 {
        run.buckets.last().map_or(i64::MIN, |&last| self.leans(last).0)
    }

    fn key(&self, b: u32, resource: usize) -> Key {
        let load = self.load[b as usize];
        (load[resource], load[0].wrapping_add(load[1]), self.count[b as usize], b)
    }

    fn least_of(&self, buckets: &[u32]) -> [Key; 2] {
        [0, 1].map(|resource| {
            let keys = buckets.iter().map(|&b| self.key(b, resource));
            keys.min().expect("a run has a bucket")
        })
    }
}
