//! Two runs side by side, or the two plans of one run: the data that the page shows.

use crate::StepView;
use dflop_types::number;
use dflop_types::statistics::Interval;

/// Two runs side by side.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Against {
    /// The names of both: first the run to compare with, then the run of this report.
    pub names: [String; 2],
    /// What was measured, and in what else the two runs differ; a sentence each.
    pub notes: Vec<String>,
    /// The numbers.
    pub rows: Vec<AgainstRow>,
    /// Steps of both on the same global batch.
    pub pairs: Vec<StepPair>,
    /// For each of the two runs its step times: (step, milliseconds).
    pub step_ms: [Vec<(u64, f64)>; 2],
}

/// A step of this report, and that of the other run on the same samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepPair {
    /// Position in [`crate::Report::steps`].
    pub index: usize,
    /// The step of the other run.
    pub other: StepView,
}

/// The unit of the numbers of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Unit {
    /// Milliseconds.
    #[default]
    Ms,
    /// A fraction of the whole, from 0 to 1.
    Share,
    /// A rate, for example samples in a second.
    PerSecond,
    /// Bytes.
    Bytes,
    /// A number without unit.
    Plain,
}

/// How one number of the two runs changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// The second over the first, with its 95 % interval.
    Ratio(Interval),
    /// The second less the first, in the unit of the row, with its 95 % interval.
    Difference(Interval),
}

/// One number of both runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgainstRow {
    /// What the number is, for example the step time.
    pub name: String,
    /// The unit of the numbers.
    pub unit: Unit,
    /// The numbers of both runs, in the order of [`Against::names`]; `None` if a run does not have it.
    pub values: [Option<f64>; 2],
    /// The change with its interval; `None` if a run has fewer than two steps, because then no interval is known.
    pub change: Option<Change>,
}

impl Unit {
    fn shown(self, value: f64) -> String {
        match self {
            Self::Ms => number::ms(value),
            Self::Share => number::percent(value),
            Self::PerSecond => format!("{}/s", number::number(value)),
            Self::Bytes => number::memory_size(value as u64),
            Self::Plain => number::number(value),
        }
    }

    /// A change in words, always with its sign.
    fn shown_change(self, value: f64) -> String {
        let text = match self {
            Self::Share => format!("{} points", number::number(100.0 * value.abs())),
            unit => unit.shown(value.abs()),
        };
        // What is shown as 0 has no sign.
        let sign = match value {
            _ if !text.contains(|c: char| ('1'..='9').contains(&c)) => "",
            v if v < 0.0 => "-",
            _ => "+",
        };
        format!("{sign}{text}")
    }
}

impl AgainstRow {
    /// The cells of the table: name, both values, the change, and its interval.
    pub fn cells(&self) -> [String; 5] {
        let none = || number::NONE.to_owned();
        let value = |at: usize| self.values[at].map_or_else(none, |value| self.unit.shown(value));
        let (change, interval) = match (self.change, self.values) {
            (Some(Change::Ratio(of)), _) => {
                let part = |ratio: f64| number::signed_percent(ratio - 1.0);
                (part(of.mean), format!("{} to {}", part(of.low), part(of.high)))
            }
            (Some(Change::Difference(of)), _) => {
                let part = |value: f64| self.unit.shown_change(value);
                (part(of.mean), format!("{} to {}", part(of.low), part(of.high)))
            }
            (None, [Some(first), Some(second)]) => (self.unit.shown_change(second - first), none()),
            (None, _) => (none(), none()),
        };
        [self.name.clone(), value(0), value(1), change, interval]
    }

    /// Whether the interval shows that there is a change: it does not contain "no change".
    pub fn is_sure(&self) -> bool {
        match self.change {
            Some(Change::Ratio(of)) => of.low > 1.0 || of.high < 1.0,
            Some(Change::Difference(of)) => of.low > 0.0 || of.high < 0.0,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_is_shown_as_nothing_has_no_sign() {
        let shown = [0.0, -1e-9, -0.25, 0.25].map(|value| Unit::Plain.shown_change(value));
        assert_eq!(shown, ["0", "0", "-0.250", "+0.250"]);
    }

    #[test]
    fn cells_say_value_change_and_interval() {
        let interval = |mean, low, high| Interval { mean, low, high };
        let row = |unit, values, change| AgainstRow { name: "x".to_owned(), unit, values, change };
        let faster = row(Unit::Ms, [Some(100.0), Some(80.0)], Some(Change::Ratio(interval(0.8, 0.75, 0.85))));
        assert_eq!(faster.cells(), ["x", "100.0 ms", "80.0 ms", "-20.0 %", "-25.0 % to -15.0 %"]);
        assert!(faster.is_sure());
        let idle = row(
            Unit::Share,
            [Some(0.25), Some(0.125)],
            Some(Change::Difference(interval(-0.125, -0.26, 0.01))),
        );
        assert_eq!(idle.cells()[3..], ["-12.5 points", "-26.0 points to +1.00 points"]);
        assert!(!idle.is_sure());
        let unsure = row(Unit::Share, [Some(0.25), None], None);
        assert_eq!(unsure.cells()[1..], ["25.0 %", number::NONE, number::NONE, number::NONE]);
        let bytes = row(Unit::Bytes, [Some(2_147_483_648.0), Some(1_073_741_824.0)], None);
        assert_eq!(bytes.cells()[3], "-1.00 GiB");
    }
}
