//! Some rows of an Arrow batch, read by what its buffers say of them, without the rest of the batch.

use crate::foreign::guarded;
use crate::read_seek::ReadSeek;
use arrow_array::{Array as _, ArrayRef, RecordBatch, RecordBatchOptions, make_array, new_empty_array};
use arrow_buffer::{BooleanBuffer, Buffer, MutableBuffer, NullBuffer};
use arrow_schema::{DataType, Schema};
use std::convert::Infallible;
use std::fmt;
use std::io::{ErrorKind, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

/// Why a file cannot be read.
#[derive(Debug)]
pub(super) enum Failure {
    /// The system refuses.
    Io(std::io::Error),
    /// It breaks the rules of its format.
    Unsound(String),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == ErrorKind::UnexpectedEof {
            return Self::Unsound("it is cut off".to_owned());
        }
        Self::Io(error)
    }
}

/// A breach of the format's rules.
pub(super) fn unsound(cause: impl fmt::Display) -> Failure {
    Failure::Unsound(cause.to_string())
}

/// The bytes behind a message header.
pub(super) struct Body<'a> {
    pub(super) file: &'a mut dyn ReadSeek,
    pub(super) range: Range<u64>,
}

/// Whether rows of every column lie side by side in their buffers.
pub(super) fn can_cut(schema: &Schema) -> bool {
    fn is_plain(data_type: &DataType) -> bool {
        use DataType as D;
        match data_type {
            D::Null
            | D::Boolean
            | D::Binary
            | D::LargeBinary
            | D::FixedSizeBinary(_)
            | D::Utf8
            | D::LargeUtf8 => true,
            D::List(field) | D::LargeList(field) | D::FixedSizeList(field, _) | D::Map(field, _) => {
                is_plain(field.data_type())
            }
            D::Struct(fields) => fields.iter().all(|field| is_plain(field.data_type())),
            other => other.primitive_width().is_some(),
        }
    }
    schema.fields().iter().all(|field| is_plain(field.data_type()))
}

/// The columns at `needed` of some rows of the batch. Its schema is one that [`can_cut`].
///
/// # Errors
/// [`Failure`].
pub(super) fn cut(
    body: &mut Body<'_>,
    batch: arrow_ipc::RecordBatch<'_>,
    schema: &Schema,
    needed: &[usize],
    rows: Range<u64>,
) -> Result<RecordBatch, Failure> {
    let nodes = batch.nodes().into_iter().flatten().map(|node| (node.length(), node.null_count()));
    let buffers = batch.buffers().into_iter().flatten();
    let mut layout =
        Layout { nodes: nodes.collect(), buffers: buffers.copied().collect(), node: 0, buffer: 0 };
    let num_rows = (rows.end - rows.start) as usize;
    let mut columns = Vec::new();
    for (index, field) in schema.fields().iter().enumerate() {
        if needed.contains(&index) {
            let column = layout
                .column(body, field.data_type(), rows.clone())
                .map_err(|failure| in_column(field.name(), failure))?;
            columns.push(column);
        } else {
            layout.skip(field.data_type());
        }
    }
    let schema = schema.project(needed).map_err(unsound)?;
    let options = RecordBatchOptions::new().with_row_count(Some(num_rows));
    RecordBatch::try_new_with_options(Arc::new(schema), columns, &options).map_err(unsound)
}

fn in_column(name: &str, failure: Failure) -> Failure {
    match failure {
        Failure::Unsound(cause) => Failure::Unsound(format!("column `{name}`: {cause}")),
        io @ Failure::Io(_) => io,
    }
}

/// Where the buffer lies in a body of `body_bytes` bytes.
///
/// # Errors
/// [`Failure::Unsound`] where it lies outside.
pub(super) fn range_of(buffer: &arrow_ipc::Buffer, body_bytes: u64) -> Result<Range<u64>, Failure> {
    let range = u64::try_from(buffer.offset()).ok().zip(u64::try_from(buffer.length()).ok());
    range
        .and_then(|(start, len)| Some(start..start.checked_add(len)?))
        .filter(|range| range.end <= body_bytes)
        .ok_or_else(|| {
            let (offset, len) = (buffer.offset(), buffer.length());
            unsound(format!("a buffer of {len} bytes at byte {offset} of a body of {body_bytes}"))
        })
}

/// The arrays and buffers of a batch, in the order of its columns, depth first.
struct Layout {
    /// Length and nulls of each array.
    nodes: Vec<(i64, i64)>,
    buffers: Vec<arrow_ipc::Buffer>,
    /// The next ones.
    node: usize,
    buffer: usize,
}

impl Layout {
    /// Passes over a column.
    fn skip(&mut self, data_type: &DataType) {
        use DataType as D;
        self.node += 1;
        self.buffer += match data_type {
            D::Null => 0,
            D::Struct(_) | D::FixedSizeList(..) => 1,
            D::Binary | D::LargeBinary | D::Utf8 | D::LargeUtf8 => 3,
            _ => 2,
        };
        match data_type {
            D::List(field) | D::LargeList(field) | D::FixedSizeList(field, _) | D::Map(field, _) => {
                self.skip(field.data_type());
            }
            D::Struct(fields) => fields.iter().for_each(|field| self.skip(field.data_type())),
            _ => {}
        }
    }

    /// Some rows of a column.
    fn column(
        &mut self,
        body: &mut Body<'_>,
        data_type: &DataType,
        rows: Range<u64>,
    ) -> Result<ArrayRef, Failure> {
        use DataType as D;
        let &(length, num_nulls) = self.nodes.get(self.node).ok_or_else(|| unsound("an array is missing"))?;
        self.node += 1;
        if u64::try_from(length).is_ok_and(|length| rows.end > length) || length < 0 || rows.start > rows.end
        {
            return Err(unsound(format!("rows {} to {} of an array of {length}", rows.start, rows.end)));
        }
        let num_rows = (rows.end - rows.start) as usize;
        // Of a type that cannot be, a map of numbers say, there is no array.
        let empty = guarded(|| Ok::<_, Infallible>(new_empty_array(data_type).to_data())).map_err(unsound)?;
        let empty = empty.into_builder().len(num_rows).align_buffers(true);
        if matches!(data_type, D::Null) {
            return guarded(|| empty.build().map(make_array)).map_err(unsound);
        }
        let validity = self.next_buffer()?;
        let nulls = if num_nulls == 0 || validity.length() == 0 {
            None
        } else {
            Some(NullBuffer::new(bits(body, &validity, &rows)?))
        };
        let data = empty.nulls(nulls);
        let data = match data_type {
            D::Boolean => {
                let values = self.next_buffer()?;
                let values: BooleanBuffer = bits(body, &values, &rows)?.iter().collect();
                data.buffers(vec![values.into_inner()])
            }
            D::Binary | D::Utf8 | D::LargeBinary | D::LargeUtf8 => {
                let is_large = matches!(data_type, D::LargeBinary | D::LargeUtf8);
                let (offsets, inner) = self.offsets(body, is_large, &rows)?;
                let values = self.next_buffer()?;
                data.buffers(vec![offsets, part(body, &values, inner)?])
            }
            D::List(field) | D::Map(field, _) | D::LargeList(field) => {
                let is_large = matches!(data_type, D::LargeList(_));
                let (offsets, inner) = self.offsets(body, is_large, &rows)?;
                let child = self.column(body, field.data_type(), inner)?;
                data.buffers(vec![offsets]).child_data(vec![child.to_data()])
            }
            D::FixedSizeList(field, size) => {
                let inner = scaled(&rows, i64::from(*size))?;
                let child = self.column(body, field.data_type(), inner)?;
                data.buffers(vec![]).child_data(vec![child.to_data()])
            }
            D::Struct(fields) => {
                let mut children = Vec::with_capacity(fields.len());
                for field in fields {
                    children.push(self.column(body, field.data_type(), rows.clone())?.to_data());
                }
                data.buffers(vec![]).child_data(children)
            }
            other => {
                let width = match other {
                    D::FixedSizeBinary(width) => i64::from(*width),
                    other => {
                        other.primitive_width().and_then(|width| i64::try_from(width).ok()).unwrap_or(-1)
                    }
                };
                let values = self.next_buffer()?;
                data.buffers(vec![part(body, &values, scaled(&rows, width)?)?])
            }
        };
        // `build` looks at every offset and every text.
        guarded(|| data.build().map(make_array)).map_err(unsound)
    }

    fn next_buffer(&mut self) -> Result<arrow_ipc::Buffer, Failure> {
        let buffer = self.buffers.get(self.buffer).ok_or_else(|| unsound("a buffer is missing"))?;
        self.buffer += 1;
        Ok(*buffer)
    }

    /// The offsets of some rows, from 0 on, and what they span.
    fn offsets(
        &mut self,
        body: &mut Body<'_>,
        is_large: bool,
        rows: &Range<u64>,
    ) -> Result<(Buffer, Range<u64>), Failure> {
        let buffer = self.next_buffer()?;
        let width = if is_large { 8 } else { 4 };
        let ends = rows.start..rows.end.checked_add(1).ok_or_else(|| unsound("a row past all rows"))?;
        // An array of no row may have no offset.
        let bytes =
            if rows.is_empty() { Buffer::default() } else { part(body, &buffer, scaled(&ends, width)?)? };
        let read = |chunk: &[u8]| match chunk.try_into() {
            Ok(eight) => i64::from_le_bytes(eight),
            Err(_) => chunk.try_into().map_or(0, |four| i64::from(i32::from_le_bytes(four))),
        };
        let offsets: Vec<i64> = bytes.chunks_exact(width as usize).map(read).collect();
        let (first, last) = (offsets.first().copied().unwrap_or(0), offsets.last().copied().unwrap_or(0));
        if first < 0 || offsets.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(unsound("offsets that do not ascend"));
        }
        let from_zero = offsets.iter().map(|offset| offset - first);
        let based = match (is_large, offsets.is_empty()) {
            (true, true) => Buffer::from_slice_ref([0_i64]),
            (false, true) => Buffer::from_slice_ref([0_i32]),
            (true, false) => from_zero.collect::<Vec<i64>>().into(),
            (false, false) => from_zero.map(|offset| offset as i32).collect::<Vec<i32>>().into(),
        };
        Ok((based, first as u64..last as u64))
    }
}

/// The range times `width`, which is not negative.
fn scaled(range: &Range<u64>, width: i64) -> Result<Range<u64>, Failure> {
    let width = u64::try_from(width).map_err(unsound)?;
    range
        .start
        .checked_mul(width)
        .zip(range.end.checked_mul(width))
        .map(|(start, end)| start..end)
        .ok_or_else(|| unsound("a row past all bytes"))
}

/// A part of a buffer.
fn part(body: &mut Body<'_>, buffer: &arrow_ipc::Buffer, part: Range<u64>) -> Result<Buffer, Failure> {
    let whole = range_of(buffer, body.range.end - body.range.start)?;
    let len = whole.end - whole.start;
    if part.end > len || part.start > part.end {
        return Err(unsound(format!("bytes {} to {} of a buffer of {len}", part.start, part.end)));
    }
    body.file.seek(SeekFrom::Start(body.range.start + whole.start + part.start))?;
    // No more than the file has, since the body is inside it.
    let mut bytes = MutableBuffer::from_len_zeroed((part.end - part.start) as usize);
    body.file.read_exact(bytes.as_slice_mut())?;
    Ok(bytes.into())
}

/// The bits of some rows.
fn bits(
    body: &mut Body<'_>,
    buffer: &arrow_ipc::Buffer,
    rows: &Range<u64>,
) -> Result<BooleanBuffer, Failure> {
    let bytes = part(body, buffer, rows.start / 8..rows.end.div_ceil(8))?;
    Ok(BooleanBuffer::new(bytes, (rows.start % 8) as usize, (rows.end - rows.start) as usize))
}
