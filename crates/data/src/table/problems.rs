//! The samples that could not be read, as a table for a person who repairs them: `NAME.problems.csv` beside a profile.

use crate::error::DataError;
use dflop_types::{
    Artifact as _, ArtifactError, DataProfile, Fault, Neighbour, Place, Problem, SourceFile, artifact,
    regular, shown,
};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The columns. An empty cell is not known; `offset` is the record's first byte in the file, its row where the file is
/// columnar; the last two say the rest of its place.
const COLUMNS: [&str; 10] =
    ["source", "position", "file", "offset", "id", "fault", "cause", "substitute", "file_index", "length"];

/// Where the problems of the data profile at `profile` stand: `data_profile.problems.csv` for `data_profile.parquet`,
/// beside the file that a link leads to.
pub fn path(profile: &Path) -> PathBuf {
    let profile = artifact::follow_links(profile);
    let name = profile.file_name().unwrap_or_default().to_string_lossy();
    profile.with_file_name(format!("{}.problems.csv", name.strip_suffix(".parquet").unwrap_or(&name)))
}

/// Writes every problem beside the data profile at `profile`, whole or not at all; with none, the table of an earlier
/// profile is removed. The answer is where it stands.
///
/// # Errors
/// [`DataError::Io`].
pub fn write(profile: &Path, problems: &[Problem], files: &[SourceFile]) -> Result<PathBuf, DataError> {
    let path = path(profile);
    prepare(&path, problems, files)
        .and_then(|prepared| put(&path, prepared))
        .map_err(|source| DataError::Io { act: "write", path: path.clone(), source })?;
    Ok(path)
}

/// The table written and synced, not yet under its name; `None` where there is no problem.
pub(crate) fn prepare(
    path: &Path,
    problems: &[Problem],
    files: &[SourceFile],
) -> io::Result<Option<Neighbour>> {
    if problems.is_empty() {
        return Ok(None);
    }
    let (neighbour, file) = Neighbour::create(path, "")?;
    let mut writer = csv::Writer::from_writer(io::BufWriter::new(file));
    writer.write_record(COLUMNS)?;
    let number = |number: Option<u64>| number.map(|n| n.to_string()).unwrap_or_default();
    // People open it, in a terminal too: it has no control characters, and of URLs neither passwords nor signatures.
    for problem in problems {
        let file = problem.place.and_then(|place| files.get(place.file as usize));
        writer.write_record([
            &shown(&problem.file),
            &number(problem.position),
            &file.map(|file| shown(&file.path)).unwrap_or_default(),
            &number(problem.place.map(|place| place.start)),
            &problem.id.as_deref().map(shown).unwrap_or_default(),
            &problem.fault.to_string(),
            &shown(&problem.cause),
            &problem.substitute.as_deref().map(shown).unwrap_or_default(),
            &number(problem.place.map(|place| place.file.into())),
            &number(problem.place.map(|place| place.len)),
        ])?;
    }
    let mut file = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    file.flush()?;
    file.get_ref().sync_all()?;
    Ok(Some(neighbour))
}

/// Gives the prepared table its name, or removes an earlier one.
pub(crate) fn put(path: &Path, prepared: Option<Neighbour>) -> io::Result<()> {
    match prepared {
        Some(neighbour) => neighbour.take(),
        None => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// Percent of bad samples above which `skip` and `substitute` end a command, where the user set no other.
pub const BAD_SAMPLES_MAX_PERCENT: f64 = 5.0;

/// So many bad samples never end a command where the user set no percentage: of a few samples, one is a large share.
pub const BAD_SAMPLES_FEW: usize = 4;

/// `Ok` if few enough samples are bad to go on without them: at most `percent_max` of all; where the user set none, at most
/// [`BAD_SAMPLES_MAX_PERCENT`], or [`BAD_SAMPLES_FEW`].
///
/// # Errors
/// [`DataError::TooManyBad`] with every one.
pub(crate) fn check_bad_samples(
    problems: &[Problem],
    num_samples: u64,
    percent_max: Option<f64>,
    files: &[SourceFile],
) -> Result<(), DataError> {
    let is_few = percent_max.is_none() && problems.len() <= BAD_SAMPLES_FEW;
    let percent_max = percent_max.unwrap_or(BAD_SAMPLES_MAX_PERCENT);
    if is_few || problems.len() as f64 * 100.0 <= percent_max * num_samples as f64 {
        return Ok(());
    }
    Err(DataError::TooManyBad {
        problems: problems.to_vec(),
        num_samples,
        percent_max,
        files: files.to_vec(),
    })
}

/// The problems beside the data profile at `profile`.
///
/// # Errors
/// [`ArtifactError::Missing`], [`ArtifactError::Io`], and [`ArtifactError::Malformed`] with the line.
pub(crate) fn read(profile: &Path, files: &[SourceFile]) -> Result<Vec<Problem>, ArtifactError> {
    let path = path(profile);
    let malformed = |cause: String| ArtifactError::Malformed {
        kind: "table of problems",
        path: path.clone(),
        cause,
        mend: DataProfile::MEND,
    };
    let (file, _) = regular::open(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => {
            ArtifactError::Missing { kind: "table of problems", path: path.clone(), mend: DataProfile::MEND }
        }
        _ => ArtifactError::Io { act: "read", path: path.clone(), source },
    })?;
    let mut reader = csv::Reader::from_reader(io::BufReader::new(file));
    let columns = reader.headers().map_err(|error| malformed(error.to_string()))?;
    if columns != COLUMNS.as_slice() {
        return Err(malformed(format!("its columns must be {}", COLUMNS.join(","))));
    }
    let mut problems = Vec::new();
    for row in reader.records() {
        let row = row.map_err(|error| malformed(error.to_string()))?;
        let line = row.position().map_or(0, csv::Position::line);
        problems.push(problem(&row, files).map_err(|cause| malformed(format!("line {line}: {cause}")))?);
    }
    Ok(problems)
}

fn problem(row: &csv::StringRecord, files: &[SourceFile]) -> Result<Problem, String> {
    let cell = |column: usize| row.get(column).unwrap_or_default();
    let text = |column: usize| (!cell(column).is_empty()).then(|| cell(column).to_owned());
    let number = |column: usize| match cell(column) {
        "" => Ok(None),
        text => text
            .parse::<u64>()
            .map(Some)
            .map_err(|_| format!("{}: `{text}`, must be a whole number of at most 64 bits", COLUMNS[column])),
    };
    let place = match (number(8)?, number(3)?, number(9)?) {
        (None, None, None) => None,
        (Some(file), Some(start), Some(len)) => {
            let file = u32::try_from(file).map_err(|_| format!("file_index: {file}, must be below 2^32"))?;
            Some(Place { file, start, len })
        }
        _ => return Err("file_index, offset and length must be there all or none".to_owned()),
    };
    let known = place.and_then(|place| files.get(place.file as usize));
    let known = known.map(|file| shown(&file.path)).unwrap_or_default();
    if known != cell(2) {
        return Err(format!("file: `{}`, the file of file_index is `{known}`", cell(2)));
    }
    let fault = Fault::ALL.into_iter().find(|fault| fault.to_string() == cell(5));
    Ok(Problem {
        file: cell(0).to_owned(),
        position: number(1)?,
        place,
        id: text(4),
        fault: fault.ok_or_else(|| format!("fault: `{}`, must be one that dflop knows", cell(5)))?,
        cause: cell(6).to_owned(),
        substitute: text(7),
    })
}
