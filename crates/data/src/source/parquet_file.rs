//! A Parquet file for its decoder, which trusts what it reads more than we do.

mod footer;
mod page;

use crate::read_seek::ReadSeek;
use bytes::Bytes;
use parquet::DecodeResult;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::ParquetError;
use parquet::file::FOOTER_SIZE;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaDataPushDecoder};
use parquet::file::reader::{ChunkReader, Length};
use std::io::{BufRead as _, BufReader, ErrorKind, Read, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

/// How an error begins that says nothing of the file, but of its store.
pub(crate) const UNREAD: &str = "it cannot be read: ";

fn unread(error: &std::io::Error) -> ParquetError {
    // Where the decoder asks for bytes past the end, the file is at fault.
    match error.kind() {
        ErrorKind::UnexpectedEof => ParquetError::EOF(error.to_string()),
        _ => ParquetError::General(format!("{UNREAD}{error}")),
    }
}

/// What the end of the file says, checked before it is decoded; with where its pages are, as `offset_index` says.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn load(
    file: &SharedFile,
    offset_index: PageIndexPolicy,
) -> Result<ArrowReaderMetadata, ParquetError> {
    let mut decoder = ParquetMetaDataPushDecoder::try_new(file.len)?
        .with_column_index_policy(PageIndexPolicy::Skip)
        .with_offset_index_policy(offset_index);
    loop {
        match decoder.try_decode()? {
            DecodeResult::NeedsData(ranges) => {
                let mut parts = Vec::new();
                for range in &ranges {
                    let bytes = file.get_bytes(range.start, (range.end - range.start) as usize)?;
                    if range.end == file.len - FOOTER_SIZE as u64 {
                        footer::check(&bytes).map_err(ParquetError::General)?;
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

/// One open file, for the Parquet decoder, which reads at several offsets in turn.
#[derive(Clone)]
pub(crate) struct SharedFile {
    reader: Arc<Mutex<Box<dyn ReadSeek>>>,
    len: u64,
}

impl SharedFile {
    pub(crate) fn new(reader: Box<dyn ReadSeek>, len: u64) -> Self {
        Self { reader: Arc::new(Mutex::new(reader)), len }
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
        let mut reader = BufReader::new(SharedFileAt { file: self.clone(), at: start });
        // What is read so is the header of a page; it stays in the buffer.
        page::check_head(reader.fill_buf().map_err(|error| unread(&error))?)
            .map_err(ParquetError::General)?;
        Ok(reader)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.len) {
            return Err(ParquetError::EOF(format!(
                "{length} bytes are named at byte {start}, the file has {}",
                self.len
            )));
        }
        let mut bytes = Vec::with_capacity(length);
        let mut reader = SharedFileAt { file: self.clone(), at: start }.take(length as u64);
        reader.read_to_end(&mut bytes).map_err(|error| unread(&error))?;
        if bytes.len() != length {
            return Err(ParquetError::EOF(format!("{} of {length} bytes are there", bytes.len())));
        }
        // Where the file says where its pages are, pages and their headers are read together.
        page::check_whole(&bytes).map_err(ParquetError::General)?;
        Ok(bytes.into())
    }
}

/// The shared file, read from an offset on.
pub(crate) struct SharedFileAt {
    file: SharedFile,
    at: u64,
}

impl Read for SharedFileAt {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        // This call seeks anew, so the state that a panicked user left in the reader does not matter.
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
