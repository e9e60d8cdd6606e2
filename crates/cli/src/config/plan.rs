//! `plan:` of `dflop.yaml`.

use super::section::Section;
use serde::Serialize;

/// `plan:`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanSection {
    /// `mean` or `p95`: what of the judged steps plans are ranked by.
    pub objective: String,
}

/// The fields of `plan:`.
pub(super) fn plan_section(section: &mut Section<'_, '_>) -> PlanSection {
    PlanSection { objective: section.choice("objective", &["mean", "p95"], "mean") }
}
