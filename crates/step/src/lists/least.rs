//! The least: below which makespan no action lists come, whatever they hold and in whatever order.
//!
//! ```text
//! makespan >= head + work + what comes after it          for each rank
//! head       when its first forward may start: after the forwards of that microbatch on the way to it
//! after      the longest tail of its component; or the backwards of its last microbatch on the way back, and the tail there
//! ```
//!
//! Which microbatch comes first and which one last is up to the lists. So both are those that take least.

use crate::lists::greedy::Work;

/// The least of each rank.
#[derive(Debug, Clone)]
pub(crate) struct Least {
    /// The makespan of a step in which a rank is never idle once it may begin, by rank: when it may begin, its work, and what comes
    /// after it.
    pub(crate) never_idle_ns: Vec<u64>,
    /// No lists have a shorter makespan.
    pub(crate) makespan_ns: u64,
}

impl Least {
    /// `ready_ns` says when each rank may begin.
    ///
    /// *Complexity*: O(rows x microbatches + messages).
    pub(crate) fn new(work: &Work, ready_ns: &[u64]) -> Self {
        let (step, m) = (work.step, work.num_microbatches());
        let mut tail_ns = [0; 2];
        for (of, &ns) in work.ranks.iter().zip(&step.tail_ns) {
            tail_ns[of.component] = ns.max(tail_ns[of.component]);
        }
        let sent_ns = |row: usize, j: usize| if step.forward_ns[row][j] > 0 { step.transfer_ns } else { 0 };
        let none = || vec![vec![0; m]; work.rows.len()];
        let (mut start_ns, mut after_ns) = (none(), none());
        let mut of_rank: Vec<OfRank> = ready_ns.iter().map(|_| OfRank::default()).collect();
        // Along the forwards: what a row waits for has been looked at.
        let mut rows: Vec<usize> = (0..work.rows.len()).collect();
        rows.sort_by_key(|&row| work.rows[row].stage);
        for row in rows {
            let rank = work.rows[row].rank as usize;
            for j in 0..m {
                let (mut start, mut after) = (ready_ns[rank], tail_ns[work.ranks[rank].component]);
                work.before(row, j).for_each(|before| {
                    let there_ns = start_ns[before][j] + step.forward_ns[before][j] + sent_ns(row, j);
                    start = there_ns.max(start);
                    // The last action of a rank may be a W, whose I came before.
                    if !work.is_split {
                        let back_ns = sent_ns(before, j) + step.backward_ns[before][j];
                        after = (back_ns + after_ns[before][j]).max(after);
                    }
                });
                let backward_ns = if work.is_split {
                    step.input_ns[row][j] + step.weight_ns[row][j]
                } else {
                    step.backward_ns[row][j]
                };
                of_rank[rank].add(start, step.forward_ns[row][j] + backward_ns, after);
                (start_ns[row][j], after_ns[row][j]) = (start, after);
            }
        }
        let mut least = Self { never_idle_ns: Vec::with_capacity(of_rank.len()), makespan_ns: 0 };
        for ((of, &ready_ns), found) in work.ranks.iter().zip(ready_ns).zip(of_rank) {
            let head_ns = found.head_ns.unwrap_or(ready_ns);
            let after_ns = found.after_ns.unwrap_or(tail_ns[of.component]);
            least.never_idle_ns.push(ready_ns + found.busy_ns + after_ns);
            least.makespan_ns = least.makespan_ns.max(head_ns + found.busy_ns + after_ns);
        }
        least
    }
}

/// What is known of a rank, in nanoseconds; `None` without a microbatch.
#[derive(Default)]
#[expect(clippy::struct_field_names, reason = "a unit stands last in a name")]
struct OfRank {
    head_ns: Option<u64>,
    busy_ns: u64,
    after_ns: Option<u64>,
}

impl OfRank {
    fn add(&mut self, head_ns: u64, busy_ns: u64, after_ns: u64) {
        let least = |of: Option<u64>, ns: u64| Some(of.map_or(ns, |of| of.min(ns)));
        self.head_ns = least(self.head_ns, head_ns);
        self.after_ns = least(self.after_ns, after_ns);
        self.busy_ns += busy_ns;
    }
}
