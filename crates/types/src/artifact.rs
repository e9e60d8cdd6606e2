//! The files between the verbs: versioned, with the hashes of what they were made from. Those written and read here are
//! JSON; the data profile is a table of its own (`dflop_data::table`).
//!
//! A top-level field stands on a line of its own, and so does each element of a top-level list: a person can
//! page through a long file, and `diff` shows what changed. A write goes to a neighbour file, is
//! synced, and takes the name in one move: an interrupted write leaves the old file whole. Links are followed, and what
//! is no file of the same kind is not replaced: see [`target`].

use crate::neighbour::Neighbour;
use crate::regular;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Hashes of what an artifact was made from, by name, as `sha256:...`.
pub type MadeFrom = BTreeMap<String, String>;

/// What to do about an error, separate from its message.
pub trait Hint {
    /// One sentence that names a flag, a field or a command; `None` if there is nothing to do.
    fn hint(&self) -> Option<String>;
}

/// A file between the verbs.
pub trait Artifact {
    /// What the file says it is, for example `plan`.
    const KIND: &'static str;
    /// Raised when a reader of the old version would misread the new one.
    const FORMAT_VERSION: u32;
    /// The command that makes it again.
    const MEND: &'static str;

    /// Hashes of what it was made from.
    fn made_from(&self) -> &MadeFrom;

    /// Every broken rule, as "field: value, rule".
    fn problems(&self) -> Vec<String>;
}

/// Why an artifact cannot be used.
#[derive(Debug, Error)]
pub enum ArtifactError {
    /// There is no such file.
    #[error("no {kind} at `{}`", path.display())]
    Missing {
        /// The artifact.
        kind: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// The command that makes it.
        mend: &'static str,
    },
    /// The operating system refused.
    #[error("cannot {act} `{}`: {source}", path.display())]
    Io {
        /// `read` or `write`.
        act: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// What stands where a file is to be written must not be replaced by it.
    #[error("cannot write a {kind} to `{}`: it is {found}, must be {rule}", path.display())]
    Taken {
        /// What is to be written, for example `plan`.
        kind: String,
        /// Where it was to be written.
        path: PathBuf,
        /// What stands there, with its article.
        found: String,
        /// What may stand there.
        rule: String,
    },
    /// The file is of another form or kind, or damaged.
    #[error("`{}` is not a {kind}: {cause}", path.display())]
    Malformed {
        /// The artifact.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause, with the line where there are lines.
        cause: String,
        /// The command that makes it.
        mend: &'static str,
    },
    /// The file is of a version we do not know.
    #[error("`{}` is a {kind} of format {found}, this dflop reads format {known}", path.display())]
    Version {
        /// The artifact.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// Version of the file.
        found: u64,
        /// Version we read.
        known: u32,
        /// The command that makes it.
        mend: &'static str,
    },
    /// The file breaks rules of its kind; all of them are listed.
    #[error("`{}` is not a valid {kind}{}", path.display(), list(problems))]
    Unsound {
        /// The artifact.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// "field: value, rule", each.
        problems: Vec<String>,
        /// The command that makes it.
        mend: &'static str,
    },
    /// The file was made from something else than what is there now.
    #[error("`{}` was made from another `{name}`: {found}, now {expected}", path.display())]
    Stale {
        /// The file.
        path: PathBuf,
        /// What differs.
        name: String,
        /// Hash in the file.
        found: String,
        /// Hash of what is there now.
        expected: String,
        /// The command that makes it again.
        mend: &'static str,
    },
}

fn list(problems: &[String]) -> String {
    problems.iter().fold(String::new(), |mut text, problem| {
        let _ = write!(text, "\n  {problem}");
        text
    })
}

impl Hint for ArtifactError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Missing { mend, .. } => Some(format!("make it with `{mend}`")),
            Self::Malformed { mend, .. }
            | Self::Version { mend, .. }
            | Self::Unsound { mend, .. }
            | Self::Stale { mend, .. } => Some(format!("make it again with `{mend}`")),
            Self::Taken { .. } | Self::Io { act: "write", .. } => {
                Some("choose another place with `--out`".to_owned())
            }
            Self::Io { .. } => None,
        }
    }
}

/// Lower-case hexadecimal of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256 of the parts, each preceded by its length, as `sha256:...`.
pub fn hash_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("sha256:{}", hex(&hash.finalize()))
}

/// Hash of an artifact's content, independent of how its file is laid out, as `sha256:...`.
pub fn hash_of<A: Artifact + Serialize>(artifact: &A) -> String {
    hash_parts([to_text(artifact).as_bytes()])
}

/// The artifact as the text of its file.
///
/// # Panics
/// Never for our artifacts: they are structs with string keys and finite numbers.
pub fn to_text<A: Artifact + Serialize>(artifact: &A) -> String {
    let value = serde_json::to_value(artifact).expect("our artifacts have string keys and finite numbers");
    let Value::Object(fields) = value else { unreachable!("an artifact is a struct") };
    let mut text = format!("{{\n\"dflop\": \"{}\",\n\"format_version\": {}", A::KIND, A::FORMAT_VERSION);
    for (name, value) in fields {
        let _ = write!(text, ",\n\"{name}\": ");
        match value {
            Value::Array(elements) if !elements.is_empty() => {
                text.push('[');
                for (index, element) in elements.iter().enumerate() {
                    let _ = write!(text, "{}\n{element}", if index == 0 { "" } else { "," });
                }
                text.push_str("\n]");
            }
            value => {
                let _ = write!(text, "{value}");
            }
        }
    }
    text.push_str("\n}\n");
    text
}

/// Writes the artifact whole, or leaves what was there.
///
/// # Errors
/// As [`write_text`].
pub fn write<A: Artifact + Serialize>(path: &Path, artifact: &A) -> Result<(), ArtifactError> {
    write_text(path, A::KIND, &to_text(artifact))
}

/// Writes `text`, which is a `kind`, whole to the [`target`] of `path`, or leaves what was there; makes the directory if
/// it is missing.
///
/// # Errors
/// [`ArtifactError::Taken`] where something else stands there, [`ArtifactError::Io`] if the directory cannot be made or
/// the file cannot be written.
pub fn write_text(path: &Path, kind: &str, text: &str) -> Result<(), ArtifactError> {
    let io = |source| ArtifactError::Io { act: "write", path: path.to_owned(), source };
    let target = target(path, kind)?;
    let written = Neighbour::create(&target, "").and_then(|(neighbour, mut file)| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        neighbour.take()
    });
    written.map_err(io)
}

/// The most symbolic links that a path may lead through, as in Linux.
const LINKS_MAX: u32 = 40;

/// Where the symbolic links at `path` lead, whether or not a file is there; `path` itself where it is not a link.
pub fn follow_links(path: &Path) -> PathBuf {
    let mut target = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(link) = std::fs::read_link(&target) else { break };
        target = target.parent().unwrap_or(Path::new("")).join(link);
    }
    target
}

/// The file to replace when a `kind` is written to `path`: the file that symbolic links lead to, so that the links
/// stay.
///
/// A file of the same kind, of any version, may be replaced, and an empty file too. Everything else is refused: a
/// directory, device, pipe or socket, which a rename would remove; an artifact of another kind; YAML, which a person
/// wrote; and any file that dflop cannot recognise as its own, for example a model's `config.json`.
///
/// # Errors
/// [`ArtifactError::Taken`]; [`ArtifactError::Io`] where links lead round in a circle, or the path through a file.
pub fn target(path: &Path, kind: &str) -> Result<PathBuf, ArtifactError> {
    let target = follow_links(path);
    let taken = |found: String, rule: String| {
        Err(ArtifactError::Taken { kind: kind.to_owned(), path: path.to_owned(), found, rule })
    };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(target),
        Err(source) => return Err(ArtifactError::Io { act: "write", path: path.to_owned(), source }),
    };
    if !metadata.is_file() {
        let found = if metadata.is_dir() { "a directory" } else { "a device, pipe or socket" };
        return taken(found.to_owned(), "a regular file or a new one".to_owned());
    }
    let is_yaml = |path: &Path| path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
    let rule = format!("another {kind} or a new file");
    match Written::at(&target, metadata.len(), kind) {
        Written::Ours => Ok(target),
        Written::Artifact(found) => taken(format!("a {found}"), rule),
        Written::Unknown if is_yaml(path) || is_yaml(&target) => {
            taken("YAML, as a configuration is".to_owned(), rule)
        }
        Written::Unknown => taken(format!("a file that dflop did not write as a {kind}"), rule),
    }
}

/// What a file is, to someone who would write a certain kind of file in its place.
enum Written {
    /// The same kind, the start of it (a disk that was full), or nothing at all.
    Ours,
    /// An artifact of this other kind.
    Artifact(String),
    /// Nothing that dflop knows, or nothing that can be read.
    Unknown,
}

impl Written {
    /// Bytes at the start of a file that are looked at: all marks stand there.
    const START_BYTES: u64 = 1 << 10;
    /// A larger file is not read whole to find its field `dflop`: artifacts of JSON have it at the start.
    const WHOLE_BYTES: u64 = 1 << 26;
    /// What a file that is no artifact begins with, in lower case, and what else stands near its start.
    const MARKS: [(&'static str, &'static str, &'static str); 7] = [
        ("report", "<!doctype html>", "content=\"dflop "),
        ("figure", "<svg ", "one training step before and after"),
        ("figure", "<svg ", "\"samples a second by "), // of a sweep
        ("table", "", ",samples,step_ms,samples_per_s,peak_gib,"), // of a sweep, behind the fields that are set
        ("man page", ".ie ", ".th dflop"),
        ("trace", "{\"displaytimeunit\":\"ns\",\"traceevents\":[", ""),
        ("summary", "{", "\"step_ms_b"), // of `blind`, or of the best baseline
    ];

    fn at(path: &Path, num_bytes: u64, kind: &str) -> Self {
        if num_bytes == 0 {
            return Self::Ours;
        }
        let mut start = Vec::new();
        let read =
            std::fs::File::open(path).and_then(|file| file.take(Self::START_BYTES).read_to_end(&mut start));
        if read.is_err() {
            return Self::Unknown;
        }
        let of_kind = |found: String| if found == kind { Self::Ours } else { Self::Artifact(found) };
        if start.starts_with(b"PAR1") {
            return of_kind("data_profile".to_owned());
        }
        let text = String::from_utf8_lossy(&start);
        if let Some(found) = said_first(&text) {
            return of_kind(found);
        }
        let own = format!("{{\"dflop\":\"{kind}\"");
        let squeezed: String = text.chars().filter(|letter| !letter.is_whitespace()).collect();
        if own.starts_with(&squeezed) {
            return Self::Ours;
        }
        let lower = text.to_lowercase();
        let is_marked = |&(of, begin, near): &(&str, &str, &str)| {
            of == kind && lower.trim_start().starts_with(begin) && lower.contains(near)
        };
        if Self::MARKS.iter().any(is_marked) {
            return Self::Ours;
        }
        if !squeezed.starts_with('{') || num_bytes > Self::WHOLE_BYTES {
            return Self::Unknown;
        }
        said_anywhere(path).map_or(Self::Unknown, of_kind)
    }
}

/// The kind of artifact that the first field of a file says it is; `None` where that is another field.
fn said_first(start: &str) -> Option<String> {
    let (name, rest) = start.trim_start().strip_prefix('{')?.split_once(':')?;
    let kind = rest.trim_start().strip_prefix('"')?.split_once('"')?.0;
    (name.trim() == "\"dflop\"").then(|| kind.to_owned())
}

/// The same for a field that stands anywhere, for example in a file that another program has written again.
fn said_anywhere(path: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Said {
        dflop: String,
    }
    let text = std::fs::read_to_string(path).ok()?;
    serde_json::from_str::<Said>(&text).ok().map(|said| said.dflop)
}

/// The longest artifact of JSON that is read, in bytes: the plan of a million rejections has a tenth of it.
const BYTES_MAX: u64 = 1 << 28;

/// The text of the file at `path`, of at most `bytes_max` bytes.
///
/// # Errors
/// What the system says; [`std::io::ErrorKind::InvalidInput`] for a directory, device, pipe or socket, which may have no end,
/// and [`std::io::ErrorKind::FileTooLarge`].
pub fn read_text(path: &Path, bytes_max: u64) -> std::io::Result<String> {
    regular::read_to_string(path, bytes_max)
}

/// The artifact at `path`, checked.
///
/// # Errors
/// [`ArtifactError::Missing`], [`ArtifactError::Io`], [`ArtifactError::Malformed`], [`ArtifactError::Version`], and
/// [`ArtifactError::Unsound`] with every problem of the file.
pub fn read<A: Artifact + DeserializeOwned>(path: &Path) -> Result<A, ArtifactError> {
    let text = read_text(path, BYTES_MAX).map_err(|source| {
        if source.kind() == std::io::ErrorKind::NotFound {
            ArtifactError::Missing { kind: A::KIND, path: path.to_owned(), mend: A::MEND }
        } else {
            ArtifactError::Io { act: "read", path: path.to_owned(), source }
        }
    })?;
    parse(path, &text)
}

/// The artifact in `text`, checked; `path` names it in errors.
///
/// # Errors
/// As [`read`], without those of the file system.
pub fn parse<A: Artifact + DeserializeOwned>(path: &Path, text: &str) -> Result<A, ArtifactError> {
    let malformed = |cause: String| ArtifactError::Malformed {
        kind: A::KIND,
        path: path.to_owned(),
        cause,
        mend: A::MEND,
    };
    let mut fields: Map<String, Value> = from_text(text).map_err(malformed)?;
    match fields.remove("dflop").as_ref().and_then(Value::as_str) {
        Some(kind) if kind == A::KIND => {}
        Some(kind) => return Err(malformed(format!("its field `dflop` says `{kind}`"))),
        None => return Err(malformed("it has no field `dflop`".to_owned())),
    }
    match fields.remove("format_version").as_ref().and_then(Value::as_u64) {
        Some(version) if version == u64::from(A::FORMAT_VERSION) => {}
        Some(found) => {
            return Err(ArtifactError::Version {
                kind: A::KIND,
                path: path.to_owned(),
                found,
                known: A::FORMAT_VERSION,
                mend: A::MEND,
            });
        }
        None => return Err(malformed("it has no field `format_version`".to_owned())),
    }
    let artifact: A = serde_path_to_error::deserialize(Value::Object(fields))
        .map_err(|error| malformed(cause_of::<A>(text, &error)))?;
    let problems = artifact.problems();
    if problems.is_empty() {
        Ok(artifact)
    } else {
        Err(ArtifactError::Unsound { kind: A::KIND, path: path.to_owned(), problems, mend: A::MEND })
    }
}

/// The value in a JSON text, or what is wrong with it.
fn from_text<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| placed(&error))?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(value)
}

/// What an error says, after the field that it speaks of, for example `modules.llm_layer.linear.points[3].forward_ns`.
fn placed(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    let path = error.path();
    if path.iter().next().is_none() {
        error.inner().to_string()
    } else {
        format!("{path}: {}", error.inner())
    }
}

/// What is wrong with a value of `text` that is no `A`: a value knows its field, but not its line, so that the text is
/// read once more.
fn cause_of<A: DeserializeOwned>(
    text: &str,
    error: &serde_path_to_error::Error<serde_json::Error>,
) -> String {
    let cause = placed(error);
    match from_text::<A>(text) {
        Err(again) if again.starts_with(&cause) => again,
        _ => cause,
    }
}

/// `Ok` if the artifact was made from the `name` whose hash is `expected`.
///
/// # Errors
/// [`ArtifactError::Stale`] with both hashes.
pub fn check_made_from<A: Artifact>(
    path: &Path,
    artifact: &A,
    name: &str,
    expected: &str,
) -> Result<(), ArtifactError> {
    match artifact.made_from().get(name) {
        Some(found) if found == expected => Ok(()),
        found => Err(ArtifactError::Stale {
            path: path.to_owned(),
            name: name.to_owned(),
            found: found.cloned().unwrap_or_else(|| "none".to_owned()),
            expected: expected.to_owned(),
            mend: A::MEND,
        }),
    }
}
