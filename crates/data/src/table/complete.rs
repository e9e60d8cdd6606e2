//! Whether a data profile holds what is asked of it.

use crate::error::DataError;
use dflop_types::DataProfile;

/// `Ok` if `profile` is of a whole dataset: its samples may be planned for.
///
/// # Errors
/// [`DataError::IsPart`].
pub fn check_whole(profile: &DataProfile) -> Result<(), DataError> {
    profile.part.map_or(Ok(()), |part| Err(DataError::IsPart { part }))
}

/// `Ok` if `profile` holds every sample of its dataset: it may be trained on.
///
/// # Errors
/// [`DataError::IsPart`] and [`DataError::IsSample`].
pub fn check_complete(profile: &DataProfile) -> Result<(), DataError> {
    check_whole(profile)?;
    if profile.strata.is_empty() {
        return Ok(());
    }
    let sum = |count: fn(&dflop_types::Stratum) -> u64| profile.strata.iter().map(count).sum();
    Err(DataError::IsSample { drawn: sum(|s| s.drawn), population: sum(|s| s.population) })
}
