//! Recomputation: what the layers of each component do not keep for the backward.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What the forward recomputes in the backward instead of keeping it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: all activations are kept.
    #[default]
    None,
    /// All but the outputs of matrix products and attention.
    Selective,
    /// Everything: only the input of the layer is kept.
    Full,
}

impl Recompute {
    /// All of them; each keeps less than the one before it.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];

    /// The name, as files, flags and people write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
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

    /// Every pair of modes; a pair stands behind all pairs that recompute less in one component and no more in the other.
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

    /// Whether neither component recomputes more than in `other`.
    pub fn is_at_most(self, other: Self) -> bool {
        self.encoder <= other.encoder && self.llm <= other.llm
    }
}

/// `full`, or `llm full`, or `encoder selective and llm full`; a component that recomputes nothing is not named.
impl fmt::Display for Recomputation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [encoder, llm] = [self.encoder, self.llm].map(Recompute::name);
        match (self.encoder, self.llm) {
            (one, other) if one == other => f.pad(one.name()),
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
    expecting = "must be `none`, `selective` or `full`, or an object with one of them as `encoder` and one as `llm`"
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
        for wrong in [r#""some""#, r#"{"encoder":"full"}"#, r#"{"encoder":"full","llm":"some"}"#] {
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
    }
}
