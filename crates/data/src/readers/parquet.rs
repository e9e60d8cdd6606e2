//! Parquet files: rows by row group, single rows by their pages.

use super::tables::{self, Row, Rows, TableFile};
use super::{fields, parquet_footer};
use crate::error::DataError;
use crate::foreign::guarded;
use crate::location::Location;
use crate::store::{Opened, ReadSeek, Stores};
use arrow_array::RecordBatch;
use bytes::Bytes;
use parquet::DecodeResult;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
    RowSelection, RowSelector,
};
use parquet::errors::ParquetError;
use parquet::file::FOOTER_SIZE;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaDataPushDecoder, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, Length};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufReader, ErrorKind, Read, SeekFrom};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// One Parquet file.
#[derive(Debug)]
pub(super) struct ParquetFile {
    location: Location,
    columns: BTreeMap<String, String>,
    footer: OnceLock<Arc<Footer>>,
}

/// What the end of the file says.
#[derive(Debug)]
struct Footer {
    metadata: ArrowReaderMetadata,
    mask: ProjectionMask,
    /// Rows of each row group.
    group_rows: Vec<u64>,
    num_rows: u64,
}

impl ParquetFile {
    pub(super) const fn new(location: Location, columns: BTreeMap<String, String>) -> Self {
        Self { location, columns, footer: OnceLock::new() }
    }

    fn footer(&self, file: &SharedFile) -> Result<Arc<Footer>, DataError> {
        if let Some(footer) = self.footer.get() {
            return Ok(Arc::clone(footer));
        }
        let metadata = guarded(|| load(file)).map_err(|cause| unsound(&self.location, cause))?;
        let needed = fields::needed(metadata.schema(), &self.columns)
            .map_err(|cause| DataError::Record(format!("`{}`: {cause}", self.location)))?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), needed);
        let rows_of = |group: &RowGroupMetaData| u64::try_from(group.num_rows()).ok();
        let group_rows: Option<Vec<_>> = metadata.metadata().row_groups().iter().map(rows_of).collect();
        let counted = group_rows.and_then(|rows| {
            let sum = rows.iter().try_fold(0_u64, |sum, rows| sum.checked_add(*rows))?;
            Some((rows, sum))
        });
        let (group_rows, num_rows) =
            counted.ok_or_else(|| unsound(&self.location, "the rows of its row groups are no sum"))?;
        let footer = Footer { metadata, mask, group_rows, num_rows };
        Ok(Arc::clone(self.footer.get_or_init(|| Arc::new(footer))))
    }

    fn open(&self, stores: &Stores) -> Result<(SharedFile, Arc<Footer>), DataError> {
        let file = SharedFile::new(stores.open(&self.location)?);
        let footer = self.footer(&file)?;
        Ok((file, footer))
    }
}

impl TableFile for ParquetFile {
    fn num_rows(&self, stores: &Stores) -> Result<u64, DataError> {
        match self.footer.get() {
            Some(footer) => Ok(footer.num_rows),
            None => self.open(stores).map(|(_, footer)| footer.num_rows),
        }
    }

    fn rows(&self, stores: &Stores) -> Result<Rows, DataError> {
        let (file, footer) = self.open(stores)?;
        let groups = Groups { file, footer, location: self.location.clone(), group: 0, open: None };
        Ok(tables::rows(&self.location, groups))
    }

    fn row(&self, stores: &Stores, index: u64) -> Result<Row, DataError> {
        let (file, footer) = self.open(stores)?;
        let mut before = index;
        for (group, &rows) in footer.group_rows.iter().enumerate() {
            if before >= rows {
                before -= rows;
                continue;
            }
            let selection =
                RowSelection::from(vec![RowSelector::skip(before as usize), RowSelector::select(1)]);
            let batch = guarded(|| footer.read(&file, group, 1, Some(selection)))
                .and_then(|mut batches| guarded(|| batches.next().transpose()))
                .and_then(|batch| batch.ok_or_else(|| format!("row {index} is not there")))
                .map_err(|cause| unsound(&self.location, cause))?;
            return tables::only_row(&self.location, &batch, index);
        }
        Err(tables::past_the_end(&self.location, index, footer.num_rows))
    }
}

/// What the end of the file says, checked before it is decoded.
fn load(file: &SharedFile) -> Result<ArrowReaderMetadata, ParquetError> {
    let mut decoder = ParquetMetaDataPushDecoder::try_new(file.len)?
        .with_column_index_policy(PageIndexPolicy::Skip)
        .with_offset_index_policy(PageIndexPolicy::Optional);
    loop {
        match decoder.try_decode()? {
            DecodeResult::NeedsData(ranges) => {
                let mut parts = Vec::new();
                for range in &ranges {
                    let bytes = file.get_bytes(range.start, (range.end - range.start) as usize)?;
                    if range.end == file.len - FOOTER_SIZE as u64 {
                        parquet_footer::check(&bytes).map_err(ParquetError::General)?;
                    }
                    parts.push(bytes);
                }
                decoder.push_ranges(ranges, parts)?;
            }
            DecodeResult::Data(metadata) => {
                return ArrowReaderMetadata::try_new(Arc::new(metadata), ArrowReaderOptions::new());
            }
            DecodeResult::Finished => return Err(ParquetError::General("it has no footer".to_owned())),
        }
    }
}

fn unsound(location: &Location, cause: impl fmt::Display) -> DataError {
    DataError::Record(format!("`{location}` is not a sound Parquet file: {cause}"))
}

impl Footer {
    fn read(
        &self,
        file: &SharedFile,
        group: usize,
        batch_rows: usize,
        selection: Option<RowSelection>,
    ) -> Result<ParquetRecordBatchReader, ParquetError> {
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file.clone(), self.metadata.clone())
            .with_projection(self.mask.clone())
            .with_row_groups(vec![group])
            .with_batch_size(batch_rows);
        match selection {
            Some(selection) => builder.with_row_selection(selection).build(),
            None => builder.build(),
        }
    }

    /// Bytes of the needed columns of a row group, unpacked, as the footer says.
    fn group_bytes(&self, group: usize) -> u64 {
        let columns = self.metadata.metadata().row_group(group).columns().iter().enumerate();
        columns
            .filter(|(leaf, _)| self.mask.leaf_included(*leaf))
            .map(|(_, column)| u64::try_from(column.uncompressed_size()).unwrap_or(0))
            .fold(0, u64::saturating_add)
    }
}

/// The batches of a file, row group after row group.
struct Groups {
    file: SharedFile,
    footer: Arc<Footer>,
    location: Location,
    /// The row group under way.
    group: usize,
    /// Its batches that are not read yet, and how many rows they must have.
    open: Option<(ParquetRecordBatchReader, u64)>,
}

impl Groups {
    fn next_batch(&mut self) -> Result<Option<RecordBatch>, String> {
        while let Some(&rows) = self.footer.group_rows.get(self.group) {
            if self.open.is_none() {
                let batch_rows = fields::batch_rows(rows, self.footer.group_bytes(self.group));
                let batches = guarded(|| self.footer.read(&self.file, self.group, batch_rows, None))?;
                self.open = Some((batches, rows));
            }
            let Some((batches, left)) = &mut self.open else { continue };
            if let Some(batch) = guarded(|| batches.next().transpose())? {
                *left = left
                    .checked_sub(batch.num_rows() as u64)
                    .ok_or("a row group has more rows than it says")?;
                return Ok(Some(batch));
            }
            if *left > 0 {
                return Err(format!("row group {} lacks {left} of its {rows} rows", self.group));
            }
            self.open = None;
            self.group += 1;
        }
        Ok(None)
    }
}

impl Iterator for Groups {
    type Item = Result<RecordBatch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_batch().map_err(|cause| unsound(&self.location, cause)).transpose()
    }
}

/// One open file, for the Parquet decoder, which reads at several offsets in turn.
#[derive(Clone)]
struct SharedFile {
    reader: Arc<Mutex<Box<dyn ReadSeek>>>,
    len: u64,
}

impl SharedFile {
    fn new(opened: Opened) -> Self {
        Self { reader: Arc::new(Mutex::new(opened.reader)), len: opened.len }
    }
}

impl Length for SharedFile {
    fn len(&self) -> u64 {
        self.len
    }
}

impl ChunkReader for SharedFile {
    type T = BufReader<SharedFileAt>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(BufReader::new(SharedFileAt { file: self.clone(), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.len) {
            return Err(ParquetError::EOF(format!(
                "{length} bytes are named at byte {start}, the file has {}",
                self.len
            )));
        }
        let mut bytes = Vec::with_capacity(length);
        SharedFileAt { file: self.clone(), at: start }.take(length as u64).read_to_end(&mut bytes)?;
        if bytes.len() != length {
            return Err(ParquetError::EOF(format!("{} of {length} bytes are there", bytes.len())));
        }
        Ok(bytes.into())
    }
}

/// The shared file, read from an offset on.
struct SharedFileAt {
    file: SharedFile,
    at: u64,
}

impl Read for SharedFileAt {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        // A reader whose other user has panicked is sought anew here: its state does not matter.
        let mut reader = self.file.reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.seek(SeekFrom::Start(self.at))?;
        let read = reader.read(buffer)?;
        // The decoder skips what it does not know without a look at how much was there: it would go on past the end.
        if read == 0 && !buffer.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}
