//! Sharing: which encoder replica encodes which parts of a microbatch's samples.
//!
//! Samples are kept whole if that gives even shares. A sample that is large compared with the even share of a replica is cut
//! into runs of parts. It is cut into as few runs as the room on the replicas allows, because each run is a message of
//! its own.

use crate::costs::BatchCosts;
use crate::error::StepError;
use crate::judge::{peaks, predict};
use crate::place::shares::{PartCosts, Shares, fullest_ns, num_parts, spread, spread_by_speed, total, whole};
use crate::place::sides::Sides;
use crate::scheduler::StepScheduler;
use dflop_cost::Prediction;
use dflop_schedule::{baseline, divide};
use dflop_sim::Simulator;
use dflop_types::{PartRange, PipelineOrder, SampleIndex, SampleShape};
use std::cmp::Reverse;

/// A way to share out the samples of a microbatch over the encoder replicas; it gets their positions in the batch.
type Way<'a> = &'a dyn Fn(&[usize]) -> Shares;

/// Samples are kept whole if the fullest replica then has at most 1 / 16 more than the even share.
const EVEN_ENOUGH: u64 = 16;

/// Shares over `replicas` of samples with these times. Whole samples are placed by LPT. If that is not even enough, samples
/// are cut, if that is more even.
pub(crate) fn spread_quickly(part_ns: &[&PartCosts], replicas: u32) -> Shares {
    let cost_ns: Vec<u64> = part_ns.iter().map(|costs| total(costs)).collect();
    let kept = whole(&baseline::single_cost_lpt(&cost_ns, replicas), replicas);
    let even_ns = cost_ns.iter().fold(0, |sum: u64, &ns| sum.saturating_add(ns)) / u64::from(replicas.max(1));
    let kept_ns = fullest_ns(part_ns, &kept);
    if kept_ns <= even_ns.saturating_add(even_ns / EVEN_ENOUGH) || part_ns.iter().all(|c| num_parts(c) < 2) {
        return kept;
    }
    let cut = spread(part_ns, replicas);
    if fullest_ns(part_ns, &cut) < kept_ns { cut } else { kept }
}

impl StepScheduler {
    /// The times of the parts of a sample on a stage of the encoder. A sample that cannot be cut is one part.
    pub(crate) fn part_costs(
        &self,
        shape: &SampleShape,
        sample_ns: u64,
        typical: dflop_cost::Typical,
        stage: dflop_cost::EncoderLayers,
    ) -> PartCosts {
        if shape.num_parts() < 2 {
            return vec![(1, sample_ns)];
        }
        let mut first = 0;
        let groups = shape.encoder_parts.iter().map(|group| {
            // The parts of a group have equal segments and features, and so equal times. If segments differ in size, the
            // mean is taken.
            let run = shape.share(PartRange { first, count: group.count });
            first += group.count;
            (group.count, self.model.sample_encoder_stage_ns(&run, typical, stage) / u64::from(group.count))
        });
        groups.collect()
    }

    /// How slow each encoder replica is, in thousandths; `None` if all are equally fast.
    fn slow_encoders(&self) -> Option<Vec<u32>> {
        let slowness = &self.adjusted.as_ref()?.slowness.as_ref()?.encoder;
        let is_uneven = slowness.iter().any(|&s| s != 1_000);
        // What is known is how slow tensor groups are: their ranks wait for each other.
        let of_group = |&s: &u32| std::iter::repeat_n(s, self.encoders_per_group() as usize);
        is_uneven.then(|| slowness.iter().flat_map(of_group).collect())
    }

    /// Shares of a microbatch, quick enough for a search: as [`spread_quickly`] has them, or by the speed of the replicas.
    pub(crate) fn share_quickly(&self, costs: &BatchCosts, column: &[usize]) -> Shares {
        let part_ns: Vec<&PartCosts> = column.iter().map(|&position| &costs.part_ns[position]).collect();
        match self.slow_encoders() {
            Some(slowness) => spread_by_speed(&part_ns, &slowness),
            None => spread_quickly(&part_ns, self.num_encoders()),
        }
    }

    /// The same shares, exchanged between replicas of one node. In each microbatch in turn, the longest share goes to the
    /// replica that has worked least in the microbatches before.
    ///
    /// This helps if the shares of a single microbatch cannot be even. For example, it has one image for two replicas: then
    /// the replicas take turns.
    fn turned(&self, mut sides: Sides) -> Sides {
        let layout = self.settings.layout;
        let (replicas, pp) = (layout.encoder.dp as usize, layout.encoder.pp as usize);
        let node_of: Vec<usize> = (0..replicas as u32).map(|replica| self.encoder_node(replica)).collect();
        let mut worked_ns = vec![0u64; replicas];
        for (llm, encoder) in sides.llm.iter().zip(&mut sides.encoder) {
            let column = predict::column(self, llm, encoder);
            let ns = |replica: usize| {
                let stages = &column.predictions[replica * pp..(replica + 1) * pp];
                let sum =
                    |prediction: &Prediction| prediction.forward_ns.saturating_add(prediction.backward_ns);
                stages.iter().map(sum).max().unwrap_or(0)
            };
            let mut longest: Vec<usize> = (0..replicas).collect();
            longest.sort_by_key(|&share| (node_of[share], Reverse(ns(share)), share));
            let mut freest: Vec<usize> = (0..replicas).collect();
            freest.sort_by_key(|&replica| (node_of[replica], worked_ns[replica], replica));
            let mut turned = vec![Vec::new(); replicas];
            for (share, replica) in longest.into_iter().zip(freest) {
                worked_ns[replica] = worked_ns[replica].saturating_add(ns(share));
                turned[replica] = std::mem::take(&mut encoder[share]);
            }
            *encoder = turned;
        }
        sides
    }

    /// The samples in the places of `bucket`, with the encoder's work shared out in the best of several ways. The best way
    /// has the shortest step under `order` within the memory budget. Each way is also tried with its shares exchanged
    /// (`turned`). Samples are cut only if that makes the step shorter.
    pub(crate) fn place_best(
        &self,
        batch: &[SampleIndex],
        costs: &BatchCosts,
        bucket: &[u32],
        order: PipelineOrder,
    ) -> Result<Sides, StepError> {
        let replicas = self.settings.layout.encoder.dp;
        let part_ns = |column: &[usize]| -> Vec<&PartCosts> {
            column.iter().map(|&position| &costs.part_ns[position]).collect()
        };
        let cost_ns = |column: &[usize]| -> Vec<u64> {
            column.iter().map(|&position| costs.encoder_ns[position]).collect()
        };
        let of_speed = |column: &[usize]| match self.slow_encoders() {
            Some(slowness) => spread_by_speed(&part_ns(column), &slowness),
            None => spread(&part_ns(column), replicas),
        };
        let ways: [Way<'_>; 4] = [
            &|column| whole(&baseline::single_cost_lpt(&cost_ns(column), replicas), replicas),
            &|column| whole(&divide(&cost_ns(column), replicas), replicas),
            &|column| self.share_quickly(costs, column),
            &of_speed,
        ];
        let mut best: Option<(bool, u64, Sides)> = None;
        let placed = ways.map(|way| self.place(batch, bucket, way));
        let turned = placed.clone().map(|sides| self.turned(sides));
        for sides in placed.into_iter().chain(turned) {
            if best.as_ref().is_some_and(|b| b.2 == sides) {
                continue;
            }
            let input = predict::predict(self, &sides.llm, &sides.encoder, order).input;
            let makespan_ns = Simulator::new(&input)?.makespan_ns();
            // A way that is no shorter than one that fits cannot be the best, so its memory is not worked out.
            if best.as_ref().is_some_and(|&(is_over, ns, _)| !is_over && ns <= makespan_ns) {
                continue;
            }
            let is_over = self.settings.memory_budget_bytes.is_some_and(|budget| {
                !peaks::are_within(self, &self.as_schedule(0, batch, sides.clone()), budget)
            });
            if best.as_ref().is_none_or(|b| (is_over, makespan_ns) < (b.0, b.1)) {
                best = Some((is_over, makespan_ns, sides));
            }
        }
        let (_, _, sides) = best.expect("the first way is better than none");
        Ok(sides)
    }
}
