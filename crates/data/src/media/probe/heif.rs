//! AVIF and HEIC: the size and rotation of the primary item; where nothing turns an AVIF, what its XMP says.

use super::Probe;
use super::boxes::{Box4, Boxes};
use super::heif_items;
use super::source::{Fault, Source};

/// Properties of a file we look at; real ones have a dozen.
const PROPERTIES_MAX: usize = 4096;

/// Whether a major brand says that the file is a picture.
pub(super) fn is_brand(brand: [u8; 4]) -> bool {
    matches!(
        &brand,
        b"avif" | b"avis" | b"heic" | b"heix" | b"heim" | b"heis" | b"hevc" | b"hevx" | b"mif1" | b"msf1"
    )
}

#[derive(Debug, Clone, Copy)]
enum Property {
    Size(u32, u32),
    QuarterTurns(u8),
    Mirror,
    Other,
}

pub(super) fn heif(source: &mut Source<'_>) -> Result<Probe, Fault> {
    let format = if matches!(&source.bytes::<4>(8)?, b"avif" | b"avis") { "avif" } else { "heif" };
    let meta = find(source, Boxes::new(0, source.len()), *b"meta")?;
    let within = || Boxes::new(meta.body + 4, meta.end);
    let pitm = find(source, within(), *b"pitm")?;
    let primary = if source.u8(pitm.body)? == 0 {
        u32::from(source.u16_be(pitm.body + 4)?)
    } else {
        source.u32_be(pitm.body + 4)?
    };
    let iprp = find(source, within(), *b"iprp")?;
    let ipco = find(source, Boxes::within(iprp), *b"ipco")?;
    let properties = read_properties(source, ipco)?;
    let ipma = find(source, Boxes::within(iprp), *b"ipma")?;
    let mut size = None;
    let mut turns = 0;
    let mut is_turned = false;
    for index in associated(source, ipma, primary)? {
        match properties.get(index) {
            Some(Property::Size(width, height)) => size = Some((*width, *height)),
            Some(Property::QuarterTurns(quarters)) => {
                turns = *quarters;
                is_turned |= turns > 0;
            }
            Some(Property::Mirror) => is_turned = true,
            _ => {}
        }
    }
    let Some((width, height)) = size else { return Fault::unsound("its primary item has no size") };
    if format == "avif" && !is_turned {
        return Ok(Probe::image(format, heif_items::turn(source, meta, primary)?.displayed((width, height))));
    }
    Ok(Probe::image(format, if turns % 2 == 1 { (height, width) } else { (width, height) }))
}

fn find(source: &mut Source<'_>, mut boxes: Boxes, kind: [u8; 4]) -> Result<Box4, Fault> {
    while let Some(found) = boxes.next(source)? {
        if found.kind == kind {
            return Ok(found);
        }
    }
    Fault::unsound(format!("it has no `{}` box", String::from_utf8_lossy(&kind)))
}

fn read_properties(source: &mut Source<'_>, ipco: Box4) -> Result<Vec<Property>, Fault> {
    let mut properties = Vec::new();
    let mut boxes = Boxes::within(ipco);
    while let Some(found) = boxes.next(source)? {
        properties.push(match &found.kind {
            b"ispe" => Property::Size(source.u32_be(found.body + 4)?, source.u32_be(found.body + 8)?),
            b"imir" => Property::Mirror,
            b"irot" => Property::QuarterTurns(source.u8(found.body)? & 3),
            _ => Property::Other,
        });
        if properties.len() > PROPERTIES_MAX {
            return Fault::unsound(format!("it has more than {PROPERTIES_MAX} properties"));
        }
    }
    Ok(properties)
}

/// Places in the list of properties (from 0) that belong to `item`.
fn associated(source: &mut Source<'_>, ipma: Box4, item: u32) -> Result<Vec<usize>, Fault> {
    let head = source.u32_be(ipma.body)?;
    let (is_long_id, is_long_index) = (head >> 24 > 0, head & 1 == 1);
    let num_entries = source.u32_be(ipma.body + 4)?;
    let mut at = ipma.body + 8;
    for _ in 0..num_entries {
        let id = if is_long_id { source.u32_be(at)? } else { u32::from(source.u16_be(at)?) };
        at += if is_long_id { 4 } else { 2 };
        let num_indices = u64::from(source.u8(at)?);
        at += 1;
        let index_bytes = if is_long_index { 2 } else { 1 };
        if id == item {
            let mut places = Vec::new();
            for index in 0..num_indices {
                let number = if is_long_index {
                    source.u16_be(at + index * index_bytes)? & 0x7fff
                } else {
                    u16::from(source.u8(at + index)? & 0x7f)
                };
                // They count from 1; 0 stands for none.
                places.extend(usize::from(number).checked_sub(1));
            }
            return Ok(places);
        }
        at += num_indices * index_bytes;
    }
    Fault::unsound("its primary item has no properties")
}
