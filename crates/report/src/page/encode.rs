//! Writes the spans of all steps as short text, so that a page can hold them. A span takes a few letters.
//!
//! ```text
//! a step    for each rank: the number of its action list, then for each span two numbers: the gap before it, its duration
//! a time    in units of the step's makespan / 65,536, or in larger units if there are many spans
//! a number  one letter below 56; two letters below 1,896; else a mark and three letters
//! ```
//!
//! `assets/viewer.js` reads it.

use dflop_types::{ActionKind, Span, Timeline};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Letters that have no special meaning in HTML or in a JSON string, and with which no URL begins.
const LETTERS: &[u8; 80] =
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%()*+,-.;[]^_{|";
const BASE: u64 = 80;
/// Numbers below this take one letter.
const SHORT: u64 = 56;
/// How many letters can begin a number of two letters. The last of all letters is the mark of longer numbers.
const MIDDLE: u64 = BASE - 1 - SHORT;

/// Times are rounded to a makespan divided by one of these. The finest comes first.
pub(super) const RESOLUTIONS: [u64; 3] = [65_536, 8_192, 2_048];

/// Encodes timelines. Each list of actions is kept once, and timelines refer to it by its number.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    numbers: BTreeMap<Vec<(ActionKind, u32, u32)>, usize>,
    /// The lists as text, for example `F0.3 B0.3`: letter, stage, microbatch.
    pub(super) lists: Vec<String>,
}

impl Encoder {
    /// The spans of a timeline, rank by rank.
    pub(super) fn timeline(&mut self, timeline: &Timeline, num_ranks: u32, parts: u64) -> String {
        let mut by_rank: Vec<Vec<Span>> = vec![Vec::new(); num_ranks as usize];
        for span in &timeline.spans {
            if let Some(spans) = by_rank.get_mut(span.rank.index()) {
                spans.push(*span);
            }
        }
        let makespan = u128::from(timeline.makespan_ns.max(1));
        let part = |ns: u64| {
            let rounded = (u128::from(ns) * u128::from(parts) + makespan / 2) / makespan;
            u64::try_from(rounded).unwrap_or(parts).min(parts)
        };
        let mut text = String::new();
        for spans in &mut by_rank {
            spans.sort_by_key(|s| (s.start_ns, s.end_ns));
            let list = spans.iter().map(|s| (s.action.kind, s.action.stage.0, s.action.microbatch)).collect();
            number(&mut text, self.list(list) as u64);
            let mut at = 0;
            for span in spans {
                // The spans of a rank follow each other. If spans of an unsound file overlap, the second begins where the
                // first ends.
                let start = part(span.start_ns).max(at);
                let end = part(span.end_ns).max(start);
                number(&mut text, start - at);
                number(&mut text, end - start);
                at = end;
            }
        }
        text
    }

    fn list(&mut self, actions: Vec<(ActionKind, u32, u32)>) -> usize {
        let next = self.lists.len();
        if let Some(&known) = self.numbers.get(&actions) {
            return known;
        }
        let names: Vec<String> =
            actions.iter().map(|(kind, stage, microbatch)| format!("{kind:?}{stage}.{microbatch}")).collect();
        self.lists.push(names.join(" "));
        self.numbers.insert(actions, next);
        next
    }
}

fn number(text: &mut String, value: u64) {
    let mut letter = |at: u64| text.push(char::from(LETTERS[at as usize]));
    if value < SHORT {
        letter(value);
    } else if value < SHORT + MIDDLE * BASE {
        letter(SHORT + (value - SHORT) / BASE);
        letter((value - SHORT) % BASE);
    } else {
        letter(BASE - 1);
        let value = value.min(BASE * BASE * BASE - 1);
        letter(value / (BASE * BASE));
        letter(value / BASE % BASE);
        letter(value % BASE);
    }
}

/// A JSON string that can stand in a `script` element: nothing in it can end the element.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for letter in text.chars() {
        match letter {
            ' '..='~' if !matches!(letter, '"' | '\\' | '<' | '>' | '&') => out.push(letter),
            letter => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_types::Rank;

    /// As `viewer.js` reads it.
    fn numbers(text: &str) -> Vec<u64> {
        let mut values = text.bytes().map(|b| LETTERS.iter().position(|&l| l == b).unwrap() as u64);
        let mut found = Vec::new();
        while let Some(first) = values.next() {
            let mut next = || values.next().unwrap();
            found.push(if first < SHORT {
                first
            } else if first < BASE - 1 {
                SHORT + (first - SHORT) * BASE + next()
            } else {
                (next() * BASE + next()) * BASE + next()
            });
        }
        found
    }

    #[test]
    fn a_number_is_read_as_it_was_written() {
        let all: Vec<u64> = (0..3_000).chain([65_536, 511_999]).collect();
        let mut text = String::new();
        for &value in &all {
            number(&mut text, value);
        }
        assert_eq!(numbers(&text), all);
        let mut letters = LETTERS.to_vec();
        letters.sort_unstable();
        letters.dedup();
        assert_eq!(letters.len(), 80);
    }

    #[test]
    fn spans_are_gaps_and_durations_in_parts_of_the_step() {
        let span = |rank, action: &str, start_ns, end_ns| Span {
            rank: Rank(rank),
            action: action.parse().unwrap(),
            start_ns,
            end_ns,
        };
        let timeline = Timeline {
            num_ranks: 2,
            makespan_ns: 1_000,
            spans: vec![span(1, "1F0", 100, 350), span(0, "0F0", 0, 100), span(1, "1B0", 350, 600)],
            ..Timeline::default()
        };
        let mut encoder = Encoder::default();
        let text = encoder.timeline(&timeline, 3, 1_000);
        // Rank 0: list 0, a span; rank 1: list 1, two spans; rank 2: list 2, none.
        assert_eq!(numbers(&text), [0, 0, 100, 1, 100, 250, 0, 250, 2]);
        assert_eq!(encoder.lists, ["F0.0", "F1.0 B1.0", ""]);
        assert_eq!(encoder.timeline(&timeline, 3, 1_000), text, "lists are known by now");
        assert_eq!(encoder.lists.len(), 3);
    }

    #[test]
    fn a_string_ends_no_script() {
        assert_eq!(
            quoted("a</script>\"\\\n\u{1f600}"),
            "\"a\\u003c/script\\u003e\\u0022\\u005c\\u000a\\ud83d\\ude00\""
        );
    }
}
