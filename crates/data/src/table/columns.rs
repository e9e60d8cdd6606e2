//! Samples as columns, and columns as samples.

use arrow_array::cast::AsArray as _;
use arrow_array::types::{Int32Type, UInt32Type, UInt64Type};
use arrow_array::{
    ArrayRef, DictionaryArray, Int32Array, ListArray, PrimitiveArray, RecordBatch, StringArray, StructArray,
    UInt32Array, UInt64Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};
use dflop_types::{EncoderParts, EncoderSegments, Place, ProfiledSample, SampleKind, SampleShape, Tower};
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
        ("segments", DataType::List(Arc::new(element(SEGMENT)))),
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
        ("parts", DataType::List(Arc::new(element(PART)))),
        // Names may stand twice in a mixture, so the position tells them apart.
        ("source_index", DataType::UInt32),
    ];
    let fields = columns.map(|(name, kind)| Field::new(name, kind, false));
    Arc::new(Schema::new(fields.to_vec()))
}

/// The columns of data profiles made before: without the encoder that reads a segment, and before that without parts.
pub(super) fn old_schemas() -> [SchemaRef; 2] {
    let old = DataType::List(Arc::new(element(OLD_SEGMENT)));
    let fields = schema()
        .fields()
        .iter()
        .map(|field| match field.name().as_str() {
            "segments" => Arc::new(field.as_ref().clone().with_data_type(old.clone())),
            _ => Arc::clone(field),
        })
        .collect::<Vec<_>>();
    let without_towers = Arc::new(Schema::new(fields));
    let without_parts = without(&without_towers, "parts");
    [without_towers, without_parts]
}

fn without(schema: &Schema, name: &str) -> SchemaRef {
    let fields = schema.fields().iter().filter(|field| field.name() != name).cloned();
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// The columns without the names of sources.
pub(super) fn schema_unnamed() -> SchemaRef {
    without(&schema(), "source")
}

/// Fields of a group of segments.
const SEGMENT: &[&str] = &["count", "tokens", "tower"];
/// Those in a profile made before there were models with two encoders.
const OLD_SEGMENT: &[&str] = &["count", "tokens"];
/// Fields of a group of parts.
const PART: &[&str] = &["count", "segments", "feature_tokens"];

fn sizes(names: &[&str]) -> Fields {
    names.iter().map(|name| Field::new(*name, DataType::UInt32, false)).collect()
}

/// One group in a list of groups with these fields.
fn element(names: &[&str]) -> Field {
    Field::new("element", DataType::Struct(sizes(names)), false)
}

/// A column of lists of groups, from the number of groups of each row and the values of each field.
fn lists(
    names: &[&str],
    lengths: impl IntoIterator<Item = usize>,
    values: Vec<UInt32Array>,
) -> Result<ArrayRef, ArrowError> {
    let values = values.into_iter().map(|column| Arc::new(column) as ArrayRef).collect();
    let groups = StructArray::try_new(sizes(names), values, None)?;
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(Arc::new(ListArray::try_new(Arc::new(element(names)), offsets, Arc::new(groups), None)?))
}

/// A column of lists of groups.
struct Lists<'a, const N: usize> {
    offsets: &'a [i32],
    values: [&'a UInt32Array; N],
}

impl<'a, const N: usize> Lists<'a, N> {
    fn of(batch: &'a RecordBatch, name: &str, fields: &[&str]) -> Result<Self, String> {
        let lists = column(batch, name)?
            .as_list_opt::<i32>()
            .ok_or_else(|| format!("column `{name}` holds no lists"))?;
        let groups =
            lists.values().as_struct_opt().ok_or_else(|| format!("column `{name}` holds no sizes"))?;
        let values = fields.iter().map(|field| {
            let column =
                groups.column_by_name(field).and_then(|column| column.as_primitive_opt::<UInt32Type>());
            column.ok_or_else(|| format!("column `{name}` has no `{field}`"))
        });
        let values = values.collect::<Result<Vec<_>, _>>()?;
        let values = values.try_into().map_err(|_| format!("column `{name}` has not {N} fields"))?;
        Ok(Self { offsets: lists.value_offsets(), values })
    }

    /// The groups of a row, as the values of their fields.
    fn row(&self, row: usize) -> impl Iterator<Item = [u32; N]> + '_ {
        let (from, to) = (self.offsets[row] as usize, self.offsets[row + 1] as usize);
        (from..to).map(|group| self.values.map(|column| column.value(group)))
    }
}

/// The column of segments, of today or as it was before there were models with two encoders.
enum Segments<'a> {
    New(Lists<'a, 3>),
    Old(Lists<'a, 2>),
}

impl<'a> Segments<'a> {
    fn of(batch: &'a RecordBatch) -> Result<Self, String> {
        let is_old =
            column(batch, "segments")?.data_type() == &DataType::List(Arc::new(element(OLD_SEGMENT)));
        Ok(if is_old {
            Self::Old(Lists::of(batch, "segments", OLD_SEGMENT)?)
        } else {
            Self::New(Lists::of(batch, "segments", SEGMENT)?)
        })
    }

    /// The groups of a row; an error for a tower that is not there.
    fn row(&self, row: usize) -> Box<dyn Iterator<Item = Result<EncoderSegments, &'static str>> + '_> {
        match self {
            Self::Old(lists) => {
                Box::new(lists.row(row).map(|[count, tokens]| Ok(EncoderSegments::of(count, tokens))))
            }
            Self::New(lists) => Box::new(lists.row(row).map(|[count, tokens, tower]| {
                let tower =
                    Tower::ALL.get(tower as usize).copied().ok_or("`tower` of `segments` is above 1")?;
                Ok(EncoderSegments { count, tokens, tower })
            })),
        }
    }
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
    let segment = |value: fn(&EncoderSegments) -> u32| {
        UInt32Array::from_iter_values(samples.iter().flat_map(|s| &s.shape.encoder_segments).map(value))
    };
    let segments = lists(
        SEGMENT,
        samples.iter().map(|s| s.shape.encoder_segments.len()),
        vec![segment(|s| s.count), segment(|s| s.tokens), segment(|s| s.tower as u32)],
    )?;
    let part = |value: fn(&EncoderParts) -> u32| {
        UInt32Array::from_iter_values(samples.iter().flat_map(|s| &s.shape.encoder_parts).map(value))
    };
    let parts = lists(
        PART,
        samples.iter().map(|s| s.shape.encoder_parts.len()),
        vec![part(|p| p.count), part(|p| p.segments), part(|p| p.feature_tokens)],
    )?;
    RecordBatch::try_new(
        schema_unnamed(),
        vec![
            Arc::new(StringArray::from_iter_values(samples.iter().map(|s| &s.id))),
            u64s(|s| s.position),
            Arc::new(kinds),
            segments,
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
            parts,
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

/// The samples in columns that have [`schema`], or one of [`old_schemas`].
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
    let segments = Segments::of(batch)?;
    let parts = match batch.column_by_name("parts") {
        Some(_) => Some(Lists::of(batch, "parts", PART)?),
        None => None,
    };
    let (positions, total) = (u64s("position")?, u64s("encoder_tokens")?);
    let (features, llm, labels) = (u32s("feature_tokens")?, u32s("llm_tokens")?, u32s("label_tokens")?);
    let (media_bytes, media_ms) = (u64s("media_bytes")?, u64s("media_ms")?);
    let (file, start, len) = (u32s("file")?, u64s("start")?, u64s("len")?);
    let (record_hash, media_hash) = (u64s("record_hash")?, u64s("media_hash")?);
    let source = u32s("source_index")?;
    let row = |i: usize| {
        let segments = segments.row(i).collect::<Result<Vec<_>, _>>()?;
        let parts = parts.iter().flat_map(|parts| parts.row(i));
        let parts =
            parts.map(|[count, segments, feature_tokens]| EncoderParts { count, segments, feature_tokens });
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
                encoder_segments: segments,
                encoder_parts: parts.collect(),
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
