//! The place in a JSON text: which field an error at some line and column speaks of.

use std::fmt::Write as _;

/// Path of the value that `text` holds before `line` and `column` (from 1, in bytes, as `serde_json` counts them), as in
/// `modules.llm_layer.linear.points[3].forward_ns`; empty at the outermost value.
///
/// The text may be broken from there on, but not before.
pub(crate) fn path_at(text: &str, line: usize, column: usize) -> String {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    let before = &text.as_bytes()[..start.saturating_add(column).min(text.len())];
    // A container that is open: the key, or the index, at which it is.
    let mut open: Vec<Result<String, usize>> = Vec::new();
    let mut at = 0;
    // Whether a string would be a key.
    let mut wants_key = false;
    while at < before.len() {
        match before[at] {
            b'{' => {
                open.push(Ok(String::new()));
                wants_key = true;
            }
            b'[' => open.push(Err(0)),
            b'}' | b']' => {
                open.pop();
                wants_key = false;
            }
            b',' => match open.last_mut() {
                Some(Ok(_)) => wants_key = true,
                Some(Err(index)) => *index += 1,
                None => {}
            },
            b'"' => {
                let end = string_end(before, at + 1);
                if wants_key && let Some(Ok(key)) = open.last_mut() {
                    *key = String::from_utf8_lossy(&before[at + 1..end]).into_owned();
                    wants_key = false;
                }
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    joined(&open)
}

/// Position of the quote that ends the string whose first byte stands at `at`; the end of `text` if there is none.
fn string_end(text: &[u8], mut at: usize) -> usize {
    while at < text.len() && text[at] != b'"' {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    at.min(text.len())
}

fn joined(open: &[Result<String, usize>]) -> String {
    let mut path = String::new();
    for part in open {
        match part {
            Ok(key) if key.is_empty() => {}
            Ok(key) => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(key);
            }
            Err(index) => {
                let _ = write!(path, "[{index}]");
            }
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_before_a_position_is_named() {
        let text = "{\n\"a\": {\"b,[\\\"\": [1, {\"c\": -5, \"d\": 1}]},\n\"e\": NaN}";
        let at = |needle: &str| {
            let offset = text.find(needle).unwrap() + needle.len();
            let line = text[..offset].matches('\n').count() + 1;
            let column = offset - text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
            path_at(text, line, column)
        };
        assert_eq!(at("-5"), "a.b,[\\\"[1].c");
        assert_eq!(at("[1"), "a.b,[\\\"[0]");
        assert_eq!(at("1}"), "a.b,[\\\"[1]");
        assert_eq!(at("N"), "e");
        assert_eq!(path_at(text, 1, 1), "");
        assert_eq!(path_at(text, 99, 99), "");
    }
}
