//! The file of a data profile: a Parquet table, one row a sample, that pandas, pyarrow and `DuckDB` read too.
//!
//! Rows stand in groups of 65,536, compressed by zstd. All other information is one JSON object in the footer's metadata
//! under `dflop`; problems stand in a table of their own beside it ([`crate::table::problems`]). A write goes to a temporary
//! file, which is synced and then renamed. A seal covers each byte, so that a damaged file is an error, and
//! the content hash that plans carry is computed while writing and compared while reading.

mod columns;
pub(crate) mod complete;
mod header;
pub mod merge;
pub mod problems;
pub mod records;
mod seal;

use crate::error::DataError;
use crate::foreign::guarded;
use crate::source::parquet_file::{self, SharedFile};
use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use dflop_types::{
    Artifact as _, ArtifactError, DataProfile, Neighbour, ProfileHasher, ProfiledSample, artifact, regular,
};
use header::Header;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::{KeyValue, PageIndexPolicy};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use seal::{Broken, Sealed};
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Seek as _};
use std::path::{Path, PathBuf};

/// Name of a data profile beside the configuration.
pub const FILE_NAME: &str = "data_profile.parquet";
/// Rows of a row group.
const GROUP_ROWS: usize = 1 << 16;
/// Bytes of ids, segments and parts at which a row group ends early: its columns stay far from what memory's offsets hold.
const GROUP_BYTES: usize = 1 << 26;
/// Rows decoded at a time.
const BATCH_ROWS: usize = 1 << 13;
/// Broken rules that are listed; the others are counted.
const SHOWN: usize = 20;

/// Writes a data profile row by row; memory stays bounded by one row group.
///
/// The names of sources are known last, so whole row groups wait in a second neighbour file until [`Writer::finish`].
/// Both are removed if the writer is dropped before.
pub struct Writer {
    path: PathBuf,
    rows: Vec<ProfiledSample>,
    /// Bytes of ids, segments and parts in `rows`.
    bytes: usize,
    num_rows: u64,
    hasher: ProfileHasher,
    target: (Neighbour, File),
    waiting: Option<(Neighbour, StreamWriter<BufWriter<File>>)>,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("path", &self.path)
            .field("num_rows", &self.num_rows)
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// A writer of the file at `path`, or where its links lead, which stays as it is until [`Writer::finish`].
    ///
    /// # Errors
    /// [`ArtifactError::Taken`] where something else stands there, a table of others too; [`ArtifactError::Io`] if the
    /// directory cannot be made or written to.
    pub fn create(path: &Path) -> Result<Self, DataError> {
        let place = artifact::target(path, DataProfile::KIND)?;
        if is_of_others(&place) {
            return Err(ArtifactError::Taken {
                kind: DataProfile::KIND.to_owned(),
                path: path.to_owned(),
                found: "a Parquet table of something else".to_owned(),
                rule: format!("another {} or a new file", DataProfile::KIND),
            }
            .into());
        }
        let target = Neighbour::create(&place, "").map_err(|error| cannot_write(path, error))?;
        Ok(Self {
            path: place,
            rows: Vec::new(),
            bytes: 0,
            num_rows: 0,
            hasher: ProfileHasher::default(),
            target,
            waiting: None,
        })
    }

    /// Takes the next row.
    ///
    /// # Errors
    /// [`ArtifactError::Io`].
    pub fn push(&mut self, sample: &ProfiledSample) -> Result<(), DataError> {
        self.hasher.push(sample);
        self.num_rows += 1;
        self.bytes += sample.id.len()
            + size_of_val(sample.shape.encoder_segments.as_slice())
            + size_of_val(sample.shape.encoder_parts.as_slice());
        self.rows.push(sample.clone());
        if self.rows.len() == GROUP_ROWS || self.bytes >= GROUP_BYTES {
            self.set_aside().map_err(|error| cannot_write(&self.path, error))?;
        }
        Ok(())
    }

    /// Moves the rows in memory to the file of those that wait.
    fn set_aside(&mut self) -> io::Result<()> {
        let batch = columns::unnamed(&self.rows).map_err(other)?;
        let (_, writer) = match &mut self.waiting {
            Some(waiting) => waiting,
            none => {
                let (neighbour, file) = Neighbour::create(&self.path, "rows.")?;
                let writer =
                    StreamWriter::try_new(BufWriter::new(file), &columns::schema_unnamed()).map_err(other)?;
                none.insert((neighbour, writer))
            }
        };
        writer.write(&batch).map_err(other)?;
        self.rows.clear();
        self.bytes = 0;
        Ok(())
    }

    /// Writes what is not a sample (the samples of `header` are ignored) and gives the file its name. The answer is
    /// the content hash.
    ///
    /// # Errors
    /// [`ArtifactError::Io`]; [`ArtifactError::Unsound`] where `header` breaks its rules. The old file then stands.
    pub fn finish(mut self, header: &DataProfile) -> Result<String, DataError> {
        let broken = header.header_problems();
        if !broken.is_empty() {
            return Err(unsound(&self.path, broken).into());
        }
        let content_hash = std::mem::take(&mut self.hasher).finish(header);
        let path = self.path.clone();
        let header = Header::new(header, self.num_rows, &content_hash);
        self.put(&header).map_err(|error| cannot_write(&path, error))?;
        Ok(content_hash)
    }

    fn put(mut self, header: &Header<'_>) -> io::Result<()> {
        let sources = header.sources();
        let mut writer =
            ArrowWriter::try_new(&self.target.1, columns::schema(), Some(properties())).map_err(other)?;
        let mut group = |batch: &RecordBatch| -> io::Result<()> {
            writer.write(&columns::named(batch, sources).map_err(other)?).map_err(other)?;
            writer.flush().map_err(other)
        };
        if let Some((_neighbour, waiting)) = self.waiting.take() {
            let mut file =
                waiting.into_inner().map_err(other)?.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.rewind()?;
            for batch in StreamReader::try_new(BufReader::new(file), None).map_err(other)? {
                group(&batch.map_err(other)?)?;
            }
        }
        if !self.rows.is_empty() {
            group(&columns::unnamed(&self.rows).map_err(other)?)?;
        }
        writer.append_key_value_metadata(KeyValue::new(header::KEY.to_owned(), header.text()));
        writer.append_key_value_metadata(KeyValue::new(seal::KEY.to_owned(), seal::blank()));
        writer.close().map_err(other)?;
        let (target, mut file) = self.target;
        seal::close(&mut file).map_err(|broken| match broken {
            Broken::Io(error) => error,
            Broken::Content(cause) => io::Error::other(cause),
        })?;
        file.sync_all()?;
        let problems_path = problems::path(&self.path);
        let table = problems::prepare(&problems_path, header.problems(), header.files())?;
        target.take()?;
        problems::put(&problems_path, table)
    }
}

/// Whether a Parquet table that is no data profile stands at `path`, as a dataset does. A damaged one, of which nobody
/// can tell, may be ours.
fn is_of_others(path: &Path) -> bool {
    let load = |source| guarded(|| parquet_file::load(&source, PageIndexPolicy::Skip)).ok();
    let loaded = regular::open(path).ok().and_then(|(file, _)| source(&file).ok()).and_then(load);
    loaded.is_some_and(|metadata| header_text(&metadata).is_none())
}

/// What the footer says under the key of our header.
fn header_text(metadata: &ArrowReaderMetadata) -> Option<&str> {
    let pairs = metadata.metadata().file_metadata().key_value_metadata()?;
    pairs.iter().find(|pair| pair.key == header::KEY)?.value.as_deref()
}

fn properties() -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).expect("3 is a level of zstd")))
        .set_max_row_group_row_count(Some(GROUP_ROWS))
        .set_statistics_enabled(EnabledStatistics::Chunk);
    // Positions ascend, so their steps are small; of hashes and ids no two are the same.
    for name in ["position", "start"] {
        let column = ColumnPath::from(name);
        properties = properties
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_encoding(column, Encoding::DELTA_BINARY_PACKED);
    }
    for name in ["id", "record_hash", "media_hash"] {
        properties = properties.set_column_dictionary_enabled(ColumnPath::from(name), false);
    }
    properties.build()
}

/// Writes `profile` whole to `path`, or leaves what was there. The answer is the content hash.
///
/// # Errors
/// Those of [`Writer`].
pub fn write(path: &Path, profile: &DataProfile) -> Result<String, DataError> {
    let mut writer = Writer::create(path)?;
    profile.samples.iter().try_for_each(|sample| writer.push(sample))?;
    writer.finish(profile)
}

/// The data profile at `path`, checked: each byte of the file, each sample, the content hash.
///
/// # Errors
/// [`ArtifactError::Missing`], [`ArtifactError::Io`]; [`ArtifactError::Malformed`] where it is damaged or of another
/// kind, or where the problems beside it are not its own; [`ArtifactError::Version`], and [`ArtifactError::Unsound`]
/// with the broken rules of its samples.
pub fn read(path: &Path) -> Result<DataProfile, ArtifactError> {
    let mut opened = Opened::new(path)?;
    let mut profile = opened.header()?;
    let mut broken = Vec::new();
    let mut num_broken = 0;
    for sample in opened.rows()? {
        let sample = sample?;
        if let Err(problem) = sample.check(profile.sources.len()) {
            num_broken += 1;
            if num_broken <= SHOWN {
                broken.push(format!("samples[{}].{problem}", profile.samples.len()));
            }
        }
        profile.samples.push(sample);
    }
    if num_broken > SHOWN {
        broken.push(format!("and {} more", num_broken - SHOWN));
    }
    if broken.is_empty() { Ok(profile) } else { Err(unsound(path, broken)) }
}

/// The data profile at `path` without its samples, and how many there are. *Complexity*: O(footer and problems).
///
/// # Errors
/// As [`read`]; the samples are not looked at.
pub fn header(path: &Path) -> Result<(DataProfile, u64), ArtifactError> {
    let opened = Opened::new(path)?;
    Ok((opened.header()?, opened.num_rows))
}

/// The samples of the data profile at `path`, one by one, in order. Memory stays bounded.
///
/// Damage is found before the first sample; an unsound sample, or another content hash than the file's, is an error in
/// the place of a sample and the last item.
///
/// # Errors
/// As [`read`].
pub fn rows(
    path: &Path,
) -> Result<Box<dyn Iterator<Item = Result<ProfiledSample, DataError>> + Send>, ArtifactError> {
    let mut rows = Opened::new(path)?.rows()?;
    let path = path.to_owned();
    let num_sources = rows.header.sources.len();
    let mut is_over = false;
    let mut index = 0_u64;
    Ok(Box::new(std::iter::from_fn(move || {
        if is_over {
            return None;
        }
        let sample = rows.next()?.and_then(|sample| match sample.check(num_sources) {
            Ok(()) => Ok(sample),
            Err(problem) => Err(unsound(&path, vec![format!("samples[{index}].{problem}")])),
        });
        is_over = sample.is_err();
        index += 1;
        Some(sample.map_err(DataError::from))
    })))
}

/// A file whose footer was checked.
struct Opened {
    path: PathBuf,
    file: File,
    sealed: Sealed,
    metadata: ArrowReaderMetadata,
    /// Without samples and problems.
    profile: DataProfile,
    counts: header::FaultCounts,
    content_hash: String,
    num_rows: u64,
}

impl Opened {
    fn new(path: &Path) -> Result<Self, ArtifactError> {
        let (mut file, _) = regular::open(path).map_err(|source| cannot_read(path, source))?;
        header::refuse_json(path, &mut file)?;
        let sealed = seal::check_footer(&mut file).map_err(|broken| not_sealed(path, broken))?;
        let source = source(&file).map_err(|error| cannot_read(path, error))?;
        let metadata = guarded(|| parquet_file::load(&source, PageIndexPolicy::Skip))
            .map_err(|cause| malformed(path, cause))?;
        let is_known = |known: &arrow_schema::Schema| metadata.schema().fields() == known.fields();
        if !is_known(&columns::schema()) && !columns::old_schemas().iter().any(|old| is_known(old)) {
            return Err(malformed(path, other_columns(metadata.schema())));
        }
        let footer = metadata.metadata().file_metadata();
        let text = header_text(&metadata)
            .ok_or_else(|| malformed(path, format!("its footer has no `{}`", header::KEY)))?;
        let (profile, rest) = header::parse(path, text)?;
        if i64::try_from(rest.num_rows) != Ok(footer.num_rows()) {
            let cause = format!("it has {} rows, its header says {}", footer.num_rows(), rest.num_rows);
            return Err(malformed(path, cause));
        }
        let (counts, content_hash, num_rows) = (rest.problems, rest.content_hash, rest.num_rows);
        Ok(Self { path: path.to_owned(), file, sealed, metadata, profile, counts, content_hash, num_rows })
    }

    /// The profile without its samples.
    fn header(&self) -> Result<DataProfile, ArtifactError> {
        // A run that failed may have left its own table there: it is not asked where this profile has no problem.
        let problems = if self.counts.is_empty() {
            Vec::new()
        } else {
            problems::read(&self.path, &self.profile.files)?
        };
        let found = header::count(&problems);
        if found != self.counts {
            let say = |counts: &header::FaultCounts| match counts.values().sum::<u64>() {
                0 => "none".to_owned(),
                total => {
                    let each: Vec<_> = counts.iter().map(|(fault, n)| format!("{fault} {n}")).collect();
                    format!("{total} ({})", each.join(", "))
                }
            };
            let cause = format!(
                "it was written with other problems than `{}` holds: {}, found {}",
                problems::path(&self.path).display(),
                say(&self.counts),
                say(&found)
            );
            return Err(malformed(&self.path, cause));
        }
        Ok(DataProfile { problems, ..self.profile.clone() })
    }

    /// The samples, not yet checked by the rules of samples.
    fn rows(&mut self) -> Result<Rows, ArtifactError> {
        self.sealed.check_pages(&mut self.file).map_err(|broken| not_sealed(&self.path, broken))?;
        let source = source(&self.file).map_err(|error| cannot_read(&self.path, error))?;
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(source, self.metadata.clone());
        let reader = guarded(|| builder.with_batch_size(BATCH_ROWS).build())
            .map_err(|cause| malformed(&self.path, cause))?;
        Ok(Rows {
            path: self.path.clone(),
            reader,
            batch: Vec::new().into_iter(),
            header: self.profile.clone(),
            hasher: Some(ProfileHasher::default()),
            content_hash: self.content_hash.clone(),
        })
    }
}

/// The file for its decoder.
fn source(file: &File) -> io::Result<SharedFile> {
    let reader = file.try_clone()?;
    let len = reader.metadata()?.len();
    Ok(SharedFile::new(Box::new(reader), len))
}

/// The samples of a file whose bytes were checked.
struct Rows {
    path: PathBuf,
    reader: ParquetRecordBatchReader,
    batch: std::vec::IntoIter<ProfiledSample>,
    header: DataProfile,
    /// `None` when all is over.
    hasher: Option<ProfileHasher>,
    content_hash: String,
}

impl Iterator for Rows {
    type Item = Result<ProfiledSample, ArtifactError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let hasher = self.hasher.as_mut()?;
            if let Some(sample) = self.batch.next() {
                hasher.push(&sample);
                return Some(Ok(sample));
            }
            let Some(batch) = guarded(|| self.reader.next().transpose()).transpose() else {
                let found = self.hasher.take()?.finish(&self.header);
                if found == self.content_hash {
                    return None;
                }
                let cause = format!("its content hash is {found}, its header says {}", self.content_hash);
                return Some(Err(malformed(&self.path, cause)));
            };
            let samples = batch.and_then(|batch| columns::samples(&batch, &self.header.sources));
            match samples {
                Ok(samples) => self.batch = samples.into_iter(),
                Err(cause) => {
                    self.hasher = None;
                    return Some(Err(malformed(&self.path, cause)));
                }
            }
        }
    }
}

fn other_columns(found: &arrow_schema::Schema) -> String {
    let known = columns::schema();
    for (index, field) in known.fields().iter().enumerate() {
        match found.fields().get(index) {
            Some(other) if other == field => {}
            Some(other) => {
                return format!(
                    "column {index} is `{}`, must be `{}` of its type",
                    other.name(),
                    field.name()
                );
            }
            None => return format!("it has no column `{}`", field.name()),
        }
    }
    format!("it has {} columns, must be {}", found.fields().len(), known.fields().len())
}

/// The error of the operating system that is inside, where there is one: a full disk says so itself.
fn other<E: std::error::Error + Send + Sync + 'static>(error: E) -> io::Error {
    let mut inside = error.source();
    while let Some(cause) = inside {
        if let Some(code) = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return io::Error::from_raw_os_error(code);
        }
        inside = cause.source();
    }
    io::Error::other(error)
}

fn cannot_write(path: &Path, source: io::Error) -> DataError {
    ArtifactError::Io { act: "write", path: path.to_owned(), source }.into()
}

fn cannot_read(path: &Path, source: io::Error) -> ArtifactError {
    if source.kind() == io::ErrorKind::NotFound {
        return ArtifactError::Missing {
            kind: DataProfile::KIND,
            path: path.to_owned(),
            mend: DataProfile::MEND,
        };
    }
    ArtifactError::Io { act: "read", path: path.to_owned(), source }
}

fn malformed(path: &Path, cause: String) -> ArtifactError {
    ArtifactError::Malformed {
        kind: DataProfile::KIND,
        path: path.to_owned(),
        cause,
        mend: DataProfile::MEND,
    }
}

fn not_sealed(path: &Path, broken: Broken) -> ArtifactError {
    match broken {
        Broken::Io(source) => cannot_read(path, source),
        Broken::Content(cause) => malformed(path, cause),
    }
}

fn unsound(path: &Path, problems: Vec<String>) -> ArtifactError {
    ArtifactError::Unsound {
        kind: DataProfile::KIND,
        path: path.to_owned(),
        problems,
        mend: DataProfile::MEND,
    }
}
