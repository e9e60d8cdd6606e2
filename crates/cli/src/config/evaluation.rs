//! `evaluation:` of `dflop.yaml`.

use super::section::Section;
use serde::Serialize;
use std::path::PathBuf;

/// `evaluation:`
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EvaluationSection {
    /// Samples held out from training, as `data.mixture`; `null`: nothing is evaluated.
    pub mixture: Option<PathBuf>,
    /// Where their media paths start; `null`: as without `data.media_root`.
    pub media_root: Option<PathBuf>,
    /// Steps from one evaluation to the next; there is one at the end, too.
    pub every: u64,
    /// Samples of the mixture that are evaluated, drawn once; `null`: all of them.
    pub samples: Option<u64>,
}

/// The fields of `evaluation:`; `beside` says what a path or URL of the file means.
pub(super) fn evaluation_section(
    section: &mut Section<'_, '_>,
    beside: impl Fn(&str) -> PathBuf,
) -> EvaluationSection {
    EvaluationSection {
        mixture: section.optional_text("mixture").as_deref().map(&beside),
        media_root: section.optional_text("media_root").as_deref().map(&beside),
        every: section.count("every", 1..=1 << 40, Some(100)),
        samples: section.optional_count("samples", 1..=u64::from(u32::MAX)),
    }
}
