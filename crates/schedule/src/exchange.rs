//! The best exchange of a few samples between one bucket and another.
//!
//! An exchange helps bucket w if w ends below its present load, and the other bucket b ends below that load too, or
//! no higher than b is already. Then the loads, sorted worst first, are smaller than before. Let r be the resource
//! that makes w's load. Let the samples that leave w cost c in r, and the samples that come cost c'. They must
//! satisfy
//!
//! ```text
//! load_r(w) - c + c' < limit     and     load_r(b) + c - c' < max(limit, load(b))
//! ```
//!
//! That is, c lies in a window above c', and the window is as wide as the room of b. Near balance the window is
//! narrow. So the sets that w may give (one, two or three samples) are sorted by r once. For each set that b may
//! give, only the sets of w inside the window are looked at. The other resource and the caps are checked on what is
//! left.

use crate::buckets::Buckets;
use crate::ladder::Ladder;
use crate::sorted_batch::{Size, minus, plus, worse};
use crate::stop::Stop;
use crate::units::{Few, NONE, Units};
use dflop_types::BUCKETS_MAX;
use std::collections::BinaryHeap;
use std::mem;

const _: () = assert!(BUCKETS_MAX.is_power_of_two(), "a bucket's number takes the last bits of its room");

/// A few samples of one bucket against a few of another; none on one side makes it a move.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange {
    /// Samples that leave the bucket.
    pub(crate) own: Few,
    /// The other bucket.
    pub(crate) other: u32,
    /// Samples that come from there.
    pub(crate) theirs: Few,
}

/// How far a search for exchanges goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    /// Samples on one side at most.
    pub(crate) samples: usize,
    /// Buckets looked at, most room first, before the search gives up.
    pub(crate) partners: usize,
}

/// Exchanges weighed between two questions whether to stop: 0.1 ms.
const ASKED_EVERY: u64 = 8_192;

/// Looks for exchanges and counts what it weighs.
pub(crate) struct Scan<'a> {
    /// Exchanges weighed so far.
    pub(crate) num_weighed: u64,
    /// After this many the scan ends with the best it has.
    max_weighed: u64,
    /// After this many `stop` is asked.
    ask_at: u64,
    stop: &'a Stop<'a>,
    own: Ladder,
    theirs: Units,
    /// Room, and in the last 20 bits a bucket's number from behind: of equals the first comes first.
    partners: BinaryHeap<u64>,
}

impl<'a> Scan<'a> {
    /// A scan that weighs at most `max_weighed` exchanges, and none after `stop` has struck.
    pub(crate) fn new(max_weighed: u64, stop: &'a Stop<'a>) -> Self {
        Self {
            num_weighed: 0,
            max_weighed,
            ask_at: 0,
            stop,
            own: Ladder::new(),
            theirs: Units::new(),
            partners: BinaryHeap::new(),
        }
    }

    /// Whether no more may be weighed. Asks nobody: a call here would cost every exchange a twentieth.
    #[inline]
    pub(crate) fn is_spent(&self) -> bool {
        self.num_weighed >= self.max_weighed
    }

    /// How many more may be weighed.
    fn left(&self) -> u64 {
        self.max_weighed.saturating_sub(self.num_weighed)
    }

    /// Counts work that weighs nothing, such as sorting or moving, as exchanges of about its time.
    pub(crate) fn charge(&mut self, work: usize) {
        self.num_weighed += self.left().min(work as u64);
    }

    /// Leaves this share of the exchanges that may still be weighed, one in `share`, and no more than `most`.
    pub(crate) fn cut(&mut self, share: u64, most: u64) {
        self.max_weighed = self.num_weighed + (self.left() / share).min(most);
    }

    /// Lets this many more exchanges be weighed, unless `stop` has struck.
    pub(crate) fn grant(&mut self, more: u64) {
        if !self.stop.has_struck() {
            self.max_weighed = self.num_weighed.max(self.max_weighed) + more;
        }
    }

    /// Asks whether to stop, if that was long ago; after a yes all is spent.
    pub(crate) fn heed(&mut self) {
        if self.num_weighed >= self.ask_at && !self.is_spent() {
            self.ask_at = self.num_weighed + ASKED_EVERY;
            if self.stop.strikes() {
                self.max_weighed = self.num_weighed;
            }
        }
    }

    /// The best exchange of bucket w with the first bucket, most room first, that has one that helps; `None` if
    /// none has. Ends early with any that takes a quarter of the excess over `goal`.
    ///
    /// Only buckets that `is_new` says yes to are looked at. In buckets of more than 16 samples only 16 of them,
    /// chosen by `turn`, take part.
    pub(crate) fn best(
        &mut self,
        buckets: &Buckets,
        w: u32,
        goal: i64,
        reach: Reach,
        turn: usize,
        is_new: impl Fn(u32) -> bool,
    ) -> Option<Exchange> {
        let load = buckets.load[w as usize];
        let r = usize::from(load[1] > load[0]);
        let value = load[r];
        self.list_partners(buckets, w, r, is_new);
        self.charge(buckets.load.len() / 4 + self.partners.len().min(reach.partners));
        if self.partners.is_empty() {
            return None;
        }
        self.own.fill(buckets, w, r, reach.samples, turn);
        self.charge(self.own.units.count);
        let enough = if value > goal { goal + (value - goal) / 4 * 3 } else { i64::MIN };
        for _ in 0..reach.partners {
            self.heed();
            if self.is_spent() {
                break;
            }
            let Some(partner) = self.partners.pop() else { break };
            let b = BUCKETS_MAX - 1 - partner as u32 % BUCKETS_MAX;
            let other = buckets.load[b as usize];
            let raised_from = worse(other);
            self.theirs.fill(buckets, b, r, reach.samples, turn);
            let window = |limit: i64| (value - limit, limit.max(raised_from + 1) - other[r]);
            let (mut limit, mut best) = (value, None);
            let left = self.left();
            self.num_weighed += self.own.walk(&self.theirs, window(limit), left, |unit, their, change| {
                // A bucket whose load does not rise never speaks against an exchange, however large its load is.
                let after = worse(plus(other, change));
                let after = if after > raised_from { after } else { 0 };
                let after = worse(minus(load, change)).max(after);
                if after < limit {
                    let (own, theirs) = (self.own.units.few(unit), self.theirs.few(their));
                    if keeps_caps(buckets, w, b, own, theirs) {
                        limit = after;
                        best = Some(Exchange { own, other: b, theirs });
                    }
                }
                (limit > enough).then(|| window(limit))
            });
            if best.is_some() {
                return best;
            }
        }
        None
    }

    /// The exchange with one of `others` that lowers bucket w, `sample` among those that leave it, and ends with the least
    /// load there; `None` if none lowers w.
    pub(crate) fn push(
        &mut self,
        buckets: &Buckets,
        w: u32,
        sample: u32,
        others: impl Iterator<Item = u32>,
        turn: usize,
    ) -> Option<Exchange> {
        let load = buckets.load[w as usize];
        let r = usize::from(load[1] > load[0]);
        let value = load[r];
        self.own.fill(buckets, w, r, 2, turn);
        self.charge(self.own.units.count);
        let (mut least, mut best) = (i64::MAX, None);
        for b in others.filter(|&b| b != w) {
            self.heed();
            let other = buckets.load[b as usize];
            self.theirs.fill(buckets, b, r, 2, turn);
            let window = (0, least.saturating_sub(other[r]));
            let left = self.left();
            self.num_weighed += self.own.walk(&self.theirs, window, left, |unit, their, change| {
                let raised = worse(plus(other, change));
                if raised < least && worse(minus(load, change)) < value {
                    let (own, theirs) = (self.own.units.few(unit), self.theirs.few(their));
                    if own.contains(&sample) && keeps_caps(buckets, w, b, own, theirs) {
                        least = raised;
                        best = Some(Exchange { own, other: b, theirs });
                    }
                }
                Some((0, least - other[r]))
            });
        }
        best
    }

    /// Lists the buckets with room for what leaves bucket w.
    ///
    /// Room has two sides: what b can take in resource r, and by how much the other resource may change, up or
    /// down. Their product says how likely an exchange that fits is.
    fn list_partners(&mut self, buckets: &Buckets, w: u32, r: usize, is_new: impl Fn(u32) -> bool) {
        let load = buckets.load[w as usize];
        let value = load[r];
        let slack = value - load[1 - r];
        // Room for more than some samples does not help further.
        let cap = value >> 3;
        // 2^21 a side, so that a product and a bucket fit.
        let shift = (i64::BITS - cap.leading_zeros()).saturating_sub(21);
        let mut partners = mem::take(&mut self.partners).into_vec();
        partners.clear();
        for (b, &other) in (0..).zip(&buckets.load) {
            if b == w || !is_new(b) {
                continue;
            }
            // A bucket above w may not rise, but may change as long as it does not.
            let excess = (worse(other) - value).max(0);
            let room = value - other[r] + excess;
            if room > 0 {
                let side = value - other[1 - r] + excess + slack;
                let area = (room.min(cap) >> shift) * (side.min(cap) >> shift);
                partners.push(
                    area.cast_unsigned() << BUCKETS_MAX.trailing_zeros() | u64::from(BUCKETS_MAX - 1 - b),
                );
            }
        }
        // Most searches end at one of the first: a heap, not a sort.
        self.partners = BinaryHeap::from(partners);
    }
}

/// Whether both buckets keep both caps when `own` samples go from w to b and `theirs` come back.
#[inline]
pub(crate) fn keeps_caps(buckets: &Buckets, w: u32, b: u32, own: Few, theirs: Few) -> bool {
    // Where nothing is capped this is all that is paid.
    buckets.batch.sizes.is_empty() || room(buckets, w, b, size(buckets, own), size(buckets, theirs))
}

fn size(buckets: &Buckets, samples: Few) -> Size {
    samples.into_iter().filter(|&sample| sample != NONE).fold([0, 0], |sum, sample| {
        let size = buckets.batch.size(sample);
        [sum[0] + size[0], sum[1] + size[1]]
    })
}

/// Whether both buckets keep both caps when `own` bytes and tokens go from w to b and `theirs` come back.
fn room(buckets: &Buckets, w: u32, b: u32, own: Size, theirs: Size) -> bool {
    let (w, b, caps) = (buckets.size[w as usize], buckets.size[b as usize], buckets.batch.caps);
    (0..caps.len()).all(|c| w[c] - own[c] <= caps[c] - theirs[c] && b[c] - theirs[c] <= caps[c] - own[c])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Costs;
    use crate::limits::Limits;
    use crate::random::{below, generator};
    use crate::sorted_batch::SortedBatch;
    use crate::units::SAMPLES_MAX;

    const ALL: usize = usize::MAX;

    fn found(costs: &Costs, limits: &Limits, bucket: &[u32], w: u32, samples: usize) -> Option<[i64; 2]> {
        let batch = SortedBatch::new(costs, limits);
        let mut buckets = Buckets::new(&batch, batch.by_own_order(bucket));
        let stop = Stop::never();
        let mut scan = Scan::new(u64::MAX, &stop);
        let exchange = scan.best(&buckets, w, 0, Reach { samples, partners: ALL }, 0, |_| true)?;
        for (few, to) in [(exchange.own, exchange.other), (exchange.theirs, w)] {
            for sample in few.into_iter().filter(|&sample| sample != NONE) {
                assert_eq!(buckets.bucket[sample as usize], if to == w { exchange.other } else { w });
                buckets.put([(sample, to)]);
            }
        }
        assert!(buckets.keeps_caps());
        Some([buckets.value(w), buckets.value(exchange.other)])
    }

    #[test]
    fn three_for_two_is_found_where_two_for_two_does_not_help() {
        // Bucket 0: 3 x 110 + 4 x 200 = 1,130 on the encoder, 1,129 on the LLM, so that none of the 199s of bucket 1
        // may come, which bring 2 on the LLM. Bucket 1: 150 + 177 + 4 x 199 = 1,123. What goes must exceed what
        // comes by 1 to 6: 110, 200, 220, 310, 400 against 0, 150, 177, 327 never do; 3 x 110 - 150 - 177 = 3 does.
        let encoder_ns = vec![110, 110, 110, 200, 200, 200, 200, 0, 150, 177, 199, 199, 199, 199];
        let llm_ns = vec![0, 0, 0, 0, 0, 0, 0, 1_129, 0, 0, 2, 2, 2, 2];
        let bucket = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1];
        let costs = Costs { encoder_ns, llm_ns, ..Costs::default() };
        let limits = Limits::new(costs.num_samples(), 2);
        assert_eq!(found(&costs, &limits, &bucket, 0, 2), None);
        assert_eq!(found(&costs, &limits, &bucket, 0, 3), Some([1_129, 1_126]));
    }

    /// All sets of one to three of `samples`.
    fn sets(samples: &[usize]) -> Vec<Vec<usize>> {
        let mut all = vec![vec![]];
        for &sample in samples {
            let more: Vec<Vec<usize>> = all.iter().filter(|set| set.len() < SAMPLES_MAX).cloned().collect();
            all.extend(more.into_iter().map(|set| [set, vec![sample]].concat()));
        }
        all
    }

    #[test]
    fn an_exchange_is_found_exactly_where_trying_all_finds_one() {
        let mut random = generator(7);
        let mut counts = [0, 0];
        for round in 0..300 {
            let (n, end) = (3 + below(&mut random, 10), [9, 50, 1_000][round % 3]);
            let mut column = |end| (0..n).map(|_| below(&mut random, end) as u64).collect::<Vec<u64>>();
            let costs = Costs {
                encoder_ns: column(end),
                llm_ns: column(end),
                bytes: Some(column(9)),
                ..Costs::default()
            };
            let bucket: Vec<u32> = (0..n).map(|_| below(&mut random, 3) as u32).collect();
            let sum = |column: &[u64], set: &[usize]| set.iter().map(|&i| column[i]).sum::<u64>();
            let lying_in = |b: u32| (0..n).filter(|&i| bucket[i] == b).collect::<Vec<usize>>();
            let columns = [&costs.encoder_ns[..], &costs.llm_ns, costs.bytes.as_deref().unwrap()];
            let totals = |b: u32| columns.map(|column| sum(column, &lying_in(b)));
            let cap = (0..3).map(|b| totals(b)[2]).max().unwrap();
            let limits = Limits { bucket_bytes_max: (round % 2 == 0).then_some(cap), ..Limits::new(n, 3) };
            let w = (0..3).max_by_key(|&b| totals(b)[0].max(totals(b)[1])).unwrap();
            let value = totals(w)[0].max(totals(w)[1]);
            let helps = |own: &[usize], b: u32, theirs: &[usize]| {
                let [goes, comes] = [own, theirs].map(|set| columns.map(|column| sum(column, set)));
                let after = |b: u32, less: [u64; 3], more: [u64; 3]| {
                    let now = totals(b);
                    [0, 1, 2].map(|c| now[c] - less[c] + more[c])
                };
                [after(w, goes, comes), after(b, comes, goes)].iter().all(|&[encoder, llm, bytes]| {
                    encoder.max(llm) < value && (limits.bucket_bytes_max.is_none() || bytes <= cap)
                })
            };
            let exists = (0..3).filter(|&b| b != w).any(|b| {
                let theirs = sets(&lying_in(b));
                sets(&lying_in(w)).iter().any(|own| theirs.iter().any(|theirs| helps(own, b, theirs)))
            });
            let found = found(&costs, &limits, &bucket, w, 3);
            assert_eq!(found.is_some(), exists, "{costs:?} {bucket:?}");
            assert!(found.is_none_or(|after| after.iter().all(|&after| after.cast_unsigned() < value)));
            counts[usize::from(exists)] += 1;
        }
        assert!(counts[0] > 20 && counts[1] > 20, "{counts:?}");
    }

    #[test]
    fn a_push_lowers_one_bucket_and_raises_the_other_the_least() {
        // Bucket 0 holds 9 and 4, bucket 1 holds 8 and 5, both 13: nothing helps. With 9 gone, 8 for it costs bucket 1
        // one; 4 beside it for 5 and 8 would raise nothing, but lowers nothing either.
        let costs = Costs { encoder_ns: vec![9, 4, 8, 5], llm_ns: vec![0; 4], ..Costs::default() };
        let limits = Limits::new(4, 2);
        let batch = SortedBatch::new(&costs, &limits);
        let buckets = Buckets::new(&batch, batch.by_own_order(&[0, 0, 1, 1]));
        let stop = Stop::never();
        let mut scan = Scan::new(u64::MAX, &stop);
        assert!(scan.best(&buckets, 0, 0, Reach { samples: 3, partners: ALL }, 0, |_| true).is_none());
        let nine = buckets.members[0].iter().copied().find(|&s| batch.cost[s as usize] == [9, 0]).unwrap();
        let pushed = scan.push(&buckets, 0, nine, [0, 1].into_iter(), 0).unwrap();
        let cost = |few: Few| -> i64 {
            few.into_iter().filter(|&s| s != NONE).map(|s| batch.cost[s as usize][0]).sum()
        };
        assert_eq!((pushed.other, cost(pushed.own), cost(pushed.theirs)), (1, 9, 8));
    }
}
