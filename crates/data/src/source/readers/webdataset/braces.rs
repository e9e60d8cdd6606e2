//! Brace patterns: `shard-{000000..000012}.tar` stands for thirteen names, `{train,val}.tar` for two.

/// Names of one pattern, at most.
pub(in crate::source::readers) const NAMES_MAX: usize = 1_000_000;
/// Bytes of one pattern, at most; braces nest no deeper than they are many.
const PATTERN_BYTES_MAX: usize = 4096;

/// Every name that `pattern` stands for, in order; itself where it has no brace.
///
/// Ranges count up or down, keep leading zeros and may have a step, for example `{0..8..2}`; braces may stand side by side
/// and within lists.
///
/// # Errors
/// What is wrong with the pattern.
pub(in crate::source::readers) fn expand(pattern: &str) -> Result<Vec<String>, String> {
    if pattern.len() > PATTERN_BYTES_MAX {
        return Err(format!("a pattern has {} bytes, must have at most {PATTERN_BYTES_MAX}", pattern.len()));
    }
    let wrong = |cause: &str| format!("`{pattern}`: {cause}");
    let Some(open) = pattern.find(['{', '}']) else { return Ok(vec![pattern.to_owned()]) };
    if pattern[open..].starts_with('}') {
        return Err(wrong("a `}` closes no brace"));
    }
    let close = closing(&pattern[open..]).ok_or_else(|| wrong("a `{` is not closed"))? + open;
    let (before, inner, after) = (&pattern[..open], &pattern[open + 1..close], &pattern[close + 1..]);
    let options = match range(inner).map_err(|cause| wrong(&cause))? {
        Some(range) => range,
        None => list(inner).map_err(|cause| wrong(&cause))?,
    };
    let rest = expand(after)?;
    if options.len().saturating_mul(rest.len()) > NAMES_MAX {
        return Err(wrong(&format!("it stands for more than {NAMES_MAX} names")));
    }
    Ok(options
        .iter()
        .flat_map(|option| rest.iter().map(move |rest| format!("{before}{option}{rest}")))
        .collect())
}

/// Position of the brace that closes the one at the beginning.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0_u32;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The numbers of `first..last` or `first..last..step`; `None` where it is a list.
fn range(inner: &str) -> Result<Option<Vec<String>>, String> {
    let parts: Vec<&str> = inner.split("..").collect();
    if inner.contains([',', '{']) || !(2..=3).contains(&parts.len()) {
        return Ok(None);
    }
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>()
            .ok()
            .filter(|_| is_number)
            .ok_or_else(|| format!("`{{{inner}}}` must be a range of numbers, as in `{{000..012}}`"))
    };
    let (first, last) = (number(parts[0])?, number(parts[1])?);
    let step = parts.get(2).map_or(Ok(1), |step| number(step))?;
    if step == 0 {
        return Err(format!("`{{{inner}}}` has a step of 0, must be at least 1"));
    }
    let count = first.abs_diff(last) / step;
    if count >= NAMES_MAX as u64 {
        return Err(format!("it stands for more than {NAMES_MAX} names"));
    }
    let is_padded = parts[..2].iter().any(|text| text.len() > 1 && text.starts_with('0'));
    let width = if is_padded { parts[0].len().max(parts[1].len()) } else { 0 };
    let names = (0..=count).map(|index| {
        let by = index * step;
        let value = if first <= last { first + by } else { first - by };
        format!("{value:0width$}")
    });
    Ok(Some(names.collect()))
}

/// The options of a list, between commas outside inner braces.
fn list(inner: &str) -> Result<Vec<String>, String> {
    let (mut options, mut depth, mut start) = (Vec::new(), 0_u32, 0);
    for (at, byte) in inner.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                options.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    options.push(&inner[start..]);
    if options.len() == 1 {
        return Err(format!("`{{{inner}}}` must be a range as `{{000..012}}` or a list as `{{a,b}}`"));
    }
    let mut names = Vec::new();
    for option in options {
        names.extend(expand(option)?);
        if names.len() > NAMES_MAX {
            return Err(format!("it stands for more than {NAMES_MAX} names"));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::expand;
    use proptest::prelude::*;

    #[test]
    fn patterns_stand_for_the_names_that_bash_gives() {
        for (pattern, names) in [
            ("a.tar", "a.tar"),
            ("a-{08..11}.tar", "a-08.tar a-09.tar a-10.tar a-11.tar"),
            ("{1..0}{a,b}", "1a 1b 0a 0b"),
            (
                "s3://b/{train,val/{0..4..2}}.tar",
                "s3://b/train.tar s3://b/val/0.tar s3://b/val/2.tar s3://b/val/4.tar",
            ),
            ("x{,-y}", "x x-y"),
        ] {
            assert_eq!(expand(pattern).unwrap().join(" "), names, "{pattern}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for (pattern, cause) in [
            ("a{0..2.tar", "is not closed"),
            ("a0..2}.tar", "closes no brace"),
            ("a{0..b}", "a range of numbers"),
            ("a{0..9..0}", "step of 0"),
            ("a{x}", "must be a range as"),
            ("{0..999999999}", "more than 1000000 names"),
            ("{0..9999}{0..9999}", "more than 1000000 names"),
        ] {
            let error = expand(pattern).unwrap_err();
            assert!(error.contains(cause), "{pattern}: {error}");
        }
    }

    /// With the stack of a main thread: without optimisation (`tools/rustc_of_tests`) frames are several times as large.
    #[test]
    fn nests_are_bounded() {
        std::thread::Builder::new().stack_size(8 << 20).spawn(deep_nests).unwrap().join().unwrap();
    }

    fn deep_nests() {
        let nested = "{a,".repeat(1300) + &"}".repeat(100);
        assert!(expand(&nested).unwrap_err().contains("is not closed"));
        let nested = "{a,".repeat(1000) + &"}".repeat(1000);
        assert_eq!(expand(&nested).unwrap().len(), 1001);
        assert_eq!(expand(&"{0..0}".repeat(600)).unwrap(), ["0".repeat(600)]);
        assert!(expand(&"{".repeat(5000)).unwrap_err().contains("at most 4096"));
    }

    proptest! {
        #[test]
        fn no_pattern_panics(pattern in "[{},.0-9a]{0,24}") {
            let _ = expand(&pattern);
        }
    }
}
