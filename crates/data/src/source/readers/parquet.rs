//! Parquet files: rows by row group, single rows by their pages.

use super::choice::{self, Chosen};
use super::fields;
use super::tables::{self, Row, Rows, TableFile};
use crate::error::DataError;
use crate::foreign::guarded;
use crate::source::location::Location;
use crate::source::mixture::Source;
use crate::source::parquet_file::{self, SharedFile};
use crate::source::store::Stores;
use arrow_array::RecordBatch;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowSelection, RowSelector,
};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, RowGroupMetaData};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// One Parquet file.
#[derive(Debug)]
pub(super) struct ParquetFile {
    location: Location,
    source: Source,
    footer: OnceLock<Arc<Footer>>,
}

/// What the end of the file says.
#[derive(Debug)]
struct Footer {
    metadata: ArrowReaderMetadata,
    mask: ProjectionMask,
    /// Columns outside of the mask.
    unread: Vec<String>,
    /// Rows of each row group.
    group_rows: Vec<u64>,
    num_rows: u64,
}

impl ParquetFile {
    pub(super) const fn new(location: Location, source: Source) -> Self {
        Self { location, source, footer: OnceLock::new() }
    }

    fn footer(&self, file: &SharedFile) -> Result<Arc<Footer>, DataError> {
        if let Some(footer) = self.footer.get() {
            return Ok(Arc::clone(footer));
        }
        let metadata = guarded(|| parquet_file::load(file, PageIndexPolicy::Optional))
            .map_err(|cause| unsound(&self.location, cause))?;
        let Chosen { read, unread } = choice::choose(metadata.schema(), &self.source)
            .map_err(|cause| DataError::Record(format!("`{}`: {cause}", self.location)))?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), read);
        check_packing(metadata.metadata(), &mask)
            .map_err(|cause| DataError::Record(format!("`{}`: {cause}", self.location)))?;
        let rows_of = |group: &RowGroupMetaData| u64::try_from(group.num_rows()).ok();
        let group_rows: Option<Vec<_>> = metadata.metadata().row_groups().iter().map(rows_of).collect();
        let counted = group_rows.and_then(|rows| {
            let sum = rows.iter().try_fold(0_u64, |sum, rows| sum.checked_add(*rows))?;
            Some((rows, sum))
        });
        let (group_rows, num_rows) =
            counted.ok_or_else(|| unsound(&self.location, "the rows of its row groups are no sum"))?;
        let footer = Footer { metadata, mask, unread, group_rows, num_rows };
        Ok(Arc::clone(self.footer.get_or_init(|| Arc::new(footer))))
    }

    fn open(&self, stores: &Stores) -> Result<(SharedFile, Arc<Footer>), DataError> {
        let opened = stores.open(&self.location)?;
        let file = SharedFile::new(opened.reader, opened.len);
        let footer = self.footer(&file)?;
        Ok((file, footer))
    }
}

impl TableFile for ParquetFile {
    fn unread(&self) -> &[String] {
        self.footer.get().map_or(&[], |footer| &footer.unread)
    }

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

/// Whether the columns that are read are packed in a way that we unpack.
fn check_packing(metadata: &ParquetMetaData, mask: &ProjectionMask) -> Result<(), String> {
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns().iter().enumerate());
    for (_, column) in columns.filter(|(leaf, _)| mask.leaf_included(*leaf)) {
        let name = match column.compression() {
            Compression::BROTLI(_) => "Brotli",
            Compression::LZO => "LZO",
            _ => continue,
        };
        return Err(format!(
            "column `{}` is compressed with {name}, must be with Zstandard, Snappy, gzip or LZ4: write the file again, for \
             example with `pyarrow.parquet.write_table(table, file, compression=\"zstd\")`",
            column.column_path().string()
        ));
    }
    Ok(())
}

fn unsound(location: &Location, cause: impl fmt::Display) -> DataError {
    let cause = cause.to_string();
    DataError::Record(match cause.split_once(parquet_file::UNREAD) {
        Some((_, cause)) => format!("cannot read `{location}`: {cause}"),
        None => format!("`{location}` is not a valid Parquet file: {cause}"),
    })
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
