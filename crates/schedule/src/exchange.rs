//! The best exchange of samples between one bucket and any other.
//!
//! An exchange helps bucket w if w ends below its load of now, and the other bucket b ends below that load too,
//! or no higher than b is already: then the loads, worst first, are smaller than before. In the resource r that
//! makes w's load, own samples of cost c against others of cost c' must therefore satisfy
//!
//! ```text
//! load_r(w) - c + c' < limit     and     load_r(b) + c - c' < max(limit, load(b))
//! ```
//!
//! that is, c' lies in a window below c, as wide as b has room. Near balance the window is narrow, and with the
//! samples sorted by r (once, their costs never change) only those in it are looked at. The other resource and
//! the caps are checked on what is left.

use crate::buckets::Buckets;
use crate::problem::{Pair, Size, minus, plus, worse};
use crate::stop::Stop;

/// Stands for "no sample".
pub(crate) const NONE: u32 = u32::MAX;

/// Members of a bucket that take part in exchanges of pairs: 16 make 120 pairs.
const PAIRED_MEMBERS: usize = 16;

/// Up to two samples of one bucket against up to two of another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange {
    /// Samples that leave the bucket; [`NONE`] where there is none.
    pub(crate) own: [u32; 2],
    /// The other bucket.
    pub(crate) other: u32,
    /// Samples that come from there.
    pub(crate) theirs: [u32; 2],
}

/// Buckets tried whole at most, before the window of the others.
const ROOMY_MAX: usize = 8;

/// Which buckets have most room in resource r for what leaves bucket w.
///
/// One bucket with much room (a giant of the other resource has it) would make the window wide for all: so a few
/// such buckets are told apart, as many as make the scan cheapest.
struct Rooms {
    /// (level, bucket), most room first; a level is the load from which a bucket rises to w's.
    light: [(i64, u32); ROOMY_MAX],
    num_roomy: usize,
    /// The lowest level of all buckets but the roomy ones and w.
    lightest_other: i64,
}

impl Rooms {
    fn new(buckets: &Buckets, w: u32, r: usize) -> Self {
        let problem = buckets.problem;
        let value = buckets.load[w as usize][r];
        let mut light = [(i64::MAX / 2, w); ROOMY_MAX];
        for (b, &load) in (0..).zip(&buckets.load) {
            let mut entry = (level(load, r, value), b);
            if b == w || entry.0 >= light[ROOMY_MAX - 1].0 {
                continue;
            }
            for held in &mut light {
                if entry < *held {
                    std::mem::swap(&mut entry, held);
                }
            }
        }
        // The window of one own sample stands for those of all.
        let members = &buckets.members[w as usize];
        let typical = members.get(members.len() / 2).map_or(0, |&s| problem.cost[s as usize][r]);
        let window = |lightest: i64| {
            let sorted = &problem.sorted[r];
            let upper = sorted.partition_point(|(cost, _)| cost[r] < typical);
            let lower =
                sorted.partition_point(|(cost, _)| cost[r] <= lightest.saturating_add(typical - value));
            upper.saturating_sub(lower)
        };
        let whole = problem.num_samples() / problem.num_buckets + 1;
        let num_roomy = (0..ROOMY_MAX).min_by_key(|&k| k * whole + window(light[k].0)).unwrap_or(0);
        Self { light, num_roomy, lightest_other: light[num_roomy].0 }
    }

    fn roomy(&self) -> &[(i64, u32)] {
        &self.light[..self.num_roomy]
    }
}

/// The load in resource r from which a bucket may rise to `value`; a bucket above `value` may rise to its own.
fn level(load: Pair, r: usize, value: i64) -> i64 {
    load[r] - (worse(load) - value).max(0)
}

/// The best exchange so far of one sample of bucket w.
struct Single<'a, 'b, 'c> {
    scan: &'a mut Scan<'c>,
    buckets: &'a Buckets<'b>,
    w: u32,
    /// What the worse of both buckets must stay below.
    limit: i64,
    best: Option<Exchange>,
}

impl Single<'_, '_, '_> {
    /// Takes the exchange of `own` against `theirs` (or [`NONE`]) of bucket `b` if it is the best so far.
    #[inline]
    fn weigh(&mut self, own: u32, theirs: u32, b: u32) {
        if self.scan.is_spent() || b == self.w {
            return;
        }
        self.scan.num_weighed += 1;
        let problem = self.buckets.problem;
        let back = if theirs == NONE { [0, 0] } else { problem.cost[theirs as usize] };
        let change = minus(problem.cost[own as usize], back);
        let left = worse(minus(self.buckets.load[self.w as usize], change));
        let after = left.max(raised(self.buckets.load[b as usize], change));
        if after < self.limit && keeps_caps(self.buckets, self.w, b, [own, NONE], [theirs, NONE]) {
            self.limit = after;
            self.best = Some(Exchange { own: [own, NONE], other: b, theirs: [theirs, NONE] });
        }
    }
}

/// One or two samples of a bucket, as a unit of exchange.
#[derive(Debug, Clone, Copy)]
struct Unit {
    cost: Pair,
    samples: [u32; 2],
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
    own_units: Vec<Unit>,
    other_units: Vec<Unit>,
    partners: Vec<(i64, u32)>,
}

impl<'a> Scan<'a> {
    /// A scan that weighs at most `max_weighed` exchanges, and none after `stop` has struck.
    pub(crate) fn new(max_weighed: u64, stop: &'a Stop<'a>) -> Self {
        Self {
            num_weighed: 0,
            max_weighed,
            ask_at: 0,
            stop,
            own_units: Vec::new(),
            other_units: Vec::new(),
            partners: Vec::new(),
        }
    }

    /// Whether no more may be weighed. Asks nobody: a call here would cost every exchange a twentieth.
    #[inline]
    pub(crate) fn is_spent(&self) -> bool {
        self.num_weighed >= self.max_weighed
    }

    /// Leaves this share of the exchanges that may still be weighed: one in `share`.
    pub(crate) fn cut(&mut self, share: u64) {
        self.max_weighed = self.num_weighed + (self.max_weighed - self.num_weighed) / share;
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

    /// The exchange of one sample, or of one against one, after which the worse of the two buckets is best;
    /// `None` if none helps. Ends early with any that halves the excess over `goal`.
    pub(crate) fn single(&mut self, buckets: &Buckets, w: u32, goal: i64) -> Option<Exchange> {
        let load = buckets.load[w as usize];
        let r = usize::from(load[1] > load[0]);
        let value = load[r];
        let rooms = Rooms::new(buckets, w, r);
        let enough = if value > goal { goal + (value - goal) / 2 } else { i64::MIN };
        let mut search = Single { scan: self, buckets, w, limit: value, best: None };
        // The few buckets with more room than all others are tried whole; the window is for the others.
        for &(_, b) in rooms.roomy() {
            search.scan.heed();
            for &own in &buckets.members[w as usize] {
                search.weigh(own, NONE, b);
                for &theirs in &buckets.members[b as usize] {
                    search.weigh(own, theirs, b);
                }
            }
            if search.limit <= enough {
                return search.best;
            }
        }
        let lightest = rooms.lightest_other;
        for &own in &buckets.members[w as usize] {
            search.scan.heed();
            let cost = buckets.problem.cost[own as usize];
            // Sorted ascending, so the window is walked from its upper end, where c' is nearest to c.
            let rank = buckets.problem.rank[r][own as usize] as usize;
            for &(other_cost, theirs) in buckets.problem.sorted[r][..rank].iter().rev() {
                if lightest + cost[r] - other_cost[r] >= search.limit {
                    break;
                }
                search.weigh(own, theirs, buckets.bucket[theirs as usize]);
                if search.limit <= enough {
                    return search.best;
                }
            }
            if search.scan.is_spent() {
                break;
            }
            if lightest + cost[r] < search.limit {
                for &b in buckets.order.iter().rev() {
                    search.weigh(own, NONE, b);
                }
            }
        }
        search.best
    }

    /// The best exchange of up to two against up to two samples with the first bucket, most room first, that has
    /// one that helps; `None` if none has.
    ///
    /// In buckets of more than 16 samples only 16 of them, chosen by `turn`, take part.
    pub(crate) fn pair(&mut self, buckets: &Buckets, w: u32, turn: usize) -> Option<Exchange> {
        let load = buckets.load[w as usize];
        let r = usize::from(load[1] > load[0]);
        let value = load[r];
        let mut own = std::mem::take(&mut self.own_units);
        let mut theirs = std::mem::take(&mut self.other_units);
        units(buckets, w, turn, &mut own);
        own.sort_unstable_by_key(|unit| (unit.cost[r], unit.samples));
        let mut partners = std::mem::take(&mut self.partners);
        partners.clear();
        let levels = (0..).zip(&buckets.load).map(|(b, &load)| (level(load, r, value), b));
        partners.extend(levels.filter(|&(level, b)| level < value && b != w));
        partners.sort_unstable();
        let mut best = None;
        for &(_, b) in &partners {
            if self.is_spent() || best.is_some() {
                break;
            }
            self.heed();
            let other_load = buckets.load[b as usize];
            let mut limit = value;
            let other_value = worse(other_load);
            units(buckets, b, turn, &mut theirs);
            theirs.push(Unit { cost: [0, 0], samples: [NONE, NONE] });
            for &their in &theirs {
                if self.is_spent() {
                    break;
                }
                self.num_weighed += 1;
                let from = own.partition_point(|unit| unit.cost[r] <= their.cost[r] + value - limit);
                for unit in &own[from..] {
                    let change = minus(unit.cost, their.cost);
                    if other_load[r] + change[r] >= limit.max(other_value + 1) || self.is_spent() {
                        break;
                    }
                    self.num_weighed += 1;
                    let after = worse(minus(load, change)).max(raised(other_load, change));
                    if after < limit && keeps_caps(buckets, w, b, unit.samples, their.samples) {
                        limit = after;
                        best = Some(Exchange { own: unit.samples, other: b, theirs: their.samples });
                    }
                }
            }
        }
        (self.own_units, self.other_units, self.partners) = (own, theirs, partners);
        best
    }
}

/// The load of a bucket after `change` where that raises it, in nanoseconds; 0 where it does not: a bucket
/// that rises no further is no reason against an exchange, however high it is.
fn raised(load: Pair, change: Pair) -> i64 {
    let after = worse(plus(load, change));
    if after > worse(load) { after } else { 0 }
}

/// Whether both buckets keep both caps when `own` samples go from w to b and `theirs` come back.
#[inline]
pub(crate) fn keeps_caps(buckets: &Buckets, w: u32, b: u32, own: [u32; 2], theirs: [u32; 2]) -> bool {
    // Where nothing is capped this is all that is paid.
    buckets.problem.sizes.is_empty() || room(buckets, w, b, size(buckets, own), size(buckets, theirs))
}

fn size(buckets: &Buckets, samples: [u32; 2]) -> Size {
    samples.into_iter().filter(|&sample| sample != NONE).fold([0, 0], |sum, sample| {
        let size = buckets.problem.size(sample);
        [sum[0] + size[0], sum[1] + size[1]]
    })
}

/// Whether both buckets keep both caps when `own` bytes and tokens go from w to b and `theirs` come back.
fn room(buckets: &Buckets, w: u32, b: u32, own: Size, theirs: Size) -> bool {
    let (w, b, caps) = (buckets.size[w as usize], buckets.size[b as usize], buckets.problem.caps);
    (0..caps.len()).all(|c| w[c] - own[c] <= caps[c] - theirs[c] && b[c] - theirs[c] <= caps[c] - own[c])
}

/// Fills `units` with the members of a bucket, alone and in pairs.
fn units(buckets: &Buckets, bucket: u32, turn: usize, units: &mut Vec<Unit>) {
    let problem = buckets.problem;
    let members = &buckets.members[bucket as usize];
    let start = if members.len() > PAIRED_MEMBERS { turn % members.len() } else { 0 };
    let one = |sample: u32| Unit { cost: problem.cost[sample as usize], samples: [sample, NONE] };
    units.clear();
    units.extend(members.iter().cycle().skip(start).take(members.len().min(PAIRED_MEMBERS)).map(|&s| one(s)));
    for second in 1..units.len() {
        for first in 0..second {
            let (a, b) = (units[first], units[second]);
            units.push(Unit { cost: plus(a.cost, b.cost), samples: [a.samples[0], b.samples[0]] });
        }
    }
}
