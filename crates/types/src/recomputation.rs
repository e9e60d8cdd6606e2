//! Recomputation: what the layers of each component do not keep for the backward.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use thiserror::Error;

/// What the forward recomputes in the backward instead of keeping it. Each keeps less than those before it.
///
/// # Examples
/// ```
/// use dflop_types::Recompute;
/// let first: Recompute = "full:12".parse().unwrap();
/// assert_eq!(first.first_layers(28), 12);
/// assert_eq!(first.first_layers(9), 9);
/// assert!(Recompute::Selective < first && first < Recompute::Full);
/// assert!("selective:12".parse::<Recompute>().unwrap() < Recompute::Selective);
/// assert_eq!(
///     "full:0".parse::<Recompute>().unwrap_err().to_string(),
///     "`full:0`: must be `none`, `selective`, `full`, or `selective:K` or `full:K` with a whole number K of 1 or more"
/// );
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Recompute {
    /// Nothing: all activations are kept.
    #[default]
    None,
    /// Of each stage so many layers, its first ones, as in [`Recompute::Selective`]; its others keep everything.
    SelectiveOf(NonZeroU32),
    /// All but the outputs of matrix products and attention.
    Selective,
    /// Of each stage so many layers, its first ones, as in [`Recompute::Full`]; its others as in [`Recompute::Selective`].
    /// A chunk of an interleaved rank is a stage. A stage of fewer layers has all of them in full.
    FullOf(NonZeroU32),
    /// Everything: only the input of the layer is kept.
    Full,
}

impl Recompute {
    /// Those in which all layers do the same, which is what can be measured of one layer.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];

    /// `full` in so many layers of each stage: `selective` for 0.
    pub fn full_of(num_layers: u32) -> Self {
        NonZeroU32::new(num_layers).map_or(Self::Selective, Self::FullOf)
    }

    /// How many of the layers of a stage, its first ones, recompute more than its others; 0 where all layers do the same.
    pub fn first_layers(self, num_layers: u32) -> u32 {
        self.first_layers_wanted().min(num_layers)
    }

    /// The layers of each stage that are asked to recompute more than its others; 0 where all layers do the same.
    pub const fn first_layers_wanted(self) -> u32 {
        match self {
            Self::SelectiveOf(first) | Self::FullOf(first) => first.get(),
            _ => 0,
        }
    }

    /// What the first layers of a stage do.
    #[must_use]
    pub const fn of_first(self) -> Self {
        match self {
            Self::SelectiveOf(_) => Self::Selective,
            Self::FullOf(_) => Self::Full,
            of_all => of_all,
        }
    }

    /// What the layers of a stage do that are not among its first ones.
    #[must_use]
    pub const fn of_rest(self) -> Self {
        match self {
            Self::SelectiveOf(_) => Self::None,
            Self::FullOf(_) => Self::Selective,
            of_all => of_all,
        }
    }
}

/// The name, as files, flags and people write it.
impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.pad("none"),
            Self::SelectiveOf(num_layers) => f.pad(&format!("selective:{num_layers}")),
            Self::Selective => f.pad("selective"),
            Self::FullOf(num_layers) => f.pad(&format!("full:{num_layers}")),
            Self::Full => f.pad("full"),
        }
    }
}

/// A text that is no mode of recomputation.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}`: must be {MODES}")]
pub struct ParseRecomputeError(String);

/// What a mode may be.
const MODES: &str =
    "`none`, `selective`, `full`, or `selective:K` or `full:K` with a whole number K of 1 or more";

impl ParseRecomputeError {
    /// The rule, without the text that breaks it.
    pub const RULE: &'static str = MODES;
}

impl FromStr for Recompute {
    type Err = ParseRecomputeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let of_all = Self::ALL.into_iter().find(|mode| mode.to_string() == text);
        let of_first = || {
            let (mode, num_layers) = text.split_once(':')?;
            let num_layers = num_layers.parse().ok()?;
            match mode {
                "selective" => Some(Self::SelectiveOf(num_layers)),
                "full" => Some(Self::FullOf(num_layers)),
                _ => None,
            }
        };
        of_all.or_else(of_first).ok_or_else(|| ParseRecomputeError(text.to_owned()))
    }
}

impl TryFrom<String> for Recompute {
    type Error = ParseRecomputeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Recompute> for String {
    fn from(mode: Recompute) -> Self {
        mode.to_string()
    }
}

/// The mode of recomputation of each component's layers. Files hold one word where both have the same mode, and else the
/// word of each.
///
/// # Examples
/// ```
/// use dflop_types::{Recomputation, Recompute};
/// let unequal = Recomputation { encoder: Recompute::None, llm: Recompute::Full };
/// assert_eq!(unequal.to_string(), "llm full");
/// assert_eq!(Recomputation::both(Recompute::Full).to_string(), "full");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Recomputation {
    /// Of the encoder.
    pub encoder: Recompute,
    /// Of the LLM backbone.
    pub llm: Recompute,
}

impl Recomputation {
    /// Both components keep everything.
    pub const NONE: Self = Self::both(Recompute::None);

    /// The same mode for both components.
    pub const fn both(mode: Recompute) -> Self {
        Self { encoder: mode, llm: mode }
    }

    /// Every pair of modes in which all layers do the same; a pair stands behind all pairs that recompute less in one component and no more in the other.
    pub fn all() -> impl Iterator<Item = Self> {
        Recompute::ALL
            .into_iter()
            .flat_map(|encoder| Recompute::ALL.into_iter().map(move |llm| Self { encoder, llm }))
    }

    /// Whether neither component recomputes anything.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// The mode of both components if it is the same.
    pub fn of_both(self) -> Option<Recompute> {
        (self.encoder == self.llm).then_some(self.encoder)
    }

    /// Whether all layers of a component do the same, in both components.
    pub fn has_even_layers(self) -> bool {
        self.encoder.first_layers_wanted() == 0 && self.llm.first_layers_wanted() == 0
    }

    /// The same, with no component recomputing more than in `most`.
    #[must_use]
    pub fn at_most(self, most: Self) -> Self {
        Self { encoder: self.encoder.min(most.encoder), llm: self.llm.min(most.llm) }
    }

    /// Whether neither component recomputes more than in `other`.
    pub fn is_at_most(self, other: Self) -> bool {
        self.encoder <= other.encoder && self.llm <= other.llm
    }
}

/// `full`, or `llm full`, or `encoder selective and llm full`; a component that recomputes nothing is not named.
impl fmt::Display for Recomputation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { encoder, llm } = *self;
        match (encoder, llm) {
            (one, other) if one == other => one.fmt(f),
            (_, Recompute::None) => write!(f, "encoder {encoder}"),
            (Recompute::None, _) => write!(f, "llm {llm}"),
            _ => write!(f, "encoder {encoder} and llm {llm}"),
        }
    }
}

/// How files hold [`Recomputation`].
#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "must be `none`, `selective`, `full`, `selective:K` or `full:K` (K layers of each stage, 1 or more), or an object with one of them as `encoder` and one as `llm`"
)]
enum Written {
    Both(Recompute),
    Each { encoder: Recompute, llm: Recompute },
}

impl From<Written> for Recomputation {
    fn from(written: Written) -> Self {
        match written {
            Written::Both(mode) => Self::both(mode),
            Written::Each { encoder, llm } => Self { encoder, llm },
        }
    }
}

impl From<Recomputation> for Written {
    fn from(of: Recomputation) -> Self {
        of.of_both().map_or(Self::Each { encoder: of.encoder, llm: of.llm }, Self::Both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_hold_one_word_where_both_are_equal() {
        for one in Recomputation::all() {
            let text = serde_json::to_string(&one).unwrap();
            assert_eq!(text.starts_with('"'), one.of_both().is_some(), "{text}");
            assert_eq!(serde_json::from_str::<Recomputation>(&text).unwrap(), one);
        }
        let unequal = Recomputation { encoder: Recompute::Selective, llm: Recompute::None };
        assert_eq!(serde_json::to_string(&unequal).unwrap(), r#"{"encoder":"selective","llm":"none"}"#);
        let some = Recomputation { encoder: Recompute::Selective, llm: Recompute::full_of(12) };
        assert_eq!(serde_json::to_string(&some).unwrap(), r#"{"encoder":"selective","llm":"full:12"}"#);
        assert_eq!(serde_json::from_str::<Recomputation>(r#""full:3""#).unwrap().llm, Recompute::full_of(3));
        for wrong in [
            r#""some""#,
            r#""full:0""#,
            r#""full:-1""#,
            r#""full:""#,
            r#""full:1.5""#,
            r#""selective:0""#,
            r#""none:2""#,
            r#"{"encoder":"full"}"#,
            r#"{"encoder":"full","llm":"some"}"#,
        ] {
            assert!(serde_json::from_str::<Recomputation>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_pair_stands_behind_those_that_recompute_less() {
        let all: Vec<Recomputation> = Recomputation::all().collect();
        assert_eq!(all.len(), 9);
        assert_eq!(all[0], Recomputation::NONE);
        for (at, one) in all.iter().enumerate() {
            assert!(all[at + 1..].iter().all(|later| !later.is_at_most(*one)));
        }
    }

    #[test]
    fn people_read_what_is_recomputed() {
        let words = |encoder, llm| Recomputation { encoder, llm }.to_string();
        let (none, selective, full) = (Recompute::None, Recompute::Selective, Recompute::Full);
        assert_eq!(words(none, none), "none");
        assert_eq!(words(selective, none), "encoder selective");
        assert_eq!(words(selective, full), "encoder selective and llm full");
        assert_eq!(words(none, Recompute::full_of(12)), "llm full:12");
        assert_eq!(Recompute::full_of(0), selective);
    }

    #[test]
    fn more_layers_in_full_are_more_recomputation() {
        let of = |num_layers| Recomputation::both(Recompute::full_of(num_layers));
        for (less, more) in [(0, 1), (1, 2), (2, 1_000)] {
            assert!(of(less).is_at_most(of(more)) && !of(more).is_at_most(of(less)));
        }
        assert!(of(1_000).is_at_most(Recomputation::both(Recompute::Full)));
        let layers = [Recompute::None, Recompute::Selective, Recompute::full_of(5), Recompute::Full];
        assert_eq!(layers.map(|mode| mode.first_layers(7)), [0, 0, 5, 0]);
        assert_eq!(layers.map(|mode| mode.first_layers(3)), [0, 0, 3, 0]);
    }
}
