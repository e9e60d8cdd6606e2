//! The cost models of a search. A way to run the components (tensor degrees, recomputation) has a cost model of its own if
//! the model profile has times for it.

use crate::error::PlanError;
use crate::input::SearchInput;
use crate::space::Candidate;
use dflop_cost::{ComponentSettings, CostModel, CostSettings};
use dflop_step::{Easing, expert_degrees, tensor_degrees};
use dflop_types::{Recomputation, Recompute, Trained};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// Up to so many ranks, components with different modes of recomputation are tried where nobody asks for them. On more ranks
/// they would take half as long again as the rest of the search, and a rank has memory to spare: states are cut over all.
const UNEQUAL_RANKS: u32 = 128;

/// How the encoder and the LLM backbone run: for each, the ranks that a layer is cut over, and what it recomputes; and over how
/// many ranks experts are dealt out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) encoder: (u32, Recompute),
    pub(crate) llm: (u32, Recompute),
    /// Ranks among which experts are dealt out; 1: each rank has them all.
    pub(crate) experts: u32,
}

impl Way {
    const PLAIN: Self = Self { encoder: (1, Recompute::None), llm: (1, Recompute::None), experts: 1 };

    pub(crate) const fn new([encoder, llm]: [u32; 2], modes: Recomputation) -> Self {
        Self { encoder: (encoder, modes.encoder), llm: (llm, modes.llm), experts: 1 }
    }

    /// How the cost model is asked for it.
    const fn settings(&self, trained: Trained) -> CostSettings {
        let (encoder, llm) = (self.encoder, self.llm);
        CostSettings {
            encoder: ComponentSettings {
                tensor_parallel_degree: encoder.0,
                expert_parallel_degree: 1,
                recompute: encoder.1,
            },
            llm: ComponentSettings {
                tensor_parallel_degree: llm.0,
                expert_parallel_degree: self.experts,
                recompute: llm.1,
            },
            trained,
        }
    }

    /// Ranks that a layer of the encoder is cut over, one of the LLM backbone, and experts are dealt out over.
    const fn degrees(&self) -> [u32; 3] {
        [self.encoder.0, self.llm.0, self.experts]
    }

    /// What its components recompute.
    pub(crate) const fn modes(&self) -> Recomputation {
        Recomputation { encoder: self.encoder.1, llm: self.llm.1 }
    }
}

impl From<&Candidate> for Way {
    fn from(candidate: &Candidate) -> Self {
        let layout = &candidate.layout;
        let way = Self::new([layout.encoder.tp, layout.llm.tp], candidate.recompute);
        Self { experts: layout.expert_parallel_degree, ..way }
    }
}

/// Every pair of modes in which all layers of a component do the same, or what is asked for; each stands behind those that
/// recompute less.
fn pairs(asked: Recomputation) -> Vec<Recomputation> {
    let of = |asked: Recompute| {
        let mut modes: Vec<Recompute> = Recompute::ALL.into_iter().chain([asked]).collect();
        modes.sort_unstable();
        modes.dedup();
        modes
    };
    let of_llm = of(asked.llm);
    let with = |encoder| of_llm.iter().map(move |&llm| Recomputation { encoder, llm });
    of(asked.encoder).into_iter().flat_map(with).collect()
}

/// Expert parallel degrees above 1 that training can run on these ranks; none where training cannot deal out experts.
fn able_expert_degrees(input: &SearchInput<'_>) -> Vec<u32> {
    expert_degrees(input.model_profile, input.cluster.num_ranks, input.cluster.ranks_per_node)
}

/// One cost model for each way that was measured.
#[derive(Debug, Clone)]
pub(crate) struct Models {
    by_way: BTreeMap<Way, Arc<CostModel>>,
    /// For each pair of tensor degrees, and expert parallel degree, the models that microbatches of colocated ranks may take; made when first asked for.
    easing: BTreeMap<[u32; 3], OnceLock<Easing>>,
    /// Tensor degrees of encoder and LLM backbone: each pair for which there is a model.
    degrees: Vec<[u32; 2]>,
    /// Expert parallel degrees above 1 for which there is a model.
    expert_degrees: Vec<u32>,
    modes: Vec<Recomputation>,
}

impl Models {
    /// The models of all degrees and modes of recomputation that the search is asked for and that training can run.
    ///
    /// # Errors
    /// As [`CostModel::with`], for whole layers without recomputation, and for degrees and modes that somebody asked for by
    /// name. If any other way was not measured, that is no error: there is just no model of it.
    pub(crate) fn new(input: &SearchInput<'_>) -> Result<Self, PlanError> {
        Self::cut_over(input, input.only.tensor_degrees())
    }

    /// As [`Models::new`], with the tensor degrees `asked` of encoder and LLM backbone; `None`: all that training can run.
    ///
    /// # Errors
    /// As [`Models::new`].
    pub(crate) fn cut_over(input: &SearchInput<'_>, asked: [Option<u32>; 2]) -> Result<Self, PlanError> {
        let nodes = input.cluster.ranks_per_node;
        let able = tensor_degrees(input.model_profile, input.trained, nodes);
        let [of_encoder, of_llm] =
            [0, 1].map(|at| asked[at].map_or_else(|| able[at].clone(), |degree| vec![degree]));
        let with = |way: Way| {
            let model = CostModel::with(input.model_profile, &way.settings(input.trained))?;
            Ok::<_, PlanError>(Arc::new(model.with_ranks_per_node(nodes)))
        };
        let mut by_way = BTreeMap::from([(Way::PLAIN, with(Way::PLAIN)?)]);
        let asked_modes = input.only.first_modes();
        // A frozen encoder keeps nothing for a backward. What it would recompute makes no difference.
        let is_free = Recomputation::all().all(|modes| input.only.has_modes(modes));
        let has_unequal = input.trained.encoder && (input.cluster.num_ranks <= UNEQUAL_RANKS || !is_free);
        let is_distinct =
            |modes: &Recomputation| has_unequal || modes.of_both().is_some() || *modes == asked_modes;
        let mut modes = vec![Recomputation::NONE];
        for pair in pairs(asked_modes).into_iter().filter(|modes| !modes.is_none()).filter(is_distinct) {
            let way = Way::new([1, 1], pair);
            match with(way) {
                Err(error) if asked_modes == pair => return Err(error),
                Err(_) => {}
                Ok(found) => {
                    by_way.insert(way, found);
                    modes.push(pair);
                }
            }
        }
        let pairs = of_encoder.iter().flat_map(|&encoder| of_llm.iter().map(move |&llm| [encoder, llm]));
        let mut degrees = Vec::new();
        for pair in pairs {
            let is_asked = (0..2).all(|at| pair[at] == 1 || asked[at].is_some());
            match with(Way::new(pair, Recomputation::NONE)) {
                Err(error) if is_asked => return Err(error),
                Err(_) => continue,
                Ok(found) => by_way.insert(Way::new(pair, Recomputation::NONE), found),
            };
            for &mode in modes.iter().filter(|mode| !mode.is_none()) {
                match with(Way::new(pair, mode)) {
                    Err(error) if is_asked => return Err(error),
                    Err(_) => {}
                    Ok(found) => {
                        by_way.insert(Way::new(pair, mode), found);
                    }
                }
            }
            degrees.push(pair);
        }
        let expert_degrees = able_expert_degrees(input);
        for &experts in &expert_degrees {
            for &mode in &modes {
                let way = Way { experts, ..Way::new([1, 1], mode) };
                by_way.insert(way, with(way)?);
            }
        }
        let easing = by_way.keys().map(|way| (way.degrees(), OnceLock::new())).collect();
        Ok(Self { by_way, easing, degrees, expert_degrees, modes })
    }

    /// The modes of recomputation for which there is a model. `Recomputation::NONE` comes first; each stands behind those
    /// that recompute less.
    pub(crate) fn modes(&self) -> &[Recomputation] {
        &self.modes
    }

    /// Tensor degrees of encoder and LLM backbone for which there is a model, as pairs.
    pub(crate) fn degrees(&self) -> &[[u32; 2]] {
        &self.degrees
    }

    /// Expert parallel degrees above 1 for which there is a model; none where experts cannot be dealt out.
    pub(crate) fn expert_degrees(&self) -> &[u32] {
        &self.expert_degrees
    }

    /// The model of the plain way: no layer is cut, and nothing is recomputed.
    pub(crate) fn plain(&self) -> &Arc<CostModel> {
        &self.by_way[&Way::PLAIN]
    }

    /// All models, each with its way.
    pub(crate) fn ways(&self) -> impl Iterator<Item = (Way, &CostModel)> + '_ {
        self.by_way.iter().map(|(&way, model)| (way, &**model))
    }

    /// Whether there is a model of a candidate.
    pub(crate) fn has(&self, candidate: &Candidate) -> bool {
        self.by_way.contains_key(&Way::from(candidate))
    }

    /// The model of a way; if there is none, that of the plain way.
    pub(crate) fn of_way(&self, way: &Way) -> &CostModel {
        self.by_way.get(way).unwrap_or_else(|| self.plain())
    }

    /// The model of a candidate. If its way was not measured, the model of the plain way.
    pub(crate) fn of(&self, candidate: &Candidate) -> &Arc<CostModel> {
        self.by_way.get(&Way::from(candidate)).unwrap_or_else(|| self.plain())
    }

    /// The models that recompute less than candidates of the same tensor degrees may; `None` if there are none of these degrees.
    pub(crate) fn easing(&self, input: &SearchInput<'_>, candidate: &Candidate) -> Option<&Easing> {
        let way = Way::from(candidate);
        let known = self.easing.get(&way.degrees())?;
        Some(known.get_or_init(|| {
            let settings = way.settings(input.trained);
            let easing = Easing::of(input.model_profile, &settings, self.modes.iter().copied());
            easing.with_ranks_per_node(input.cluster.ranks_per_node)
        }))
    }

    /// The model of a candidate that other people run: also one whose layers recompute in part.
    pub(crate) fn of_others(&self, input: &SearchInput<'_>, candidate: &Candidate) -> &Arc<CostModel> {
        if self.has(candidate) {
            return self.of(candidate);
        }
        let partly = self.easing(input, candidate).and_then(|easing| easing.of_mode(candidate.recompute));
        partly.unwrap_or_else(|| self.plain())
    }

    /// The model of layers cut over so many ranks, in these modes of recomputation; `None` if that was not measured.
    pub(crate) fn cut(&self, degrees: [u32; 2], modes: Recomputation) -> Option<&Arc<CostModel>> {
        self.by_way.get(&Way::new(degrees, modes))
    }
}
