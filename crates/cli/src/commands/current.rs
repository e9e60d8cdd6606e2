//! Whether a data profile is of the configuration and the data that are there now: the error names the command that makes
//! it again.

use crate::Failure;
use crate::config::Config;
use dflop_data::DataError;
use dflop_data::profile::{ProfileSettings, check_current};
use dflop_types::{Artifact as _, ArtifactError, DataProfile};
use std::path::Path;

/// `Ok` if the data profile at `path` is of this configuration and its data. Data that are not on this machine are no fault:
/// stderr says so.
pub(super) fn check_data(config: &Config, path: &Path, profile: &DataProfile) -> Result<(), Failure> {
    check(&config.profile_settings(), config, path, profile, DataProfile::MEND)
}

/// As [`check_data`], of the samples that are held out.
pub(super) fn check_evaluation(config: &Config, path: &Path, profile: &DataProfile) -> Result<(), Failure> {
    let settings = config.evaluation_settings().map_err(|rule| Failure::new(rule, None))?;
    check(&settings, config, path, profile, "dflop profile data --evaluation")
}

/// What makes the data profile stale, in words; `None` where nothing does.
pub(super) fn stale(config: &Config, profile: &DataProfile) -> Result<Option<String>, Failure> {
    match check_current(&config.profile_settings(), config.model.family.as_deref(), profile) {
        Err(DataError::Stale { name, found, expected }) => {
            // Of two hashes a person needs to know only that they differ.
            let is_hash = found.starts_with("sha256:") && expected.starts_with("sha256:");
            Ok(Some(if is_hash {
                format!("`{name}` is another one now")
            } else {
                format!("`{name}` was {found}, is {expected} now")
            }))
        }
        Err(error) => Err(error.into()),
        Ok(_) => Ok(None),
    }
}

fn check(
    settings: &ProfileSettings,
    config: &Config,
    path: &Path,
    profile: &DataProfile,
    mend: &'static str,
) -> Result<(), Failure> {
    match check_current(settings, config.model.family.as_deref(), profile) {
        Err(DataError::Stale { name, found, expected }) => {
            let (path, name) = (path.to_owned(), name.to_owned());
            Err(ArtifactError::Stale { path, name, found, expected, mend }.into())
        }
        Err(error) => Err(error.into()),
        Ok(None) => Ok(()),
        Ok(Some(notice)) => {
            talk!("note: {notice}");
            Ok(())
        }
    }
}
