//! A log of step times by rank, and what it alone says: how long ranks wait for the slowest.

use super::estimate::Estimate;
use crate::Failure;
use dflop_types::{counted, printable, thousands};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Columns of the file.
const COLUMNS: [&str; 3] = ["step", "rank", "ms"];

/// The longest time of a step, in milliseconds: eleven days.
const MS_MAX: f64 = 1e9;

/// Bad lines shown; the number of all of them stands above.
const SHOWN: usize = 10;

/// Own times of all ranks in all steps.
#[derive(Debug, PartialEq)]
pub(crate) struct StepTimes {
    /// By step, in ascending order: the times of the ranks, in the order of `ranks`, in milliseconds.
    steps: Vec<Vec<f64>>,
    ranks: Vec<u64>,
}

/// What the log says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Waiting {
    pub(crate) num_steps: usize,
    pub(crate) num_ranks: usize,
    /// Mean over the steps of the slowest rank's time over the mean rank's.
    pub(crate) max_over_mean: Estimate,
    /// Of the time of all ranks, the part in which they wait for the slowest of their step.
    pub(crate) lost_share: f64,
    /// The rank that was slowest in most steps, and in how many; steps whose slowest are several count for none.
    pub(crate) slowest: Option<(u64, usize)>,
}

impl StepTimes {
    /// The times of a CSV with the columns `step,rank,ms`; every bad line is listed.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, Failure> {
        let file = path.display();
        let malformed =
            |error: csv::Error| refused(format!("`{file}` is not a table of step times: {error}"));
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
        let header = reader.headers().map_err(malformed)?.clone();
        let at = |name: &str| {
            let mut found = header.iter().enumerate().filter(|(_, column)| *column == name);
            found.next().map(|(at, _)| at).filter(|_| found.next().is_none())
        };
        let [Some(step), Some(rank), Some(ms)] = COLUMNS.map(at) else {
            let header = header.iter().collect::<Vec<_>>().join(",");
            let message = format!(
                "`{file}` has the header `{}`, must have each of step,rank,ms once",
                printable(&header)
            );
            return Err(refused(message));
        };
        let mut problems = Vec::new();
        let mut times: BTreeMap<u64, BTreeMap<u64, f64>> = BTreeMap::new();
        for record in reader.records() {
            let cells = record.map_err(malformed)?;
            let line = cells.position().map_or(0, csv::Position::line);
            let mut bad = |name: &str, cell: &str, rule: &str| {
                problems.push(format!("line {line}: {name}: `{}`, must be {rule}", printable(cell)));
            };
            let (step_cell, rank_cell, ms_cell) = (&cells[step], &cells[rank], &cells[ms]);
            let number = |cell: &str| cell.parse::<u64>().ok();
            let ns = ms_cell.parse::<f64>().ok().filter(|ms| *ms > 0.0 && *ms <= MS_MAX);
            match (number(step_cell), number(rank_cell), ns) {
                (None, _, _) => bad("step", step_cell, "an integer from 0"),
                (_, None, _) => bad("rank", rank_cell, "an integer from 0"),
                (_, _, None) => bad("ms", ms_cell, "a number above 0, at most 1e9"),
                (Some(step), Some(rank), Some(ms)) => {
                    if times.entry(step).or_default().insert(rank, ms).is_some() {
                        problems.push(format!("line {line}: step {step} has rank {rank} a second time"));
                    }
                }
            }
        }
        Self::checked(path, times, problems)
    }

    /// The times, if each step has those of the same ranks, at least two.
    fn checked(
        path: &Path,
        times: BTreeMap<u64, BTreeMap<u64, f64>>,
        mut problems: Vec<String>,
    ) -> Result<Self, Failure> {
        let file = path.display();
        let mut ranks: Vec<u64> = times.values().flat_map(|of_step| of_step.keys().copied()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        if problems.is_empty() {
            if ranks.len() < 2 {
                let found = counted(ranks.len() as u64, "rank");
                return Err(refused(format!("`{file}` has times of {found}, must be of 2 at least")));
            }
            for (step, of_step) in &times {
                if let Some(rank) = ranks.iter().find(|rank| !of_step.contains_key(rank)) {
                    problems.push(format!("step {step}: no time of rank {rank}, which other steps have"));
                }
            }
        }
        if problems.is_empty() {
            let steps = times.into_values().map(|of_step| of_step.into_values().collect()).collect();
            return Ok(Self { steps, ranks });
        }
        let mut message = format!("`{file}` has {}", counted(problems.len() as u64, "fault"));
        for problem in problems.iter().take(SHOWN) {
            let _ = write!(message, "\n  {problem}");
        }
        if problems.len() > SHOWN {
            let _ = write!(message, "\n  and {} more", thousands((problems.len() - SHOWN) as u64));
        }
        Err(refused(message))
    }

    /// How long the ranks wait.
    pub(crate) fn waiting(&self) -> Waiting {
        let num_ranks = self.ranks.len();
        let mean = |times: &Vec<f64>| times.iter().sum::<f64>() / num_ranks as f64;
        let max = |times: &Vec<f64>| times.iter().copied().fold(0.0, f64::max);
        let ratios: Vec<f64> = self.steps.iter().map(|times| max(times) / mean(times)).collect();
        let sum = |of: &dyn Fn(&Vec<f64>) -> f64| self.steps.iter().map(of).sum::<f64>();
        let mut times_slowest = vec![0; num_ranks];
        for times in &self.steps {
            let most = max(times);
            let mut slowest = times.iter().enumerate().filter(|(_, ms)| **ms >= most);
            if let (Some((rank, _)), None) = (slowest.next(), slowest.next()) {
                times_slowest[rank] += 1;
            }
        }
        let slowest = self.ranks.iter().copied().zip(times_slowest).rev().max_by_key(|(_, count)| *count);
        Waiting {
            num_steps: self.steps.len(),
            num_ranks,
            max_over_mean: Estimate::of_ratio(&ratios, &vec![1.0; ratios.len()]),
            lost_share: 1.0 - sum(&mean) / sum(&max),
            slowest: slowest.filter(|(_, count)| *count > 0),
        }
    }
}

/// A log that is none.
fn refused(message: String) -> Failure {
    Failure::new(message, Some("write a line a rank and step: `step,rank,ms`, as in `0,3,412.5`".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<StepTimes, String> {
        StepTimes::parse(Path::new("log.csv"), text).map_err(|failure| failure.message)
    }

    /// Step 0: 10 and 30, 30 over 20. Step 1: 20 and 20, 1. Mean 1.25; lost 20 of 100, as the ranks' 30 + 30 + 20 + 20.
    #[test]
    fn waiting_by_hand() {
        let waiting = parse("rank,step,ms\n0,0,10\n1,0,30\n1,1,20.0\n0,1,20\n").unwrap().waiting();
        assert_eq!((waiting.num_steps, waiting.num_ranks), (2, 2));
        assert!((waiting.max_over_mean.mean - 1.25).abs() < 1e-12, "{waiting:?}");
        // Residuals 0.25 and -0.25: deviation of the mean 0.25, t of one degree 12.706.
        assert!((waiting.max_over_mean.half.unwrap() - 12.706 * 0.25).abs() < 1e-3, "{waiting:?}");
        assert!((waiting.lost_share - 0.2).abs() < 1e-12, "{waiting:?}");
        assert_eq!(waiting.slowest, Some((1, 1)));
    }

    #[test]
    fn ranks_that_take_the_same_lose_nothing() {
        let waiting = parse("step,rank,ms\n7,2,5\n7,9,5\n").unwrap().waiting();
        assert_eq!((waiting.max_over_mean, waiting.lost_share), (Estimate { mean: 1.0, half: None }, 0.0));
        assert_eq!(waiting.slowest, None);
    }

    #[test]
    fn bad_logs_are_refused_by_line_and_rule() {
        for (text, expected) in [
            ("step,rank\n0,0\n", "`log.csv` has the header `step,rank`, must have each of step,rank,ms once"),
            ("step,rank,ms,ms\n0,0,1,1\n", "must have each of step,rank,ms once"),
            ("step,rank,ms\n", "has times of 0 ranks, must be of 2 at least"),
            ("step,rank,ms\n0,4,1\n", "has times of 1 rank, must be of 2 at least"),
            ("step,rank,ms\n0,0,1\n0,1,nan\n", "line 3: ms: `nan`, must be a number above 0, at most 1e9"),
            ("step,rank,ms\n0,0,0\n", "line 2: ms: `0`, must be"),
            ("step,rank,ms\n0,0,inf\n", "line 2: ms: `inf`, must be"),
            ("step,rank,ms\n-1,0,1\n", "line 2: step: `-1`, must be an integer from 0"),
            ("step,rank,ms\n1,x,1\n", "line 2: rank: `x`, must be an integer from 0"),
            ("step,rank,ms\n1,0,1\n1,1,1\n1,0,2\n", "line 4: step 1 has rank 0 a second time"),
            ("step,rank,ms\n1,0,1\n1,1,1\n2,0,2\n", "step 2: no time of rank 1, which other steps have"),
            ("step,rank,ms\n1,0\n", "is not a table of step times"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let many = "1,x,1\n".repeat(12);
        let error = parse(&format!("step,rank,ms\n{many}")).unwrap_err();
        assert!(error.contains("has 12 faults") && error.contains("and 2 more"), "{error}");
    }
}
