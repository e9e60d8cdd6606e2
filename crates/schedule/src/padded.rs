//! Buckets of a trainer that pads: each sample of a bucket takes as long as the longest one of it.
//!
//! ```text
//! samples, longest first:   9 8 | 5 5 4 | 2 2 2 2 1 1
//! LLM work, padded:         2x9 |  3x5  |     6x2         a bucket holds neighbours of this order
//! ```
//!
//! The LLM's work of a bucket is its number of samples times its largest LLM cost; the encoder's is a sum, as ever. Neighbours
//! in the order of LLM cost pad least: exchanging two samples of different buckets so that each bucket is a run of that order
//! makes no bucket's largest cost larger. So runs alone are looked at.

use crate::assignment::sums;
use crate::bisection::least;
use crate::costs::{Costs, TOTAL_MAX};
use crate::dealing::{dealt, microbatches, renumbered};
use crate::error::BalanceError;
use crate::limits::Limits;
use crate::meets::{Meets, NEAR, schedule_for};
use crate::packing::{filled, sizes_of};
use crate::sorted_batch::Size;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// Caps tried on the work of a bucket, in parts of 16 of the least that is possible; then none. Uneven buckets may pad less in
/// all, which is worth more where a rank takes several, or where the encoder's loads are waited for apart.
const LADDER: [u128; 6] = [16, 17, 19, 22, 28, 40];

/// Samples times buckets up to which the runs that pad least are looked for: some 90 ms for all caps.
const TABLE_MAX: usize = 1 << 20;

/// Bucket of each sample such that ranks that meet as `meets` says wait least, where the rows of a bucket are padded.
///
/// Of runs of the order of LLM cost, and of the answer of [`schedule_for`] to the same costs: what is returned is never slower
/// than that one, where its padded rows keep the caps. Bucket `b` is the microbatch `b / num_ranks` of rank `b % num_ranks`.
/// No bucket is empty where there are as many samples as buckets. A cap holds for the padded bucket: its number of samples
/// times its largest size.
///
/// *Complexity*: that of [`schedule_for`], and O(b n log n) more for n samples and b buckets.
///
/// # Errors
/// Those of [`Costs::check`] and [`Limits::check`]; [`BalanceError::Overflow`] where padded costs pass [`TOTAL_MAX`];
/// [`BalanceError::NoPacking`] where no runs of the order of LLM cost keep the caps.
pub fn padded(
    costs: &Costs,
    limits: &Limits,
    meets: Meets,
    num_microbatches: u32,
) -> Result<Vec<u32>, BalanceError> {
    costs.check()?;
    limits.check(costs)?;
    let num_buckets = limits.num_buckets;
    if num_microbatches == 0 || !num_buckets.is_multiple_of(num_microbatches) {
        return Err(BalanceError::Undivided { num_buckets, num_microbatches });
    }
    let runs = Runs::new(costs, limits, meets)?;
    let num_ranks = num_buckets / num_microbatches;
    let Some(least_work) = runs.least_work() else { return Err(runs.no_packing()) };
    let caps = LADDER.map(|part| (u128::from(least_work) * part / 16).min(u64::MAX.into()) as u64);
    // Where one load of each bucket alone is waited for, a higher cap only makes it worse.
    let is_one = meets == Meets::Pipeline || (meets == Meets::Step && num_microbatches == 1);
    let caps = caps.into_iter().chain([u64::MAX]).take(if is_one { 1 } else { usize::MAX });
    // Like lengths stand together in runs, whatever their encoder costs are. Where lengths differ little, that is what counts.
    let plain = schedule_for(costs, limits, meets, num_microbatches, NEAR, &|| false).ok();
    let plain = plain.map(|found| without_empty(costs, &found.bucket, num_buckets));
    let plain = plain.filter(|bucket| runs.keeps_caps(bucket));
    let mut best: Option<((u64, u64), Vec<u32>)> = None;
    let mut weigh = |bucket: Vec<u32>| {
        let (encoder_ns, llm_ns) = padded_loads(costs, &bucket, num_buckets);
        let wait = (meets.wait_ns(&encoder_ns, &llm_ns, num_microbatches), llm_ns.iter().sum());
        if best.as_ref().is_none_or(|(shortest, _)| wait < *shortest) {
            best = Some((wait, bucket));
        }
    };
    for bucket in caps.map(|cap| runs.cut(cap)).chain(plain.clone()) {
        let (encoder_ns, llm_ns) = padded_loads(costs, &bucket, num_buckets);
        let loads: Vec<[u64; 2]> = encoder_ns.iter().zip(&llm_ns).map(|(&e, &l)| [e, l]).collect();
        let both: Vec<u64> = loads.iter().map(|[encoder, llm]| encoder + llm).collect();
        weigh(match meets {
            Meets::Step => dealt(&bucket, &both, num_ranks),
            Meets::Phase => renumbered(&bucket, &microbatches(&loads, num_ranks as usize)),
            Meets::Pipeline => {
                let mut order: Vec<usize> = (0..both.len()).collect();
                order.sort_by_key(|&bucket| Reverse(both[bucket]));
                renumbered(&bucket, &order)
            }
        });
    }
    // Its own microbatches may be better than those of these lines.
    plain.into_iter().for_each(weigh);
    Ok(best.map(|(_, bucket)| bucket).unwrap_or_default())
}

/// The same assignment without empty buckets, as [`filled`] makes it.
fn without_empty(costs: &Costs, bucket: &[u32], num_buckets: u32) -> Vec<u32> {
    let mut of_sample = vec![0; bucket.len()];
    for (bucket, samples) in (0..).zip(filled(costs, bucket, num_buckets)) {
        for sample in samples {
            of_sample[sample as usize] = bucket;
        }
    }
    of_sample
}

/// Encoder work and padded LLM work of each bucket.
pub fn padded_loads(costs: &Costs, bucket: &[u32], num_buckets: u32) -> (Vec<u64>, Vec<u64>) {
    let (mut count, mut largest) = (vec![0_u64; num_buckets as usize], vec![0_u64; num_buckets as usize]);
    for (&llm_ns, &bucket) in costs.llm_ns.iter().zip(bucket) {
        count[bucket as usize] += 1;
        largest[bucket as usize] = largest[bucket as usize].max(llm_ns);
    }
    let llm_ns = count.into_iter().zip(largest).map(|(count, largest)| count * largest).collect();
    (sums(&costs.encoder_ns, bucket, num_buckets), llm_ns)
}

/// How many of the first samples fit the buckets of `limits` under their caps where rows are padded; all without a cap.
///
/// At least as many samples as buckets, if there are enough samples.
///
/// *Complexity*: O(n log^2 n).
///
/// # Errors
/// As [`padded`], but for [`BalanceError::NoPacking`].
pub fn fitting_padded(costs: &Costs, limits: &Limits) -> Result<usize, BalanceError> {
    costs.check()?;
    limits.check(costs)?;
    let num_samples = costs.num_samples();
    // The same order as that of the cut, so that what fits is what can be cut. Too large costs are refused before.
    Runs::new(costs, limits, Meets::Step)?;
    let fits = |count: u64| {
        let first = Runs::new(&costs.gather(&(0..count as usize)), limits, Meets::Step);
        first.is_ok_and(|runs| runs.num_needed(u64::MAX) <= runs.num_buckets)
    };
    let each_alone = (limits.num_buckets as usize).min(num_samples);
    Ok(least(each_alone as u64, num_samples as u64, |count| !fits(count + 1)) as usize)
}

/// The samples, longest first, and what a run of them takes.
#[derive(Clone)]
struct Runs {
    /// The caller's index of each sample.
    order: Vec<u32>,
    llm_ns: Vec<u64>,
    /// Encoder work of all samples before each, and of all.
    encoder_before: Vec<u64>,
    /// Bytes and tokens of each sample; 0 where there is no cap.
    sizes: Vec<Size>,
    caps: Size,
    num_buckets: usize,
    meets: Meets,
}

impl Runs {
    fn new(costs: &Costs, limits: &Limits, meets: Meets) -> Result<Self, BalanceError> {
        let mut order: Vec<u32> = (0..costs.num_samples() as u32).collect();
        // Stable: equal costs stay in the order they came in.
        order.sort_by_key(|&sample| Reverse(costs.llm_ns[sample as usize]));
        let llm_ns: Vec<u64> = order.iter().map(|&sample| costs.llm_ns[sample as usize]).collect();
        let most = u128::from(llm_ns.first().copied().unwrap_or(0)) * order.len() as u128;
        let mut encoder_before = vec![0; order.len() + 1];
        for (at, &sample) in order.iter().enumerate() {
            encoder_before[at + 1] = encoder_before[at] + costs.encoder_ns[sample as usize];
        }
        if most + u128::from(encoder_before[order.len()]) > u128::from(TOTAL_MAX) {
            let (column, sample) = ("samples * longest llm_ns", order[0] as usize);
            return Err(BalanceError::Overflow { column, sample, limit: TOTAL_MAX });
        }
        let (sizes, caps) = sizes_of(costs, limits);
        let sizes = order.iter().map(|&sample| sizes[sample as usize]).collect();
        Ok(Self {
            order,
            llm_ns,
            encoder_before,
            sizes,
            caps,
            num_buckets: limits.num_buckets as usize,
            meets,
        })
    }

    /// Why no runs keep the caps: one that is too low, and what it would have to be.
    fn no_packing(mut self) -> BalanceError {
        let is_broken = |runs: &Self| runs.num_needed(u64::MAX) > runs.num_buckets;
        let capped: Vec<usize> = (0..2).filter(|&column| self.caps[column] != u64::MAX).collect();
        // The cap that alone is too low; with none, the first: both together are.
        let mut column = capped.first().copied().unwrap_or(0);
        for &alone in &capped {
            let mut runs = self.clone();
            runs.caps = [u64::MAX; 2];
            runs.caps[alone] = self.caps[alone];
            if is_broken(&runs) {
                (column, self) = (alone, runs);
                break;
            }
        }
        let cap = self.caps[column];
        let largest = self.sizes.iter().map(|sizes| sizes[column]).max().unwrap_or(0);
        let best = least(cap, largest.saturating_mul(self.order.len() as u64), |cap| {
            let mut runs = self.clone();
            runs.caps[column] = cap;
            !is_broken(&runs)
        });
        let (num_samples, num_buckets) = (self.order.len(), self.num_buckets as u32);
        BalanceError::NoPacking { num_samples, num_buckets, unit: ["bytes", "tokens"][column], cap, best }
    }

    /// Whether so many samples, of which the largest have these sizes, keep the caps with their rows padded.
    fn keeps(&self, count: usize, largest: Size) -> bool {
        (0..2).all(|c| {
            self.caps[c] == u64::MAX || count as u128 * u128::from(largest[c]) <= self.caps[c].into()
        })
    }

    /// Whether each bucket keeps the caps with its rows padded.
    fn keeps_caps(&self, bucket: &[u32]) -> bool {
        let mut held = vec![(0, [0; 2]); self.num_buckets];
        for (&sample, sizes) in self.order.iter().zip(&self.sizes) {
            let (count, largest) = &mut held[bucket[sample as usize] as usize];
            *count += 1;
            *largest = [0, 1].map(|column: usize| sizes[column].max(largest[column]));
        }
        held.into_iter().all(|(count, largest)| self.keeps(count, largest))
    }

    /// What a rank spends on the run from `first` to before `end`.
    fn work(&self, first: usize, end: usize) -> u64 {
        let encoder = self.encoder_before[end] - self.encoder_before[first];
        let llm = self.llm_ns[first] * (end - first) as u64;
        if self.meets == Meets::Pipeline { encoder.max(llm) } else { encoder + llm }
    }

    /// The end of the longest run from each sample on whose work is at most `cap`, and that keeps the caps; the sample itself
    /// where not even that is possible.
    fn ends(&self, cap: u64) -> Vec<usize> {
        let num = self.order.len();
        // The largest sizes of the run, largest first: a queue for each column, as runs move on.
        let mut queues: [VecDeque<usize>; 2] = Default::default();
        let (mut end, mut ends) = (0, Vec::with_capacity(num));
        for first in 0..num {
            end = end.max(first);
            while end < num && self.work(first, end + 1) <= cap {
                let largest = [0, 1].map(|column: usize| {
                    let before = queues[column].front().map_or(0, |&at| self.sizes[at][column]);
                    before.max(self.sizes[end][column])
                });
                if !self.keeps(end + 1 - first, largest) {
                    break;
                }
                for (column, queue) in queues.iter_mut().enumerate() {
                    while queue.back().is_some_and(|&at| self.sizes[at][column] <= self.sizes[end][column]) {
                        queue.pop_back();
                    }
                    queue.push_back(end);
                }
                end += 1;
            }
            ends.push(end);
            for queue in &mut queues {
                if queue.front() == Some(&first) {
                    queue.pop_front();
                }
            }
        }
        ends
    }

    /// Runs that are needed where each goes as far as it can; more than any number of buckets where one sample passes `cap`.
    fn num_needed(&self, cap: u64) -> usize {
        let ends = self.ends(cap);
        let (mut at, mut num) = (0, 0);
        while at < ends.len() {
            if ends[at] == at {
                return usize::MAX;
            }
            at = ends[at];
            num += 1;
        }
        num
    }

    /// The least work of the worst bucket; `None` where no runs keep the caps.
    fn least_work(&self) -> Option<u64> {
        let is_enough = |cap: u64| self.num_needed(cap) <= self.num_buckets;
        let all = if self.order.is_empty() { 0 } else { self.work(0, self.order.len()) };
        is_enough(all).then(|| least(0, all, is_enough))
    }

    /// Bucket of each sample, in the caller's order: runs of work at most `cap`, as many as there are buckets, that pad least
    /// in all.
    ///
    /// A dynamic program: row k has the least padded work of the first samples in k runs. As samples are added, the begin of the
    /// best last run never moves back (padded work is a Monge array). So the middle of a row splits the search for its two halves.
    fn cut(&self, cap: u64) -> Vec<u32> {
        let num = self.order.len();
        let num_runs = self.num_buckets.min(num);
        let ends = self.ends(cap);
        if num.saturating_mul(num_runs) > TABLE_MAX {
            return self.cut_greedily(&ends, num_runs);
        }
        // The first sample from which a run may reach to before `end`.
        let mut firsts = vec![0; num + 1];
        let mut first = 0;
        for (end, found) in firsts.iter_mut().enumerate().skip(1) {
            while ends[first] < end {
                first += 1;
            }
            *found = first;
        }
        let mut padded = vec![u64::MAX; num + 1];
        padded[0] = 0;
        let mut begins = vec![vec![0_u32; num + 1]; num_runs];
        // With one run fewer, the furthest sample that is reached.
        let mut reach = 0;
        for (run, begins) in (1..).zip(&mut begins) {
            let mut row = vec![u64::MAX; num + 1];
            let reached = if reach < num { ends[reach] } else { num };
            let span = |end: usize| (firsts[end].max(run - 1), (end - 1).min(reach));
            // Ends that are still to be found, from the first to the last, and where their last runs may begin.
            let mut open = vec![(run, reached, 0, num)];
            while let Some((low, high, from, to)) = open.pop() {
                if low > high {
                    continue;
                }
                let end = low + (high - low) / 2;
                let (earliest, latest) = span(end);
                let of =
                    |begin: usize| padded[begin].saturating_add(self.llm_ns[begin] * (end - begin) as u64);
                let best =
                    (earliest.max(from)..=latest.min(to)).min_by_key(|&begin| of(begin)).unwrap_or(earliest);
                row[end] = of(best);
                begins[end] = best as u32;
                open.push((low, end - 1, from, best));
                open.push((end + 1, high, best, to));
            }
            padded = row;
            reach = reached;
        }
        let mut bucket = vec![0; num];
        let mut end = num;
        for run in (0..num_runs).rev() {
            let begin = begins[run][end] as usize;
            for &sample in &self.order[begin..end] {
                bucket[sample as usize] = run as u32;
            }
            end = begin;
        }
        bucket
    }

    /// The same without a table: each run goes as far as it can, and leaves a sample to each run after it.
    fn cut_greedily(&self, ends: &[usize], num_runs: usize) -> Vec<u32> {
        let mut bucket = vec![0; self.order.len()];
        let mut begin = 0;
        for run in 0..num_runs {
            let end = ends[begin].min(self.order.len() - (num_runs - 1 - run));
            for &sample in &self.order[begin..end] {
                bucket[sample as usize] = run as u32;
            }
            begin = end;
        }
        bucket
    }
}
