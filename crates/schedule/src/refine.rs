//! From a first assignment to a better one: exchanges until none helps, then kicks and exchanges again.
//!
//! The objective is the vector of bucket loads, worst first, compared entry by entry. An exchange between two
//! buckets that leaves both below the worse of them (or one lower and the other no higher) lowers that vector,
//! whatever the other buckets hold: so the search never needs the vector to choose an exchange, only to judge a
//! kick.

use crate::buckets::Buckets;
use crate::exchange::{Exchange, NONE, Scan, keeps_caps};
use crate::problem::worse;
use crate::random::{below, generator};
use crate::stop::Stop;
use rand_chacha::ChaCha8Rng;

/// Buckets, from the worst one, that must have no helpful exchange left before a kick is judged.
const KICK_DEPTH: usize = 3;

/// What lies below the worst bucket is balanced to one part in this many of its mean, no finer, once the worst
/// one is proven: more would cost time and change no step.
const REST_PRECISION: i64 = 10_000;

/// The share of the moves left that goes to the rest once the worst bucket is proven: one in this many.
const REST_SHARE: u64 = 4;

/// Kicks in a row, and ten a bucket, that may fail before the search for the rest ends, once the worst bucket is
/// proven.
const REST_PATIENCE: usize = 200;

/// Improves an assignment in place; returns the exchanges weighed, at most `max_moves`.
///
/// Ends when the worst bucket is at `bound` (and the rest is even), when the moves are spent, or when `stop` strikes. The result is
/// never worse, in the order of the objective, than what it began with, and keeps every cap that was kept.
pub(crate) fn refine(buckets: &mut Buckets, bound: i64, max_moves: u64, seed: u64, stop: &Stop) -> u64 {
    if buckets.problem.num_buckets < 2 || buckets.problem.num_samples() < 2 {
        return 0;
    }
    let mut search = Search {
        scan: Scan::new(max_moves, stop),
        random: generator(seed),
        is_stuck: vec![false; buckets.problem.num_buckets],
        bound,
    };
    search.scan.heed();
    search.descend(buckets, usize::MAX, i64::MAX);
    buckets.mark();
    let mut best: Vec<i64> = buckets.values().collect();
    let mut was_stuck = Vec::new();
    let (mut failures, mut is_proven) = (0, false);
    while !search.scan.is_spent() {
        let (first, goal) = search.free(buckets);
        if first > 0 && !is_proven {
            is_proven = true;
            search.scan.cut(REST_SHARE);
        }
        let level = best.get(first).copied().unwrap_or(0);
        let enough = if first == 0 { goal } else { goal + goal / REST_PRECISION };
        let is_tired = first > 0 && failures > REST_PATIENCE + 10 * buckets.order.len();
        if level <= enough || is_tired {
            break;
        }
        was_stuck.clone_from(&search.is_stuck);
        search.scan.heed();
        search.kick(buckets, first);
        search.descend(buckets, first + KICK_DEPTH, level);
        let found = buckets.values().cmp(best.iter().copied());
        failures = if found.is_lt() { 0 } else { failures + 1 };
        if found.is_le() {
            // Of equals the newer, so that the search walks along plateaus.
            buckets.mark();
            best.clear();
            best.extend(buckets.values());
        } else {
            buckets.undo();
            search.is_stuck.clone_from(&was_stuck);
        }
    }
    search.scan.num_weighed
}

struct Search<'a> {
    scan: Scan<'a>,
    random: ChaCha8Rng,
    /// Buckets found to have no helpful exchange, and not changed since.
    is_stuck: Vec<bool>,
    bound: i64,
}

impl Search<'_> {
    /// The number of worst buckets that cannot be improved for certain, and a load that the worst of the others
    /// reaches for certain while those stay as they are.
    ///
    /// A bucket is certain when one sample alone makes its load, or when it stands at the bound. Whatever lies
    /// in it, it takes at most its load of either resource; the others share what is left at best evenly.
    fn free(&self, buckets: &Buckets) -> (usize, i64) {
        let problem = buckets.problem;
        let mut total = worse(problem.total);
        let mut first = 0;
        for &b in &buckets.order {
            let value = buckets.value(b);
            let alone = buckets.members[b as usize].iter().any(|&s| worse(problem.cost[s as usize]) == value);
            if !alone && value != self.bound {
                break;
            }
            total -= value;
            first += 1;
        }
        let rest = (buckets.order.len() - first).cast_signed() as i64;
        let mean = if rest == 0 { 0 } else { (total.max(0) + rest - 1) / rest };
        (first, if first == 0 { mean.max(self.bound) } else { mean })
    }

    /// Improves the worst bucket, then the next, down to place `depth`, until none of them has a helpful
    /// exchange. Gives up where the worst bucket is stuck above `level`.
    fn descend(&mut self, buckets: &mut Buckets, depth: usize, level: i64) {
        let (first, goal) = self.free(buckets);
        let mut at = first;
        while at < depth.min(buckets.order.len()) && !self.scan.is_spent() {
            let w = buckets.order[at];
            let value = buckets.value(w);
            if value <= goal {
                break;
            }
            if self.is_stuck[w as usize] {
                at += 1;
                continue;
            }
            let found = match self.scan.single(buckets, w, goal) {
                None => {
                    let turn = below(&mut self.random, 1 << 16);
                    self.scan.pair(buckets, w, turn)
                }
                found => found,
            };
            let Some(exchange) = found else {
                self.is_stuck[w as usize] = true;
                if at == first && value > level {
                    break;
                }
                continue;
            };
            self.apply(buckets, w, exchange);
            at = first;
            self.is_stuck[buckets.order[first] as usize] = false;
        }
    }

    fn apply(&mut self, buckets: &mut Buckets, w: u32, exchange: Exchange) {
        for sample in exchange.own.into_iter().filter(|&s| s != NONE) {
            buckets.put(sample, exchange.other);
        }
        for sample in exchange.theirs.into_iter().filter(|&s| s != NONE) {
            buckets.put(sample, w);
        }
        self.is_stuck[w as usize] = false;
        self.is_stuck[exchange.other as usize] = false;
    }

    /// Moves or exchanges a few samples at random, most often beginning with the worst free bucket.
    fn kick(&mut self, buckets: &mut Buckets, first: usize) {
        let num_exchanges = 1 + below(&mut self.random, 3);
        for number in 0..num_exchanges {
            if self.scan.is_spent() {
                break;
            }
            let place = if number == 0 && below(&mut self.random, 4) > 0 {
                first
            } else {
                first + below(&mut self.random, buckets.order.len() - first)
            };
            self.scan.num_weighed += 1;
            let w = buckets.order[place];
            if let Some(exchange) = self.random_exchange(buckets, w) {
                self.apply(buckets, w, exchange);
            }
        }
    }

    /// A sample of bucket w that moves to any bucket, or goes against one near it in cost; `None` where the draw
    /// is no exchange or breaks a cap.
    ///
    /// Partners are near more often than far: near ones disturb a nearly even assignment little and yet give
    /// every bucket new partners.
    fn random_exchange(&mut self, buckets: &Buckets, w: u32) -> Option<Exchange> {
        let problem = buckets.problem;
        let num_samples = problem.num_samples();
        let members = &buckets.members[w as usize];
        let own = *members.get(below(&mut self.random, members.len().max(1)))?;
        let (other, theirs) = if below(&mut self.random, 4) == 0 {
            (below(&mut self.random, problem.num_buckets) as u32, NONE)
        } else {
            let resource = below(&mut self.random, 2);
            let reach = 1 << below(&mut self.random, (usize::BITS - num_samples.leading_zeros()) as usize);
            let rank = problem.rank[resource][own as usize] as usize;
            let low = rank.saturating_sub(reach);
            let high = (rank + reach).min(num_samples - 1);
            let theirs = problem.sorted[resource][low + below(&mut self.random, high - low + 1)].1;
            (buckets.bucket[theirs as usize], theirs)
        };
        let is_sound = other != w && keeps_caps(buckets, w, other, [own, NONE], [theirs, NONE]);
        is_sound.then_some(Exchange { own: [own, NONE], other, theirs: [theirs, NONE] })
    }
}
