//! The columnar files of one source, one after the other.

use super::fields;
use super::{Body, RawRecord, Reader, Records};
use crate::error::DataError;
use crate::source::location::{Location, MediaPlace};
use crate::source::store::Stores;
use arrow_array::RecordBatch;
use dflop_types::Place;
use std::fmt;

/// What one row says, and its media.
pub(super) type Row = (Body, Vec<MediaPlace>);
/// The rows of a file, in order.
pub(super) type Rows = Box<dyn Iterator<Item = Result<Row, DataError>> + Send>;

/// The rows of the file at `location`, batch after batch; they are made into fields one by one.
pub(super) fn rows(
    location: &Location,
    batches: impl Iterator<Item = Result<RecordBatch, DataError>> + Send + 'static,
) -> Rows {
    let name = location.name();
    let mut next_row = 0;
    Box::new(batches.flat_map(move |batch| -> Rows {
        let batch = match batch {
            Ok(batch) => batch,
            Err(error) => return Box::new(std::iter::once(Err(error))),
        };
        let first_row = next_row;
        next_row += batch.num_rows() as u64;
        let name = name.clone();
        Box::new((0..batch.num_rows()).map(move |at| Ok(said(&batch, at, &name, first_row + at as u64))))
    }))
}

/// The row at `at` of the batch; one that is too large costs itself alone.
fn said(batch: &RecordBatch, at: usize, file: &str, row: u64) -> Row {
    match fields::row(batch, at, file, row) {
        Ok((fields, media)) => (Body::Fields(fields), media),
        Err(cause) => (Body::Unsound(cause), Vec::new()),
    }
}

/// The one row of `batch`, which is the row at `index` of the file at `location`.
///
/// # Errors
/// [`DataError::Record`].
pub(super) fn only_row(location: &Location, batch: &RecordBatch, index: u64) -> Result<Row, DataError> {
    if batch.num_rows() != 1 {
        return Err(DataError::Record(format!(
            "`{location}`: {} rows are read for row {index}, must be 1",
            batch.num_rows()
        )));
    }
    Ok(said(batch, 0, &location.name(), index))
}

/// The error of a row that is not there.
pub(super) fn past_the_end(location: &Location, index: u64, num_rows: u64) -> DataError {
    DataError::Record(format!("`{location}`: row {index} is asked for, it has {num_rows} rows"))
}

/// One columnar file.
pub(super) trait TableFile: Send + Sync + fmt::Debug {
    /// Columns that are not read, once its schema was looked at.
    fn unread(&self) -> &[String];

    /// How many rows it has.
    ///
    /// # Errors
    /// [`DataError::Io`] and [`DataError::Record`].
    fn num_rows(&self, stores: &Stores) -> Result<u64, DataError>;

    /// Every row, in order.
    ///
    /// # Errors
    /// [`DataError::Io`] and [`DataError::Record`].
    fn rows(&self, stores: &Stores) -> Result<Rows, DataError>;

    /// The row at `index`, read alone.
    ///
    /// # Errors
    /// [`DataError::Io`] and [`DataError::Record`].
    fn row(&self, stores: &Stores, index: u64) -> Result<Row, DataError>;
}

/// The columnar files of one source.
#[derive(Debug)]
pub(super) struct Tables {
    locations: Vec<Location>,
    files: Vec<Box<dyn TableFile>>,
}

impl Tables {
    /// The files at `locations`, in order, opened by `open`; the first is looked into, so that what is wrong with all
    /// of them is said at once.
    ///
    /// # Errors
    /// Those of reading the first file's columns.
    pub(super) fn open(
        locations: Vec<Location>,
        stores: &Stores,
        open: impl Fn(&Location) -> Box<dyn TableFile>,
    ) -> Result<Self, DataError> {
        let files: Vec<_> = locations.iter().map(open).collect();
        if let Some(first) = files.first() {
            first.num_rows(stores)?;
        }
        Ok(Self { locations, files })
    }
}

impl Reader for Tables {
    fn files(&self) -> &[Location] {
        &self.locations
    }

    fn unread(&self, file: usize) -> &[String] {
        self.files.get(file).map_or(&[], |file| file.unread())
    }

    fn count(&self, stores: &Stores) -> Result<u64, DataError> {
        self.files.iter().try_fold(0_u64, |sum, file| Ok(sum.saturating_add(file.num_rows(stores)?)))
    }

    fn records<'a>(&'a self, stores: &'a Stores) -> Result<Records<'a>, DataError> {
        let files = self.files.iter().enumerate().flat_map(move |(file, table)| {
            let (rows, error) = match table.rows(stores) {
                Ok(rows) => (Some(rows), None),
                Err(error) => (None, Some(Err(error))),
            };
            let records = rows.into_iter().flatten().enumerate().map(move |(index, row)| {
                let place = Place { file: file as u32, start: index as u64, len: 0 };
                row.map(|row| record(place, row))
            });
            records.chain(error)
        });
        // An error ends the source.
        Ok(Box::new(files.scan(false, |has_failed, record| {
            let is_past = std::mem::replace(has_failed, record.is_err());
            (!is_past).then_some(record)
        })))
    }

    fn fetch(&self, stores: &Stores, place: Place) -> Result<RawRecord, DataError> {
        let file = self.files.get(place.file as usize).ok_or_else(|| {
            DataError::Record(format!("file {} is asked for, there are {}", place.file, self.files.len()))
        })?;
        file.row(stores, place.start).map(|row| record(place, row))
    }
}

fn record(place: Place, (body, attachments): Row) -> RawRecord {
    RawRecord { place, body, attachments }
}
