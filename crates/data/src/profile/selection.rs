//! Which records of a source are taken: the mixture's sampling, then a random sample, then a part, each deciding
//! record by record, so that no list of positions is held.

use crate::source::mixture::{Amount, Sampling};
use dflop_types::{ProfilePart, Stratum};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Streams of the draws of `--sample`, apart from those of the mixture, which are counted from 0.
const SAMPLE_STREAMS: u64 = 1 << 32;

/// One choice among records that come one by one.
#[derive(Debug)]
enum Stage {
    /// Those from `from` on, before `to`.
    Block { at: u64, from: u64, to: u64 },
    /// Selection sampling (Knuth, Algorithm S): one pass, ascending, every subset equally likely.
    Draw { random: Box<ChaCha8Rng>, left: u64, wanted: u64 },
}

impl Stage {
    fn draw(wanted: u64, of: u64, seed: u64, stream: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Self::Draw { random: Box::new(random), left: of, wanted }
    }

    /// Whether the next record is taken.
    fn takes(&mut self) -> bool {
        match self {
            Self::Block { at, from, to } => {
                *at += 1;
                (*from..*to).contains(&(*at - 1))
            }
            Self::Draw { left: 0, .. } => false,
            Self::Draw { random, left, wanted } => {
                let is_taken = random.random_range(0..*left) < *wanted;
                *left -= 1;
                *wanted -= u64::from(is_taken);
                is_taken
            }
        }
    }

    /// Whether no later record is taken.
    const fn is_done(&self) -> bool {
        match self {
            Self::Block { at, to, .. } => *at >= *to,
            Self::Draw { wanted, .. } => *wanted == 0,
        }
    }
}

/// Which records of one source are taken.
#[derive(Debug)]
pub(crate) struct Selection {
    /// A record is taken that every stage takes; each stage sees what the one before takes.
    stages: Vec<Stage>,
    /// Records of the source, where they were counted.
    pub(crate) total: Option<u64>,
    /// Records taken, where that is known before they are read.
    pub(crate) num_taken: Option<u64>,
    /// Samples that `--sample` draws of those the mixture takes.
    pub(crate) stratum: Option<Stratum>,
}

impl Selection {
    /// Whether the sampling of a source needs to know how many records there are.
    pub(crate) const fn needs_total(sampling: Sampling) -> bool {
        !matches!(sampling, Sampling::All | Sampling::First(Amount::Count(_)))
    }

    /// What `sampling` takes of source number `index`, which has `total` records, where that is known.
    ///
    /// # Panics
    /// If `total` is not known though [`Selection::needs_total`].
    pub(crate) fn new(sampling: Sampling, total: Option<u64>, seed: u64, index: u64) -> Self {
        let known = || total.expect("the records of a source are counted where its sampling needs it");
        let block = |from, to| Stage::Block { at: 0, from, to };
        let (stages, num_taken) = match sampling {
            Sampling::All => (vec![], total),
            Sampling::First(Amount::Count(count)) => (vec![block(0, count)], total.map(|n| n.min(count))),
            Sampling::First(amount) => (vec![block(0, amount.of(known()))], Some(amount.of(known()))),
            Sampling::End(amount) => {
                let taken = amount.of(known());
                (vec![block(known() - taken, known())], Some(taken))
            }
            Sampling::Random(amount) => {
                let taken = amount.of(known());
                (vec![Stage::draw(taken, known(), seed, index)], Some(taken))
            }
        };
        Self { stages, total, num_taken, stratum: None }
    }

    /// Of what is taken, `drawn` at random.
    pub(crate) fn sample(&mut self, drawn: u64, seed: u64, index: u64) {
        let population = self.num_taken.expect("the records of a source are counted for a sample");
        self.stages.push(Stage::draw(drawn, population, seed, SAMPLE_STREAMS + index));
        self.stratum = Some(Stratum { population, drawn });
        self.num_taken = Some(drawn);
    }

    /// Of what is taken, the contiguous block of one part.
    pub(crate) fn part(&mut self, part: ProfilePart) {
        let population = self.num_taken.expect("the records of a source are counted for a part");
        let bound = |index: u32| {
            let bound = u128::from(population) * u128::from(index) / u128::from(part.num_parts);
            // At most the population, since the index is at most the number of parts.
            bound as u64
        };
        let (from, to) = (bound(part.index), bound(part.index + 1));
        self.stages.push(Stage::Block { at: 0, from, to });
        self.num_taken = Some(to - from);
    }

    /// Whether the next record is taken.
    pub(crate) fn takes(&mut self) -> bool {
        self.stages.iter_mut().all(Stage::takes)
    }

    /// Whether no later record is taken: the rest of the source need not be read.
    pub(crate) fn is_done(&self) -> bool {
        self.stages.iter().any(Stage::is_done)
    }
}

/// How many of `wanted` samples come from each source: in proportion to `populations`, at least 1 of each that is not
/// empty, the rest by the largest remainders; all, where there are fewer.
///
/// # Errors
/// The number of sources that are not empty, where that is more than `wanted`.
pub(crate) fn allocate(populations: &[u64], wanted: u64) -> Result<Vec<u64>, u64> {
    let total: u128 = populations.iter().map(|&n| u128::from(n)).sum();
    if u128::from(wanted) >= total {
        return Ok(populations.to_vec());
    }
    let num_filled = populations.iter().filter(|&&n| n > 0).count() as u64;
    if wanted < num_filled {
        return Err(num_filled);
    }
    let share = |n: u64| u128::from(n) * u128::from(wanted);
    let mut drawn: Vec<u64> =
        populations.iter().map(|&n| ((share(n) / total) as u64).max(n.min(1))).collect();
    let mut given: u64 = drawn.iter().sum();
    let mut by_remainder: Vec<usize> = (0..populations.len()).collect();
    by_remainder.sort_by_key(|&i| std::cmp::Reverse(share(populations[i]) % total));
    for &index in by_remainder.iter().cycle() {
        if given >= wanted {
            break;
        }
        // A source that was raised to 1 sample already has more than its part.
        if share(populations[index]) >= total && drawn[index] < populations[index] {
            drawn[index] += 1;
            given += 1;
        }
    }
    // What the smallest sources got beyond their shares, the largest ones give.
    while given > wanted {
        let largest = (0..drawn.len()).rev().max_by_key(|&i| drawn[i]).expect("there are sources");
        drawn[largest] -= 1;
        given -= 1;
    }
    Ok(drawn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn taken(selection: &mut Selection, total: u64) -> Vec<u64> {
        let mut taken = Vec::new();
        for position in 0..total {
            if selection.is_done() {
                break;
            }
            if selection.takes() {
                taken.push(position);
            }
        }
        taken
    }

    fn sampling() -> impl Strategy<Value = Sampling> {
        let amount = prop_oneof![
            (0_u64..300).prop_map(Amount::Count),
            (0_u32..=100).prop_map(|percent| Amount::Percent(f64::from(percent)))
        ];
        (0..4_u32, amount).prop_map(|(kind, amount)| match kind {
            0 => Sampling::All,
            1 => Sampling::First(amount),
            2 => Sampling::End(amount),
            _ => Sampling::Random(amount),
        })
    }

    proptest! {
        #[test]
        fn one_by_one_is_the_list_of_the_mixture(sampling in sampling(), total in 0_u64..200, seed: u64) {
            let known = Selection::needs_total(sampling).then_some(total);
            let mut selection = Selection::new(sampling, known, seed, 3);
            let expected = sampling.choose(total, seed, 3);
            if let Some(num_taken) = selection.num_taken {
                prop_assert_eq!(num_taken, expected.len() as u64);
            }
            prop_assert_eq!(taken(&mut selection, total), expected);
        }

        #[test]
        fn parts_in_order_are_the_whole(sampling in sampling(), total in 0_u64..200, num_parts in 1_u32..9) {
            let mut joined = Vec::new();
            for index in 0..num_parts {
                let mut selection = Selection::new(sampling, Some(total), 1, 0);
                selection.part(ProfilePart { index, num_parts });
                let num_taken = selection.num_taken;
                let part = taken(&mut selection, total);
                prop_assert_eq!(num_taken, Some(part.len() as u64));
                joined.extend(part);
            }
            prop_assert_eq!(joined, sampling.choose(total, 1, 0));
        }

        #[test]
        fn a_sample_is_shared_out(populations in prop::collection::vec(0_u64..2000, 1..8), wanted in 1_u64..3000) {
            let total: u64 = populations.iter().sum();
            let num_filled = populations.iter().filter(|&&n| n > 0).count() as u64;
            let Ok(drawn) = allocate(&populations, wanted) else {
                prop_assert!(wanted < num_filled);
                return Ok(());
            };
            prop_assert_eq!(drawn.iter().sum::<u64>(), wanted.min(total));
            for (&drawn, &population) in drawn.iter().zip(&populations) {
                prop_assert!(drawn <= population && (drawn > 0) == (population > 0));
            }
        }
    }

    #[test]
    fn remainders_decide_and_small_sources_keep_one() {
        // Shares of 10 in 100: 5.5, 3.3, 1.2: the first has the largest remainder.
        assert_eq!(allocate(&[55, 33, 12], 10), Ok(vec![6, 3, 1]));
        // Shares 9.99 and 0.01: the small one keeps 1.
        assert_eq!(allocate(&[999, 1], 10), Ok(vec![9, 1]));
        assert_eq!(allocate(&[5, 0, 5], 100), Ok(vec![5, 0, 5]));
        assert_eq!(allocate(&[5, 5, 5], 2), Err(3));
    }

    #[test]
    fn a_sample_is_of_its_size_and_differs_by_seed() {
        let drawn = |seed| {
            let mut selection = Selection::new(Sampling::First(Amount::Count(50)), Some(80), seed, 0);
            selection.sample(20, seed, 0);
            assert_eq!(selection.stratum, Some(Stratum { population: 50, drawn: 20 }));
            taken(&mut selection, 80)
        };
        assert_eq!(drawn(1).len(), 20);
        assert!(drawn(1).iter().all(|&position| position < 50));
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
    }
}
