//! Where bytes are: a file or an object, whole or in part, or a cell of a table.

use bytes::Bytes;
use std::fmt;
use std::path::{Path, PathBuf};

/// A file on this machine, or an object in a store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Location {
    /// A path.
    Local(PathBuf),
    /// A URL with scheme, for example `s3://bucket/key`.
    Remote(String),
}

impl Location {
    /// The location that `text` names: a URL where it has a scheme that we read, else a path.
    pub fn parse(text: &str) -> Self {
        const SCHEMES: [&str; 5] = ["s3://", "gs://", "https://", "http://", "file://"];
        match SCHEMES.into_iter().find(|scheme| text.starts_with(scheme)) {
            Some("file://") => Self::Local(PathBuf::from(&text["file://".len()..])),
            Some(_) => Self::Remote(text.to_owned()),
            None => Self::Local(PathBuf::from(text)),
        }
    }

    /// What `name` means beside this directory: itself where it is absolute or a URL.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        match (self, Self::parse(name)) {
            (Self::Local(directory), Self::Local(path)) => Self::Local(directory.join(path)),
            (Self::Remote(url), Self::Local(path)) if path.is_relative() => {
                let name = if is_web(url) { escaped(name) } else { name.to_owned() };
                Self::Remote(format!("{}/{name}", url.trim_end_matches('/')))
            }
            (_, other) => other,
        }
    }

    /// The directory it stands in; `.` for a bare name.
    #[must_use]
    pub fn parent(&self) -> Self {
        match self {
            Self::Local(path) => Self::Local(
                path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned(),
            ),
            Self::Remote(url) => {
                let url = without_query(url);
                let start = url.find("://").map_or(0, |at| at + 3);
                let end = url[start..].rfind('/').map_or(url.len(), |at| start + at);
                Self::Remote(url[..end].to_owned())
            }
        }
    }

    /// The last part of its name.
    pub fn name(&self) -> String {
        match self {
            Self::Local(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            Self::Remote(url) => without_query(url).rsplit('/').next().unwrap_or_default().to_owned(),
        }
    }

    /// The name's ending in lower case, without the dot; empty where there is none.
    pub fn extension(&self) -> String {
        let name = self.name();
        name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase()).unwrap_or_default()
    }

    /// It as a path for messages: the URL itself where it is remote.
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Local(path) => path.clone(),
            Self::Remote(url) => PathBuf::from(url),
        }
    }
}

fn is_web(url: &str) -> bool {
    url.starts_with("http://") || url.starts_with("https://")
}

/// The URL up to its query, as of a signed one; keys of buckets have none.
fn without_query(url: &str) -> &str {
    if is_web(url) { url.split(['?', '#']).next().unwrap_or(url) } else { url }
}

/// A file's name as a part of a web URL: what would end the path is escaped.
fn escaped(name: &str) -> String {
    name.replace('%', "%25").replace('?', "%3F").replace('#', "%23")
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(path) => write!(f, "{}", path.display()),
            Self::Remote(url) => f.write_str(url),
        }
    }
}

/// Where the bytes of one medium are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MediaPlace {
    /// A whole file.
    Whole(Location),
    /// A part of a file, as the member of a tar shard.
    Range {
        /// The file.
        file: Location,
        /// First byte.
        start: u64,
        /// Bytes.
        len: u64,
        /// The member's name, for messages.
        name: String,
    },
    /// Bytes that came with the record, as the cell of a table.
    Bytes {
        /// The bytes.
        bytes: Bytes,
        /// What to call them in messages.
        name: String,
    },
}

impl MediaPlace {
    /// The place, holding no more memory than its own bytes: a cell of a table may be a part of a whole column.
    #[must_use]
    pub fn alone(self) -> Self {
        match self {
            Self::Bytes { bytes, name } => Self::Bytes { bytes: Bytes::copy_from_slice(&bytes), name },
            Self::Whole(_) | Self::Range { .. } => self,
        }
    }
}

impl fmt::Display for MediaPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(location) => location.fmt(f),
            Self::Range { file, name, .. } => write!(f, "{file}/{name}"),
            Self::Bytes { name, .. } => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_joined_as_the_reader_of_a_mixture_expects() {
        let url = Location::parse("s3://bucket/data/");
        assert_eq!(url.join("a/b.jpg"), Location::Remote("s3://bucket/data/a/b.jpg".to_owned()));
        assert_eq!(url.join("https://x/y.jpg"), Location::Remote("https://x/y.jpg".to_owned()));
        assert_eq!(url.join("/abs.jpg"), Location::Local(PathBuf::from("/abs.jpg")));
        let local = Location::parse("data");
        assert_eq!(local.join("a.jpg"), Location::Local(PathBuf::from("data/a.jpg")));
        assert_eq!(Location::parse("s3://bucket/data/x.jsonl").parent().to_string(), "s3://bucket/data");
        assert_eq!(Location::parse("s3://bucket").parent().to_string(), "s3://bucket");
        let signed = Location::parse("https://x/a/b.jsonl?key=c/d.e");
        assert_eq!(
            (signed.extension(), signed.parent().to_string()),
            ("jsonl".to_owned(), "https://x/a".to_owned())
        );
        assert_eq!(signed.parent().join("50% #1?.jpg").to_string(), "https://x/a/50%25 %231%3F.jpg");
        assert_eq!(url.join("50% #1?.jpg").to_string(), "s3://bucket/data/50% #1?.jpg");
        assert_eq!(Location::parse("x.JSONL").parent(), Location::Local(PathBuf::from(".")));
        assert_eq!(Location::parse("x.JSONL").extension(), "jsonl");
    }
}
