//! What is not a sample: one JSON object in the footer.

use super::{cannot_read, malformed, unsound};
use dflop_types::{
    Artifact as _, ArtifactError, DataProfile, MadeFrom, Problem, ProfilePart, SourceFile, Stratum,
};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read as _, Seek as _};
use std::path::Path;

/// Key of the object in the footer's metadata.
pub(super) const KEY: &str = "dflop";

/// Problems by the name of their fault; faults without one are left out.
pub(super) type FaultCounts = BTreeMap<String, u64>;

/// How many problems there are of each fault.
pub(super) fn count(problems: &[Problem]) -> FaultCounts {
    problems.iter().fold(FaultCounts::new(), |mut counts, problem| {
        *counts.entry(problem.fault.to_string()).or_default() += 1;
        counts
    })
}

/// A profile without its samples, and what its rows are held to.
pub(super) struct Header<'p> {
    profile: &'p DataProfile,
    fields: Fields<'p>,
}

impl<'p> Header<'p> {
    pub(super) fn new(profile: &'p DataProfile, num_rows: u64, content_hash: &str) -> Self {
        let fields = Fields {
            kind: DataProfile::KIND.into(),
            format_version: DataProfile::FORMAT_VERSION.into(),
            made_from: Cow::Borrowed(&profile.made_from),
            family: Cow::Borrowed(&profile.family),
            settings: Cow::Borrowed(&profile.settings),
            sources: Cow::Borrowed(&profile.sources),
            files: Cow::Borrowed(&profile.files),
            strata: Cow::Borrowed(&profile.strata),
            part: profile.part,
            problems: count(&profile.problems),
            content_hash: content_hash.to_owned(),
            num_rows,
        };
        Self { profile, fields }
    }

    pub(super) fn sources(&self) -> &'p [String] {
        &self.profile.sources
    }

    pub(super) fn files(&self) -> &'p [SourceFile] {
        &self.profile.files
    }

    pub(super) fn problems(&self) -> &'p [Problem] {
        &self.profile.problems
    }

    pub(super) fn text(&self) -> String {
        serde_json::to_string(&self.fields).expect("a header has string keys and whole numbers")
    }
}

/// The object, in the order in which it stands in the file.
#[derive(Serialize, Deserialize)]
struct Fields<'p> {
    kind: Cow<'p, str>,
    format_version: u64,
    made_from: Cow<'p, MadeFrom>,
    family: Cow<'p, str>,
    settings: Cow<'p, BTreeMap<String, String>>,
    sources: Cow<'p, [String]>,
    files: Cow<'p, [SourceFile]>,
    strata: Cow<'p, [Stratum]>,
    part: Option<ProfilePart>,
    problems: FaultCounts,
    content_hash: String,
    num_rows: u64,
}

/// What the rows and the problems of a file must come to.
pub(super) struct Expected {
    pub(super) problems: FaultCounts,
    pub(super) content_hash: String,
    pub(super) num_rows: u64,
}

/// What says of which kind a file is.
#[derive(Deserialize)]
struct Mark {
    #[serde(alias = "dflop")]
    kind: String,
    format_version: u64,
}

impl Mark {
    fn check(&self, path: &Path) -> Result<(), ArtifactError> {
        if self.kind != DataProfile::KIND {
            return Err(malformed(path, format!("its field `dflop` says `{}`", self.kind)));
        }
        if self.format_version != u64::from(DataProfile::FORMAT_VERSION) {
            return Err(ArtifactError::Version {
                kind: "data profile",
                path: path.to_owned(),
                found: self.format_version,
                known: DataProfile::FORMAT_VERSION,
                mend: DataProfile::MEND,
            });
        }
        Ok(())
    }
}

/// The profile without samples and problems in `text`, checked.
pub(super) fn parse(path: &Path, text: &str) -> Result<(DataProfile, Expected), ArtifactError> {
    let broken = |error: serde_json::Error| malformed(path, format!("its footer's `{KEY}`: {error}"));
    // Check the version first: the contents of another version are unknown here.
    serde_json::from_str::<Mark>(text).map_err(broken)?.check(path)?;
    let fields: Fields<'_> = serde_json::from_str(text).map_err(broken)?;
    let profile = DataProfile {
        made_from: fields.made_from.into_owned(),
        family: fields.family.into_owned(),
        settings: fields.settings.into_owned(),
        sources: fields.sources.into_owned(),
        files: fields.files.into_owned(),
        strata: fields.strata.into_owned(),
        part: fields.part,
        problems: Vec::new(),
        samples: Vec::new(),
    };
    let problems = profile.header_problems();
    if !problems.is_empty() {
        return Err(unsound(path, problems));
    }
    let Fields { problems, content_hash, num_rows, .. } = fields;
    Ok((profile, Expected { problems, content_hash, num_rows }))
}

/// `Ok` if the file does not begin as JSON does: profiles of format 1 were JSON, and so are the other artifacts.
pub(super) fn refuse_json(path: &Path, file: &mut File) -> Result<(), ArtifactError> {
    let mut first = [0];
    match file.read(&mut first).map_err(|source| cannot_read(path, source))? {
        1 if first[0] == b'{' => {}
        _ => return Ok(()),
    }
    file.rewind().map_err(|source| cannot_read(path, source))?;
    let mark: Mark = serde_json::from_reader(BufReader::new(file))
        .map_err(|error| malformed(path, format!("it is no Parquet file: {error}")))?;
    mark.check(path)?;
    Err(malformed(path, "it is JSON, must be Parquet".to_owned()))
}
