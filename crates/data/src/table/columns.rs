//! Samples as columns, and columns as samples.

use arrow_array::cast::AsArray as _;
use arrow_array::types::{Int32Type, UInt32Type, UInt64Type};
use arrow_array::{
    ArrayRef, DictionaryArray, Int32Array, ListArray, PrimitiveArray, RecordBatch, StringArray, StructArray,
    UInt32Array, UInt64Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};
use dflop_types::{EncoderSegments, Place, ProfiledSample, SampleKind, SampleShape};
use std::sync::Arc;

/// Position of the column with the names of sources: they are known last.
const SOURCE: usize = 1;

/// The columns of a data profile.
pub(super) fn schema() -> SchemaRef {
    let name = || DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let columns = [
        ("id", DataType::Utf8),
        ("source", name()),
        ("position", DataType::UInt64),
        ("kind", name()),
        ("segments", DataType::List(Arc::new(segment()))),
        ("encoder_tokens", DataType::UInt64),
        ("feature_tokens", DataType::UInt32),
        ("llm_tokens", DataType::UInt32),
        ("label_tokens", DataType::UInt32),
        ("media_bytes", DataType::UInt64),
        ("media_ms", DataType::UInt64),
        ("file", DataType::UInt32),
        ("start", DataType::UInt64),
        ("len", DataType::UInt64),
        ("record_hash", DataType::UInt64),
        ("media_hash", DataType::UInt64),
        // Names may stand twice in a mixture, so the position tells them apart.
        ("source_index", DataType::UInt32),
    ];
    let fields = columns.map(|(name, kind)| Field::new(name, kind, false));
    Arc::new(Schema::new(fields.to_vec()))
}

/// The columns without the names of sources.
pub(super) fn schema_unnamed() -> SchemaRef {
    let mut fields: Vec<_> = schema().fields().iter().cloned().collect();
    fields.remove(SOURCE);
    Arc::new(Schema::new(fields))
}

fn segment_fields() -> Fields {
    Fields::from(["count", "tokens"].map(|name| Field::new(name, DataType::UInt32, false)).to_vec())
}

fn segment() -> Field {
    Field::new("element", DataType::Struct(segment_fields()), false)
}

/// The samples as columns, sources as positions only.
///
/// # Errors
/// Where a column does not fit into memory's offsets, or encoder tokens pass 64 bits.
pub(super) fn unnamed(samples: &[ProfiledSample]) -> Result<RecordBatch, ArrowError> {
    let u64s = |value: fn(&ProfiledSample) -> u64| -> ArrayRef {
        Arc::new(samples.iter().map(value).map(Some).collect::<UInt64Array>())
    };
    let u32s = |value: fn(&ProfiledSample) -> u32| -> ArrayRef {
        Arc::new(samples.iter().map(value).map(Some).collect::<UInt32Array>())
    };
    let encoder_tokens: Vec<u64> = samples
        .iter()
        .map(|s| {
            encoder_tokens(&s.shape).ok_or_else(|| {
                ArrowError::InvalidArgumentError(format!("sample `{}` has 2^64 encoder tokens or more", s.id))
            })
        })
        .collect::<Result<_, _>>()?;
    let kinds =
        samples.iter().map(|s| (0..).zip(SampleKind::ALL).find(|(_, k)| *k == s.kind).map(|(key, _)| key));
    let kind_names: Vec<String> = SampleKind::ALL.iter().map(ToString::to_string).collect();
    let kinds =
        DictionaryArray::try_new(kinds.collect::<Int32Array>(), Arc::new(StringArray::from(kind_names)))?;
    let groups = || samples.iter().flat_map(|s| &s.shape.encoder_segments);
    let group_columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(groups().map(|s| s.count))),
        Arc::new(UInt32Array::from_iter_values(groups().map(|s| s.tokens))),
    ];
    let lengths = samples.iter().map(|s| s.shape.encoder_segments.len());
    let segments = ListArray::try_new(
        Arc::new(segment()),
        OffsetBuffer::from_lengths(lengths),
        Arc::new(StructArray::try_new(segment_fields(), group_columns, None)?),
        None,
    )?;
    RecordBatch::try_new(
        schema_unnamed(),
        vec![
            Arc::new(StringArray::from_iter_values(samples.iter().map(|s| &s.id))),
            u64s(|s| s.position),
            Arc::new(kinds),
            Arc::new(segments),
            Arc::new(UInt64Array::from(encoder_tokens)),
            u32s(|s| s.shape.feature_tokens),
            u32s(|s| s.shape.llm_tokens),
            u32s(|s| s.shape.label_tokens),
            u64s(|s| s.media_bytes),
            u64s(|s| s.media_ms),
            u32s(|s| s.place.file),
            u64s(|s| s.place.start),
            u64s(|s| s.place.len),
            u64s(|s| s.record_hash),
            u64s(|s| s.media_hash),
            u32s(|s| s.source),
        ],
    )
}

/// The same columns with the names of sources.
///
/// # Errors
/// Where a source is past `sources`.
pub(super) fn named(batch: &RecordBatch, sources: &[String]) -> Result<RecordBatch, ArrowError> {
    let mut columns = batch.columns().to_vec();
    let positions = batch.column(batch.num_columns() - 1).as_primitive::<UInt32Type>();
    let keys = positions.values().iter().map(|&source| {
        i32::try_from(source).ok().filter(|key| (*key as usize) < sources.len()).ok_or_else(|| {
            let message = format!("a sample's source {source} is past the {} sources", sources.len());
            ArrowError::InvalidArgumentError(message)
        })
    });
    let keys = keys.collect::<Result<Vec<i32>, _>>()?;
    let names = StringArray::from_iter_values(sources);
    columns.insert(SOURCE, Arc::new(DictionaryArray::try_new(Int32Array::from(keys), Arc::new(names))?));
    RecordBatch::try_new(schema(), columns)
}

/// The samples in columns that have [`schema`].
///
/// # Errors
/// What is not as a writer leaves it, in words.
pub(super) fn samples(batch: &RecordBatch, sources: &[String]) -> Result<Vec<ProfiledSample>, String> {
    let u64s = |name: &str| primitive::<UInt64Type>(batch, name);
    let u32s = |name: &str| primitive::<UInt32Type>(batch, name);
    let ids = column(batch, "id")?.as_string_opt::<i32>().ok_or("column `id` holds no text")?;
    let (source_names, kind_names) = (Names::of(batch, "source")?, Names::of(batch, "kind")?);
    let kinds = kind_names
        .values
        .iter()
        .map(|name| name.and_then(|name| SampleKind::ALL.into_iter().find(|kind| kind.to_string() == name)));
    let kinds: Vec<Option<SampleKind>> = kinds.collect();
    let segments =
        column(batch, "segments")?.as_list_opt::<i32>().ok_or("column `segments` holds no lists")?;
    let groups = segments.values().as_struct_opt().ok_or("column `segments` holds no sizes")?;
    let group = |name: &str| {
        let column = groups.column_by_name(name).and_then(|column| column.as_primitive_opt::<UInt32Type>());
        column.ok_or_else(|| format!("column `segments` has no `{name}`"))
    };
    let (counts, tokens) = (group("count")?, group("tokens")?);
    let (positions, total) = (u64s("position")?, u64s("encoder_tokens")?);
    let (features, llm, labels) = (u32s("feature_tokens")?, u32s("llm_tokens")?, u32s("label_tokens")?);
    let (media_bytes, media_ms) = (u64s("media_bytes")?, u64s("media_ms")?);
    let (file, start, len) = (u32s("file")?, u64s("start")?, u64s("len")?);
    let (record_hash, media_hash) = (u64s("record_hash")?, u64s("media_hash")?);
    let source = u32s("source_index")?;
    let row = |i: usize| {
        let bounds = segments.value_offsets();
        let (from, to) = (bounds[i] as usize, bounds[i + 1] as usize);
        let segments =
            (from..to).map(|g| EncoderSegments { count: counts.value(g), tokens: tokens.value(g) });
        let sample = ProfiledSample {
            id: ids.value(i).to_owned(),
            source: source.value(i),
            position: positions.value(i),
            place: Place { file: file.value(i), start: start.value(i), len: len.value(i) },
            kind: kind_names
                .key(i)
                .and_then(|key| kinds.get(key).copied().flatten())
                .ok_or("unknown kind")?,
            shape: SampleShape {
                encoder_segments: segments.collect(),
                feature_tokens: features.value(i),
                llm_tokens: llm.value(i),
                label_tokens: labels.value(i),
            },
            media_bytes: media_bytes.value(i),
            media_ms: media_ms.value(i),
            record_hash: record_hash.value(i),
            media_hash: media_hash.value(i),
        };
        let name = source_names.key(i).and_then(|key| source_names.values.get(key).copied().flatten());
        if sources.get(sample.source as usize).is_some_and(|known| Some(known.as_str()) != name) {
            return Err("`source` is not the name of `source_index`");
        }
        if encoder_tokens(&sample.shape) != Some(total.value(i)) {
            return Err("`encoder_tokens` is not the sum of `segments`");
        }
        Ok(sample)
    };
    let position = |i: usize| positions.value(i);
    (0..batch.num_rows())
        .map(|i| row(i).map_err(|cause| format!("the sample at position {}: {cause}", position(i))))
        .collect()
}

/// Encoder tokens over all segments, where they fit.
fn encoder_tokens(shape: &SampleShape) -> Option<u64> {
    shape.encoder_segments.iter().try_fold(0_u64, |sum, segments| {
        sum.checked_add(u64::from(segments.count) * u64::from(segments.tokens))
    })
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, String> {
    batch.column_by_name(name).ok_or_else(|| format!("there is no column `{name}`"))
}

fn primitive<'a, T: arrow_array::ArrowPrimitiveType>(
    batch: &'a RecordBatch,
    name: &str,
) -> Result<&'a PrimitiveArray<T>, String> {
    column(batch, name)?
        .as_primitive_opt::<T>()
        .ok_or_else(|| format!("column `{name}` holds no numbers of its type"))
}

/// A column of few names.
struct Names<'a> {
    keys: &'a Int32Array,
    values: Vec<Option<&'a str>>,
}

impl<'a> Names<'a> {
    fn of(batch: &'a RecordBatch, name: &str) -> Result<Self, String> {
        let array = column(batch, name)?
            .as_dictionary_opt::<Int32Type>()
            .ok_or_else(|| format!("column `{name}` holds no names"))?;
        let values = array
            .values()
            .as_string_opt::<i32>()
            .ok_or_else(|| format!("column `{name}` holds no text"))?
            .iter()
            .collect();
        Ok(Self { keys: array.keys(), values })
    }

    fn key(&self, row: usize) -> Option<usize> {
        usize::try_from(self.keys.value(row)).ok()
    }
}
