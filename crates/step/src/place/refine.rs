//! Refinement: single samples are moved to other buckets as long as that makes the simulated step shorter.
//!
//! Balanced buckets do not give the shortest step. A small first microbatch fills the pipeline sooner, and a small last one
//! drains it sooner. Long encoder work of a microbatch can run beside long LLM work of the microbatch before it. Only the
//! simulator sees all that.

use crate::batches::below;
use crate::costs::BatchCosts;
use crate::error::StepError;
use crate::judge::memory::FRACTION_ONE;
use crate::judge::predict;
use crate::judge::work::Column;
use crate::place::search::{Effort, Search};
use dflop_sim::{MicrobatchDurations, Simulator};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// The most actions that all trials together time for a step of one second: some 10 ms on one core. A trial counts its own
/// actions, and [`TRIAL_ACTIONS`] more for what it costs besides. With large microbatches it counts [`SAMPLE_ACTIONS`] for
/// each sample of a microbatch instead, if that is more.
const ACTIONS: u64 = 2_000_000;
const TRIAL_ACTIONS: u64 = 1_000;
const SAMPLE_ACTIONS: u64 = 15;

/// Trials between two calls that ask whether to stop.
const TRIALS_UNASKED: u64 = 32;

/// After this many trials for each sample without a gain, the search goes back to the best buckets and leaves them by a few
/// random moves.
const PATIENCE: u64 = 3;

/// How good a choice of buckets is; less is better. First the simulated makespan in nanoseconds, then the sum of the squared
/// loads of all buckets.
///
/// The second number decides between steps of equal length. Without it the search would leave buckets uneven if a longer
/// action elsewhere hides that, and then a little noise in training would make the step longer.
type Judgement = (u64, u128);

/// The state of the search: the bucket of each sample, the times of each microbatch with these samples, and the simulator of
/// the step.
struct Buckets<'a> {
    search: &'a Search<'a>,
    /// Bucket of each sample, microbatch * replicas + replica.
    bucket: Vec<u32>,
    /// Positions of the samples of each microbatch, in no order.
    members: Vec<Vec<usize>>,
    columns: Vec<Column>,
    /// Load of each bucket on the encoder and on the LLM backbone, in nanoseconds.
    load_ns: Vec<[u64; 2]>,
    /// What the samples of each bucket take of its memory, in parts of `FRACTION_ONE`.
    held: Vec<u64>,
    /// LLM tokens of each bucket; all 0 without a cap on them.
    tokens: Vec<u64>,
    squares: u128,
    simulator: Simulator,
}

/// What is needed to take a move back: the samples with the buckets they came from, and the microbatches as they were.
struct Undo {
    moves: Vec<(usize, u32)>,
    columns: Vec<(usize, Column)>,
}

impl<'a> Buckets<'a> {
    fn new(search: &'a Search<'a>, bucket: Vec<u32>) -> Result<Self, StepError> {
        let Search { scheduler, costs, fractions, .. } = *search;
        let settings = &scheduler.settings;
        let num_buckets = settings.num_buckets() as usize;
        let mut members = vec![Vec::new(); settings.num_microbatches as usize];
        let mut load_ns = vec![[0, 0]; num_buckets];
        let (mut held, mut tokens) = (vec![0; num_buckets], vec![0; num_buckets]);
        for (position, &at) in bucket.iter().enumerate() {
            members[(at / settings.layout.llm.dp) as usize].push(position);
            let load: &mut [u64; 2] = &mut load_ns[at as usize];
            *load = add(*load, cost(costs, position));
            held[at as usize] += fractions.map_or(0, |fractions| fractions[position]);
            tokens[at as usize] += tokens_of(costs, position);
        }
        let squares = load_ns.iter().map(|&load| square(load)).sum();
        let columns: Vec<Column> = members.iter().map(|members| search.column_of(&bucket, members)).collect();
        let simulator = Simulator::new(&predict::assemble(scheduler, &columns, search.order).input)?;
        Ok(Self { search, bucket, members, columns, load_ns, held, tokens, squares, simulator })
    }

    fn judgement(&mut self) -> Judgement {
        (self.simulator.makespan_ns(), self.squares)
    }

    /// Moves samples to other buckets, and gives what is needed to take that back.
    fn put(&mut self, moves: &[(usize, u32)]) -> Undo {
        let mut undo = Undo { moves: Vec::with_capacity(moves.len()), columns: Vec::new() };
        for &(position, to) in moves {
            undo.moves.push((position, self.shift(position, to)));
        }
        let replicas = self.search.scheduler.settings.layout.llm.dp;
        let mut touched: Vec<usize> =
            moves.iter().chain(&undo.moves).map(|&(_, bucket)| (bucket / replicas) as usize).collect();
        touched.sort_unstable();
        touched.dedup();
        for at in touched {
            let column = self.search.column_of(&self.bucket, &self.members[at]);
            self.set(at, &column);
            undo.columns.push((at, std::mem::replace(&mut self.columns[at], column)));
        }
        undo
    }

    fn take_back(&mut self, undo: Undo) {
        for (position, from) in undo.moves.into_iter().rev() {
            self.shift(position, from);
        }
        for (at, column) in undo.columns {
            self.set(at, &column);
            self.columns[at] = column;
        }
    }

    /// Moves one sample to another bucket, and gives the bucket it came from.
    fn shift(&mut self, position: usize, to: u32) -> u32 {
        let from = std::mem::replace(&mut self.bucket[position], to);
        let replicas = self.search.scheduler.settings.layout.llm.dp;
        let members = &mut self.members[(from / replicas) as usize];
        if let Some(at) = members.iter().position(|&member| member == position) {
            members.swap_remove(at);
        }
        self.members[(to / replicas) as usize].push(position);
        let fraction = self.search.fractions.map_or(0, |fractions| fractions[position]);
        let tokens = tokens_of(self.search.costs, position);
        let cost = cost(self.search.costs, position);
        for (bucket, is_in) in [(from as usize, false), (to as usize, true)] {
            let load = self.load_ns[bucket];
            let after = if is_in { add(load, cost) } else { [load[0] - cost[0], load[1] - cost[1]] };
            self.squares = self.squares - square(load) + square(after);
            self.load_ns[bucket] = after;
            for (held, size) in [(&mut self.held[bucket], fraction), (&mut self.tokens[bucket], tokens)] {
                *held = if is_in { *held + size } else { *held - size };
            }
        }
        from
    }

    fn set(&mut self, at: usize, column: &Column) {
        let by_rank = |of: fn(&dflop_cost::Prediction) -> u64| column.predictions.iter().map(of).collect();
        let with = MicrobatchDurations {
            forward_ns: by_rank(|p| p.forward_ns),
            backward_ns: by_rank(|p| p.backward_ns),
            input_ns: by_rank(|p| p.input_ns),
            weight_ns: by_rank(|p| p.weight_ns),
            feeds: column.feeds.clone(),
        };
        self.simulator.set_microbatch(at, self.search.scheduler.settings.layout, &with);
    }

    /// Whether no bucket holds more than the memory it may use, or more tokens than the cap.
    fn is_within(&self) -> bool {
        let within = |held: &[u64], cap: Option<u64>| cap.is_none_or(|cap| held.iter().all(|&h| h <= cap));
        within(&self.held, self.search.fractions.map(|_| FRACTION_ONE))
            && within(&self.tokens, self.search.scheduler.bucket_tokens_max)
    }
}

fn cost(costs: &BatchCosts, position: usize) -> [u64; 2] {
    [costs.costs.encoder_ns[position], costs.costs.llm_ns[position]]
}

/// LLM tokens of a sample; 0 without a cap on them.
fn tokens_of(costs: &BatchCosts, position: usize) -> u64 {
    costs.costs.tokens.as_ref().map_or(0, |tokens| tokens[position])
}

fn add(a: [u64; 2], b: [u64; 2]) -> [u64; 2] {
    [a[0] + b[0], a[1] + b[1]]
}

fn square(load_ns: [u64; 2]) -> u128 {
    load_ns.iter().map(|&ns| u128::from(ns) * u128::from(ns)).sum()
}

impl Search<'_> {
    /// Buckets of the samples (microbatch * replicas + replica) with which the simulated step is no longer than with
    /// `bucket`.
    ///
    /// A move takes a random sample to a random bucket, or exchanges two samples. It is kept if the step is no longer, and
    /// if every bucket keeps the cap on tokens and, if there is one, the memory it may use. Moves that leave the step equally
    /// long are kept too, so that the search can walk along plateaus. After many trials without a gain it goes on from
    /// near the best buckets.
    pub(crate) fn refine(&self, bucket: Vec<u32>) -> Result<Vec<u32>, StepError> {
        let num_buckets = self.scheduler.settings.num_buckets();
        if num_buckets < 2 || self.batch.is_empty() {
            return Ok(bucket);
        }
        let mut best = bucket.clone();
        let mut buckets = Buckets::new(self, bucket)?;
        let mut current = buckets.judgement();
        let mut best_judgement = current;
        let mut random = ChaCha8Rng::seed_from_u64(self.seed());
        let (mut failures, mut moves) = (0, Vec::new());
        let of_microbatch = self.batch.len() as u64 / u64::from(self.scheduler.settings.num_microbatches);
        let num_trials = num_trials(self.effort, self.scheduler.num_actions(), of_microbatch);
        for trial in 0..num_trials {
            if trial % TRIALS_UNASKED == 0 && (self.halt)() {
                break;
            }
            let is_shaken = failures >= PATIENCE * self.batch.len() as u64;
            moves.clear();
            if is_shaken {
                let away =
                    buckets.bucket.iter().zip(&best).enumerate().filter(|(_, (now, best))| now != best);
                let back: Vec<(usize, u32)> = away.map(|(position, (_, &best))| (position, best)).collect();
                buckets.put(&back);
                for _ in 0..3 {
                    change(&buckets.bucket, num_buckets, &mut random, &mut moves);
                }
            } else {
                change(&buckets.bucket, num_buckets, &mut random, &mut moves);
            }
            let undo = buckets.put(&moves);
            let found = if buckets.is_within() { buckets.judgement() } else { (u64::MAX, u128::MAX) };
            if is_shaken || found <= current {
                failures = if is_shaken || found < current { 0 } else { failures + 1 };
                current = found;
            } else {
                failures += 1;
                buckets.take_back(undo);
            }
            if current < best_judgement {
                best_judgement = current;
                best.clone_from(&buckets.bucket);
            }
        }
        Ok(best)
    }

    /// The predictions of a microbatch with the samples at `positions`.
    fn column_of(&self, bucket: &[u32], positions: &[usize]) -> Column {
        let scheduler = self.scheduler;
        // Samples stand in the order of the batch, as they do in the final schedule: a prediction depends a little on the
        // order in which samples are packed.
        let mut positions = positions.to_vec();
        positions.sort_unstable();
        let share = |column: &[usize]| scheduler.share_quickly(self.costs, column);
        let (llm, encoder) = scheduler.place_column(self.batch, bucket, &positions, share);
        predict::column(scheduler, &llm, &encoder)
    }
}

/// Number of trials for a step with this many actions and this many samples in a microbatch.
fn num_trials(effort: Effort, num_actions: u64, of_microbatch: u64) -> u64 {
    effort.of(ACTIONS) / (TRIAL_ACTIONS.max(SAMPLE_ACTIONS * of_microbatch) + num_actions)
}

/// Draws the next move: one sample to another bucket, or an exchange of two samples of different buckets.
fn change(bucket: &[u32], num_buckets: u32, random: &mut ChaCha8Rng, moves: &mut Vec<(usize, u32)>) {
    let mut draw = |end: u64| below(random, end);
    let one = draw(bucket.len() as u64) as usize;
    let other = draw(bucket.len() as u64) as usize;
    if draw(2) == 0 || bucket[one] == bucket[other] {
        let step = 1 + draw(u64::from(num_buckets) - 1) as u32;
        moves.push((one, ((u64::from(bucket[one]) + u64::from(step)) % u64::from(num_buckets)) as u32));
    } else {
        moves.extend([(one, bucket[other]), (other, bucket[one])]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For a step of one second with 32 actions there are 2,000,000 / 1,032 trials. If a trial packs 4,096 samples, there are
    /// 2,000,000 / 61,472.
    #[test]
    fn large_microbatches_cost_trials() {
        let of = |of_microbatch| num_trials(Effort::of_step(1_000_000_000), 32, of_microbatch);
        assert_eq!([0, 1, 66, 4_096].map(of), [1_937, 1_937, 1_937, 32]);
    }

    #[test]
    fn a_change_moves_one_sample_or_exchanges_two() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let start: Vec<u32> = (0..12).map(|i| i % 4).collect();
        let mut kinds = [0; 2];
        for _ in 0..500 {
            let mut moves = Vec::new();
            change(&start, 4, &mut random, &mut moves);
            assert!(moves.iter().all(|&(position, to)| to < 4 && to != start[position]));
            kinds[moves.len() - 1] += 1;
        }
        assert!(kinds[0] > 100 && kinds[1] > 100, "{kinds:?}");
    }
}
