//! What one side of an exchange may give: the members of a bucket alone, in pairs and in threes.

use crate::buckets::Buckets;
use crate::sorted_batch::{Pair, plus};

/// Stands for "no sample".
pub(crate) const NONE: u32 = u32::MAX;

/// Samples that one side of an exchange gives at most.
pub(crate) const SAMPLES_MAX: usize = 3;

/// Members of a bucket that take part in exchanges: 16 make 120 pairs and 560 threes.
const MEMBERS_MAX: usize = 16;

/// Some samples, with [`NONE`] in the places left over.
pub(crate) type Few = [u32; SAMPLES_MAX];

/// Units of one to three members.
const UNITS_MAX: usize = MEMBERS_MAX
    + MEMBERS_MAX * (MEMBERS_MAX - 1) / 2
    + MEMBERS_MAX * (MEMBERS_MAX - 1) * (MEMBERS_MAX - 2) / 6;

/// The place of no member.
const NOWHERE: u8 = MEMBERS_MAX as u8;

/// The members of each unit, for units of up to two and of up to three members. Units of the first k members alone come
/// before any unit with a later member.
static PLACES: [[[u8; SAMPLES_MAX]; UNITS_MAX]; 2] = [places(2), places(3)];

const fn places(samples: usize) -> [[u8; SAMPLES_MAX]; UNITS_MAX] {
    let mut places = [[NOWHERE; SAMPLES_MAX]; UNITS_MAX];
    let (mut at, mut k) = (0, 0);
    while k < NOWHERE {
        places[at] = [k, NOWHERE, NOWHERE];
        at += 1;
        let mut j = 0;
        while j < k {
            places[at] = [k, j, NOWHERE];
            at += 1;
            let mut i = 0;
            while i < j && samples > 2 {
                places[at] = [k, j, i];
                at += 1;
                i += 1;
            }
            j += 1;
        }
        k += 1;
    }
    places
}

/// The units of a bucket: its members alone, in pairs and in threes.
pub(crate) struct Units {
    /// The members, and behind them [`NONE`], which costs nothing.
    sample: [u32; MEMBERS_MAX + 1],
    cost: [Pair; MEMBERS_MAX + 1],
    /// What each unit costs in the resource that is looked at, and, behind the last, nothing.
    pub(crate) key: [i64; UNITS_MAX + 1],
    /// Units there are.
    pub(crate) count: usize,
    /// Most members of a unit.
    samples: usize,
}

impl Units {
    pub(crate) fn new() -> Self {
        Self {
            sample: [NONE; MEMBERS_MAX + 1],
            cost: [[0, 0]; MEMBERS_MAX + 1],
            key: [0; UNITS_MAX + 1],
            count: 0,
            samples: SAMPLES_MAX,
        }
    }

    /// Those of one bucket, keyed by resource r. Of more than 16 members the 16 from `turn` on take part.
    pub(crate) fn fill(&mut self, buckets: &Buckets, bucket: u32, r: usize, samples: usize, turn: usize) {
        let members = &buckets.members[bucket as usize];
        let count = members.len().min(MEMBERS_MAX);
        let start = if members.len() > MEMBERS_MAX { turn % members.len() } else { 0 };
        let mut key = [0; MEMBERS_MAX];
        for (at, &member) in members[start..].iter().chain(members).take(count).enumerate() {
            self.sample[at] = member;
            self.cost[at] = buckets.batch.cost[member as usize];
            key[at] = self.cost[at][r];
        }
        self.samples = samples;
        let mut at = 0;
        for (k, &alone) in key[..count].iter().enumerate() {
            self.key[at] = alone;
            at += 1;
            for (j, &more) in key[..k].iter().enumerate() {
                let two = alone.wrapping_add(more);
                self.key[at] = two;
                at += 1;
                if samples > 2 {
                    for (slot, &more) in self.key[at..at + j].iter_mut().zip(&key) {
                        *slot = two.wrapping_add(more);
                    }
                    at += j;
                }
            }
        }
        self.key[at] = 0;
        self.count = at;
    }

    /// What each unit costs in the resource that is looked at.
    pub(crate) fn keys(&self) -> &[i64] {
        &self.key[..self.count]
    }

    /// The places of a unit's members; of the one behind the last, none.
    #[inline]
    fn places(&self, at: usize) -> [usize; SAMPLES_MAX] {
        let places = if at < self.count { PLACES[self.samples - 2][at] } else { [NOWHERE; SAMPLES_MAX] };
        places.map(usize::from)
    }

    /// What a unit costs.
    #[inline]
    pub(crate) fn cost(&self, at: usize) -> Pair {
        let [k, j, i] = self.places(at);
        plus(self.cost[k], plus(self.cost[j], self.cost[i]))
    }

    /// The samples of a unit.
    pub(crate) fn few(&self, at: usize) -> Few {
        self.places(at).map(|place| self.sample[place])
    }
}
