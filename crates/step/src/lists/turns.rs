//! Turns: the order in which ranks come to forwards and backwards, chunk by chunk and microbatch by microbatch.
//!
//! All ranks of a component have the same turns, and first chunks come to microbatches in the order of the encoder. So
//! messages of a kind between two ranks arrive in the order in which the receiver waits for them.
//!
//! ```text
//! order 2 0 1 3, one chunk                forwards  2 0 1 3                    backwards  2 0 1 3
//! the same, two chunks (a, b), 2 rounds   forwards  a2 a0 b2 b0  a1 a3 b1 b3   backwards  b2 b0 a2 a0  b1 b3 a1 a3
//! the same, 0 alone                       forwards  a2 b2  a0 b0  a1 a3 b1 b3  backwards  b2 a2  b0 a0  b1 b3 a1 a3
//! ```

/// One forward, or one backward, of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Which of the rank's chunks: 0 where it has one stage.
    pub(crate) chunk: u32,
    pub(crate) microbatch: u32,
}

/// The turns of the ranks of one component.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turns {
    pub(crate) forwards: Vec<Turn>,
    pub(crate) backwards: Vec<Turn>,
    /// How many forwards a rank has run at least before `backwards[at]`: those up to its own, and on ranks that feed others
    /// those up to the last one that these have run by then.
    pub(crate) needs: Vec<u32>,
}

impl Turns {
    /// Sets the turns of ranks with `chunks` chunks, which take the microbatches of `order` in `num_rounds` rounds. Rounds
    /// are as even as possible, the longer ones first. With one chunk rounds make no difference.
    ///
    /// A microbatch that is `alone` (by microbatch; past its end none is) has a round of its own. Those between two such take
    /// their share of `num_rounds`, rounded up.
    pub(crate) fn set(&mut self, order: &[u32], chunks: u32, num_rounds: u32, alone: &[bool]) {
        self.forwards.clear();
        self.backwards.clear();
        self.needs.clear();
        let is_alone = |microbatch: &u32| alone.get(*microbatch as usize).is_some_and(|&is_alone| is_alone);
        for run in order.chunk_by(|before, after| !is_alone(before) && !is_alone(after)) {
            let rounds = (run.len() * num_rounds as usize).div_ceil(order.len()).clamp(1, run.len());
            let (least, longer) = (run.len() / rounds, run.len() % rounds);
            let mut first = 0;
            for round in 0..rounds {
                let after = first + least + usize::from(round < longer);
                self.add_round(&run[first..after], chunks);
                first = after;
            }
        }
    }

    /// Adds the turns of one round, chunk by chunk.
    fn add_round(&mut self, round: &[u32], chunks: u32) {
        let before = self.forwards.len();
        for chunk in 0..chunks {
            self.forwards.extend(round.iter().map(|&microbatch| Turn { chunk, microbatch }));
        }
        for chunk in (0..chunks).rev() {
            self.backwards.extend(round.iter().map(|&microbatch| Turn { chunk, microbatch }));
            let own = before + chunk as usize * round.len();
            self.needs.extend((1..=round.len()).map(|at| (own + at) as u32));
        }
    }

    /// Sets the turns of ranks with one chunk that feed the first chunks of ranks with the turns `fed`.
    pub(crate) fn set_before(&mut self, fed: &Self) {
        self.forwards.clear();
        self.forwards.extend(fed.forwards.iter().filter(|turn| turn.chunk == 0));
        self.backwards.clear();
        self.needs.clear();
        let (mut run, mut sent) = (0, 0);
        for (&backward, &needs) in fed.backwards.iter().zip(&fed.needs) {
            while run < needs as usize {
                sent += u32::from(fed.forwards[run].chunk == 0);
                run += 1;
            }
            if backward.chunk == 0 {
                self.backwards.push(backward);
                self.needs.push(sent);
            }
        }
    }

    /// The most that a rank holds at a time if it runs each backward as soon as it has run the forwards up to it, and
    /// nothing ahead. `held` says what a turn takes. With less room the rank would wait for ever.
    pub(crate) fn least_room(&self, held: impl Fn(Turn) -> u64) -> u64 {
        let (mut now, mut most, mut done) = (0_u64, 0, 0);
        for (&backward, &needs) in self.backwards.iter().zip(&self.needs) {
            while done < needs as usize {
                now = now.saturating_add(held(self.forwards[done]));
                done += 1;
            }
            most = most.max(now);
            now = now.saturating_sub(held(backward));
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(turns: &[Turn]) -> String {
        let name = |turn: &Turn| format!("{}{}", ["a", "b", "c"][turn.chunk as usize], turn.microbatch);
        turns.iter().map(name).collect::<Vec<_>>().join(" ")
    }

    /// The pictures of this file's documentation, and what a rank holds at least, worked out by hand.
    #[test]
    fn turns_of_small_steps() {
        let mut turns = Turns::default();
        turns.set(&[2, 0, 1, 3], 1, 2, &[]);
        assert_eq!(text(&turns.forwards), "a2 a0 a1 a3");
        assert_eq!(turns.backwards, turns.forwards);
        assert_eq!(turns.needs, [1, 2, 3, 4]);
        assert_eq!(turns.least_room(|turn| u64::from(turn.microbatch)), 3, "the largest alone");
        turns.set(&[2, 0, 1, 3], 2, 2, &[]);
        assert_eq!(text(&turns.forwards), "a2 a0 b2 b0 a1 a3 b1 b3");
        assert_eq!(text(&turns.backwards), "b2 b0 a2 a0 b1 b3 a1 a3");
        assert_eq!(turns.needs, [3, 4, 1, 2, 7, 8, 5, 6]);
        assert_eq!(turns.least_room(|_| 1), 3, "a2 a0 b2; then b0 takes the place of b2");
        let mut before = Turns::default();
        before.set_before(&turns);
        assert_eq!(text(&before.forwards), "a2 a0 a1 a3");
        assert_eq!(before.backwards, before.forwards);
        assert_eq!(before.needs, [2, 2, 4, 4], "no b is done before all a of its round");
        let zero_is_alone = [true, false, false, false];
        turns.set(&[2, 0, 1, 3], 2, 2, &zero_is_alone);
        assert_eq!(text(&turns.forwards), "a2 b2 a0 b0 a1 a3 b1 b3");
        assert_eq!(text(&turns.backwards), "b2 a2 b0 a0 b1 b3 a1 a3");
        assert_eq!(turns.needs, [2, 1, 4, 3, 7, 8, 5, 6]);
        let giant = |turn: Turn| if turn.microbatch == 0 { 5 } else { 1 };
        assert_eq!(turns.least_room(giant), 10, "both chunks of 0 and nothing else");
        turns.set(&[0, 1, 2, 3], 2, 1, &zero_is_alone);
        assert_eq!(text(&turns.forwards), "a0 b0 a1 a2 a3 b1 b2 b3");
        turns.set(&[2, 0, 1, 3], 2, 9, &[]);
        assert_eq!(text(&turns.forwards), "a2 b2 a0 b0 a1 b1 a3 b3");
        assert_eq!(turns.least_room(|_| 1), 2, "one microbatch, both chunks");
        turns.set(&[], 3, 2, &[]);
        assert!(turns.forwards.is_empty() && turns.backwards.is_empty() && turns.needs.is_empty());
    }
}
