//! YAML files that people write.

use saphyr::LoadableYamlNode;
use saphyr_parser::{Event, Parser};

/// Levels of lists and mappings, at most: ours have four, and each takes a part of the stack.
const MAX_DEPTH: usize = 64;

/// The documents of the text.
///
/// # Errors
/// Why it is none, with the place, in words that follow "it is not YAML: ".
pub fn load<'y, N: LoadableYamlNode<'y>>(text: &'y str) -> Result<Vec<N>, String> {
    check_depth(text)?;
    N::load_from_str(text).map_err(|error| error.to_string())
}

/// The loader calls itself for each level, up to the end of the stack; the events that it loads come one by one.
fn check_depth(text: &str) -> Result<(), String> {
    let mut depth = 0_usize;
    // What is no YAML is said by the loader.
    for (event, span) in Parser::new_from_str(text).map_while(Result::ok) {
        match event {
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            let line = span.start.line();
            return Err(format!("line {line}: more than {MAX_DEPTH} levels of lists and mappings"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use saphyr::Yaml;

    #[test]
    fn levels_are_bounded() {
        for level in ["[", "- ", "? ", "- ? ", "{a: "] {
            let error = load::<Yaml<'_>>(&level.repeat(100_000)).unwrap_err();
            assert!(error.contains("more than 64 levels") || error.contains("recursion limit"), "{error}");
        }
        let deep = |levels: usize| {
            let text = format!("a:\n  b: {}{}", "[".repeat(levels - 2), "]".repeat(levels - 2));
            load::<Yaml<'_>>(&text).map(|documents| documents.len())
        };
        assert_eq!(deep(64), Ok(1));
        assert_eq!(deep(65), Err("line 2: more than 64 levels of lists and mappings".to_owned()));
    }
}
