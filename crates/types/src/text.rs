//! Text that comes from outside, on its way to a person.

use std::borrow::Cow;

/// The text with control characters written out (`\u{1b}`, `\n`): names in a dataset must not clear a screen, tear a
/// table or turn the direction of a line.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// The same of a text of several lines, whose line breaks and tabs stay.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |letter| matches!(letter, '\n' | '\t'))
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_escaped = |letter: char| {
        // Line and paragraph separators, and what overrides the direction of writing, act as control characters do.
        let acts = matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        (letter.is_control() || acts) && !stays(letter)
    };
    if !text.chars().any(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        if is_escaped(letter) {
            escaped.extend(letter.escape_default());
        } else {
            escaped.push(letter);
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(printable("\u{1b}[2J\r\na\tb\u{9b}c\u{202e}d"), "\\u{1b}[2J\\r\\na\\tb\\u{9b}c\\u{202e}d");
        assert_eq!(printable_lines("a\n\tb\u{7f}\r"), "a\n\tb\\u{7f}\\r");
        for plain in ["a \\ 'b'", "\u{732b}\u{e9}\u{1f600}", ""] {
            assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain));
        }
    }
}
