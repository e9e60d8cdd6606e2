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

/// The first `most` characters of a text, with `...` where it is longer.
pub fn clipped(text: &str, most: usize) -> String {
    let short: String = text.chars().take(most).collect();
    if short.len() < text.len() { format!("{short}...") } else { short }
}

/// The text with what proves an identity left out of its URLs: `https://user:secret@host/a?X-Signature=..` becomes
/// `https://***@host/a?***`.
///
/// Left out are user and password of every URL, and the query of a web URL, which holds the signature of a signed one.
/// The key of an object in a bucket (`s3://..`) may contain a question mark and stays. A URL ends at a space, a quotation
/// mark, a backtick or an angle bracket.
pub fn without_secrets(text: &str) -> Cow<'_, str> {
    let mut shown = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + "://".len());
        let end = url
            .find(|letter: char| letter.is_whitespace() || matches!(letter, '"' | '`' | '<' | '>'))
            .unwrap_or(url.len());
        let (url, after) = url.split_at(end);
        // A password may hold a question mark by mistake: what stands before the last `@` of the host's part goes first.
        let host = &url[..url.find('/').unwrap_or(url.len())];
        let (user, place) = match host.rfind('@') {
            Some(sign) => ("***", &url[sign..]),
            None => ("", url),
        };
        let (place, query) = match place.find('?') {
            Some(mark) if is_web(before) => (&place[..mark], "?***"),
            _ => (place, ""),
        };
        for part in [before, user, place, query] {
            shown.push_str(part);
        }
        rest = after;
    }
    if shown.is_empty() {
        return Cow::Borrowed(text);
    }
    shown.push_str(rest);
    Cow::Owned(shown)
}

/// Whether a text that ends at `://` ends with the scheme of the web.
fn is_web(before: &str) -> bool {
    let before = before.as_bytes();
    ["http://", "https://"].iter().any(|scheme| {
        let start = before.len().saturating_sub(scheme.len());
        before[start..].eq_ignore_ascii_case(scheme.as_bytes())
    })
}

/// A line of text from outside, fit to be shown or written into a table: [`printable`], [`without_secrets`].
pub fn shown(text: &str) -> String {
    // In this order, what is shown once is shown again alike: a written-out `\n` does not end a URL, a line break does.
    without_secrets(&printable(text)).into_owned()
}

/// The same of a text of several lines, whose line breaks and tabs stay.
pub fn shown_lines(text: &str) -> String {
    without_secrets(&printable_lines(text)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn secrets_of_urls_are_left_out() {
        for (text, expected) in [
            ("`https://h/a.jpg?X-Amz-Signature=f00&b=1`: gone", "`https://h/a.jpg?***`: gone"),
            ("http://u:p@h:80/a?b c?d", "http://***@h:80/a?*** c?d"),
            ("HTTPS://user:p%40ss@h", "HTTPS://***@h"),
            ("https://u:p@@h/x@y", "https://***@h/x@y"),
            ("https://h?sig=1 https://g/?sig=2", "https://h?*** https://g/?***"),
            ("https://u:a?b@h/c", "https://***@h/c"),
            ("https://h?mail=x@y", "https://***@y"),
            ("s3://key:secret@bucket/what?.jpg", "s3://***@bucket/what?.jpg"),
            ("<a href=\"https://h/a?b=c\">", "<a href=\"https://h/a?***\">"),
            ("a://", "a://"),
            ("", ""),
        ] {
            assert_eq!(without_secrets(text), expected);
        }
        assert!(matches!(without_secrets("is it a ratio 1:2? yes@no"), Cow::Borrowed(_)));
        assert_eq!(shown("https://u:p@h/\u{1b}\n"), "https://***@h/\\u{1b}\\n");
        assert_eq!(shown_lines("a\nhttps://u:p@h"), "a\nhttps://***@h");
    }

    proptest! {
        /// What is shown once stays as it is: tables are read and written again.
        #[test]
        fn what_is_shown_is_shown_again_alike(text in "(https?://|s3://|[a@:/? `\u{1b}\u{202e}\n]){0,12}") {
            prop_assert_eq!(shown(&shown(&text)), shown(&text));
            let once = without_secrets(&text);
            prop_assert_eq!(&without_secrets(&once), &once);
        }
    }

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(printable("\u{1b}[2J\r\na\tb\u{9b}c\u{202e}d"), "\\u{1b}[2J\\r\\na\\tb\\u{9b}c\\u{202e}d");
        assert_eq!(printable_lines("a\n\tb\u{7f}\r"), "a\n\tb\\u{7f}\\r");
        for plain in ["a \\ 'b'", "\u{732b}\u{e9}\u{1f600}", ""] {
            assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain));
        }
    }
}
