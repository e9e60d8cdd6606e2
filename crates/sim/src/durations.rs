//! Durations: how long each action of one pipeline takes, as measured or made up by a person.

use crate::engine::SLOTS_MAX;
use crate::error::{SimError, Violation};
use crate::rows::DurationRows;
use dflop_types::PipelineOrder;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const FIELDS: [&str; 5] = ["forward_ns", "backward_ns", "transfer_ns", "input_ns", "weight_ns"];

/// Durations of one pipeline of p stages; what `dflop simulate --durations` reads.
///
/// *Invariants* (checked by [`Durations::check`]): at least one stage; both lists have the same stages; every
/// stage has the same number of microbatches (0 is allowed: an empty step).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Durations {
    /// Forward of `[stage][microbatch]`, in nanoseconds.
    pub forward_ns: Vec<Vec<u64>>,
    /// Backward of `[stage][microbatch]`, in nanoseconds.
    pub backward_ns: Vec<Vec<u64>>,
    /// The part of the backward that gives the gradient of the stage's input (I), as `backward_ns`; empty if no backward
    /// is split.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input_ns: Vec<Vec<u64>>,
    /// The part that gives the gradients of the weights (W), as `input_ns`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight_ns: Vec<Vec<u64>>,
    /// What an action's output takes to the neighbouring stage, in nanoseconds.
    pub transfer_ns: u64,
}

impl Durations {
    /// The durations in a JSON text, checked.
    ///
    /// A whole number written with a fraction (`3.0`) is taken as that number.
    ///
    /// # Errors
    /// [`SimError::Json`] if the text is not JSON, [`SimError::Unsound`] with every violation of its content.
    ///
    /// # Examples
    /// ```
    /// let text = r#"{"forward_ns": [[1, 1], [1]], "backward_ns": [[2, -2], [2, 2]], "transfer_ns": 0}"#;
    /// let error = dflop_sim::Durations::from_json(text).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "the durations cannot be simulated\n  \
    ///      backward_ns[0][1]: -2, expected a whole number of nanoseconds\n  \
    ///      forward_ns[1]: 1 microbatch, stage 0 has 2"
    /// );
    /// ```
    pub fn from_json(text: &str) -> Result<Self, SimError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| SimError::Json { cause: error.to_string() })?;
        let mut violations = Vec::new();
        let mut durations = Self::default();
        if let Value::Object(fields) = &value {
            for key in fields.keys() {
                if !FIELDS.contains(&key.as_str()) {
                    violations.push(Violation::Unknown { path: key.clone() });
                }
            }
            let field = |path, violations: &mut Vec<_>| {
                let found = fields.get(path);
                if found.is_none() {
                    violations.push(Violation::Missing { path });
                }
                found
            };
            if let Some(found) = field("forward_ns", &mut violations) {
                durations.forward_ns = stages("forward_ns", found, &mut violations);
            }
            if let Some(found) = field("backward_ns", &mut violations) {
                durations.backward_ns = stages("backward_ns", found, &mut violations);
            }
            for (path, list) in
                [("input_ns", &mut durations.input_ns), ("weight_ns", &mut durations.weight_ns)]
            {
                if let Some(found) = fields.get(path) {
                    *list = stages(path, found, &mut violations);
                }
            }
            if let Some(found) = field("transfer_ns", &mut violations) {
                durations.transfer_ns = time(|| "transfer_ns".to_owned(), found, &mut violations);
            }
        } else {
            violations.push(kind("durations".to_owned(), &value, "an object"));
        }
        // A missing list has been reported already. Here it would be reported again, as a list of 0 stages.
        if rows_are_lists(&value) {
            violations.extend(durations.violations());
        }
        if violations.is_empty() { Ok(durations) } else { Err(unsound(violations)) }
    }

    /// Nothing if the invariants hold.
    ///
    /// # Errors
    /// [`SimError::Unsound`] with every invariant that does not.
    pub fn check(&self) -> Result<(), SimError> {
        let violations = self.violations();
        if violations.is_empty() { Ok(()) } else { Err(unsound(violations)) }
    }

    /// Microbatches of each stage; if stages differ, those of stage 0.
    pub(crate) fn num_microbatches(&self) -> usize {
        self.forward_ns.first().map_or(0, Vec::len)
    }

    /// Stages and microbatches.
    ///
    /// # Errors
    /// As [`Self::check`], or if the actions are too many.
    pub(crate) fn sizes(&self) -> Result<(u32, u32), SimError> {
        self.check()?;
        let (p, m) = (self.forward_ns.len(), self.num_microbatches());
        let actions = 3 * p as u128 * m as u128;
        let is_few = actions <= u128::from(SLOTS_MAX);
        let sizes = u32::try_from(p).ok().zip(u32::try_from(m).ok()).filter(|_| is_few);
        sizes.ok_or_else(|| unsound(vec![Violation::TooMany { actions }]))
    }

    /// Nothing if one rank a stage can run `order`.
    pub(crate) fn check_order(&self, order: PipelineOrder) -> Result<(), SimError> {
        let (path, needs) = match order {
            PipelineOrder::Interleaved => ("ranks", "several stages a rank, so fewer ranks than stages"),
            order if crate::order::is_split(order) && !self.has_split() => {
                ("order", "`input_ns` and `weight_ns`")
            }
            _ => return Ok(()),
        };
        Err(unsound(vec![Violation::Order { path, order, needs }]))
    }

    /// Whether there are times of I and W.
    pub(crate) fn has_split(&self) -> bool {
        !self.input_ns.is_empty() || !self.weight_ns.is_empty()
    }

    pub(crate) fn rows(&self) -> DurationRows<'_> {
        DurationRows {
            forward_ns: &self.forward_ns,
            backward_ns: &self.backward_ns,
            input_ns: &self.input_ns,
            weight_ns: &self.weight_ns,
        }
    }

    fn violations(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        let expected = self.num_microbatches();
        if self.forward_ns.is_empty() {
            violations.push(Violation::Zero { path: "forward_ns".to_owned(), what: "stage" });
        }
        let mut lists = vec![("forward_ns", &self.forward_ns), ("backward_ns", &self.backward_ns)];
        // I and W go together: if one list is there, the other must be there too.
        if self.has_split() {
            lists.extend([("input_ns", &self.input_ns), ("weight_ns", &self.weight_ns)]);
        }
        for (name, list) in &lists {
            if list.len() != self.forward_ns.len() {
                violations.push(Violation::Count {
                    path: (*name).to_owned(),
                    found: list.len(),
                    what: "stage",
                    other: "forward_ns",
                    expected: self.forward_ns.len(),
                });
            }
        }
        for (name, list) in lists {
            for (stage, found) in
                list.iter().map(Vec::len).enumerate().filter(|&(_, found)| found != expected)
            {
                // Nothing to compare with: the missing stages have been named above.
                if self.forward_ns.is_empty() {
                    break;
                }
                violations.push(Violation::Count {
                    path: format!("{name}[{stage}]"),
                    found,
                    what: "microbatch",
                    other: if stage == 0 { "forward_ns[0]" } else { "stage 0" },
                    expected,
                });
            }
        }
        violations
    }
}

fn unsound(violations: Vec<Violation>) -> SimError {
    SimError::Unsound { subject: "the durations", violations }
}

fn rows_are_lists(value: &Value) -> bool {
    let is_rows = |value: &Value| value.as_array().is_some_and(|rows| rows.iter().all(Value::is_array));
    ["forward_ns", "backward_ns"].iter().all(|name| value.get(name).is_some_and(is_rows))
        && ["input_ns", "weight_ns"].iter().all(|name| value.get(name).is_none_or(is_rows))
}

fn stages(name: &str, value: &Value, violations: &mut Vec<Violation>) -> Vec<Vec<u64>> {
    let Value::Array(stages) = value else {
        violations.push(kind(name.to_owned(), value, "a list of stages"));
        return Vec::new();
    };
    let mut read = Vec::with_capacity(stages.len());
    for (stage, value) in stages.iter().enumerate() {
        let Value::Array(row) = value else {
            violations.push(kind(format!("{name}[{stage}]"), value, "a list of times, one a microbatch"));
            read.push(Vec::new());
            continue;
        };
        let path = |microbatch| move || format!("{name}[{stage}][{microbatch}]");
        read.push(row.iter().enumerate().map(|(at, value)| time(path(at), value, violations)).collect());
    }
    read
}

fn time(path: impl Fn() -> String, value: &Value, violations: &mut Vec<Violation>) -> u64 {
    // Above 2^53 a float no longer says which integer was meant.
    let whole = |number: f64| number.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(&number);
    if let Some(time) = value.as_u64() {
        time
    } else if let Some(number) = value.as_f64().filter(|&number| whole(number)) {
        number as u64
    } else {
        violations.push(kind(path(), value, "a whole number of nanoseconds"));
        0
    }
}

fn kind(path: String, value: &Value, expected: &'static str) -> Violation {
    let mut found = value.to_string();
    if let Some((cut, _)) = found.char_indices().nth(40) {
        found.truncate(cut);
        found.push_str("...");
    }
    Violation::Kind { path, found, expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(text: &str) -> Vec<String> {
        match Durations::from_json(text) {
            Err(SimError::Unsound { violations, .. }) => violations.iter().map(ToString::to_string).collect(),
            other => panic!("{other:?}"),
        }
    }

    /// A sound text gives the durations, `3.0` and 0 microbatches included.
    #[test]
    fn sound_texts() {
        let text =
            r#"{"transfer_ns": 3.0, "forward_ns": [[1, 2]], "backward_ns": [[3, 18446744073709551615]]}"#;
        let expected = Durations {
            forward_ns: vec![vec![1, 2]],
            backward_ns: vec![vec![3, u64::MAX]],
            transfer_ns: 3,
            ..Durations::default()
        };
        assert_eq!(Durations::from_json(text), Ok(expected.clone()));
        assert_eq!(Durations::from_json(&serde_json::to_string(&expected).unwrap()), Ok(expected));
        let empty = r#"{"forward_ns": [[], []], "backward_ns": [[], []], "transfer_ns": 0}"#;
        assert_eq!(Durations::from_json(empty).unwrap().num_microbatches(), 0);
    }

    /// Every violation is listed with its place, none twice.
    #[test]
    fn every_problem_is_listed() {
        assert_eq!(
            violations(
                r#"{"forward_ns": [[1,1,1,1],[1,1,1]], "backward_ns": [[1,1],[1,1,1,1],[1]], "transfer_ns": 0}"#
            ),
            [
                "backward_ns: 3 stages, forward_ns has 2",
                "forward_ns[1]: 3 microbatches, stage 0 has 4",
                "backward_ns[0]: 2 microbatches, forward_ns[0] has 4",
                "backward_ns[2]: 1 microbatch, stage 0 has 4",
            ]
        );
        assert_eq!(
            violations(
                r#"{"forward_ns": [[1.5, -1, "a", null, 1e+300]], "backward": 3, "transfer_ns": true}"#
            ),
            [
                "backward: unknown, the fields are `forward_ns`, `backward_ns`, `transfer_ns`, `input_ns` and `weight_ns`",
                "forward_ns[0][0]: 1.5, expected a whole number of nanoseconds",
                "forward_ns[0][1]: -1, expected a whole number of nanoseconds",
                "forward_ns[0][2]: \"a\", expected a whole number of nanoseconds",
                "forward_ns[0][3]: null, expected a whole number of nanoseconds",
                "forward_ns[0][4]: 1e+300, expected a whole number of nanoseconds",
                "backward_ns: missing",
                "transfer_ns: true, expected a whole number of nanoseconds",
            ]
        );
        assert_eq!(violations("[1]"), ["durations: [1], expected an object"]);
        assert_eq!(
            violations(r#"{"forward_ns": [], "backward_ns": [], "transfer_ns": 0}"#),
            ["forward_ns: 0 stages, at least 1 is needed"]
        );
        assert_eq!(
            violations(r#"{"forward_ns": [3], "backward_ns": [[3]], "transfer_ns": 0}"#),
            ["forward_ns[0]: 3, expected a list of times, one a microbatch"]
        );
        assert_eq!(
            violations(&format!(
                r#"{{"forward_ns": "{}", "backward_ns": [[3]], "transfer_ns": 0}}"#,
                "x".repeat(99)
            )),
            [format!("forward_ns: \"{}..., expected a list of stages", "x".repeat(39))]
        );
    }

    /// What is no JSON names line and column.
    #[test]
    fn broken_json() {
        let error = Durations::from_json("{\"forward_ns\": [[1,}").unwrap_err();
        assert_eq!(error.to_string(), "durations are not JSON: expected value at line 1 column 20");
    }
}
