//! Marks in what a template is given, which say where that stands in what it writes.
//!
//! ```text
//! BEGIN digits text END      digits: the turn that the text is of, where marks of several turns are put at once
//! ```

use super::spaces::strip_as_python;
use std::ops::{Range, RangeInclusive};

/// Where a marked text begins. Unicode keeps this character for the use inside programs; records must not have it.
pub(super) const BEGIN: char = '\u{fdd0}';
/// Where a marked text ends.
pub(super) const END: char = '\u{fdd1}';
/// The digits of a turn's number, of which there are sixteen.
const DIGITS: RangeInclusive<char> = '\u{fdd2}'..='\u{fde1}';

/// A marked text, in bytes of the text without marks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    /// The turn that it was numbered with.
    pub(super) turn: Option<usize>,
    pub(super) range: Range<usize>,
}

/// Whether texts may not hold it.
pub(super) fn is_mark(letter: char) -> bool {
    [BEGIN, END].contains(&letter) || DIGITS.contains(&letter)
}

/// A text with marks around it.
pub(super) fn around(text: &str, turn: Option<usize>) -> String {
    let mut digits = Vec::new();
    let mut number = turn;
    while let Some(left) = number {
        digits.extend(char::from_u32(u32::from(*DIGITS.start()) + (left % 16) as u32));
        number = Some(left / 16).filter(|&left| left > 0);
    }
    let digits: String = digits.into_iter().rev().collect();
    format!("{BEGIN}{digits}{text}{END}")
}

/// A text with marks around it, the spaces at its ends outside; without marks where it is spaces alone.
pub(super) fn around_words(text: &str, turn: Option<usize>) -> String {
    let words = strip_as_python(text, None, true, true);
    if words.is_empty() {
        return text.to_owned();
    }
    let start = text.len() - strip_as_python(text, None, true, false).len();
    let end = start + words.len();
    format!("{}{}{}", &text[..start], around(words, turn), &text[end..])
}

/// The text without its marks, and where they were, ascending; `None` if they do not pair.
pub(super) fn strip(marked: &str) -> Option<(String, Vec<Span>)> {
    let mut text = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    let mut begun: Option<(Option<usize>, usize)> = None;
    let mut rest = marked;
    while let Some(at) = rest.find(is_mark) {
        text.push_str(&rest[..at]);
        let mark = rest[at..].chars().next()?;
        rest = &rest[at + mark.len_utf8()..];
        match (mark, begun) {
            (BEGIN, None) => {
                let digits: String = rest.chars().take_while(|letter| DIGITS.contains(letter)).collect();
                rest = &rest[digits.len()..];
                let digits =
                    digits.chars().map(|digit| (u32::from(digit) - u32::from(*DIGITS.start())) as usize);
                let turn =
                    digits.fold(None, |number: Option<usize>, digit| Some(number.unwrap_or(0) * 16 + digit));
                begun = Some((turn, text.len()));
            }
            (END, Some((turn, start))) => {
                spans.push(Span { turn, range: start..text.len() });
                begun = None;
            }
            _ => return None,
        }
    }
    text.push_str(rest);
    begun.is_none().then_some((text, spans))
}

/// The words of `said` at this place of the text, with the spaces at their ends that the template has left, those before them
/// from `floor` on.
pub(super) fn with_spaces(text: &str, words: Range<usize>, said: &str, floor: usize) -> Range<usize> {
    let lead = said.len() - strip_as_python(said, None, true, false).len();
    let tail = strip_as_python(said, None, false, true).len().max(lead);
    let left = said[..lead].chars().rev().zip(text[floor..words.start].chars().rev());
    let right = said[tail..].chars().zip(text[words.end..].chars());
    let same = |letters: &mut dyn Iterator<Item = (char, char)>| -> usize {
        letters.take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
    };
    words.start - same(&mut left.into_iter())..words.end + same(&mut right.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_say_which_turn_they_are_of() {
        for turn in [None, Some(0), Some(15), Some(16), Some(4095), Some(70_000)] {
            let marked = format!("a{}c{}", around("b", turn), around_words(" \n", turn));
            assert_eq!(strip(&marked), Some(("abc \n".to_owned(), vec![Span { turn, range: 1..2 }])));
        }
        for broken in [format!("{BEGIN}a"), format!("a{END}"), format!("{BEGIN}{BEGIN}a{END}{END}")] {
            assert_eq!(strip(&broken), None);
        }
        assert!(around("", Some(70_000)).chars().all(is_mark));
    }

    #[test]
    fn spaces_that_are_left_belong_to_the_words() {
        assert_eq!(with_spaces(": a \n|", 2..3, "\n a \n", 0), 1..5);
        assert_eq!(with_spaces(":a|", 1..2, " a ", 0), 1..2);
    }
}
