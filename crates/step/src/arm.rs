//! Arms: the ways to schedule a global batch that can be compared, from what trainers do to all that dflop does.

use std::{fmt, str::FromStr};
use thiserror::Error;

/// How much of the data the schedule looks at. The methods stand in order: each looks at more than the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// Arrival order and equal counts, on both sides of the boundary. A trainer that does not look at the data does this.
    Blind,
    /// Buckets balanced by LLM tokens alone, longest first (LPT): the balancing that other trainers have.
    Tokens,
    /// Buckets balanced by the predicted times of both components.
    Balanced,
    /// As `Balanced`; the simulator chooses which buckets form a microbatch, and the order of the microbatches.
    Ordered,
    /// As `Ordered`, with smaller buckets where the pipeline fills and drains. Then single samples are moved as long as that
    /// makes the simulated step shorter.
    Shaped,
    /// As `Shaped`, with action lists made for the step if the pipeline order of the plan is `data-aware`.
    Aware,
}

/// A way to schedule a global batch: a method, and how far forwards may run ahead.
///
/// # Examples
/// ```
/// use dflop_step::Arm;
/// assert_eq!("aware".parse(), Ok(Arm::AWARE));
/// assert_eq!("blind-ahead".parse::<Arm>().unwrap().to_string(), "blind-ahead");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arm {
    /// How much of the data it looks at.
    pub method: Method,
    /// Whether forwards run ahead as far as memory allows. Otherwise no more microbatches are in flight than under the
    /// pipeline order of the plan.
    pub is_ahead: bool,
}

impl Arm {
    /// All that dflop does, without running ahead.
    pub const AWARE: Self = Self { method: Method::Aware, is_ahead: false };
    /// Arrival order, without running ahead: what a trainer does that does not look at the data.
    pub const BLIND: Self = Self { method: Method::Blind, is_ahead: false };
}

const METHODS: [(Method, &str); 6] = [
    (Method::Blind, "blind"),
    (Method::Tokens, "tokens"),
    (Method::Balanced, "balanced"),
    (Method::Ordered, "ordered"),
    (Method::Shaped, "shaped"),
    (Method::Aware, "aware"),
];

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = METHODS.iter().find(|(method, _)| *method == self.method).map_or("", |(_, name)| name);
        write!(f, "{name}{}", if self.is_ahead { "-ahead" } else { "" })
    }
}

/// A text that names no arm.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "arm `{0}`, must be one of: blind, tokens, balanced, ordered, shaped, aware; each also with `-ahead`"
)]
pub struct ParseArmError(pub String);

impl FromStr for Arm {
    type Err = ParseArmError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, is_ahead) = text.strip_suffix("-ahead").map_or((text, false), |name| (name, true));
        let found = METHODS.iter().find(|(_, known)| *known == name);
        found.map(|&(method, _)| Self { method, is_ahead }).ok_or_else(|| ParseArmError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (method, _) in METHODS {
            for is_ahead in [false, true] {
                let arm = Arm { method, is_ahead };
                assert_eq!(arm.to_string().parse(), Ok(arm));
            }
        }
        for text in ["", "-ahead", "Aware", "aware-", "aware-ahead-ahead"] {
            assert_eq!(text.parse::<Arm>(), Err(ParseArmError(text.to_owned())));
        }
    }
}
