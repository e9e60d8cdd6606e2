//! Megatron-LM as people run it: pipelines of one shape over all ranks, the encoder before the first stage.
//!
//! ```text
//! ways with equally many microbatches of equal layers    packed once for all of them
//! each way and cut    its least work, then the work of its busiest rank under these microbatches: out if above the best so far
//!                     its memory, then its steps batch by batch: out as soon as steps and bounds together are above the best
//! ```
//!
//! What is out is certain to be slower, so the answer is that of judging all of them.

use crate::contender::Known;
use crate::fastest::{Field, mean_ns};
use crate::input::SearchInput;
use crate::leaders::{Leaders, in_turn};
use crate::models::Models;
use crate::packed::{Packed, by_arrival, by_time, costs_ns};
use crate::pipelines::{Pipelines, Run};
use crate::rival::{Rival, none, words};
use crate::space::{divisors, microbatch_counts};
use dflop_cost::{CostModel, RankMicrobatch};
use dflop_types::number::counted;
use dflop_types::{RankOrder, Recomputation, SampleIndex};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// The numbers of chunks on a pipeline rank that are tried.
const CHUNKS: [u32; 4] = [1, 2, 3, 4];

/// Microbatch counts to try. Our own plans try the same ones, but for those that make whole rounds of `pp` microbatches.
fn round_counts(global_batch_size: u32, pp: u32, dp: u32) -> Vec<u32> {
    let mut counts = microbatch_counts(global_batch_size, dp);
    let most = global_batch_size / dp;
    counts.extend((0..32).map_while(|power| pp.checked_mul(1 << power)).take_while(|&m| m <= most));
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// All ways to run the ranks, with the even cut and without recomputation.
fn ways(input: &SearchInput<'_>, models: &Models) -> Vec<Pipelines> {
    let (ranks, num_layers) = (input.cluster.num_ranks, models.plain().num_llm_layers());
    let groups = models.degrees().iter().filter(|&&[encoder, tp]| {
        let is_cut = models.degrees().contains(&[tp, tp]);
        ranks.is_multiple_of(tp) && encoder == if is_cut { tp } else { 1 }
    });
    groups
        .flat_map(|&tp| divisors(ranks / tp[1]).into_iter().map(move |pp| (tp, pp)))
        .filter(|&(_, pp)| pp <= num_layers)
        .flat_map(|(tp, pp)| {
            let dp = ranks / tp[1] / pp;
            let counts = input
                .num_microbatches
                .map_or_else(|| round_counts(input.global_batch_size, pp, dp), |count| vec![count]);
            let recompute = Recomputation::NONE;
            counts.into_iter().flat_map(move |num_microbatches| {
                let (rank_order, cut) = (RankOrder::TpDpPp, None);
                CHUNKS.map(|chunks| Pipelines {
                    tp,
                    pp,
                    chunks,
                    dp,
                    num_microbatches,
                    recompute,
                    rank_order,
                    cut,
                })
            })
        })
        .filter(|way| way.has_rounds(num_layers))
        .collect()
}

/// Ways with the same microbatches, each with its place among all ways.
type Group = Vec<(usize, Pipelines)>;

/// The time of each sample of a batch, by tensor degrees, mode of recomputation and batch.
type Costs = BTreeMap<([u32; 2], Recomputation, usize), Arc<[u64]>>;

/// The fastest pipelines whose encoder runs on the rank of the first stage, before it. Optimizer states are sharded over
/// the replicas (ZeRO-1; Megatron calls it the distributed optimizer).
pub(crate) fn megatron(field: &Field<'_>, name: &'static str, is_balanced: bool) -> Rival {
    let (input, models) = (field.input, field.models);
    let batches: Vec<&[SampleIndex]> = field.batches.all().map(|(_, batch)| batch).collect();
    let race = Race {
        field,
        batches,
        num_timed: field.batches.sampled.len(),
        is_balanced,
        costs_ns: Mutex::default(),
        leaders: Leaders::new(1, field.prunes),
        is_cut: AtomicBool::new(false),
    };
    // Ways of one group have the same microbatches.
    let mut groups: BTreeMap<([u32; 2], u32), Group> = BTreeMap::new();
    for (at, way) in ways(input, models).into_iter().enumerate() {
        groups.entry((way.tp, way.num_buckets())).or_default().push((at, way));
    }
    let mut groups: Vec<Group> = groups.into_values().collect();
    // Short ramps first: the sooner a good one is known, the fewer others are timed.
    let ramp = |ways: &Group| {
        let of = |(_, way): &(usize, Pipelines)| 1_000 * (way.pp - 1) / (way.chunks * way.num_microbatches);
        ways.iter().map(of).min()
    };
    groups.sort_by_key(ramp);
    let found = in_turn(&groups, |ways| race.group(ways));
    let Some(best) = found.into_iter().flatten().min_by_key(|one| (one.step_ns, one.place)) else {
        return none(name);
    };
    Rival {
        layout: words(&in_words(&best.way), best.way.recompute),
        num_microbatches: best.way.num_microbatches,
        step_ns_mean: Some(best.step_ns),
        bubble_ratio: Some(best.idle_ratio),
        is_cut: race.is_cut.into_inner(),
        ..none(name)
    }
}

/// A way in its own words, recomputation apart.
fn in_words(way: &Pipelines) -> String {
    let chunks = if way.chunks > 1 { format!(" interleave {}", way.chunks) } else { String::new() };
    let cut = way.cut.map_or_else(String::new, |cut| {
        format!(", first rank {}, last {}", counted(cut.first.into(), "layer"), cut.last)
    });
    // Its own order of ranks is the other one.
    let is_own = way.rank_order == RankOrder::TpDpPp;
    let order = if is_own { String::new() } else { format!(", order {}", way.rank_order) };
    format!("tp {} pp {} dp {}{chunks}{cut}, zero 1{order}", way.tp[1], way.pp, way.dp)
}

/// A way that fits, with its place among all: way, mode of recomputation, cut.
struct Found {
    place: [usize; 3],
    way: Pipelines,
    step_ns: u64,
    idle_ratio: f64,
}

/// What is known of a mode of recomputation of a way and cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Fits,
    Lacks,
    /// It is too slow, so nobody looked.
    Unknown,
}

/// A way with one of its cuts, and its modes of recomputation so far.
struct Cut {
    place: [usize; 2],
    way: Pipelines,
    modes: Vec<(Recomputation, Memory)>,
}

/// The search of one rival.
struct Race<'a> {
    field: &'a Field<'a>,
    /// The first `num_timed` of them give the time; all must fit.
    batches: Vec<&'a [SampleIndex]>,
    num_timed: usize,
    is_balanced: bool,
    costs_ns: Mutex<Costs>,
    leaders: Leaders,
    is_cut: AtomicBool,
}

/// The microbatches of a group in arrival order, batch by batch as they are asked for: the same in every mode of recomputation.
type Arrival = Vec<Option<Arc<[RankMicrobatch]>>>;

/// The microbatches of a group in one mode of recomputation, batch by batch as they are asked for.
struct Packs<'a> {
    race: &'a Race<'a>,
    model: &'a CostModel,
    way: Pipelines,
    by_batch: Vec<Option<Packed>>,
}

impl<'a> Packs<'a> {
    /// Of a way with its mode, and all ways of its group.
    fn new(race: &'a Race<'a>, model: &'a CostModel, way: Pipelines) -> Self {
        Self { race, model, way, by_batch: race.batches.iter().map(|_| None).collect() }
    }

    /// `None`: some microbatch has too many tokens.
    fn of(&mut self, at: usize, arrival: &mut Arrival) -> Option<&mut Packed> {
        let (input, batch) = (self.race.field.input, self.race.batches[at]);
        let packed = self.by_batch[at].get_or_insert_with(|| {
            let num_buckets = self.way.num_buckets();
            Packed::new(if self.race.is_balanced {
                by_time(input, batch, &self.race.costs_ns(self.model, &self.way, at), num_buckets)
            } else {
                Arc::clone(arrival[at].get_or_insert_with(|| by_arrival(input, batch, num_buckets)))
            })
        });
        Some(packed).filter(|packed| packed.keeps_cap(input))
    }
}

impl Race<'_> {
    /// The ways of a group that fit and may be the fastest.
    fn group(&self, ways: &[(usize, Pipelines)]) -> Vec<Found> {
        let mut found = Vec::new();
        let Some(&(_, first)) = ways.first() else { return found };
        let (input, models) = (self.field.input, self.field.models);
        let mut arrival: Arrival = vec![None; self.batches.len()];
        let Some(mut cuts) = self.cuts(ways, &mut arrival) else { return found };
        for (mode, &recompute) in models.modes().iter().enumerate() {
            let Some(model) = models.cut(first.tp, recompute) else { continue };
            let mut packs = Packs::new(self, model, Pipelines { recompute, ..first });
            let mut runs: Vec<(u64, usize, Run<'_>, Vec<u64>)> = Vec::new();
            for (at, cut) in cuts.iter().enumerate() {
                if self.is_left_out(cut, recompute) {
                    continue;
                }
                let run = Run::new(input, model, Pipelines { recompute, ..cut.way });
                let least_ns = self.bounds_ns(&run);
                runs.push((mean_ns(&least_ns), at, run, least_ns));
            }
            // The most promising first.
            runs.sort_by_key(|&(ns, at, ..)| (ns, at));
            for (_, at, run, mut least_ns) in runs {
                if self.leaders.has_some() && (input.halt)() {
                    self.is_cut.store(true, Relaxed);
                    return found;
                }
                let memory = self.judge(&run, &mut least_ns, &mut packs, &mut arrival, &mut cuts[at]);
                if let Some((step_ns, idle_ratio)) = memory.1 {
                    let [way, cut] = cuts[at].place;
                    found.push(Found { place: [way, mode, cut], way: run.way, step_ns, idle_ratio });
                }
                cuts[at].modes.push((recompute, memory.0));
            }
        }
        found
    }

    /// All ways of a group with all their cuts; `None` where layers cut so are not measured.
    fn cuts(&self, ways: &[(usize, Pipelines)], arrival: &mut Arrival) -> Option<Vec<Cut>> {
        let (_, first) = ways.first()?;
        let (input, batch) = (self.field.input, *self.batches.first()?);
        let model = self.field.models.cut(first.tp, first.recompute)?;
        let microbatches = by_arrival(input, batch, first.num_buckets());
        let mut packed = Packed::new(Arc::clone(&microbatches));
        arrival[0] = Some(microbatches);
        let llm_tokens = batch.iter().map(|sample| u64::from(input.shapes[sample.index()].llm_tokens)).sum();
        let of_way = |&(at, way): &(usize, Pipelines)| {
            let cuts = way.ordered(input, model, llm_tokens).cuts(model, &mut packed);
            let of = |(cut, way)| Cut { place: [at, cut], way, modes: Vec::new() };
            cuts.into_iter().enumerate().map(of).collect::<Vec<Cut>>()
        };
        Some(ways.iter().flat_map(of_way).collect())
    }

    /// More recomputation never shortens a step of the same microbatches and stages. So a mode is left out if one that recomputes
    /// less fits, or is too slow. Balance looks at times, which recomputation changes: there only unequal modes are left out for this,
    /// and only if the other one fits.
    fn is_left_out(&self, cut: &Cut, recompute: Recomputation) -> bool {
        let less = |&&(mode, _): &&(Recomputation, Memory)| mode.is_at_most(recompute);
        let mut less = cut.modes.iter().filter(less).map(|&(_, memory)| memory);
        if self.is_balanced {
            recompute.of_both().is_none() && less.any(|memory| memory == Memory::Fits)
        } else {
            less.any(|memory| memory != Memory::Lacks)
        }
    }

    /// The time of each sample of a batch, in nanoseconds.
    fn costs_ns(&self, model: &CostModel, way: &Pipelines, at: usize) -> Arc<[u64]> {
        let key = (way.tp, way.recompute, at);
        let known = || self.costs_ns.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known().get(&key) {
            return Arc::clone(found);
        }
        let found: Arc<[u64]> = costs_ns(self.field.input, model, self.batches[at]).into();
        known().insert(key, Arc::clone(&found));
        found
    }

    /// Whether a mode that recomputes less fits, of those of which nobody looked so far.
    fn has_less(&self, run: &Run<'_>, arrival: &mut Arrival, cut: &mut Cut) -> bool {
        for (mode, memory) in &mut cut.modes {
            let is_open = *memory == Memory::Unknown && mode.is_at_most(run.way.recompute);
            let Some(model) = self.field.models.cut(run.way.tp, *mode).filter(|_| is_open) else { continue };
            let less = Run::new(run.input, model, Pipelines { recompute: *mode, ..run.way });
            *memory = self.memory(&less, &mut Packs::new(self, model, less.way), arrival);
            if *memory == Memory::Fits {
                return true;
            }
        }
        false
    }

    /// Whether a way fits on all batches.
    fn memory(&self, run: &Run<'_>, packs: &mut Packs<'_>, arrival: &mut Arrival) -> Memory {
        let fits = |at| packs.of(at, arrival).and_then(|packed| run.fits(packed)) == Some(true);
        if (0..self.batches.len()).all(fits) { Memory::Fits } else { Memory::Lacks }
    }

    /// For each timed batch a lower bound of the step, in nanoseconds.
    fn bounds_ns(&self, run: &Run<'_>) -> Vec<u64> {
        let known: &Known<'_> = self.field.known;
        let works = known.works_in(run.way.tp, run.way.recompute).unwrap_or(&[]);
        let of =
            |at: usize| works.get(at).map_or(0, |work| run.way.work_min_ns(work, &run.stages, run.tail_ns));
        (0..self.num_timed).map(of).collect()
    }

    /// Whether a way fits, as far as that was asked, and its mean step and idle ratio if it fits and may be the fastest.
    fn judge(
        &self,
        run: &Run<'_>,
        least_ns: &mut [u64],
        packs: &mut Packs<'_>,
        arrival: &mut Arrival,
        cut: &mut Cut,
    ) -> (Memory, Option<(u64, f64)>) {
        let too_slow = |least_ns: &[u64]| mean_ns(least_ns) > self.leaders.limit_ns();
        for at in 0..least_ns.len() {
            if too_slow(least_ns) {
                return (Memory::Unknown, None);
            }
            let Some(packed) = packs.of(at, arrival) else { return (Memory::Lacks, None) };
            least_ns[at] = run.least_ns(packed).max(least_ns[at]);
        }
        if too_slow(least_ns) {
            return (Memory::Unknown, None);
        }
        if self.is_balanced && run.way.recompute.of_both().is_none() && self.has_less(run, arrival, cut) {
            return (Memory::Unknown, None);
        }
        if self.memory(run, packs, arrival) == Memory::Lacks {
            return (Memory::Lacks, None);
        }
        let mut idle = 0.0;
        for at in 0..least_ns.len() {
            let Some(packed) = packs.of(at, arrival) else { return (Memory::Lacks, None) };
            let Some((step_ns, idle_ns)) = run.step_ns(packed) else { return (Memory::Lacks, None) };
            least_ns[at] = step_ns;
            idle += idle_ns as f64 / step_ns.max(1) as f64;
            if too_slow(least_ns) {
                return (Memory::Fits, None);
            }
        }
        let step_ns = mean_ns(least_ns);
        self.leaders.add(step_ns);
        (Memory::Fits, Some((step_ns, idle / least_ns.len().max(1) as f64)))
    }
}
