//! Spaces as Python has them.

/// `str.strip` of Python: its spaces are those of Unicode and U+001C to U+001F.
pub(super) fn strip_as_python<'t>(text: &'t str, what: Option<&str>, start: bool, end: bool) -> &'t str {
    let is_stripped = |c: char| match what {
        Some(what) => what.contains(c),
        None => c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c),
    };
    let text = if start { text.trim_start_matches(is_stripped) } else { text };
    if end { text.trim_end_matches(is_stripped) } else { text }
}
