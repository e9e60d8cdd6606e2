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
}

/// What is worth adding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    Nothing,
    Line,
    Both,
}

impl Advice {
    /// Its name in JSON.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Line => "line",
            Self::Both => "both",
        }
    }
}

/// A gain below this is not worth a change of code, and the second line not worth its own.
const GAIN_MIN: f64 = 1.01;

impl Gains {
    /// Of all ways, as [`Mixture::simulate`] gives them.
    pub(crate) fn of(all: &[Simulated]) -> Self {
        let one = Estimate { mean: 1.0, half: None };
        let of = |way| all.iter().find(|s| s.way == way).map_or(one, |s| s.over_bound);
        let others = all.iter().filter(|simulated| simulated.way.is_other());
        let best = others.min_by(|a, b| a.over_bound.mean.total_cmp(&b.over_bound.mean));
        let best = best.map_or(Way::Arrival, |simulated| simulated.way);
        let has_removed = all.iter().any(|simulated| simulated.way == Way::Removed);
        Self {
            best,
            line: of(best).over(of(Way::Line)),
            both: of(best).over(of(Way::Both)),
            removed: has_removed.then(|| of(best).over(of(Way::Removed))),
        }
    }

    /// A line pays where its gain is 1 % at least and certain; the second where it adds as much, and can be had.
    pub(crate) fn advice(&self, has_second_line: bool) -> Advice {
        let pays = |gain: Estimate| gain.mean >= GAIN_MIN && gain.low() > 1.0;
        let second = if pays(self.line) { self.line.mean * GAIN_MIN } else { GAIN_MIN };
        if has_second_line && pays(self.both) && self.both.mean >= second {
            Advice::Both
        } else if pays(self.line) {
            Advice::Line
        } else {
            Advice::Nothing
        }
    }
}
