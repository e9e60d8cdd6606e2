//! The metadata of an AVIF: its items of EXIF and XMP that belong to the picture.

use super::boxes::{Box4, Boxes};
use super::orientation::Turn;
use super::source::{Fault, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;

/// Bytes of a picture's items together, at most; real ones have some KB, a long XMP some MB.
const BYTES_MAX: usize = 1 << 24;
/// Items of EXIF and XMP, at most; a picture has one or two.
const ITEMS_MAX: usize = 1 << 10;
/// The type of content that XMP has.
const RDF: &[u8] = b"application/rdf+xml\0";

/// The boxes of the `meta` box that say what the items are; `None` for a box that the file lacks.
#[derive(Debug, Default)]
struct Lists {
    names: Option<Box4>,
    places: Option<Box4>,
    references: Option<Box4>,
    data: Option<Box4>,
}

/// Which way up the picture `primary` is displayed by its EXIF and XMP, as Pillow reads an AVIF that no property turns: an
/// orientation in the EXIF counts for nothing but that the XMP is not asked.
///
/// # Errors
/// [`Fault::Unsound`] where Pillow refuses the EXIF, and where the lists of items are broken.
pub(super) fn turn(source: &mut Source<'_>, meta: Box4, primary: u32) -> Result<Turn, Fault> {
    let mut lists = Lists::default();
    let mut boxes = Boxes::new(meta.body + 4, meta.end);
    while let Some(found) = boxes.next(source)? {
        match &found.kind {
            b"iinf" => lists.names = Some(found),
            b"iloc" => lists.places = Some(found),
            b"iref" => lists.references = Some(found),
            b"idat" => lists.data = Some(found),
            _ => {}
        }
    }
    let described = lists.describing(source, primary)?;
    let metadata = lists.metadata(source, &described)?;
    let mut bytes = lists.bytes(source, metadata.iter().map(|&(id, _)| id).collect())?;
    let mut turn = Turn::default();
    for (id, is_xmp) in metadata {
        // Of an item that is named twice the first counts.
        let Some(bytes) = bytes.remove(&id) else { continue };
        let len = bytes.len() as u64;
        let mut held = Source::new(Box::new(Cursor::new(bytes)), len);
        if is_xmp {
            turn.read_xmp(&mut held, 0, len)?;
        } else if len > 4 {
            // Before it stands where its TIFF header begins, which Pillow does not ask.
            let mut told = Turn::default();
            told.read_exif(&mut held, 4, len)?;
            if told.is_told_by_exif() {
                turn.leave();
            }
        }
    }
    Ok(turn)
}

impl Lists {
    /// Items that describe the picture `primary`.
    fn describing(&self, source: &mut Source<'_>, primary: u32) -> Result<BTreeSet<u32>, Fault> {
        let mut found = BTreeSet::new();
        let Some(list) = self.references else { return Ok(found) };
        let id_bytes = if source.u8(list.body)? == 0 { 2 } else { 4 };
        let mut boxes = Boxes::new(list.body + 4, list.end);
        while let Some(reference) = boxes.next(source)? {
            if &reference.kind != b"cdsc" {
                continue;
            }
            let from = number(source, reference.body, id_bytes)?;
            let count = u64::from(source.u16_be(reference.body + id_bytes)?);
            for place in 0..count {
                let to = number(source, reference.body + id_bytes + 2 + place * id_bytes, id_bytes)?;
                if to == u64::from(primary) {
                    found.insert(from as u32);
                }
            }
        }
        Ok(found)
    }

    /// Those of EXIF and of XMP among the `described` items, and whether they are XMP.
    fn metadata(
        &self,
        source: &mut Source<'_>,
        described: &BTreeSet<u32>,
    ) -> Result<Vec<(u32, bool)>, Fault> {
        let mut found = Vec::new();
        let Some(list) = self.names else { return Ok(found) };
        let count_bytes = if source.u8(list.body)? == 0 { 2 } else { 4 };
        let mut boxes = Boxes::new(list.body + 4 + count_bytes, list.end);
        while let Some(item) = boxes.next(source)? {
            let version = source.u8(item.body)?;
            if &item.kind != b"infe" || version < 2 {
                continue;
            }
            let id_bytes = if version == 2 { 2 } else { 4 };
            let id = number(source, item.body + 4, id_bytes)? as u32;
            if !described.contains(&id) {
                continue;
            }
            let kind_at = item.body + 4 + id_bytes + 2;
            let is_xmp = match &source.bytes::<4>(kind_at)? {
                b"Exif" => false,
                b"mime" => {
                    let mut text = Vec::new();
                    source.append(&mut text, kind_at + 4, item.end.min(kind_at + 4 + 4096))?;
                    let content = text.iter().position(|&byte| byte == 0).map(|end| &text[end + 1..]);
                    if !content.is_some_and(|content| content.starts_with(RDF)) {
                        continue;
                    }
                    true
                }
                _ => continue,
            };
            if found.len() == ITEMS_MAX {
                return Fault::unsound(format!("it has more than {ITEMS_MAX} items of EXIF and XMP"));
            }
            found.push((id, is_xmp));
        }
        Ok(found)
    }

    /// The bytes of the `wanted` items, each from all its places; an item that has none is not there.
    fn bytes(
        &self,
        source: &mut Source<'_>,
        mut wanted: BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, Vec<u8>>, Fault> {
        let mut found = BTreeMap::new();
        let mut num_bytes = 0;
        let Some(list) = self.places else { return Ok(found) };
        let version = source.u8(list.body)?;
        let [sizes, more] = source.bytes::<2>(list.body + 4)?;
        let (offset_bytes, length_bytes) = (u64::from(sizes >> 4), u64::from(sizes & 15));
        let base_bytes = u64::from(more >> 4);
        let index_bytes = if version == 0 { 0 } else { u64::from(more & 15) };
        let id_bytes = if version < 2 { 2 } else { 4 };
        let num_items = number(source, list.body + 6, id_bytes)?;
        let mut at = list.body + 6 + id_bytes;
        for _ in 0..num_items {
            let id = number(source, at, id_bytes)?;
            at += id_bytes;
            let mut is_in_meta = false;
            if version > 0 {
                is_in_meta = source.u16_be(at)? & 15 == 1;
                at += 2;
            }
            let base = number(source, at + 2, base_bytes)?;
            let num_extents = u64::from(source.u16_be(at + 2 + base_bytes)?);
            at += 4 + base_bytes;
            let extent_bytes = index_bytes + offset_bytes + length_bytes;
            if !wanted.remove(&(id as u32)) {
                at = at.saturating_add(num_extents * extent_bytes);
                continue;
            }
            if extent_bytes == 0 && num_extents > 1 {
                return Fault::unsound(format!(
                    "item {id} has {num_extents} places that take no bytes in `iloc`"
                ));
            }
            let mut bytes = Vec::new();
            for _ in 0..num_extents {
                let offset = number(source, at + index_bytes, offset_bytes)?;
                let length = number(source, at + index_bytes + offset_bytes, length_bytes)?;
                at += extent_bytes;
                let start = if is_in_meta { self.data.map_or(u64::MAX, |data| data.body) } else { 0 };
                let start = start.saturating_add(base).saturating_add(offset);
                let end = if length == 0 { source.len() } else { start.saturating_add(length) };
                num_bytes = end.saturating_sub(start).saturating_add(num_bytes);
                if num_bytes > BYTES_MAX as u64 {
                    return Fault::unsound(format!("its metadata have more than {BYTES_MAX} bytes"));
                }
                source.append(&mut bytes, start, end)?;
            }
            found.insert(id as u32, bytes);
        }
        Ok(found)
    }
}

/// A number of 0, 2, 4 or 8 bytes; 0 where it has none.
fn number(source: &mut Source<'_>, at: u64, num_bytes: u64) -> Result<u64, Fault> {
    match num_bytes {
        0 => Ok(0),
        2 => source.u16_be(at).map(u64::from),
        4 => source.u32_be(at).map(u64::from),
        8 => source.u64_be(at),
        _ => Fault::unsound(format!("box `iloc` has numbers of {num_bytes} bytes, must be 0, 4 or 8")),
    }
}
