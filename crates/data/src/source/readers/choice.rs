//! Which columns of a columnar file are read, and which are told of.

use crate::source::mixture::{FIELDS, MEDIA, Source};
use crate::source::unread;
use arrow_schema::{DataType, Field, Schema};
use std::collections::BTreeMap;

/// The columns of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    /// Positions of those that are read.
    pub(super) read: Vec<usize>,
    /// Names of the others, those that the mixture has ignored left out.
    pub(super) unread: Vec<String>,
}

/// The columns that conversations are made of: those of a name we know, and those that `columns` of the mixture names.
/// Where no medium is among these, those whose name is one of media are read too: a record with a medium under such a
/// name is refused, and a column of bytes is at once.
///
/// # Errors
/// Which column is missing, stands twice, is of a type that has no JSON form, or holds media under a name we do not know.
pub(super) fn choose(schema: &Schema, source: &Source) -> Result<Chosen, String> {
    let columns = &source.columns;
    let names =
        || schema.fields().iter().map(|field| format!("`{}`", field.name())).collect::<Vec<_>>().join(", ");
    if let Some(theirs) =
        columns.values().chain(&source.ignore).find(|theirs| schema.column_with_name(theirs).is_none())
    {
        return Err(format!("there is no column `{theirs}`, there are {}", names()));
    }
    let is_needed = |name: &String| {
        let is_ours = FIELDS.contains(&name.as_str()) && !columns.contains_key(name);
        is_ours && !source.ignore.contains(name) || columns.values().any(|theirs| theirs == name)
    };
    let mut found: Vec<usize> = Vec::new();
    for (index, field) in schema.fields().iter().enumerate().filter(|(_, field)| is_needed(field.name())) {
        if found.iter().any(|&other| schema.field(other).name() == field.name()) {
            return Err(format!("two columns are named `{}`", field.name()));
        }
        check(field.data_type()).map_err(|cause| format!("column `{}` {cause}", field.name()))?;
        found.push(index);
    }
    if found.is_empty() {
        return Err(format!(
            "none of its columns is one that a conversation is made of: {}; name them in the mixture under `columns`",
            names()
        ));
    }
    let is_told = |name: &String| !is_needed(name) && !source.ignore.contains(name);
    if !found.iter().any(|&index| is_media(schema.field(index), columns)) {
        for (index, field) in schema.fields().iter().enumerate().filter(|(_, field)| is_told(field.name())) {
            if holds_bytes(field.data_type()) {
                let name = field.name();
                return Err(format!(
                    "column `{name}` holds bytes, and no column that is read holds media: {}",
                    unread::mend(name)
                ));
            }
            if unread::names_media(field.name()) && check(field.data_type()).is_ok() {
                found.push(index);
            }
        }
        found.sort_unstable();
    }
    let unread = schema.fields().iter().enumerate().filter(|(index, field)| {
        !found.contains(index) && is_told(field.name()) && *field.data_type() != DataType::Null
    });
    let unread = unread.map(|(_, field)| field.name().clone()).collect();
    Ok(Chosen { read: found, unread })
}

/// Whether a column that is read is one of media, by our name or by what it holds.
fn is_media(field: &Field, columns: &BTreeMap<String, String>) -> bool {
    let ours = columns.iter().find(|(_, theirs)| *theirs == field.name()).map(|(ours, _)| ours);
    MEDIA.contains(&ours.unwrap_or(field.name()).as_str()) || holds_bytes(field.data_type())
}

/// Whether a cell may hold a medium: bytes of one length for all are hashes and the like.
fn holds_bytes(data_type: &DataType) -> bool {
    use DataType as D;
    match data_type {
        D::Binary | D::LargeBinary | D::BinaryView => true,
        D::List(field) | D::LargeList(field) | D::FixedSizeList(field, _) | D::Map(field, _) => {
            holds_bytes(field.data_type())
        }
        D::Struct(fields) => fields.iter().any(|field| holds_bytes(field.data_type())),
        D::Dictionary(_, values) => holds_bytes(values),
        _ => false,
    }
}

/// Whether values of this type have a JSON form.
fn check(data_type: &DataType) -> Result<(), String> {
    use DataType as D;
    match data_type {
        D::Null
        | D::Boolean
        | D::Int8
        | D::Int16
        | D::Int32
        | D::Int64
        | D::UInt8
        | D::UInt16
        | D::UInt32
        | D::UInt64
        | D::Float16
        | D::Float32
        | D::Float64
        | D::Timestamp(..)
        | D::Date32
        | D::Date64
        | D::Time32(_)
        | D::Time64(_)
        | D::Duration(_)
        | D::Binary
        | D::FixedSizeBinary(_)
        | D::LargeBinary
        | D::BinaryView
        | D::Utf8
        | D::LargeUtf8
        | D::Utf8View => Ok(()),
        D::List(field) | D::LargeList(field) | D::FixedSizeList(field, _) | D::Map(field, _) => {
            check(field.data_type())
        }
        D::Struct(fields) => fields.iter().try_for_each(|field| check(field.data_type())),
        D::Dictionary(_, values) => check(values),
        other => {
            Err(format!("holds values of type {other}, which have no JSON form: cast it, or leave it out"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::location::Location;
    use std::sync::Arc;

    fn columns(mapping: &[(&str, &str)]) -> Source {
        let columns =
            mapping.iter().map(|(ours, theirs)| ((*ours).to_owned(), (*theirs).to_owned())).collect();
        Source { columns, ..Source::new(Location::parse("x.parquet")) }
    }

    fn needed(schema: &Schema, source: &Source) -> Result<Vec<usize>, String> {
        choose(schema, source).map(|chosen| chosen.read)
    }

    #[test]
    fn columns_of_use_are_chosen_by_name() {
        let field = |name: &str| Field::new(name, DataType::Utf8, true);
        let schema =
            Schema::new(vec![field("id"), field("img"), field("image"), field("score"), field("messages")]);
        assert_eq!(needed(&schema, &columns(&[])), Ok(vec![0, 2, 4]));
        assert_eq!(needed(&schema, &columns(&[("image", "img")])), Ok(vec![0, 1, 4]));
        let missing = needed(&schema, &columns(&[("image", "picture")])).unwrap_err();
        assert_eq!(
            missing,
            "there is no column `picture`, there are `id`, `img`, `image`, `score`, `messages`"
        );
        let none = needed(&Schema::new(vec![field("x")]), &columns(&[])).unwrap_err();
        assert!(none.contains("none of its columns"), "{none}");
        let twice = needed(&Schema::new(vec![field("id"), field("id")]), &columns(&[])).unwrap_err();
        assert_eq!(twice, "two columns are named `id`");
        let odd = Schema::new(vec![Field::new("id", DataType::Decimal128(9, 2), true)]);
        assert!(
            needed(&odd, &columns(&[]))
                .unwrap_err()
                .starts_with("column `id` holds values of type Decimal128")
        );
    }

    #[test]
    fn no_column_of_media_is_passed_over() {
        let text = |name: &str| Field::new(name, DataType::Utf8, true);
        let bytes = |name: &str| Field::new(name, DataType::Binary, true);
        let file = |more: Vec<Field>| Schema::new([vec![text("query"), text("answer")], more].concat());
        let refused = choose(&file(vec![bytes("img")]), &columns(&[])).unwrap_err();
        assert_eq!(
            refused,
            "column `img` holds bytes, and no column that is read holds media: give it our name in the mixture, \
             `columns: {image: img}`, or list it under `ignore` there"
        );
        let inside = Field::new("pictures", DataType::List(Arc::new(bytes("item"))), true);
        assert!(choose(&file(vec![inside]), &columns(&[])).is_err());
        // Bytes of one length for all are no media.
        let hash = Field::new("sha256", DataType::FixedSizeBinary(32), true);
        let chosen = |read: &[usize], unread: &[&str]| {
            let unread = unread.iter().map(|name| (*name).to_owned()).collect();
            Ok(Chosen { read: read.to_vec(), unread })
        };
        assert_eq!(
            choose(&file(vec![hash, text("url")]), &columns(&[])),
            chosen(&[0, 1], &["sha256", "url"])
        );
        // A field that may be a medium by its name is read only where the record has no other medium.
        let named = file(vec![text("url"), text("image_path")]);
        assert_eq!(choose(&named, &columns(&[])), chosen(&[0, 1, 3], &["url"]));
        let beside = file(vec![text("image"), text("image_path"), bytes("thumbnail")]);
        assert_eq!(choose(&beside, &columns(&[])), chosen(&[0, 1, 2], &["image_path", "thumbnail"]));
        let ignored = Source { ignore: ["img".to_owned()].into(), ..columns(&[]) };
        assert_eq!(choose(&file(vec![bytes("img")]), &ignored), chosen(&[0, 1], &[]));
        assert_eq!(
            choose(&file(vec![]), &ignored).unwrap_err(),
            "there is no column `img`, there are `query`, `answer`"
        );
    }
}
