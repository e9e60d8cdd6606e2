//! Problems of samples in words: a line each, the first of many.

use dflop_types::{Fault, Problem, printable};
use std::collections::HashMap;
use std::fmt::Write as _;

/// Problems shown of a long list; the number of all of them stands beside it.
const SHOWN: usize = 20;

/// Problems with one cause that are shown.
const SHOWN_OF_CAUSE: usize = 3;

/// The problem as a line: file, position, id, cause.
pub(crate) fn line(problem: &Problem) -> String {
    let mut text = problem.file.clone();
    if let Some(position) = problem.position {
        let _ = write!(text, ": sample {position}");
    }
    if let Some(id) = &problem.id {
        let _ = write!(text, " (`{id}`)");
    }
    let _ = write!(text, ": {}", problem.cause);
    printable(&text).into_owned()
}

/// The problems, a line each. A long list names the first of them. In a long list, problems of one file with the same cause are
/// named up to [`SHOWN_OF_CAUSE`] times, and the others are counted.
pub(crate) fn listed(problems: &[Problem]) -> String {
    if problems.len() <= SHOWN {
        return list(&problems.iter().map(line).collect::<Vec<String>>(), 0);
    }
    let mut of_cause: HashMap<(&str, &str), usize> = HashMap::new();
    let (mut lines, mut again): (Vec<String>, Vec<(&str, &str)>) = (Vec::new(), Vec::new());
    let mut num_left = 0;
    for problem in problems {
        let cause = (problem.file.as_str(), without_line(&problem.cause));
        let count = of_cause.entry(cause).or_default();
        *count += 1;
        match *count {
            count if count > SHOWN_OF_CAUSE + 1 => {}
            count if count > SHOWN_OF_CAUSE => again.push(cause),
            _ if lines.len() < SHOWN => lines.push(line(problem)),
            _ => num_left += 1,
        }
    }
    for cause in again {
        let count = of_cause[&cause] - SHOWN_OF_CAUSE;
        let (file, cause) = cause;
        if lines.len() < SHOWN {
            lines.push(printable(&format!("{file}: the same of {count} more: {cause}")).into_owned());
        } else {
            num_left += count;
        }
    }
    list(&lines, num_left)
}

/// A cause without the line of the file at which it was met.
fn without_line(cause: &str) -> &str {
    let after = cause.strip_prefix("line ").map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    after.and_then(|rest| rest.strip_prefix(": ")).unwrap_or(cause)
}

pub(crate) fn list(lines: &[String], num_left: usize) -> String {
    let mut text = lines.iter().fold(String::new(), |mut text, line| {
        let _ = write!(text, "\n  {line}");
        text
    });
    if num_left > 0 {
        let _ = write!(text, "\n  and {num_left} more");
    }
    text
}

/// How many problems there are of each fault, where not all are listed.
pub(crate) fn by_fault(problems: &[Problem]) -> String {
    if problems.len() <= SHOWN {
        return String::new();
    }
    let count = |fault| problems.iter().filter(|problem| problem.fault == fault).count();
    let counts: Vec<String> = Fault::ALL
        .into_iter()
        .map(|fault| (fault, count(fault)))
        .filter(|(_, count)| *count > 0)
        .map(|(fault, count)| format!("{fault} {count}"))
        .collect();
    format!("\n  by fault: {}", counts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(position: u64, cause: &str) -> Problem {
        Problem {
            file: "videos.jsonl".to_owned(),
            position: Some(position),
            place: None,
            id: None,
            fault: Fault::ALL[0],
            cause: cause.to_owned(),
            substitute: None,
        }
    }

    /// A family that takes no videos refuses each of them for the same reason: three are named, and the others counted.
    #[test]
    fn problems_with_one_cause_are_counted() {
        let mut problems: Vec<Problem> =
            (0..30).map(|at| problem(at, &format!("line {}: no videos", at + 1))).collect();
        problems.insert(10, problem(77, "line 78: the answer is empty"));
        assert_eq!(
            listed(&problems),
            "
  videos.jsonl: sample 0: line 1: no videos
  videos.jsonl: sample 1: line 2: no videos
  videos.jsonl: sample 2: line 3: no videos
  videos.jsonl: sample 77: line 78: the answer is empty
  videos.jsonl: the same of 27 more: no videos"
        );
        // All causes differ, as where files are missing: the first are named.
        let missing: Vec<Problem> = (0..25).map(|at| problem(at, &format!("no file {at}"))).collect();
        let text = listed(&missing);
        assert!(text.starts_with("\n  videos.jsonl: sample 0: no file 0\n"));
        assert!(text.ends_with("sample 19: no file 19\n  and 5 more"));
        assert_eq!(without_line("line 3 of the template"), "line 3 of the template");
    }
}
