//! Arrow IPC, stream and file format: an index of batches, and rows cut out of them.
//!
//! Both formats are the same messages one after the other, so that both are indexed by one walk over message headers.
//! Of a batch only the needed rows of the needed columns are read, by the offsets its buffers hold; a batch that is
//! packed, or has columns of types whose rows do not lie side by side, is read whole.

use super::arrow_rows::{self, Body, Failure, unsound};
use super::tables::{self, Row, Rows, TableFile};
use super::{choice, fields};
use crate::error::DataError;
use crate::foreign::guarded;
use crate::read_seek::ReadSeek;
use crate::source::location::Location;
use crate::source::mixture::Source;
use crate::source::store::Stores;
use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_ipc::{MessageHeader, MetadataVersion, convert, reader};
use arrow_schema::SchemaRef;
use std::collections::HashMap;
use std::io::{Read, SeekFrom};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const MAGIC: &[u8; 6] = b"ARROW1";
/// Where the first message of a file begins, at most: after its magic word and zeros up to a multiple of 8 (pyarrow) or
/// of 64 (arrow-rs) bytes.
const MAX_START: u64 = 64;
/// Bytes of one message header, at most.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// Bytes of one packed buffer once unpacked, at most.
const MAX_UNPACKED_BYTES: u64 = 2 << 30;
/// Bytes that a buffer may claim to have unpacked, whatever its size, and for each packed byte; as a page of Parquet.
const UNPACKED_BYTES: (u64, u64) = (64 << 20, 64);

/// One Arrow IPC file.
#[derive(Debug)]
pub(super) struct ArrowFile {
    location: Location,
    source: Source,
    index: OnceLock<Arc<Index>>,
    /// The batch that was read whole last.
    whole: Mutex<Option<(usize, RecordBatch)>>,
}

/// Where the batches of a file are.
#[derive(Debug)]
struct Index {
    schema: SchemaRef,
    needed: Vec<usize>,
    /// The other columns.
    unread: Vec<String>,
    batches: Vec<Batch>,
    dictionaries: Vec<Message>,
    num_rows: u64,
}

/// A header and what follows it, in bytes of the file.
#[derive(Debug, Clone)]
struct Message {
    header: Range<u64>,
    body: Range<u64>,
}

#[derive(Debug)]
struct Batch {
    message: Message,
    num_rows: u64,
    first_row: u64,
}

impl ArrowFile {
    pub(super) const fn new(location: Location, source: Source) -> Self {
        Self { location, source, index: OnceLock::new(), whole: Mutex::new(None) }
    }

    fn index(&self, stores: &Stores) -> Result<Arc<Index>, DataError> {
        if let Some(index) = self.index.get() {
            return Ok(Arc::clone(index));
        }
        let opened = stores.open(&self.location)?;
        let mut file = opened.reader;
        let mut index =
            Index::read(file.as_mut(), opened.len).map_err(|failure| named(&self.location, failure))?;
        let chosen = choice::choose(&index.schema, &self.source)
            .map_err(|cause| DataError::Record(format!("`{}`: {cause}", self.location)))?;
        (index.needed, index.unread) = (chosen.read, chosen.unread);
        Ok(Arc::clone(self.index.get_or_init(|| Arc::new(index))))
    }
}

fn named(location: &Location, failure: Failure) -> DataError {
    match failure {
        Failure::Io(source) => DataError::Io { act: "read", path: location.path(), source },
        Failure::Unsound(cause) => {
            DataError::Record(format!("`{location}` is not a valid Arrow file: {cause}"))
        }
    }
}

impl TableFile for ArrowFile {
    fn unread(&self) -> &[String] {
        self.index.get().map_or(&[], |index| &index.unread)
    }

    fn num_rows(&self, stores: &Stores) -> Result<u64, DataError> {
        self.index(stores).map(|index| index.num_rows)
    }

    fn rows(&self, stores: &Stores) -> Result<Rows, DataError> {
        let index = self.index(stores)?;
        let mut file = stores.open(&self.location)?.reader;
        let location = self.location.clone();
        let (mut batch, mut from) = (0, 0);
        let mut whole = None;
        let batches = std::iter::from_fn(move || {
            while from >= index.batches.get(batch)?.num_rows {
                (batch, from) = (batch + 1, 0);
            }
            let Batch { message, num_rows, .. } = &index.batches[batch];
            let step = fields::batch_rows(*num_rows, message.body.end - message.body.start) as u64;
            let rows = from..num_rows.min(&(from + step)).to_owned();
            from = rows.end;
            let read = index.cut(file.as_mut(), batch, rows, &mut whole);
            Some(read.map_err(|failure| named(&location, failure)))
        });
        Ok(tables::rows(&self.location, batches))
    }

    fn row(&self, stores: &Stores, index: u64) -> Result<Row, DataError> {
        let found = self.index(stores)?;
        let batch = found.batches.partition_point(|batch| batch.first_row + batch.num_rows <= index);
        let Some(Batch { first_row, .. }) = found.batches.get(batch) else {
            return Err(tables::past_the_end(&self.location, index, found.num_rows));
        };
        let row = index - first_row;
        let mut file = stores.open(&self.location)?.reader;
        // Two threads may take turns here. Each of them leaves the batch that it has read whole.
        let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner).take();
        let cut = found.cut(file.as_mut(), batch, row..row + 1, &mut whole);
        if whole.is_some() {
            *self.whole.lock().unwrap_or_else(PoisonError::into_inner) = whole;
        }
        let cut = cut.map_err(|failure| named(&self.location, failure))?;
        tables::only_row(&self.location, &cut, index)
    }
}

impl Index {
    /// The index of a file of `len` bytes; no column is needed yet.
    fn read(file: &mut dyn ReadSeek, len: u64) -> Result<Self, Failure> {
        let mut head = Vec::new();
        file.take(8).read_to_end(&mut head)?;
        let is_file = head.starts_with(MAGIC);
        let (mut at, mut schema) = (if is_file { first_message(file, len)? } else { 0 }, None);
        let (mut batches, mut dictionaries) = (Vec::<Batch>::new(), Vec::new());
        while let Some(message) = next_message(file, at, len)? {
            let bytes = bytes_at(file, message.header.clone())?;
            let header = arrow_ipc::root_as_message(&bytes).map_err(unsound)?;
            at = message.body.end;
            match header.header_type() {
                MessageHeader::Schema if schema.is_none() => {
                    let found = header.header_as_schema().ok_or_else(|| unsound("its schema is empty"))?;
                    if !found.endianness().equals_to_target_endianness() {
                        return Err(unsound("it is big-endian, must be little-endian"));
                    }
                    let found = guarded(|| convert::try_fb_to_schema(found)).map_err(unsound)?;
                    schema = Some(Arc::new(found));
                }
                MessageHeader::RecordBatch if schema.is_some() => {
                    let batch = header.header_as_record_batch().ok_or_else(|| unsound("a batch is empty"))?;
                    let num_rows = u64::try_from(batch.length()).map_err(unsound)?;
                    let first_row = batches.last().map_or(0, |batch| batch.first_row + batch.num_rows);
                    if first_row.checked_add(num_rows).is_none() {
                        return Err(unsound("the rows of its batches are no sum"));
                    }
                    batches.push(Batch { message, num_rows, first_row });
                }
                MessageHeader::DictionaryBatch if schema.is_some() => dictionaries.push(message),
                other => {
                    return Err(unsound(format!("a message at byte {at} is {other:?}, out of turn")));
                }
            }
        }
        if is_file {
            check_footer(file, len, batches.len())?;
        }
        let num_rows = batches.last().map_or(0, |batch| batch.first_row + batch.num_rows);
        let schema = schema.ok_or_else(|| unsound("it has no schema"))?;
        Ok(Self { schema, needed: Vec::new(), unread: Vec::new(), batches, dictionaries, num_rows })
    }

    /// The needed columns of some rows of a batch; `whole` keeps a batch that had to be read whole.
    fn cut(
        &self,
        file: &mut dyn ReadSeek,
        batch: usize,
        rows: Range<u64>,
        whole: &mut Option<(usize, RecordBatch)>,
    ) -> Result<RecordBatch, Failure> {
        let slice = |(_, found): &(usize, RecordBatch)| {
            let end = found.num_rows().min(rows.end as usize);
            let start = end.min(rows.start as usize);
            found.slice(start, end - start)
        };
        if let Some(found) = whole.as_ref().filter(|(index, _)| *index == batch) {
            return Ok(slice(found));
        }
        let message = &self.batches[batch].message;
        let bytes = bytes_at(file, message.header.clone())?;
        let header = arrow_ipc::root_as_message(&bytes).map_err(unsound)?;
        let found = header.header_as_record_batch().ok_or_else(|| unsound("a batch is empty"))?;
        let mut body = Body { file, range: message.body.clone() };
        if found.compression().is_none() && arrow_rows::can_cut(&self.schema) {
            return arrow_rows::cut(&mut body, found, &self.schema, &self.needed, rows);
        }
        let dictionaries = self.dictionaries_before(body.file, message.header.start)?;
        let buffer = whole_body(&mut body, found)?;
        let decoded = self.decode(&buffer, found, &dictionaries, header.version())?;
        Ok(slice(whole.insert((batch, decoded))))
    }

    fn decode(
        &self,
        body: &Buffer,
        batch: arrow_ipc::RecordBatch<'_>,
        dictionaries: &HashMap<i64, ArrayRef>,
        version: MetadataVersion,
    ) -> Result<RecordBatch, Failure> {
        let schema = Arc::clone(&self.schema);
        let needed = Some(&self.needed[..]);
        guarded(|| reader::read_record_batch(body, batch, schema, dictionaries, needed, &version))
            .map_err(unsound)
    }

    /// The dictionaries as they are at the message that begins at byte `at`.
    fn dictionaries_before(
        &self,
        file: &mut dyn ReadSeek,
        at: u64,
    ) -> Result<HashMap<i64, ArrayRef>, Failure> {
        let mut dictionaries = HashMap::new();
        for message in self.dictionaries.iter().filter(|message| message.header.start < at) {
            let bytes = bytes_at(file, message.header.clone())?;
            let header = arrow_ipc::root_as_message(&bytes).map_err(unsound)?;
            let found = header.header_as_dictionary_batch();
            let found = found.ok_or_else(|| unsound("a dictionary is empty"))?;
            let values = found.data().ok_or_else(|| unsound("a dictionary has no values"))?;
            let body = whole_body(&mut Body { file, range: message.body.clone() }, values)?;
            let version = header.version();
            guarded(|| reader::read_dictionary(&body, found, &self.schema, &mut dictionaries, &version))
                .map_err(unsound)?;
        }
        Ok(dictionaries)
    }
}

/// The four bytes at byte `at`, as a number.
fn word(file: &mut dyn ReadSeek, at: u64) -> Result<u32, Failure> {
    let mut word = [0; 4];
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

/// Where the first message of a file in file format begins: behind the zeros that follow its magic word.
fn first_message(file: &mut dyn ReadSeek, len: u64) -> Result<u64, Failure> {
    let mut at = 8;
    while at < MAX_START.min(len.saturating_sub(4)) && word(file, at)? == 0 {
        at += 4;
    }
    Ok(at)
}

/// The message at byte `at` of a file of `len` bytes; `None` at the end mark.
fn next_message(file: &mut dyn ReadSeek, at: u64, len: u64) -> Result<Option<Message>, Failure> {
    let cut_off = || unsound("it is cut off: it ends without an end mark");
    if at.checked_add(4).is_none_or(|end| end > len) {
        return Err(cut_off());
    }
    // Before version 0.15, there was no mark before the length.
    let (mut start, mut header_bytes) = (at + 4, word(file, at)?);
    if header_bytes == u32::MAX {
        (start, header_bytes) = (at + 8, word(file, at + 4)?);
    }
    if header_bytes == 0 {
        return Ok(None);
    }
    let header = start..start + u64::from(header_bytes);
    if header.end > len {
        return Err(cut_off());
    }
    if u64::from(header_bytes) > MAX_HEADER_BYTES {
        let cause =
            format!("a header of {header_bytes} bytes at byte {at}, must be at most {MAX_HEADER_BYTES}");
        return Err(unsound(cause));
    }
    let bytes = bytes_at(file, header.clone())?;
    let message = arrow_ipc::root_as_message(&bytes)
        .map_err(|error| unsound(format!("what stands at byte {at} is no Arrow message: {error}")))?;
    let body_bytes = u64::try_from(message.bodyLength()).map_err(unsound)?;
    let end = header.end.checked_add(body_bytes).filter(|&end| end <= len).ok_or_else(cut_off)?;
    Ok(Some(Message { body: header.end..end, header }))
}

/// Bytes of the file, which are there.
fn bytes_at(file: &mut dyn ReadSeek, range: Range<u64>) -> Result<Buffer, Failure> {
    file.seek(SeekFrom::Start(range.start))?;
    let mut bytes = MutableBuffer::from_len_zeroed((range.end - range.start) as usize);
    file.read_exact(bytes.as_slice_mut())?;
    Ok(bytes.into())
}

/// The bytes behind the header, whose buffers lie inside it and claim no absurd size.
fn whole_body(body: &mut Body<'_>, batch: arrow_ipc::RecordBatch<'_>) -> Result<Buffer, Failure> {
    let bytes = bytes_at(body.file, body.range.clone())?;
    let mut claims = Vec::new();
    for buffer in batch.buffers().iter().flatten() {
        let range = arrow_rows::range_of(buffer, bytes.len() as u64)?;
        let found = &bytes[range.start as usize..range.end as usize];
        if batch.compression().is_some() {
            let claim = found.first_chunk().map_or(0, |claim| i64::from_le_bytes(*claim));
            // One that is stored as it is claims -1.
            claims.push((found.len() as u64, u64::try_from(claim).unwrap_or(0)));
        }
    }
    check_claims(&claims, bytes.len() as u64)?;
    Ok(bytes)
}

/// Whether packed buffers of a body, by (bytes, bytes they claim to have unpacked), may be unpacked: each, and all of
/// them, which may be the same bytes again and again.
fn check_claims(claims: &[(u64, u64)], body_bytes: u64) -> Result<(), Failure> {
    let limit_of = |packed: u64| UNPACKED_BYTES.0.saturating_add(UNPACKED_BYTES.1.saturating_mul(packed));
    let refuse = |packed: u64, claim: u128, limit: u64| {
        unsound(format!("{packed} packed bytes claim {claim} unpacked, must be at most {limit}"))
    };
    for &(packed, claim) in claims {
        let limit = limit_of(packed).min(MAX_UNPACKED_BYTES);
        if claim > limit {
            return Err(refuse(packed, claim.into(), limit));
        }
    }
    let (sum, limit) = (claims.iter().map(|claim| u128::from(claim.1)).sum(), limit_of(body_bytes));
    if sum > u128::from(limit) { Err(refuse(body_bytes, sum, limit)) } else { Ok(()) }
}

/// Whether the end of a file in file format agrees with its messages.
fn check_footer(file: &mut dyn ReadSeek, len: u64, num_batches: usize) -> Result<(), Failure> {
    let start = len.checked_sub(10).ok_or_else(|| unsound("it is cut off"))?;
    let tail = bytes_at(file, start..len)?;
    if &tail[4..] != MAGIC {
        return Err(unsound("it is cut off: it does not end with `ARROW1`"));
    }
    let footer_bytes = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
    let begin = start
        .checked_sub(footer_bytes)
        .filter(|_| footer_bytes <= MAX_HEADER_BYTES)
        .ok_or_else(|| unsound("its footer claims more bytes than there are"))?;
    let bytes = bytes_at(file, begin..start)?;
    let footer = arrow_ipc::root_as_footer(&bytes).map_err(unsound)?;
    let listed = footer.recordBatches().map_or(0, |blocks| blocks.len());
    if listed == num_batches {
        return Ok(());
    }
    Err(unsound(format!("its footer lists {listed} batches, there are {num_batches}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_buffers_are_bounded_each_and_together() {
        const MIB: u64 = 1 << 20;
        let said = |claims: &[(u64, u64)], body_bytes| match check_claims(claims, body_bytes) {
            Ok(()) => String::new(),
            Err(Failure::Unsound(cause)) => cause,
            Err(Failure::Io(error)) => error.to_string(),
        };
        assert_eq!(said(&[(0, 64 * MIB)], 0), "");
        assert_eq!(
            said(&[(1, 100 * MIB)], 0),
            "1 packed bytes claim 104857600 unpacked, must be at most 67108928"
        );
        let large = said(&[(40 * MIB, 2049 * MIB)], 40 * MIB);
        assert_eq!(large.split_once(", ").unwrap().1, "must be at most 2147483648");
        // Many buffers may share bytes of the body.
        let shared = [(600, 16 * MIB); 1000];
        assert_eq!(
            said(&shared, 600),
            "600 packed bytes claim 16777216000 unpacked, must be at most 67147264"
        );
        assert_eq!(said(&shared, 300 * MIB), "");
    }
}
