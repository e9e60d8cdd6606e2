//! The cost model of each way to recompute that the profile knows.

use dflop_cost::{ComponentSettings, CostError, CostModel, CostSettings};
use dflop_types::{ModelProfile, Recompute};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One cost model for each mode of recomputation that was measured.
#[derive(Debug, Clone)]
pub(crate) struct Models {
    plain: Arc<CostModel>,
    others: BTreeMap<Recompute, Arc<CostModel>>,
}

impl Models {
    /// Those of a profile.
    ///
    /// # Errors
    /// As [`CostModel::new`]. A mode that was not measured is no error: there is no model of it.
    pub(crate) fn new(profile: &ModelProfile) -> Result<Self, CostError> {
        let of = |recompute| {
            let component = ComponentSettings { recompute, ..ComponentSettings::default() };
            let settings = CostSettings { encoder: component, llm: component, ..CostSettings::default() };
            Some((recompute, Arc::new(CostModel::with(profile, &settings).ok()?)))
        };
        Ok(Self {
            plain: Arc::new(CostModel::new(profile)?),
            others: [Recompute::Selective, Recompute::Full].into_iter().filter_map(of).collect(),
        })
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
