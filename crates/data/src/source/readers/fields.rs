//! Rows of columnar files as fields: JSON values, with media that stand in cells as attachments.

use crate::source::location::MediaPlace;
use arrow_array::cast::AsArray as _;
use arrow_array::types::{
    Date32Type, Date64Type, DurationMicrosecondType, DurationMillisecondType, DurationNanosecondType,
    DurationSecondType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    Time32MillisecondType, Time32SecondType, Time64MicrosecondType, Time64NanosecondType,
    TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch, StructArray};
use arrow_schema::{DataType, Field, Fields, TimeUnit};
use bytes::Bytes;
use serde_json::{Map, Number, Value, json};

/// Values of one row, at most: lists of nulls take no bytes in a file, but do in memory.
const MAX_VALUES: usize = 1 << 22;
/// Bytes of text in one row, at most, as of a record of JSON: a packed cell of some kilobytes may hold a gigabyte.
const TEXT_BYTES_MAX: usize = 64 << 20;
/// Bytes of cells read at once, where rows are small enough.
const BATCH_BYTES: u64 = 16 << 20;
/// Rows read at once, at most.
const BATCH_ROWS: u64 = 64;

/// Rows to read at once where `num_rows` rows have `bytes` bytes: at least one.
pub(super) fn batch_rows(num_rows: u64, bytes: u64) -> usize {
    let row_bytes = bytes / num_rows.max(1);
    (BATCH_BYTES / row_bytes.max(1)).clamp(1, BATCH_ROWS) as usize
}

/// The row at `at` of the batch, and the media in its cells; `row` counts in `file`, both are for names.
///
/// Null fields are left out, at every level, since a table has no other way to say that a field is not there.
///
/// # Errors
/// Column and cause.
pub(super) fn row(
    batch: &RecordBatch,
    at: usize,
    file: &str,
    row: u64,
) -> Result<(Value, Vec<MediaPlace>), String> {
    let mut cells = Cells { file, row, column: "", attachments: Vec::new(), num_values: 0, text_bytes: 0 };
    let schema = batch.schema_ref();
    let mut fields = Map::new();
    for (field, array) in schema.fields().iter().zip(batch.columns()) {
        cells.column = field.name();
        let value = cells
            .value_of(field, array.as_ref(), at)
            .map_err(|cause| format!("row {row}, column `{}`: {cause}", field.name()))?;
        if !value.is_null() {
            fields.insert(field.name().clone(), value);
        }
    }
    Ok((Value::Object(fields), cells.attachments))
}

/// The cells of one row.
struct Cells<'a> {
    file: &'a str,
    row: u64,
    column: &'a str,
    attachments: Vec<MediaPlace>,
    num_values: usize,
    text_bytes: usize,
}

impl Cells<'_> {
    /// The value of a field, whose type may say that its text is JSON.
    fn value_of(&mut self, field: &Field, array: &dyn Array, at: usize) -> Result<Value, String> {
        let value = self.value(array, at)?;
        match value {
            Value::String(text) if is_json(field) => serde_json::from_str(&text).map_err(|error| {
                format!("the type of `{}` says that its text is JSON, and it is not: {error}", field.name())
            }),
            other => Ok(other),
        }
    }

    fn value(&mut self, array: &dyn Array, at: usize) -> Result<Value, String> {
        use DataType as D;
        self.num_values += 1;
        if self.num_values > MAX_VALUES {
            return Err(format!("it holds more than {MAX_VALUES} values, must be at most that"));
        }
        if array.is_null(at) {
            return Ok(Value::Null);
        }
        macro_rules! primitive {
            ($kind:ty) => {
                Value::from(array.as_primitive::<$kind>().value(at))
            };
        }
        Ok(match array.data_type() {
            D::Null => Value::Null,
            D::Boolean => array.as_boolean().value(at).into(),
            D::Int8 => primitive!(Int8Type),
            D::Int16 => primitive!(Int16Type),
            D::Int32 => primitive!(Int32Type),
            D::Int64 => primitive!(Int64Type),
            D::UInt8 => primitive!(UInt8Type),
            D::UInt16 => primitive!(UInt16Type),
            D::UInt32 => primitive!(UInt32Type),
            D::UInt64 => primitive!(UInt64Type),
            D::Float16 => float(array.as_primitive::<Float16Type>().value(at).to_f64()),
            D::Float32 => float(f64::from(array.as_primitive::<Float32Type>().value(at))),
            D::Float64 => float(array.as_primitive::<Float64Type>().value(at)),
            // Times count in their own unit: no conversation is made of them, but records carry them.
            D::Date32 => primitive!(Date32Type),
            D::Date64 => primitive!(Date64Type),
            D::Time32(TimeUnit::Second) => primitive!(Time32SecondType),
            D::Time32(_) => primitive!(Time32MillisecondType),
            D::Time64(TimeUnit::Microsecond) => primitive!(Time64MicrosecondType),
            D::Time64(_) => primitive!(Time64NanosecondType),
            D::Timestamp(TimeUnit::Second, _) => primitive!(TimestampSecondType),
            D::Timestamp(TimeUnit::Millisecond, _) => primitive!(TimestampMillisecondType),
            D::Timestamp(TimeUnit::Microsecond, _) => primitive!(TimestampMicrosecondType),
            D::Timestamp(TimeUnit::Nanosecond, _) => primitive!(TimestampNanosecondType),
            D::Duration(TimeUnit::Second) => primitive!(DurationSecondType),
            D::Duration(TimeUnit::Millisecond) => primitive!(DurationMillisecondType),
            D::Duration(TimeUnit::Microsecond) => primitive!(DurationMicrosecondType),
            D::Duration(TimeUnit::Nanosecond) => primitive!(DurationNanosecondType),
            D::Utf8 => self.text(array.as_string::<i32>().value(at))?,
            D::LargeUtf8 => self.text(array.as_string::<i64>().value(at))?,
            D::Utf8View => self.text(array.as_string_view().value(at))?,
            D::List(field) => self.list(field, array.as_list::<i32>().value(at).as_ref())?,
            D::LargeList(field) => self.list(field, array.as_list::<i64>().value(at).as_ref())?,
            D::FixedSizeList(field, _) => self.list(field, array.as_fixed_size_list().value(at).as_ref())?,
            D::Map(..) => self.map(&array.as_map().value(at))?,
            D::Struct(fields) => self.structure(array.as_struct(), fields, at)?,
            D::Dictionary(..) => {
                let dictionary = array.as_any_dictionary();
                let key = self.value(dictionary.keys(), at)?.as_u64().unwrap_or(u64::MAX) as usize;
                if key >= dictionary.values().len() {
                    return Err(format!("key {key} is past the {} values", dictionary.values().len()));
                }
                self.value(dictionary.values().as_ref(), key)?
            }
            other => match binary(array, at) {
                Some(bytes) => self.attach(bytes, None),
                None => return Err(format!("values of type {other} have no JSON form")),
            },
        })
    }

    /// A text, counted before it is copied.
    fn text(&mut self, text: &str) -> Result<Value, String> {
        self.text_bytes = self.text_bytes.saturating_add(text.len());
        if self.text_bytes > TEXT_BYTES_MAX {
            return Err(format!(
                "the row has {} bytes of text or more, must have at most {TEXT_BYTES_MAX}",
                self.text_bytes
            ));
        }
        Ok(text.into())
    }

    fn list(&mut self, field: &Field, items: &dyn Array) -> Result<Value, String> {
        // No capacity beforehand: lengths are claims of the file.
        let mut values = Vec::new();
        for at in 0..items.len() {
            values.push(self.value_of(field, items, at)?);
        }
        Ok(Value::Array(values))
    }

    fn map(&mut self, entries: &StructArray) -> Result<Value, String> {
        let mut fields = Map::new();
        for at in 0..entries.len() {
            let key = match self.value(entries.column(0).as_ref(), at)? {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let value = self.value_of(&entries.fields()[1], entries.column(1).as_ref(), at)?;
            if !value.is_null() {
                fields.insert(key, value);
            }
        }
        Ok(Value::Object(fields))
    }

    fn structure(&mut self, cell: &StructArray, fields: &Fields, at: usize) -> Result<Value, String> {
        if let Some((bytes, path)) = media_columns(fields) {
            let path = self.value(cell.column(path).as_ref(), at)?;
            let bytes = cell.column(bytes);
            return Ok(match binary(bytes.as_ref(), at).filter(|_| bytes.is_valid(at)) {
                Some(bytes) => self.attach(bytes, path.as_str()),
                // A medium that is lost, and not a row without one: that has null for the whole cell.
                None if path.is_null() => json!({}),
                None => path,
            });
        }
        let mut values = Map::new();
        for (field, column) in fields.iter().zip(cell.columns()) {
            let value = self.value_of(field, column.as_ref(), at)?;
            if !value.is_null() {
                values.insert(field.name().clone(), value);
            }
        }
        Ok(Value::Object(values))
    }

    /// Bytes of a medium. They are copied, so that one medium does not hold the batch it came with.
    fn attach(&mut self, bytes: &[u8], path: Option<&str>) -> Value {
        let mut name = format!("{}, row {}, column {}", self.file, self.row, self.column);
        if let Some(path) = path {
            name = format!("{path} ({name})");
        }
        self.attachments.push(MediaPlace::Bytes { bytes: Bytes::copy_from_slice(bytes), name });
        json!({"attachment": self.attachments.len() - 1})
    }
}

/// A number; text where JSON has none, for example "NaN".
fn float(value: f64) -> Value {
    Number::from_f64(value).map_or_else(|| value.to_string().into(), Value::Number)
}

fn binary(array: &dyn Array, at: usize) -> Option<&[u8]> {
    Some(match array.data_type() {
        DataType::Binary => array.as_binary::<i32>().value(at),
        DataType::LargeBinary => array.as_binary::<i64>().value(at),
        DataType::BinaryView => array.as_binary_view().value(at),
        DataType::FixedSizeBinary(_) => array.as_fixed_size_binary().value(at),
        _ => return None,
    })
}

/// Whether the texts of a field are JSON, as `datasets.Json` writes them: rows of chats whose messages have unequal fields.
fn is_json(field: &Field) -> bool {
    field.extension_type_name() == Some("arrow.json")
}

/// Positions of `bytes` and `path`, where the fields are those of a medium as `datasets` writes it.
fn media_columns(fields: &Fields) -> Option<(usize, usize)> {
    let find = |name, is_of: fn(&Field) -> bool| {
        fields.find(name).filter(|(_, field)| is_of(field)).map(|(index, _)| index)
    };
    let bytes = find("bytes", |field| {
        use DataType::{Binary, BinaryView, LargeBinary, Null};
        matches!(field.data_type(), Binary | LargeBinary | BinaryView | Null)
    })?;
    let path = find("path", |field| {
        use DataType::{LargeUtf8, Null, Utf8, Utf8View};
        matches!(field.data_type(), Utf8 | LargeUtf8 | Utf8View | Null)
    })?;
    (fields.len() == 2).then_some((bytes, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::builder::{Int32Builder, ListBuilder, MapBuilder, StringBuilder};
    use arrow_array::types::Int8Type;
    use arrow_array::{ArrayRef, BinaryArray, DictionaryArray, Float64Array, NullArray, StringArray};
    use arrow_schema::Schema;
    use std::sync::Arc;

    #[test]
    fn values_are_json_and_nulls_are_left_out() {
        let mut list = ListBuilder::new(Int32Builder::new());
        list.append_value([Some(1), None]);
        let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
        map.keys().append_value("k");
        map.values().append_value(7);
        map.append(true).unwrap();
        let dictionary: DictionaryArray<Int8Type> = ["word"].into_iter().collect();
        let arrays: Vec<(&str, ArrayRef)> = vec![
            ("list", Arc::new(list.finish())),
            ("map", Arc::new(map.finish())),
            ("dictionary", Arc::new(dictionary)),
            ("nan", Arc::new(Float64Array::from(vec![f64::NAN]))),
            ("nothing", Arc::new(NullArray::new(1))),
            ("null", Arc::new(StringArray::from(vec![None::<&str>]))),
            ("bytes", Arc::new(BinaryArray::from_vec(vec![b"abc"]))),
        ];
        let batch =
            RecordBatch::try_from_iter_with_nullable(arrays.into_iter().map(|(n, a)| (n, a, true))).unwrap();
        let (fields, attachments) = row(&batch, 0, "x.parquet", 9).unwrap();
        let expected = json!({"list": [1, null], "map": {"k": 7}, "dictionary": "word", "nan": "NaN",
                              "bytes": {"attachment": 0}});
        assert_eq!(fields, expected);
        let name = "x.parquet, row 9, column bytes".to_owned();
        assert_eq!(attachments, [MediaPlace::Bytes { bytes: Bytes::from_static(b"abc"), name }]);
    }

    /// `datasets` refuses such a cell. A row without a picture has null for the whole cell.
    #[test]
    fn a_medium_without_bytes_and_path_is_lost_and_not_absent() {
        let names = ["bytes", "path"].map(|name| match name {
            "bytes" => Field::new(name, DataType::Binary, true),
            _ => Field::new(name, DataType::Utf8, true),
        });
        let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![None, None, Some(&b"abc"[..])]));
        let paths: ArrayRef = Arc::new(StringArray::from(vec![None::<&str>, None, None]));
        let is_there = vec![true, false, true].into();
        let cells = StructArray::new(names.to_vec().into(), vec![bytes, paths], Some(is_there));
        let batch = RecordBatch::try_from_iter([("image", Arc::new(cells) as ArrayRef)]).unwrap();
        let found: Vec<Value> = (0..3).map(|at| row(&batch, at, "x.parquet", 0).unwrap().0).collect();
        assert_eq!(found, [json!({"image": {}}), json!({}), json!({"image": {"attachment": 0}})]);
    }

    #[test]
    fn text_whose_type_is_json_is_read_as_what_it_says() {
        let json = |name: &str| {
            let mark = ("ARROW:extension:name".to_owned(), "arrow.json".to_owned());
            Field::new(name, DataType::Utf8, true).with_metadata([mark])
        };
        let mut list = ListBuilder::new(StringBuilder::new()).with_field(json("item"));
        list.append_value([Some(r#"{"role": "user", "content": [{"type": "text"}]}"#), None]);
        let plain = Field::new("plain", DataType::Utf8, true);
        let list_field = Field::new_list("messages", json("item"), true);
        let schema = Schema::new(vec![list_field, json("tools"), plain]);
        let texts = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text])) };
        let columns = |tools: &str| -> Vec<ArrayRef> { vec![texts(tools), texts("{}")] };
        let messages: ArrayRef = Arc::new(list.finish());
        let batch = |tools: &str| {
            let arrays = [vec![messages.clone()], columns(tools)].concat();
            RecordBatch::try_new(Arc::new(schema.clone()), arrays).unwrap()
        };
        let (fields, _) = row(&batch("[1]"), 0, "x.arrow", 0).unwrap();
        let expected = json!({
            "messages": [{"role": "user", "content": [{"type": "text"}]}, null], "tools": [1], "plain": "{}",
        });
        assert_eq!(fields, expected);
        let cause = row(&batch("[1"), 0, "x.arrow", 4).unwrap_err();
        assert!(
            cause.starts_with(
                "row 4, column `tools`: the type of `tools` says that its text is JSON, and it is not: "
            ),
            "{cause}"
        );
    }

    #[test]
    fn batches_are_bounded_by_rows_and_bytes() {
        assert_eq!(batch_rows(1000, 1000), 64);
        assert_eq!(batch_rows(100, 100 << 20), 16);
        assert_eq!(batch_rows(1, 1 << 40), 1);
        assert_eq!(batch_rows(0, 0), 64);
    }
}
