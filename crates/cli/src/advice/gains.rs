//! What the lines gain over the best of the other ways, and what is worth adding.

use super::estimate::Estimate;
use super::ways::{Simulated, Way};

/// What the first line and both lines give over the best of the other ways.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gains {
    /// The best of the other ways.
    pub(crate) best: Way,
    /// Its step over ours.
    pub(crate) line: Estimate,
    /// Its step over that with both lines.
    pub(crate) both: Estimate,
    /// Its step over that of the first line with `remove_padding`; `None` where rows are not padded.
    pub(crate) removed: Option<Estimate>,
    /// The step of `best`, divided by the step with both lines and `remove_padding`. `None`: rows are not padded.
    pub(crate) both_removed: Option<Estimate>,
}

/// Which of the first two lines are worth adding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lines {
    None,
    First,
    Both,
}

impl Lines {
    /// Its name in JSON.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::None => "nothing",
            Self::First => "line",
            Self::Both => "both",
        }
    }
}

/// What is worth adding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Advice {
    pub(crate) lines: Lines,
    /// Whether the third line, `remove_padding`, is worth adding to them.
    pub(crate) removes_padding: bool,
}

impl Advice {
    pub(crate) const NOTHING: Self = Self { lines: Lines::None, removes_padding: false };
}

/// A gain below this is not worth a change of code, and no further line worth its own.
const GAIN_MIN: f64 = 1.01;

impl Gains {
    /// Of all ways, as [`Mixture::simulate`] gives them.
    pub(crate) fn of(all: &[Simulated]) -> Self {
        let one = Estimate { mean: 1.0, half: None };
        let of = |way| all.iter().find(|s| s.way == way).map_or(one, |s| s.over_bound);
        let others = all.iter().filter(|simulated| simulated.way.is_other());
        let best = others.min_by(|a, b| a.over_bound.mean.total_cmp(&b.over_bound.mean));
        let best = best.map_or(Way::Arrival, |simulated| simulated.way);
        let over = |way| all.iter().any(|simulated| simulated.way == way).then(|| of(best).over(of(way)));
        Self {
            best,
            line: of(best).over(of(Way::Line)),
            both: of(best).over(of(Way::Both)),
            removed: over(Way::Removed),
            both_removed: over(Way::BothRemoved),
        }
    }

    /// A line pays where its gain is 1 % at least and certain; a further one where it adds as much, and can be had.
    pub(crate) fn advice(&self, has_second_line: bool) -> Advice {
        let (mut found, mut enough) = (Advice::NOTHING, GAIN_MIN);
        let all = [
            (Lines::First, false, Some(self.line)),
            (Lines::Both, false, Some(self.both)),
            (Lines::First, true, self.removed),
            (Lines::Both, true, self.both_removed),
        ];
        for (lines, removes_padding, gain) in all {
            let can_be_had = has_second_line || lines != Lines::Both;
            if let Some(gain) = gain.filter(|gain| can_be_had && gain.mean >= enough && gain.low() > 1.0) {
                found = Advice { lines, removes_padding };
                enough = gain.mean * GAIN_MIN;
            }
        }
        found
    }
}
