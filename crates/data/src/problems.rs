//! The samples that could not be read, as a table for a person who mends them.

use crate::error::DataError;
use dflop_types::{Problem, SourceFile};
use std::path::{Path, PathBuf};

/// Writes every problem beside the data profile at `profile`, as `NAME.problems.csv`: file, position, place, id, fault,
/// cause, substitute. The answer is where it stands.
///
/// # Errors
/// [`DataError::Io`].
pub fn write(profile: &Path, problems: &[Problem], files: &[SourceFile]) -> Result<PathBuf, DataError> {
    let path = profile.with_extension("problems.csv");
    let io = |source| DataError::Io { act: "write", path: path.clone(), source };
    let mut writer = csv::Writer::from_writer(Vec::new());
    let header = ["file", "position", "start", "len", "id", "fault", "cause", "substitute"];
    let number = |number: Option<u64>| number.map(|n| n.to_string()).unwrap_or_default();
    let rows = problems.iter().map(|problem| {
        let file = problem.place.and_then(|place| files.get(place.file as usize));
        [
            file.map_or_else(|| problem.file.clone(), |file| file.path.clone()),
            number(problem.position),
            number(problem.place.map(|place| place.start)),
            number(problem.place.map(|place| place.len)),
            problem.id.clone().unwrap_or_default(),
            problem.fault.to_string(),
            problem.cause.clone(),
            problem.substitute.clone().unwrap_or_default(),
        ]
    });
    for row in std::iter::once(header.map(str::to_owned)).chain(rows) {
        writer.write_record(row).map_err(|error| io(std::io::Error::other(error)))?;
    }
    let bytes = writer.into_inner().map_err(|error| io(std::io::Error::other(error.to_string())))?;
    // Whole or not at all.
    let neighbour = path.with_extension(format!("csv.{}.tmp", std::process::id()));
    std::fs::write(&neighbour, bytes).and_then(|()| std::fs::rename(&neighbour, &path)).map_err(io)?;
    Ok(path)
}
