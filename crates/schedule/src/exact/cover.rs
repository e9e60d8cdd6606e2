//! From sets to a partition: which sets, one a bucket, hold all samples.
//!
//! No set is worth more than V, and what the m buckets hold must be worth the sum W of all worths: so together
//! they fall short of m V by m V - W at most, the slack. Each choice spends what its new samples fall short of V,
//! and where the slack is small few sets are left to choose from.

use super::bits::{Bits, SAMPLES_MAX};
use super::work::{PORTION, Work};

/// Work of a look at a set, in nodes.
const NODES_PER_SET: u64 = 3;

/// What became of the search for a cover.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cover {
    /// These sets, by index, hold all samples.
    Found(Vec<u32>),
    /// No choice of sets does.
    None,
    /// The work was spent before an answer.
    Unknown,
}

/// Sets to choose from, and the worths that bound the choice.
pub(super) struct Choice<'a> {
    /// Samples of each set, the best first.
    pub(super) sets: &'a [&'a [u32]],
    /// Worth of each sample.
    pub(super) value: &'a [i64],
    /// No set is worth more.
    pub(super) most: i64,
}

/// A set as bits, with what it is worth in samples not yet covered.
#[derive(Clone, Copy)]
struct Candidate {
    bits: Bits,
    at: u32,
    worth: i64,
}

struct Walk<'w, 's> {
    work: &'w mut Work<'s>,
    nodes: u64,
    left: u64,
    chosen: Vec<u32>,
}

impl Choice<'_> {
    /// At most `num_buckets` sets that hold all samples, looked for with at most `share` of the work.
    pub(super) fn cover(&self, num_buckets: usize, work: &mut Work, share: u64) -> Cover {
        let open = Bits::of(0..self.value.len() as u32);
        let slack = num_buckets.cast_signed() as i64 * self.most - self.value.iter().sum::<i64>();
        let candidates: Vec<Candidate> = (0..)
            .zip(self.sets)
            .map(|(at, set)| Candidate { bits: Bits::of(set.iter().copied()), at, worth: 0 })
            .collect();
        let mut walk = Walk { work, nodes: 0, left: share, chosen: Vec::new() };
        let answer = self.descend(open, num_buckets, slack, &candidates, &mut walk);
        let (unspent, chosen) = (walk.nodes, walk.chosen);
        work.give_back(unspent);
        match answer {
            Some(true) => Cover::Found(chosen),
            Some(false) => Cover::None,
            None => Cover::Unknown,
        }
    }

    /// Whether sets for the open samples were found; `None` where the work is spent.
    ///
    /// The sample that the fewest sets hold is covered next, by each of them in turn; a set that was tried is not
    /// tried again beside another for the same sample.
    fn descend(
        &self,
        open: Bits,
        num_buckets: usize,
        slack: i64,
        candidates: &[Candidate],
        walk: &mut Walk,
    ) -> Option<bool> {
        if open == Bits::EMPTY {
            return Some(true);
        }
        if num_buckets == 0 {
            return Some(false);
        }
        walk.spend((candidates.len() as u64 + 1) * NODES_PER_SET)?;
        let mut count = [0_u32; SAMPLES_MAX];
        let mut viable: Vec<Candidate> = Vec::new();
        for candidate in candidates {
            let samples = self.sets[candidate.at as usize];
            let is_open = |&&i: &&u32| open.has(i as usize);
            let worth = samples.iter().filter(is_open).map(|&i| self.value[i as usize]).sum();
            if self.most - worth <= slack {
                viable.push(Candidate { worth, ..*candidate });
                for &i in samples {
                    count[i as usize] += 1;
                }
            }
        }
        let is_open = |i: &usize| open.has(*i);
        let rarest = (0..self.value.len()).filter(is_open).min_by_key(|&i| count[i])?;
        viable.sort_unstable_by_key(|candidate| (std::cmp::Reverse(candidate.worth), candidate.at));
        // Sets that hold the rarest sample come last, so that those tried fall off the end.
        let (mut others, holders): (Vec<Candidate>, Vec<Candidate>) =
            viable.into_iter().partition(|candidate| !candidate.bits.has(rarest));
        let first = others.len();
        others.extend(holders.into_iter().rev());
        while others.len() > first {
            let Some(Candidate { bits, at, worth }) = others.pop() else { break };
            let rest = open.without(&bits);
            walk.chosen.push(at);
            let answer = self.descend(rest, num_buckets - 1, slack - (self.most - worth), &others, walk);
            if answer != Some(false) {
                return answer;
            }
            walk.chosen.pop();
        }
        Some(false)
    }
}

impl Walk<'_, '_> {
    fn spend(&mut self, amount: u64) -> Option<()> {
        self.left = self.left.checked_sub(amount)?;
        while self.nodes < amount {
            let taken = self.work.take(PORTION);
            if taken == 0 {
                return None;
            }
            self.nodes += taken;
        }
        self.nodes -= amount;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    fn cover(sets: &[&[u32]], value: &[i64], num_buckets: usize, work: u64) -> Cover {
        let most = sets.iter().map(|set| set.iter().map(|&i| value[i as usize]).sum()).max().unwrap_or(0);
        let stop = Stop::never();
        Choice { sets, value, most }.cover(num_buckets, &mut Work::new(work, &stop), work)
    }

    #[test]
    fn a_cover_is_found_or_ruled_out() {
        // {0, 1}, {2, 3} hold all; {0, 2} and {1, 3} do as well; {1, 2} goes with nothing.
        let sets: [&[u32]; 4] = [&[1, 2], &[0, 1], &[0, 2], &[2, 3]];
        let Cover::Found(mut found) = cover(&sets, &[5; 4], 2, 1_000_000) else { panic!("there is one") };
        found.sort_unstable();
        assert_eq!(found, [1, 3]);
        assert_eq!(cover(&sets[..3], &[5; 4], 2, 1_000_000), Cover::None);
        // Doubles are allowed where the slack allows them: three sets of 10 for 20.
        assert!(matches!(cover(&[&[0, 1], &[1, 2], &[2, 3]], &[5; 4], 3, 1_000_000), Cover::Found(_)));
        assert_eq!(cover(&sets, &[5; 4], 1, 1_000_000), Cover::None);
        assert_eq!(cover(&sets, &[5; 4], 2, 3), Cover::Unknown);
    }
}
