//! Swaps: two microbatches change places. Only the actions that come after the first action of either are timed again.

use crate::engine::Times;
use crate::simulator::Simulator;

impl Simulator {
    /// Makespan in nanoseconds, tails included, after the `a`-th and the `b`-th microbatch of the present order have
    /// changed places.
    ///
    /// The microbatches stay swapped until [`Self::undo`]. All other methods answer for the step in its new order. Only
    /// actions that come in the topological order after the first action of either microbatch are timed again.
    ///
    /// *Complexity*: O(actions after the first of `a` and `b` + ranks + rows of durations) and one copy of the ends of all
    /// actions; allocates nothing after the first call.
    ///
    /// # Panics
    /// If `a` or `b` is no microbatch, or the simulator was made from lists.
    ///
    /// # Examples
    /// ```
    /// # use dflop_types::{ComponentLayout, Layout, PipelineOrder};
    /// # let one = ComponentLayout { tp: 1, pp: 1, dp: 1 };
    /// # let input = dflop_sim::StepInput {
    /// #     layout: Layout::disaggregated(one, one),
    /// #     order: PipelineOrder::OneFOneB,
    /// #     num_microbatches: 3,
    /// #     forward_ns: vec![vec![1, 9, 3], vec![4, 4, 4]],
    /// #     backward_ns: vec![vec![2, 2, 1], vec![4, 4, 4]],
    /// #     input_ns: Vec::new(),
    /// #     weight_ns: Vec::new(),
    /// #     feeds: vec![vec![vec![0]]; 3],
    /// #     transfer_ns: 0,
    /// #     tail_ns: vec![0, 0],
    /// #     ready_ns: Vec::new(),
    /// # };
    /// let mut simulator = dflop_sim::Simulator::new(&input)?;
    /// let before_ns = simulator.makespan_ns();
    /// let swapped_ns = simulator.swap(1, 2);
    /// if swapped_ns >= before_ns {
    ///     simulator.undo();
    /// }
    /// assert_eq!(simulator.makespan_ns(), before_ns.min(swapped_ns));
    /// # Ok::<(), dflop_sim::SimError>(())
    /// ```
    pub fn swap(&mut self, a: usize, b: usize) -> u64 {
        assert!(self.is_ordered, "microbatches swap under a pipeline order, not under lists");
        if !self.swaps.is_timed {
            self.makespan_ns();
        }
        if self.swaps.first.is_empty() {
            self.prepare();
        }
        self.exchange(a, b);
        let at = if self.swaps.first[a] < self.swaps.first[b] { a } else { b };
        let position = self.swaps.first[at];
        let num_ranks = self.graph.num_ranks();
        let swaps = &mut self.swaps;
        swaps.last = Some((a, b));
        swaps.before_it.end_ns.clone_from(&self.clock.end_ns);
        swaps.before_it.last_end_ns.clone_from(&self.clock.last_end_ns);
        let before = &swaps.before[at * num_ranks..(at + 1) * num_ranks];
        for (rank, &count) in before.iter().enumerate() {
            self.clock.last_end_ns[rank] = match count.checked_sub(1) {
                Some(last) => self.clock.end_ns[self.graph.lists.of(rank)[last as usize] as usize],
                None => self.ready_ns.get(rank).map_or(0, |&ns| ns),
            };
        }
        let times = Times {
            durations_ns: &self.durations_ns,
            feeds: &self.feeds,
            order: &self.standing,
            transfer_ns: self.transfer_ns,
        };
        self.graph.run_from(position, &times, &mut self.clock);
        self.end_ns(true)
    }

    /// Takes the last swap back, if it has not been taken back yet.
    ///
    /// *Complexity*: O(rows of durations).
    pub fn undo(&mut self) {
        let Some((a, b)) = self.swaps.last.take() else { return };
        self.exchange(a, b);
        // If another order was timed since, the clock before the swap is of no use: the next timing makes a new one.
        if self.swaps.is_timed {
            std::mem::swap(&mut self.clock, &mut self.swaps.before_it);
        }
    }

    /// The present order: for each position, the number that its microbatch has in the input.
    pub fn standing(&self) -> &[u32] {
        &self.standing
    }

    fn exchange(&mut self, a: usize, b: usize) {
        self.standing.swap(a, b);
        for row in self.durations_ns.chunks_exact_mut(self.standing.len()) {
            row.swap(a, b);
        }
    }

    fn prepare(&mut self) {
        self.swaps.first = self.graph.first_positions();
        self.swaps.before = self.graph.actions_before(&self.swaps.first);
    }
}
