//! JSON and JSONL: records found chunk by chunk, without parsing them.

mod splitter;

use super::{Body, RawRecord, Reader, Records};
use crate::error::DataError;
use crate::source::location::Location;
use crate::source::store::Stores;
use serde_json::Value;
use splitter::{Extent, Splitter};
use std::io::{Cursor, ErrorKind, Read, Seek as _, SeekFrom};
use std::ops::Range;

/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of one record, at most: what is longer is an odd quote or bracket, not a conversation.
const MAX_RECORD_BYTES: u64 = 64 << 20;

/// How a text file holds its records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// One a line.
    Lines,
    /// The elements of one array.
    Array,
}

/// One text file of records: JSON Lines, or one JSON array.
#[derive(Debug)]
pub(super) struct JsonFile {
    location: [Location; 1],
    form: Form,
}

impl JsonFile {
    pub(super) const fn new(location: Location, form: Form) -> Self {
        Self { location: [location], form }
    }

    fn io(&self, source: std::io::Error) -> DataError {
        DataError::Io { act: "read", path: self.location[0].path(), source }
    }

    fn unsound(&self, cause: &str) -> DataError {
        DataError::Record(format!("`{}`: {cause}", self.location[0]))
    }

    fn scan(&self, stores: &Stores) -> Result<Scan, DataError> {
        let reader = stores.open(&self.location[0])?.reader;
        Scan::new(reader, self.form, CHUNK_BYTES, MAX_RECORD_BYTES).map_err(|error| self.name(error))
    }

    fn name(&self, error: ScanError) -> DataError {
        match error {
            ScanError::Io(source) => self.io(source),
            ScanError::Unsound(cause) => self.unsound(&cause),
        }
    }
}

impl Reader for JsonFile {
    fn files(&self) -> &[Location] {
        &self.location
    }

    fn count(&self, stores: &Stores) -> Result<u64, DataError> {
        let mut scan = self.scan(stores)?;
        let mut count = 0;
        while scan.next_extent(None).map_err(|error| self.name(error))?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    fn records<'a>(&'a self, stores: &'a Stores) -> Result<Records<'a>, DataError> {
        let mut scan = self.scan(stores)?;
        let mut has_failed = false;
        Ok(Box::new(std::iter::from_fn(move || {
            if has_failed {
                return None;
            }
            let mut text = Vec::new();
            let place = scan.next_extent(Some(&mut text)).transpose()?;
            has_failed = place.is_err();
            Some(place.map_err(|error| self.name(error)).map(|place| RawRecord {
                place: dflop_types::Place { file: 0, start: place.start, len: place.len },
                body: Body::Json { text, line: place.line },
                attachments: Vec::new(),
            }))
        })))
    }

    fn fetch(&self, stores: &Stores, place: dflop_types::Place) -> Result<RawRecord, DataError> {
        if place.len > MAX_RECORD_BYTES {
            return Err(self.unsound(&format!(
                "a record of {} bytes is asked for, must be at most {MAX_RECORD_BYTES}",
                place.len
            )));
        }
        let mut reader = stores.open(&self.location[0])?.reader;
        reader.seek(SeekFrom::Start(place.start)).map_err(|e| self.io(e))?;
        let mut text = Vec::new();
        reader.take(place.len).read_to_end(&mut text).map_err(|e| self.io(e))?;
        if (text.len() as u64) < place.len {
            return Err(self.io(ErrorKind::UnexpectedEof.into()));
        }
        Ok(RawRecord { place, body: Body::Json { text, line: 0 }, attachments: Vec::new() })
    }
}

#[derive(Debug)]
enum ScanError {
    Io(std::io::Error),
    Unsound(String),
}

/// The places of a file's records, one after the other; no more than one chunk and one record are in memory.
struct Scan {
    reader: Box<dyn Read + Send>,
    splitter: Splitter,
    chunk: Vec<u8>,
    /// What of the chunk is not looked at yet.
    left: Range<usize>,
    is_at_end: bool,
}

impl Scan {
    fn new(
        mut reader: impl Read + Send + 'static,
        form: Form,
        chunk_bytes: usize,
        max_record_bytes: u64,
    ) -> Result<Self, ScanError> {
        let mut head = Vec::new();
        reader.by_ref().take(4).read_to_end(&mut head).map_err(ScanError::Io)?;
        let start = text_start(&head).map_err(ScanError::Unsound)?;
        Ok(Self {
            reader: Box::new(Cursor::new(head.split_off(start)).chain(reader)),
            splitter: Splitter::new(form, start as u64, max_record_bytes),
            chunk: vec![0; chunk_bytes],
            left: 0..0,
            is_at_end: false,
        })
    }

    /// The next record's place, `None` after the last; its bytes go to `text`.
    fn next_extent(&mut self, mut text: Option<&mut Vec<u8>>) -> Result<Option<Extent>, ScanError> {
        loop {
            if self.left.is_empty() {
                if !self.is_at_end {
                    self.left = 0..self.fill().map_err(ScanError::Io)?;
                    self.is_at_end = self.left.is_empty();
                }
                if self.is_at_end {
                    return self.splitter.finish().map_err(ScanError::Unsound);
                }
            }
            let bytes = &self.chunk[self.left.clone()];
            let step = self.splitter.step(bytes).map_err(ScanError::Unsound)?;
            if let Some(text) = text.as_deref_mut() {
                text.extend_from_slice(&bytes[step.kept]);
            }
            self.left.start += step.taken;
            if step.found.is_some() {
                return Ok(step.found);
            }
        }
    }

    fn fill(&mut self) -> std::io::Result<usize> {
        loop {
            match self.reader.read(&mut self.chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}

/// Where the text begins in a file that begins with `head`: behind a byte order mark.
fn text_start(head: &[u8]) -> Result<usize, String> {
    let packed = |format, tool| {
        Err(format!(
            "it is {format}, must be plain text, because records are found by their position in bytes: unpack it with `{tool}`"
        ))
    };
    match head {
        [0xef, 0xbb, 0xbf, ..] => Ok(3),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Err("it is UTF-16, must be UTF-8".to_owned()),
        [0x1f, 0x8b, ..] => packed("gzip", "gzip -d"),
        [0x28, 0xb5, 0x2f, 0xfd] => packed("Zstandard", "zstd -d"),
        _ => Ok(0),
    }
}

/// The record in `bytes`, which begins at `line` of its file.
pub(super) fn parse(bytes: &[u8], line: u64) -> Result<Value, String> {
    serde_json::from_slice(bytes).map_err(|error| {
        // serde_json counts from the record; people count from the file.
        let text = error.to_string();
        let cause = text.split(" at line ").next().unwrap_or(&text);
        let at =
            format!("line {}, column {}", line + (error.line() as u64).saturating_sub(1), error.column());
        match (std::str::from_utf8(bytes), no_number(bytes, &error)) {
            (Err(_), _) => format!("{at}: it is not UTF-8"),
            (_, Some(word)) => format!("{at}: `{word}` is no number of JSON, must be a number or `null`"),
            _ => format!("{at}: it is not JSON: {cause}"),
        }
    })
}

/// `NaN` or `Infinity`, if the parser stopped there. Python's `json.dumps` writes these words, and JSON has no such numbers.
fn no_number(bytes: &[u8], error: &serde_json::Error) -> Option<&'static str> {
    let row = bytes.split(|byte| *byte == b'\n').nth(error.line().checked_sub(1)?)?;
    // The parser stops at the first letter, or behind a sign that it took for a number's.
    let stands = |word: &&str, before: usize| {
        let at = error.column().checked_sub(before);
        at.and_then(|at| row.get(at..)).is_some_and(|rest| rest.starts_with(word.as_bytes()))
    };
    ["NaN", "-Infinity", "Infinity"].into_iter().find(|word| stands(word, 1) || stands(word, 2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn scan(
        bytes: &[u8],
        form: Form,
        chunk_bytes: usize,
        limit: u64,
    ) -> Result<Vec<(Extent, String)>, String> {
        let cause = |error| match error {
            ScanError::Unsound(cause) => cause,
            ScanError::Io(error) => panic!("reading memory fails: {error}"),
        };
        let mut scan = Scan::new(Cursor::new(bytes.to_vec()), form, chunk_bytes, limit).map_err(cause)?;
        let mut found = Vec::new();
        loop {
            let mut text = Vec::new();
            let Some(place) = scan.next_extent(Some(&mut text)).map_err(cause)? else { break };
            assert_eq!(text, bytes[place.start as usize..][..place.len as usize]);
            found.push((place, String::from_utf8_lossy(&text).into_owned()));
        }
        Ok(found)
    }

    fn elements(bytes: &[u8]) -> Result<Vec<(Extent, String)>, String> {
        scan(bytes, Form::Array, CHUNK_BYTES, MAX_RECORD_BYTES)
    }

    fn lines(bytes: &[u8]) -> Result<Vec<(Extent, String)>, String> {
        scan(bytes, Form::Lines, CHUNK_BYTES, MAX_RECORD_BYTES)
    }

    fn values(found: &[(Extent, String)]) -> Vec<Value> {
        found.iter().map(|(_, text)| parse(text.as_bytes(), 1).unwrap()).collect()
    }

    #[test]
    fn a_broken_element_costs_itself_alone() {
        let text = br#"[{"id": 1}, {"id": "a,]\"" x},
 {"id": [2, {"b": 3}]}
 , 7]"#;
        let found = elements(text).unwrap();
        assert_eq!(found.iter().map(|(place, _)| place.line).collect::<Vec<_>>(), [1, 1, 2, 3]);
        let parsed: Vec<_> = found.iter().map(|(_, text)| parse(text.as_bytes(), 1).is_ok()).collect();
        assert_eq!(parsed, [true, false, true, true]);
    }

    #[test]
    fn what_is_no_array_is_refused() {
        for (text, cause) in [
            ("", "it is empty"),
            ("{}", "one a line is `.jsonl`"),
            ("3", "does not begin with `[`"),
            ("[{\"id\": 1}, {\"id\"", "in sample 1 at line 1"),
            ("[1,]", "missing before `]`"),
            ("[,1]", "missing before `,`"),
            ("[1] 2", "more after the array"),
            ("\u{1f}\u{8b}", "does not begin"),
        ] {
            let error = elements(text.as_bytes()).unwrap_err();
            assert!(error.contains(cause), "{text}: {error}");
        }
        assert_eq!(elements(b" [ ]\n"), Ok(vec![]));
    }

    #[test]
    fn what_is_no_plain_text_of_lines_is_refused() {
        for (bytes, cause) in [
            (&b"\n [{\"id\": 1}]"[..], "an array is `.json`"),
            (b"\x1f\x8b\x08\x00...", "it is gzip"),
            (b"\x28\xb5\x2f\xfd...", "it is Zstandard"),
            (b"\xff\xfe{\0", "it is UTF-16"),
        ] {
            let error = lines(bytes).unwrap_err();
            assert!(error.contains(cause), "{error}");
        }
        assert_eq!(lines(b""), Ok(vec![]));
    }

    #[test]
    fn marks_line_ends_and_blank_lines_are_no_part_of_a_record() {
        let text = b"\xef\xbb\xbf{\"a\": 1}\r\n\r\n  \n {\"b\": 2}\n\n{\"c\": 3}";
        let found = lines(text).unwrap();
        let places: Vec<_> = found.iter().map(|(p, _)| (p.start, p.len, p.line)).collect();
        // A carriage return is white space, which JSON allows.
        assert_eq!(places, [(3, 9, 1), (19, 8, 4), (29, 8, 6)]);
        assert_eq!(values(&found), [json!({"a": 1}), json!({"b": 2}), json!({"c": 3})]);
        let array = elements(b"\xef\xbb\xbf[1, 2]").unwrap();
        assert_eq!(array.iter().map(|(place, _)| place.start).collect::<Vec<_>>(), [4, 7]);
    }

    #[test]
    fn a_record_past_the_limit_is_named() {
        let text = format!("{{}}\n\n{{\"a\": \"{}\"}}\n", "x".repeat(100));
        for chunk_bytes in [1, 7, 1000] {
            let error = scan(text.as_bytes(), Form::Lines, chunk_bytes, 50).unwrap_err();
            assert!(error.starts_with("line 3: a record of more than 50 bytes"), "{error}");
            let array = format!("[1,\n\"{}", "x".repeat(100));
            let error = scan(array.as_bytes(), Form::Array, chunk_bytes, 50).unwrap_err();
            assert!(error.starts_with("line 2: a record of more than 50 bytes"), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_line_of_the_file() {
        assert_eq!(
            parse(b"{\"id\": 1,\n \"x\" 2}", 40).unwrap_err(),
            "line 41, column 6: it is not JSON: expected `:`"
        );
    }

    /// Python's `json.dumps` writes `NaN` unless it is told not to; Latin-1 comes of old files.
    #[test]
    fn what_python_writes_for_no_number_and_other_encodings_are_named() {
        let cause = |bytes: &[u8]| parse(bytes, 1).unwrap_err();
        let rule = "is no number of JSON, must be a number or `null`";
        assert_eq!(cause(b"{\"a\": NaN}"), format!("line 1, column 7: `NaN` {rule}"));
        assert_eq!(cause(b"[1,\nInfinity]"), format!("line 2, column 1: `Infinity` {rule}"));
        assert!(cause(b"{\"a\": -Infinity}").ends_with(&format!("`-Infinity` {rule}")));
        assert_eq!(cause(b"{\"a\": \"NaN\", x}").split(": ").nth(1), Some("it is not JSON"));
        assert!(cause(b"{\"a\": \"\xe4\"}").ends_with("it is not UTF-8"));
    }

    #[test]
    fn a_record_is_fetched_by_its_place() {
        let directory = tempfile::tempdir().unwrap();
        for (name, form, text) in [
            ("a.jsonl", Form::Lines, "\u{feff}{\"id\": \"\u{e9}\"}\r\n\n{\"id\": 2}"),
            ("a.json", Form::Array, "[{\"id\": \"\u{e9}\"} ,\n {\"id\": 2}]"),
        ] {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            let (stores, file) = (Stores::default(), JsonFile::new(Location::Local(path), form));
            let records: Vec<_> = file.records(&stores).unwrap().map(Result::unwrap).collect();
            assert_eq!(records.len(), 2);
            assert_eq!(file.count(&stores).unwrap(), 2);
            for record in records {
                let fetched = file.fetch(&stores, record.place).unwrap();
                assert_eq!((fetched.hash(), fetched.parse()), (record.hash(), record.parse()));
            }
            let past = dflop_types::Place { file: 0, start: 20, len: 60 };
            assert!(matches!(file.fetch(&stores, past), Err(DataError::Io { .. })));
            let claim = dflop_types::Place { file: 0, start: 0, len: u64::MAX };
            assert!(file.fetch(&stores, claim).unwrap_err().to_string().contains("must be at most"));
        }
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
        fn every_element_is_found_whole(values_in in prop::collection::vec(value(), 0..6), pretty: bool) {
            let whole = Value::from(values_in.clone());
            let text = if pretty { format!("{whole:#}") } else { whole.to_string() };
            prop_assert_eq!(&values(&elements(text.as_bytes()).unwrap()), &values_in);
            // A first line that is an array is refused.
            let objects: Vec<_> = values_in.iter().map(|value| json!({"v": value})).collect();
            let lined = objects.iter().map(Value::to_string).collect::<Vec<_>>().join("\n\n");
            prop_assert_eq!(&values(&lines(lined.as_bytes()).unwrap()), &objects);
        }

        #[test]
        fn chunks_of_any_size_give_the_same(
            values_in in prop::collection::vec(value(), 0..6),
            pretty: bool,
            chunk_bytes in 1_usize..40,
        ) {
            let whole = Value::from(values_in);
            let text = if pretty { format!("{whole:#}") } else { whole.to_string() };
            let chunked = scan(text.as_bytes(), Form::Array, chunk_bytes, MAX_RECORD_BYTES);
            prop_assert_eq!(chunked, elements(text.as_bytes()));
        }

        #[test]
        fn chunks_of_any_size_give_the_same_of_any_text(
            text in "[\\[\\]{},\"\\\\ \r\n1a\u{e9}\u{1f600}]{0,60}",
            limit in 1_u64..60,
            chunk_bytes in 1_usize..40,
        ) {
            for form in [Form::Lines, Form::Array] {
                let whole = scan(text.as_bytes(), form, 4096, limit);
                prop_assert_eq!(scan(text.as_bytes(), form, chunk_bytes, limit), whole);
            }
        }
    }
}
