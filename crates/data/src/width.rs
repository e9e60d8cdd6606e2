//! Names in columns of a terminal, in which some letters are two wide.

use dflop_types::printable;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// The text within this many columns: `mark` replaces the middle, since paths differ at their ends.
pub(crate) fn cut(text: &str, columns: usize, mark: &str) -> String {
    let text = printable(text);
    if text.width() <= columns {
        return text.into_owned();
    }
    let room = columns - mark.len();
    let mut left = room / 2;
    let head: String = text.chars().take_while(|letter| fits(*letter, &mut left)).collect();
    left = room - room / 2;
    let tail: Vec<char> = text.chars().rev().take_while(|letter| fits(*letter, &mut left)).collect();
    head + mark + &tail.into_iter().rev().collect::<String>()
}

/// Whether a letter fits in the columns left, which it takes.
fn fits(letter: char, left: &mut usize) -> bool {
    let rest = left.checked_sub(letter.width().unwrap_or(0));
    *left = rest.unwrap_or(0);
    rest.is_some()
}

/// The text with spaces up to so many columns; `{:<N}` counts letters.
pub(crate) fn pad(text: &str, columns: usize) -> String {
    let spaces = columns.saturating_sub(text.width());
    format!("{text}{:spaces$}", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_take_their_columns() {
        assert_eq!(cut("0123456789", 10, ".."), "0123456789");
        assert_eq!(cut("0123456789x", 10, ".."), "0123..789x");
        // Two columns each.
        let wide = "\u{732b}".repeat(9);
        let short = cut(&wide, 10, "..");
        assert_eq!((short.chars().count(), short.width()), (6, 10));
        assert_eq!(pad(&short, 12), format!("{short}  "));
        assert_eq!(cut("a\nb", 10, ".."), "a\\nb");
    }
}
