//! The search for lists: passes under several rules, orders of microbatches and rounds, then with microbatches moved.

use crate::lists::greedy::{Listed, Pass, Rule, Work};
use crate::lists::least::Least;
use crate::lists::turns::Turns;
use dflop_types::Layout;

/// Rules in the order in which they are tried.
///
/// They were chosen out of 72 combinations, with 4 to 16 stages and 8 to 64 microbatches (`examples/ratios.rs`): one of
/// these always gave the best list, or one within 0.1 % of it. Mostly it was the first rule.
fn rules(is_split: bool) -> Vec<Rule> {
    let rule = |is_forward_first, makes_room, wait_permille, delay_permille| Rule {
        is_forward_first,
        makes_room,
        wait_permille,
        delay_permille,
    };
    if is_split {
        vec![
            rule(true, false, 0, 1000),
            rule(true, true, 0, 1000),
            rule(true, false, 0, 300),
            rule(false, false, 0, 300),
            rule(true, true, 0, 0),
            rule(true, true, 300, 0),
        ]
    } else {
        vec![rule(true, false, 0, 0), rule(false, false, 0, 0), rule(true, false, 300, 0)]
    }
}

/// The best that a search has found.
struct Found {
    makespan_ns: u64,
    rule: Rule,
    order: Vec<u32>,
    num_rounds: u32,
    lists: Vec<Listed>,
}

/// Makes lists for one order after the other, and keeps the best.
struct Search<'a> {
    work: &'a Work<'a>,
    pass: Pass,
    /// No lists have a shorter makespan.
    makespan_min_ns: u64,
    /// Turns of the encoder's ranks and of the LLM backbone's.
    turns: [Turns; 2],
    /// Microbatches that have a round of their own ([`Work::alone`]).
    alone: Vec<bool>,
    best: Option<Found>,
}

impl Search<'_> {
    /// Whether no lists are shorter than the best found.
    fn is_least(&self) -> bool {
        self.best.as_ref().is_some_and(|best| best.makespan_ns <= self.makespan_min_ns)
    }

    /// The makespan under a rule, with the microbatches in `order` and ranks with chunks in so many rounds; `u64::MAX` if it is
    /// longer than the best. `None` if a rank has too little room for that.
    fn attempt(&mut self, rule: Rule, order: &[u32], num_rounds: u32) -> Option<u64> {
        let chunks = self.work.step.layout.llm_interleave;
        let [encoder, llm] = &mut self.turns;
        llm.set(order, chunks, num_rounds, &self.alone);
        encoder.set_before(llm);
        // With one chunk each microbatch alone is the least room, and that has been checked.
        if chunks > 1 && !self.work.has_room(&self.turns) {
            return None;
        }
        let best_ns = self.best.as_ref().map_or(u64::MAX, |best| best.makespan_ns);
        let Some(makespan_ns) = self.pass.run(self.work, &self.turns, rule, best_ns) else {
            return Some(u64::MAX);
        };
        if self.best.is_none() || makespan_ns < best_ns {
            let lists = self.pass.lists.clone();
            self.best = Some(Found { makespan_ns, rule, order: order.to_vec(), num_rounds, lists });
        }
        Some(makespan_ns)
    }
}

/// The best lists that were found: every rule is tried on some orders, then the best rule on orders with microbatches
/// moved.
pub(crate) fn search(work: &Work, effort: usize) -> Vec<Listed> {
    let m = work.num_microbatches();
    let of_pass = (work.rows.len() * m * if work.is_split { 3 } else { 2 }).max(1);
    let num_passes = (effort / of_pass).max(1);
    let Least { never_idle_ns, makespan_ns: makespan_min_ns } = Least::new(work, &work.ready_ns());
    let pass = Pass::new(work, never_idle_ns);
    let mut search =
        Search { work, pass, makespan_min_ns, turns: Default::default(), alone: work.alone(), best: None };
    let (rules, orders, rounds) = (rules(work.is_split), orders(work), rounds(&work.step.layout, m as u32));
    let mut starts = Vec::with_capacity(rules.len() * orders.len() * rounds.len());
    if rounds.len() == 1 {
        starts.extend(orders.iter().flat_map(|order| rules.iter().map(move |&rule| (rule, order, 1))));
    } else {
        // With chunks the rounds matter more than the rule, so all rounds come first.
        for &rule in &rules {
            starts.extend(
                orders
                    .iter()
                    .flat_map(|order| rounds.iter().map(move |&num_rounds| (rule, order, num_rounds))),
            );
        }
    }
    let mut num_left = num_passes;
    for (rule, order, num_rounds) in starts {
        // The last rounds have room wherever each microbatch alone has. So there is a list in any case.
        if (num_left > 0 || search.best.is_none()) && !search.is_least() {
            num_left -= usize::from(search.attempt(rule, order, num_rounds).is_some() && num_left > 0);
        }
    }
    if let Some((rule, num_rounds, mut order, mut standing_ns)) = search
        .best
        .as_ref()
        .filter(|_| m > 1)
        .map(|best| (best.rule, best.num_rounds, best.order.clone(), best.makespan_ns))
    {
        let mut random = SplitMix64(0);
        let mut tried = Vec::with_capacity(m);
        for _ in 0..num_left {
            if search.is_least() {
                break;
            }
            let (a, b) = (random.below(m), random.below(m));
            tried.clone_from(&order);
            if random.below(2) == 0 {
                tried.swap(a, b);
            } else {
                let moved = tried.remove(a);
                tried.insert(b, moved);
            }
            // An equally good order is taken too: the search can so leave a plateau.
            if let Some(makespan_ns) =
                search.attempt(rule, &tried, num_rounds).filter(|&ns| ns <= standing_ns)
            {
                standing_ns = makespan_ns;
                std::mem::swap(&mut order, &mut tried);
            }
        }
    }
    search.best.map(|best| best.lists).unwrap_or_default()
}

/// Numbers of rounds that are tried. One round does for ranks with one chunk. With chunks: that of interleaved 1F1B, whose
/// rounds have about as many microbatches as there are pipeline ranks; fewer and longer rounds; then more and shorter ones,
/// down to a round for each microbatch, which takes the least memory.
fn rounds(layout: &Layout, num_microbatches: u32) -> Vec<u32> {
    let m = num_microbatches.max(1);
    if !layout.is_interleaved() {
        return vec![1];
    }
    let usual = (m / layout.llm.pp).max(1);
    let mut rounds = vec![usual, usual.div_ceil(2), 1, (2 * usual).min(m), m];
    let mut seen = Vec::new();
    rounds.retain(|count| {
        !seen.contains(count) && {
            seen.push(*count);
            true
        }
    });
    rounds
}

/// Numbers that are the same on every machine: Steele, Lea and Flood, 2014, DOI 10.1145/2660193.2660195.
struct SplitMix64(u64);

impl SplitMix64 {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}

/// Orders of the microbatches with which the search begins: the given one, and orders with short microbatches at both ends,
/// where the pipeline fills and drains.
fn orders(work: &Work) -> Vec<Vec<u32>> {
    let given: Vec<u32> = (0..work.step.num_microbatches).collect();
    let load = |j: &u32| -> u128 {
        let rows = work.step.forward_ns.iter().chain(&work.step.backward_ns);
        rows.map(|row| u128::from(row[*j as usize])).sum()
    };
    let mut ascending = given.clone();
    ascending.sort_by_cached_key(load);
    let (mut front, mut back) = (Vec::new(), Vec::new());
    for (at, &j) in ascending.iter().enumerate() {
        if at % 2 == 0 { front.push(j) } else { back.push(j) }
    }
    front.extend(back.into_iter().rev());
    vec![given, front]
}
