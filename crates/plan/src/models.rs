//! The cost model of each way to recompute that the profile knows.

use dflop_cost::{ComponentSettings, CostError, CostModel, CostSettings};
use dflop_types::{ModelProfile, Recompute, Trained};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One cost model for each mode of recomputation that was measured.
#[derive(Debug, Clone)]
pub(crate) struct Models {
    plain: Arc<CostModel>,
    others: BTreeMap<Recompute, Arc<CostModel>>,
}

impl Models {
    /// Those of a profile, where `trained` trains, on nodes of so many ranks; layers of encoder and LLM backbone are
    /// each cut over so many of them.
    ///
    /// # Errors
    /// As [`CostModel::with`]. A mode that was not measured is no error: there is no model of it.
    pub(crate) fn new(
        profile: &ModelProfile,
        trained: Trained,
        ranks_per_node: u32,
        [encoder, llm]: [u32; 2],
    ) -> Result<Self, CostError> {
        let cut =
            |degree| ComponentSettings { tensor_parallel_degree: degree, ..ComponentSettings::default() };
        let settings = CostSettings { encoder: cut(encoder), llm: cut(llm), trained };
        let with = |mode| {
            let model = CostModel::with(profile, &settings.recomputing(mode))?;
            Ok::<_, CostError>(Arc::new(model.with_ranks_per_node(ranks_per_node)))
        };
        let of = |mode| Some((mode, with(mode).ok()?));
        Ok(Self {
            plain: with(Recompute::None)?,
            others: [Recompute::Selective, Recompute::Full].into_iter().filter_map(of).collect(),
        })
    }

    /// The modes there are, none first.
    pub(crate) fn modes(&self) -> impl Iterator<Item = Recompute> + '_ {
        std::iter::once(Recompute::None).chain(self.others.keys().copied())
    }

    /// The model where nothing is recomputed.
    pub(crate) const fn plain(&self) -> &Arc<CostModel> {
        &self.plain
    }

    /// The model of a mode; of one that was not measured, that of none.
    pub(crate) fn of(&self, recompute: Recompute) -> &Arc<CostModel> {
        self.others.get(&recompute).unwrap_or(&self.plain)
    }
}
