//! JSON and JSONL: where each record begins and ends, found without parsing it.

use super::{Body, RawRecord, Reader, Records};
use crate::error::DataError;
use crate::location::Location;
use crate::store::Stores;
use serde_json::Value;
use std::io::{Read as _, Seek as _, SeekFrom};

/// One text file of records: JSON Lines, or one JSON array.
#[derive(Debug)]
pub(super) struct JsonFile {
    location: [Location; 1],
}

/// Where one record stands in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    start: u64,
    len: u64,
    line: u64,
}

impl JsonFile {
    pub(super) const fn new(location: Location) -> Self {
        Self { location: [location] }
    }

    fn io(&self, source: std::io::Error) -> DataError {
        DataError::Io { act: "read", path: self.location[0].path(), source }
    }

    fn places(&self, stores: &Stores) -> Result<(Vec<u8>, Vec<Place>), DataError> {
        let mut bytes = Vec::new();
        stores.open(&self.location[0])?.reader.read_to_end(&mut bytes).map_err(|e| self.io(e))?;
        let is_lines = self.location[0].extension() == "jsonl";
        let places = if is_lines { lines(&bytes) } else { elements(&bytes) }
            .map_err(|cause| DataError::Record(format!("`{}`: {cause}", self.location[0])))?;
        Ok((bytes, places))
    }
}

impl Reader for JsonFile {
    fn files(&self) -> &[Location] {
        &self.location
    }

    fn count(&self, stores: &Stores) -> Result<u64, DataError> {
        Ok(self.places(stores)?.1.len() as u64)
    }

    fn records<'a>(&'a self, stores: &'a Stores) -> Result<Records<'a>, DataError> {
        let (bytes, places) = self.places(stores)?;
        Ok(Box::new(places.into_iter().map(move |place| {
            let text = bytes[place.start as usize..][..place.len as usize].to_vec();
            Ok(RawRecord {
                place: dflop_types::Place { file: 0, start: place.start, len: place.len },
                body: Body::Json { text, line: place.line },
                attachments: Vec::new(),
            })
        })))
    }

    fn fetch(&self, stores: &Stores, place: dflop_types::Place) -> Result<RawRecord, DataError> {
        let mut reader = stores.open(&self.location[0])?.reader;
        let mut text = vec![0; place.len as usize];
        reader
            .seek(SeekFrom::Start(place.start))
            .and_then(|_| reader.read_exact(&mut text))
            .map_err(|e| self.io(e))?;
        Ok(RawRecord { place, body: Body::Json { text, line: 0 }, attachments: Vec::new() })
    }
}

/// One record a line; empty lines hold none.
#[expect(clippy::unnecessary_wraps, reason = "the sibling of `elements`")]
fn lines(bytes: &[u8]) -> Result<Vec<Place>, String> {
    let mut places = Vec::new();
    let mut start = 0;
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        if !line.trim_ascii().is_empty() {
            places.push(Place { start: start as u64, len: line.len() as u64, line: index as u64 + 1 });
        }
        start += line.len() + 1;
    }
    Ok(places)
}

/// The elements of the one array in `bytes`. An element ends at a comma or at the end of the array, outside every
/// string and inner bracket, so that a broken element does not hide the next one, unless its own brackets or quotes
/// are odd.
fn elements(bytes: &[u8]) -> Result<Vec<Place>, String> {
    let begin = bytes.iter().position(|byte| !byte.is_ascii_whitespace());
    // A byte order mark is no part of JSON; serde_json would refuse it with a riddle.
    let Some(begin) = begin.filter(|&at| bytes[at] == b'[') else {
        return Err(match begin.map(|at| bytes[at]) {
            None => "it is empty, must be an array of samples".to_owned(),
            Some(b'{') => {
                "it begins with `{`, must be an array of samples (one a line is `.jsonl`)".to_owned()
            }
            Some(_) => "it does not begin with `[`, must be an array of samples".to_owned(),
        });
    };
    let mut places = Vec::new();
    let (mut depth, mut in_string, mut is_escaped) = (0_u32, false, false);
    let mut line = bytes[..begin].split(|&byte| byte == b'\n').count() as u64;
    // Start and line of the element under way.
    let mut element: Option<(usize, u64)> = None;
    let mut end = None;
    for (at, &byte) in bytes.iter().enumerate().skip(begin + 1) {
        if byte == b'\n' {
            line += 1;
        }
        if end.is_some() {
            if !byte.is_ascii_whitespace() {
                return Err(format!("line {line}: there is more after the array"));
            }
            continue;
        }
        if element.is_none() && !byte.is_ascii_whitespace() && !matches!(byte, b',' | b']') {
            element = Some((at, line));
        }
        if in_string {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' => is_escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth > 0 => depth -= 1,
            b',' | b']' if depth == 0 => {
                let is_last = byte == b']' && places.is_empty();
                match element.take() {
                    Some((start, line)) => {
                        places.push(Place { start: start as u64, len: (at - start) as u64, line });
                    }
                    None if is_last => {}
                    None => {
                        return Err(format!("line {line}: a sample is missing before `{}`", byte as char));
                    }
                }
                end = (byte == b']').then_some(at);
            }
            _ => {}
        }
    }
    if end.is_none() {
        let last_start = element.map_or(line, |(_, start)| start);
        return Err(format!(
            "the array has no end: cut off, or a quote or bracket is odd in sample {} at line {last_start}",
            places.len()
        ));
    }
    Ok(places)
}

/// The record in `bytes`, which begins at `line` of its file.
pub(super) fn parse(bytes: &[u8], line: u64) -> Result<Value, String> {
    serde_json::from_slice(bytes).map_err(|error| {
        // serde_json counts from the record; people count from the file.
        let text = error.to_string();
        let cause = text.split(" at line ").next().unwrap_or(&text);
        let line = line + (error.line() as u64).saturating_sub(1);
        format!("line {line}, column {}: it is not JSON: {cause}", error.column())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn texts(bytes: &[u8], places: &[Place]) -> Vec<String> {
        places
            .iter()
            .map(|p| {
                String::from_utf8_lossy(&bytes[p.start as usize..(p.start + p.len) as usize]).into_owned()
            })
            .collect()
    }

    #[test]
    fn a_broken_element_costs_itself_alone() {
        let text = br#"[{"id": 1}, {"id": "a,]\"" x},
 {"id": [2, {"b": 3}]}
 , 7]"#;
        let places = elements(text).unwrap();
        assert_eq!(places.iter().map(|p| p.line).collect::<Vec<_>>(), [1, 1, 2, 3]);
        let parsed: Vec<_> = texts(text, &places).iter().map(|t| parse(t.as_bytes(), 1).is_ok()).collect();
        assert_eq!(parsed, [true, false, true, true]);
    }

    #[test]
    fn what_is_no_array_is_refused() {
        for (text, cause) in [
            ("", "it is empty"),
            ("{}", "one a line"),
            ("3", "does not begin with `[`"),
            ("[{\"id\": 1}, {\"id\"", "in sample 1 at line 1"),
            ("[1,]", "missing before `]`"),
            ("[1] 2", "more after the array"),
        ] {
            let error = elements(text.as_bytes()).unwrap_err();
            assert!(error.contains(cause), "{text}: {error}");
        }
        assert_eq!(elements(b" [ ]\n"), Ok(vec![]));
    }

    #[test]
    fn an_error_names_the_line_of_the_file() {
        assert_eq!(
            parse(b"{\"id\": 1,\n \"x\" 2}", 40).unwrap_err(),
            "line 41, column 6: it is not JSON: expected `:`"
        );
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<i64>().prop_map(Value::from),
            "[\\PC\"\\\\\n\\[\\]{},]{0,12}".prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[a-z\"\\\\]{0,4}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_element_is_found_whole(values in prop::collection::vec(value(), 0..6), pretty: bool) {
            let whole = Value::from(values.clone());
            let text = if pretty { format!("{whole:#}") } else { whole.to_string() };
            let places = elements(text.as_bytes()).unwrap();
            let found: Vec<_> = texts(text.as_bytes(), &places).iter().map(|t| parse(t.as_bytes(), 1).unwrap()).collect();
            prop_assert_eq!(&found, &values);
            let lined = values.iter().map(Value::to_string).collect::<Vec<_>>().join("\n\n");
            let places = lines(lined.as_bytes()).unwrap();
            let found: Vec<_> = texts(lined.as_bytes(), &places).iter().map(|t| parse(t.as_bytes(), 1).unwrap()).collect();
            prop_assert_eq!(&found, &values);
        }
    }
}
