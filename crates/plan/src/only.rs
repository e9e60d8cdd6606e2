//! The choice of candidates that `dflop plan --only` makes, for example `colocated=true,zero=2`.

use dflop_types::{
    Component, Layout, ParseRecomputeError, Placement, RankOrder, Recomputation, Recompute, Zero, counted,
};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Which candidates a search looks at; by default all that this version trains.
///
/// # Examples
/// ```
/// use dflop_plan::Only;
/// use dflop_types::{Layout, Zero};
/// let only: Only = "colocated=true,zero=2".parse()?;
/// assert!(only.has_layout(&Layout::colocated(8, Zero::Gradients)));
/// assert!(!only.has_layout(&Layout::colocated(8, Zero::Parameters)));
/// # Ok::<(), dflop_plan::ParseOnlyError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Only {
    encoder_tp: Option<u32>,
    encoder_pp: Option<u32>,
    encoder_dp: Option<u32>,
    llm_tp: Option<u32>,
    llm_pp: Option<u32>,
    llm_dp: Option<u32>,
    llm_interleave: Option<u32>,
    llm_ep: Option<u32>,
    placement: Option<Placement>,
    zero: Option<Zero>,
    encoder_recompute: Option<Recompute>,
    llm_recompute: Option<Recompute>,
    cut: Option<Cut>,
    rank_order: Option<RankOrder>,
    shard_ranks: Option<u32>,
}

/// How layers are cut into stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Even,
    Uneven,
}

/// A text that is no choice of candidates.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParseOnlyError {
    /// A part without `=`, or with an unknown name.
    #[error("`{0}` names no part of a plan, must be one of: {names}", names = NAMES.join(", "))]
    Name(String),
    /// A part of one component that a plan has for both: sharding, and the way of cutting layers into stages.
    #[error("`{name}` is no choice of its own, `{both}` is: {why}; the parts of a plan are {names}", names = NAMES.join(", "))]
    Both {
        /// What was given.
        name: String,
        /// The part that asks for both components.
        both: &'static str,
        /// Why one component cannot have it alone.
        why: &'static str,
    },
    /// A value that the part cannot have.
    #[error("`{name}={value}`: must be {rule}")]
    Value {
        /// The part.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it may be.
        rule: &'static str,
    },
    /// A part that is named twice.
    #[error("`{0}` is named twice, must be once")]
    Twice(&'static str),
}

const NAMES: [&str; 16] = [
    "encoder.tp",
    "encoder.pp",
    "encoder.dp",
    "llm.tp",
    "llm.pp",
    "llm.dp",
    "llm.interleave",
    "llm.ep",
    "colocated",
    "zero",
    "recompute",
    "encoder.recompute",
    "llm.recompute",
    "cut",
    "rank_order",
    "shard_ranks",
];

/// Parts that a plan has for both components at once, and why.
const OF_BOTH: [(&str, &str); 3] = [
    (
        "cut",
        "where layers are cut unevenly, both components have the cut that makes their longest stage shortest",
    ),
    ("zero", "both components shard the same, each over its own replicas"),
    ("shard_ranks", "both components shard over as many replicas"),
];

/// The error of a part with an unknown name.
fn unknown(part: &str, name: &str) -> ParseOnlyError {
    let of_one = ["encoder.", "llm."].into_iter().find_map(|component| name.strip_prefix(component));
    match OF_BOTH.into_iter().find(|(both, _)| of_one == Some(*both)) {
        Some((both, why)) => ParseOnlyError::Both { name: name.to_owned(), both, why },
        None => ParseOnlyError::Name(part.to_owned()),
    }
}

impl FromStr for Only {
    type Err = ParseOnlyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut only = Self::default();
        let mut named: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let Some(name) = NAMES.into_iter().find(|known| *known == name.trim()) else {
                return Err(unknown(part, name.trim()));
            };
            if named.contains(&name) {
                return Err(ParseOnlyError::Twice(name));
            }
            named.push(name);
            let value = value.trim();
            let wrong = |rule| ParseOnlyError::Value { name, value: value.to_owned(), rule };
            let degree = || {
                let number = value.parse().ok().filter(|&degree: &u32| degree > 0);
                number.map(Some).ok_or_else(|| wrong("a whole number of 1 or more"))
            };
            match name {
                "encoder.tp" => only.encoder_tp = degree()?,
                "encoder.pp" => only.encoder_pp = degree()?,
                "encoder.dp" => only.encoder_dp = degree()?,
                "llm.tp" => only.llm_tp = degree()?,
                "llm.pp" => only.llm_pp = degree()?,
                "llm.dp" => only.llm_dp = degree()?,
                "llm.interleave" => only.llm_interleave = degree()?,
                "llm.ep" => only.llm_ep = degree()?,
                "shard_ranks" => only.shard_ranks = degree()?,
                "colocated" => {
                    only.placement = Some(match value {
                        "true" => Placement::Colocated,
                        "false" => Placement::Disaggregated,
                        _ => return Err(wrong("`true` or `false`")),
                    });
                }
                "zero" => {
                    let zero = value.parse().ok().and_then(|number: u8| Zero::try_from(number).ok());
                    only.zero = Some(zero.ok_or_else(|| wrong("0, 1, 2 or 3"))?);
                }
                "cut" => {
                    only.cut = Some(match value {
                        "even" => Cut::Even,
                        "uneven" => Cut::Uneven,
                        _ => return Err(wrong("`even` or `uneven`")),
                    });
                }
                "rank_order" => {
                    let order = RankOrder::ALL.into_iter().find(|order| order.to_string() == value);
                    only.rank_order = Some(order.ok_or_else(|| wrong("`tp-pp-dp` or `tp-dp-pp`"))?);
                }
                _ => {
                    let mode: Result<Recompute, _> = value.parse();
                    let mode = Some(mode.map_err(|_| wrong(ParseRecomputeError::RULE))?);
                    if name != "llm.recompute" {
                        only.encoder_recompute = mode;
                    }
                    if name != "encoder.recompute" {
                        only.llm_recompute = mode;
                    }
                }
            }
        }
        Ok(only)
    }
}

impl fmt::Display for Only {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |name: &str, number: Option<u32>| number.map(|number| format!("{name}={number}"));
        let mode = |name: &str, mode: Option<Recompute>| mode.map(|mode| format!("{name}={mode}"));
        let of_both = self.encoder_recompute.filter(|_| self.encoder_recompute == self.llm_recompute);
        let parts = [
            number("encoder.tp", self.encoder_tp),
            number("encoder.pp", self.encoder_pp),
            number("encoder.dp", self.encoder_dp),
            number("llm.tp", self.llm_tp),
            number("llm.pp", self.llm_pp),
            number("llm.dp", self.llm_dp),
            number("llm.interleave", self.llm_interleave),
            number("llm.ep", self.llm_ep),
            self.placement.map(|placement| format!("colocated={}", placement == Placement::Colocated)),
            number("zero", self.zero.map(|zero| u32::from(u8::from(zero)))),
            mode("recompute", of_both),
            mode("encoder.recompute", self.encoder_recompute.filter(|_| of_both.is_none())),
            mode("llm.recompute", self.llm_recompute.filter(|_| of_both.is_none())),
            self.cut.map(|cut| format!("cut={}", if cut == Cut::Even { "even" } else { "uneven" })),
            self.rank_order.map(|order| format!("rank_order={order}")),
            number("shard_ranks", self.shard_ranks),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

impl Only {
    /// The candidates of one placement.
    pub fn placed(placement: Placement) -> Self {
        Self { placement: Some(placement), ..Self::default() }
    }

    /// Whether a candidate may have this layout.
    pub fn has_layout(&self, layout: &Layout) -> bool {
        let is_even = layout.encoder_cut.is_none() && layout.llm_cut.is_none();
        self.has_degrees(layout)
            && self.zero.is_none_or(|zero| zero == layout.zero)
            && self.shard_ranks.is_none_or(|ranks| ranks == layout.shard_degree(Component::Llm))
            && self.cut.is_none_or(|cut| (cut == Cut::Even) == is_even)
            && (!layout.has_rank_orders() || self.rank_order.is_none_or(|order| order == layout.rank_order))
    }

    /// Whether a candidate may have the degrees and the placement of this layout.
    pub(crate) fn has_degrees(&self, layout: &Layout) -> bool {
        let is = |wanted: Option<u32>, degree| wanted.is_none_or(|wanted| wanted == degree);
        is(self.encoder_tp, layout.encoder.tp)
            && is(self.encoder_pp, layout.encoder.pp)
            && is(self.encoder_dp, layout.encoder.dp)
            && is(self.llm_tp, layout.llm.tp)
            && is(self.llm_pp, layout.llm.pp)
            && is(self.llm_dp, layout.llm.dp)
            && is(self.llm_interleave, layout.llm_interleave)
            && is(self.llm_ep, layout.expert_parallel_degree)
            && self.placement.is_none_or(|placement| placement == layout.placement)
    }

    /// Why no layout of so many ranks has these degrees, where the degrees alone tell.
    pub(crate) fn why_not(&self, num_ranks: u32) -> Option<String> {
        let product = |degrees: [Option<u32>; 3]| degrees.into_iter().flatten().fold(1, u32::saturating_mul);
        let (encoder, llm) = (
            product([self.encoder_tp, self.encoder_pp, self.encoder_dp]),
            product([self.llm_tp, self.llm_pp, self.llm_dp]),
        );
        let more_than_one = |degree: Option<u32>| degree.is_some_and(|degree| degree > 1);
        let is_pipeline = self.placement == Some(Placement::Disaggregated)
            || more_than_one(self.llm_pp)
            || more_than_one(self.encoder_pp)
            || more_than_one(self.llm_interleave);
        let least = if is_pipeline { encoder.saturating_add(llm) } else { encoder.max(llm) };
        if least > num_ranks {
            return Some(format!("which takes {} or more", counted(least.into(), "rank")));
        }
        if more_than_one(self.llm_interleave) && self.llm_pp == Some(1) {
            return Some("and `llm.interleave` needs `llm.pp` of 2 or more".to_owned());
        }
        if more_than_one(self.llm_ep)
            && (is_pipeline || more_than_one(self.llm_tp) || more_than_one(self.encoder_tp))
        {
            return Some("and experts are dealt out over colocated ranks of tp 1 alone".to_owned());
        }
        if self.placement == Some(Placement::Colocated) {
            if is_pipeline {
                return Some("and colocated ranks form no pipeline".to_owned());
            }
            if let (Some(encoder), Some(llm)) = (self.encoder_tp, self.llm_tp)
                && encoder != llm
                && encoder != 1
            {
                return Some(
                    "and on colocated ranks `encoder.tp` is 1 or that of the LLM backbone".to_owned(),
                );
            }
            let group = self.llm_tp.or(self.encoder_tp).unwrap_or(1);
            if !num_ranks.is_multiple_of(group) {
                return Some(format!("whose groups of {group} do not divide them"));
            }
            let replicas = num_ranks / group;
            if let Some(ranks) = self.shard_ranks.filter(|&ranks| !replicas.is_multiple_of(ranks)) {
                return Some(format!("and {replicas} replicas do not divide into shards of {ranks}"));
            }
        }
        if is_pipeline && self.zero == Some(Zero::Parameters) {
            return Some("and the ranks of a pipeline do not gather parameters (`zero=3`)".to_owned());
        }
        if self.cut == Some(Cut::Uneven) {
            return Some("where an even cut is the best, no other is tried".to_owned());
        }
        None
    }

    /// What replicas keep only a part of; `None` if any sharding may be tried.
    pub(crate) const fn zero(&self) -> Option<Zero> {
        self.zero
    }

    /// Over how many replicas shards are cut that is asked for; `None` if any may be tried.
    pub(crate) const fn shard_ranks(&self) -> Option<u32> {
        self.shard_ranks
    }

    /// Which ranks stand next to each other; `None` if any order may be tried.
    pub(crate) const fn rank_order(&self) -> Option<RankOrder> {
        self.rank_order
    }

    /// The number of encoder stages that is asked for; `None` if any may be tried.
    pub(crate) const fn encoder_stages(&self) -> Option<u32> {
        self.encoder_pp
    }

    /// The number of chunks of a pipeline rank that is asked for; `None` if none was.
    pub(crate) const fn chunks(&self) -> Option<u32> {
        self.llm_interleave
    }

    /// The number of ranks over which experts shall be dealt out; `None` if any may be tried.
    pub(crate) const fn expert_degree(&self) -> Option<u32> {
        self.llm_ep
    }

    /// The tensor degrees of encoder and LLM backbone that are asked for; `None` if any may be tried. Colocated components
    /// have the same, so one that is asked for is that of both.
    pub fn tensor_degrees(&self) -> [Option<u32>; 2] {
        match self.placement {
            Some(Placement::Colocated) => [self.encoder_tp.or(self.llm_tp), self.llm_tp.or(self.encoder_tp)],
            _ => [self.encoder_tp, self.llm_tp],
        }
    }

    /// Whether a mode of recomputation is asked for.
    pub(crate) const fn names_modes(&self) -> bool {
        self.encoder_recompute.is_some() || self.llm_recompute.is_some()
    }

    /// Whether candidates may use these modes of recomputation.
    pub(crate) fn has_modes(&self, recompute: Recomputation) -> bool {
        self.encoder_recompute.is_none_or(|wanted| wanted == recompute.encoder)
            && self.llm_recompute.is_none_or(|wanted| wanted == recompute.llm)
    }

    /// The modes of recomputation that a candidate is tried with first: those asked for, else none.
    pub(crate) fn first_modes(&self) -> Recomputation {
        let [encoder, llm] = [self.encoder_recompute, self.llm_recompute].map(Option::unwrap_or_default);
        Recomputation { encoder, llm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let text = "encoder.tp=2,encoder.pp=3,encoder.dp=2,llm.tp=4,llm.pp=2,llm.dp=3,llm.interleave=2,llm.ep=1,colocated=false,zero=1,recompute=full,cut=even,rank_order=tp-dp-pp,shard_ranks=8";
        let only: Only = text.parse().unwrap();
        assert_eq!(only.to_string(), text);
        assert_eq!("".parse::<Only>(), Ok(Only::default()));
        let each: Only = "encoder.recompute=none,llm.recompute=full".parse().unwrap();
        assert_eq!(each.to_string(), "encoder.recompute=none,llm.recompute=full");
        for one in ["llm.recompute=full", "llm.recompute=full:12", "recompute=full:3"] {
            assert_eq!(one.parse::<Only>().unwrap().to_string(), one);
        }
        let both: Only = "encoder.recompute=full,llm.recompute=full".parse().unwrap();
        assert_eq!(both, "recompute=full".parse().unwrap());
        // `recompute` says both, and what is said of one of them after it counts.
        assert_eq!(
            "recompute=full,encoder.recompute=none".parse::<Only>().unwrap(),
            "llm.recompute=full,encoder.recompute=none".parse().unwrap()
        );
        assert_eq!(" zero = 3 ".replace(' ', "").parse::<Only>().unwrap().to_string(), "zero=3");
    }

    #[test]
    fn degrees_that_no_layout_has_say_why() {
        let why = |text: &str, ranks| text.parse::<Only>().unwrap().why_not(ranks).unwrap_or_default();
        assert_eq!(why("llm.pp=29", 8), "which takes 30 ranks or more");
        assert_eq!(why("llm.pp=29", 30), "");
        assert_eq!(why("llm.tp=8,llm.dp=2", 15), "which takes 16 ranks or more");
        assert_eq!(why("colocated=false,encoder.dp=4,llm.tp=4", 7), "which takes 8 ranks or more");
        assert_eq!(why("llm.pp=1,llm.interleave=29", 8), "and `llm.interleave` needs `llm.pp` of 2 or more");
        assert_eq!(why("colocated=true,llm.pp=2", 8), "and colocated ranks form no pipeline");
        assert_eq!(
            why("colocated=true,encoder.tp=2,llm.tp=1", 8),
            "and on colocated ranks `encoder.tp` is 1 or that of the LLM backbone"
        );
        assert_eq!(why("colocated=true,encoder.tp=1,llm.tp=2", 8), "");
        assert_eq!(why("colocated=true,encoder.tp=1,llm.tp=5", 8), "whose groups of 5 do not divide them");
        assert_eq!(why("colocated=true,llm.tp=5", 8), "whose groups of 5 do not divide them");
        assert_eq!(
            why("colocated=true,llm.tp=2,shard_ranks=5", 64),
            "and 32 replicas do not divide into shards of 5"
        );
        assert_eq!(why("colocated=true,llm.tp=2,shard_ranks=4", 64), "");
        let alone = "and experts are dealt out over colocated ranks of tp 1 alone";
        assert_eq!([why("llm.ep=2,llm.tp=2", 8), why("llm.ep=2,llm.pp=2", 8)], [alone; 2]);
        let gathered = "and the ranks of a pipeline do not gather parameters (`zero=3`)";
        assert_eq!([why("zero=3,llm.pp=2", 8), why("colocated=false,zero=3", 8)], [gathered; 2]);
        assert_eq!(why("cut=uneven,llm.pp=3", 8), "where an even cut is the best, no other is tried");
    }

    /// A plan shards both components the same, and the search tries one uneven cut of both. Who asks for one of them is told so.
    #[test]
    fn what_both_components_share_is_not_asked_of_one() {
        let error = |text: &str| text.parse::<Only>().unwrap_err().to_string();
        let names = NAMES.join(", ");
        assert_eq!(
            error("encoder.zero=1,llm.zero=3"),
            format!(
                "`encoder.zero` is no choice of its own, `zero` is: both components shard the same, each over its own replicas; the parts of a plan are {names}"
            )
        );
        assert!(error("llm.cut=uneven").starts_with("`llm.cut` is no choice of its own, `cut` is: "));
        assert!(error("llm.shard_ranks=8").starts_with("`llm.shard_ranks` is no choice of its own"));
        assert!(error("llm.order=1").starts_with("`llm.order=1` names no part of a plan"));
        // The uneven cut itself can be asked for, and is that of either component.
        let uneven: Only = "cut=uneven".parse().unwrap();
        let degrees = |pp| dflop_types::ComponentLayout { tp: 1, pp, dp: 1 };
        let even = Layout::disaggregated(degrees(1), degrees(2));
        let cut = dflop_types::LayerCut::new(&[3, 5]).unwrap();
        assert!(!uneven.has_layout(&even) && uneven.has_layout(&Layout { llm_cut: Some(cut), ..even }));
    }

    #[test]
    fn a_wrong_part_is_named_with_what_it_may_be() {
        let error = |text: &str| text.parse::<Only>().unwrap_err().to_string();
        assert_eq!(error("zero=4"), "`zero=4`: must be 0, 1, 2 or 3");
        assert_eq!(
            error("llm.recompute=full:0"),
            "`llm.recompute=full:0`: must be `none`, `selective`, `full`, or `selective:K` or `full:K` with a whole number K of 1 or more"
        );
        assert_eq!(error("llm.tp=2,llm.tp=4"), "`llm.tp` is named twice, must be once");
        assert_eq!(error("llm.pp=0"), "`llm.pp=0`: must be a whole number of 1 or more");
        assert_eq!(error("colocated"), "`colocated=`: must be `true` or `false`");
        assert_eq!(
            error("dp=2"),
            "`dp=2` names no part of a plan, must be one of: encoder.tp, encoder.pp, encoder.dp, llm.tp, llm.pp, llm.dp, llm.interleave, llm.ep, colocated, zero, recompute, encoder.recompute, llm.recompute, cut, rank_order, shard_ranks"
        );
    }
}
