//! Sharing out: the encoder's work of each microbatch over all colocated ranks, where they meet in each component.

use crate::colocated::effort::Effort;
use crate::colocated::placing::mean;
use crate::costs::loads;
use crate::error::StepError;
use crate::scheduler::{StepScheduler, Stop};
use dflop_schedule::Costs;
use dflop_types::{SampleIndex, Schedule};

/// Samples times buckets up to which exchanges are made after a stop: 16,384 samples on 4,096 ranks. Beyond, greedy alone takes
/// seconds where memory is short.
const FEW_MAX: usize = 1 << 26;

impl StepScheduler {
    /// Balances the LLM loads alone, and shares the encoder's work of each microbatch out over all ranks. A rank may then
    /// encode samples that another rank reads, so features and their gradients are exchanged. `None` if it does not fit.
    ///
    /// One column of loads is even after few exchanges. So they are made even if `halt` has struck: this is most of what the
    /// whole search gains, in a tenth of its time, and first answers can be compared.
    pub(super) fn shared_out(
        &self,
        step: u64,
        batch: &[SampleIndex],
        count: u32,
        halt: Stop,
    ) -> Result<Option<Schedule>, StepError> {
        let costs = self.costs_in(batch, count)?;
        if self.settings.layout.llm.dp == 1 || costs.encoder_ns.iter().all(|&ns| ns == 0) {
            return Ok(None);
        }
        let is_small = batch.len() * (count * self.settings.layout.llm.dp) as usize <= FEW_MAX;
        let effort = if is_small && halt() { Effort::Few } else { Effort::Until(halt) };
        let of_llm = Costs { encoder_ns: vec![0; batch.len()], ..costs.costs.clone() };
        for fractions in [
            None,
            self.reading_fractions(batch, costs.typical, count, 0),
            self.reading_fractions(batch, costs.typical, count, 15),
            self.reading_fractions(batch, costs.typical, count, 30),
        ] {
            let Ok(assignment) = self.assigned(step, batch, &of_llm, count, fractions, effort) else {
                continue;
            };
            let mut placement =
                self.place(batch, &assignment.bucket, |column| self.share_quickly(&costs, column));
            for (llm, encoder) in placement.llm.iter().zip(&mut placement.encoder) {
                self.at_home(llm, encoder);
            }
            let mut schedule = self.as_schedule(step, batch, placement);
            if self.check_limits(&schedule).is_err() {
                continue;
            }
            let ranks = self.settings.layout.llm.dp;
            let (encoder_ns, llm_ns) = loads(&costs.costs, &assignment.bucket, count * ranks);
            let encoded: Vec<u64> = encoder_ns
                .chunks(ranks as usize)
                .flat_map(|column| std::iter::repeat_n(mean(column, ranks), column.len()))
                .collect();
            schedule.max_load_ns = self.meets().wait_ns(&encoded, &llm_ns, count);
            schedule.lower_bound_ns =
                mean(&encoded, ranks).saturating_add(mean(&llm_ns, ranks)).min(schedule.max_load_ns);
            self.time(&mut schedule)?;
            schedule.was_stopped = assignment.was_stopped;
            return Ok(Some(schedule));
        }
        Ok(None)
    }
}
