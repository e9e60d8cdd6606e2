//! Where records end in the text of a file, looked at in pieces of any size.

use super::Form;
use std::ops::Range;

/// Where one record stands in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) line: u64,
}

/// What became of some bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Bytes looked at; the rest is for the next step.
    pub(super) taken: usize,
    /// Those of them that belong to the record under way.
    pub(super) kept: Range<usize>,
    /// That record, where it has ended.
    pub(super) found: Option<Extent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Before,
    Inside,
    After,
}

/// Finds records in bytes that come in pieces of any size.
///
/// In an array, an element ends at a comma or at the end of the array, outside every string and inner bracket, so
/// that a broken element does not hide the next one, unless its own brackets or quotes are odd.
#[derive(Debug)]
pub(super) struct Splitter {
    form: Form,
    max_record_bytes: u64,
    /// Offset and line of the next byte.
    at: u64,
    line: u64,
    num_found: u64,
    /// Start and line of the record under way.
    begun: Option<(u64, u64)>,
    // Of an array.
    stage: Stage,
    depth: u64,
    in_string: bool,
    is_escaped: bool,
}

impl Splitter {
    pub(super) const fn new(form: Form, at: u64, max_record_bytes: u64) -> Self {
        Self {
            form,
            max_record_bytes,
            at,
            line: 1,
            num_found: 0,
            begun: None,
            stage: Stage::Before,
            depth: 0,
            in_string: false,
            is_escaped: false,
        }
    }

    /// Looks at `bytes` up to the end of a record.
    pub(super) fn step(&mut self, bytes: &[u8]) -> Result<Step, String> {
        let (first, begun_before) = (self.at, self.begun.is_some());
        let end = match self.form {
            Form::Lines => self.line_end(bytes)?,
            Form::Array => self.element_end(bytes)?,
        };
        let seen = end.unwrap_or(bytes.len());
        let kept = match self.begun {
            None => 0..0,
            Some(_) if begun_before => 0..seen,
            Some((start, _)) => (start - first) as usize..seen,
        };
        self.at = first + seen as u64;
        if let Some((start, line)) = self.begun
            && self.at - start > self.max_record_bytes
        {
            return Err(format!(
                "line {line}: a record of more than {} bytes, must be at most that (or a quote, a bracket or a line \
                 end is missing)",
                self.max_record_bytes
            ));
        }
        let found = end.and_then(|_| self.found());
        // The byte that ends a record is no part of it.
        let taken = seen + usize::from(end.is_some());
        self.at = first + taken as u64;
        self.line += u64::from(end.is_some_and(|end| bytes[end] == b'\n'));
        Ok(Step { taken, kept, found })
    }

    /// The record under way, which ends here.
    fn found(&mut self) -> Option<Extent> {
        let (start, line) = self.begun.take()?;
        self.num_found += 1;
        Some(Extent { start, len: self.at - start, line })
    }

    /// The end of the line, where it is in `bytes`. Empty lines hold no record.
    fn line_end(&mut self, bytes: &[u8]) -> Result<Option<usize>, String> {
        let end = bytes.iter().position(|&byte| byte == b'\n');
        if self.begun.is_none()
            && let Some(start) =
                bytes[..end.unwrap_or(bytes.len())].iter().position(|byte| !byte.is_ascii_whitespace())
        {
            if self.num_found == 0 && bytes[start] == b'[' {
                return Err(
                    "it begins with `[`, must have one sample a line (an array is `.json`: rename it, or \
                            set `format: json`)"
                        .to_owned(),
                );
            }
            self.begun = Some((self.at + start as u64, self.line));
        }
        Ok(end)
    }

    /// The comma or bracket that ends the element under way, where it is in `bytes`.
    fn element_end(&mut self, bytes: &[u8]) -> Result<Option<usize>, String> {
        for (index, &byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    b'\n' => self.line += 1,
                    _ if self.is_escaped => {}
                    b'"' => self.in_string = false,
                    _ => {}
                }
                self.is_escaped = byte == b'\\' && !self.is_escaped;
                continue;
            }
            if byte.is_ascii_whitespace() {
                self.line += u64::from(byte == b'\n');
                continue;
            }
            match self.stage {
                Stage::Before => self.begin(byte)?,
                Stage::Inside => {
                    if self.inside(byte, self.at + index as u64)? {
                        return Ok(Some(index));
                    }
                }
                Stage::After => return Err(format!("line {}: there is more after the array", self.line)),
            }
        }
        Ok(None)
    }

    fn begin(&mut self, byte: u8) -> Result<(), String> {
        self.stage = Stage::Inside;
        match byte {
            b'[' => Ok(()),
            b'{' => Err(
                "it begins with `{`, must be an array of samples (one a line is `.jsonl`: rename it, or set \
                         `format: jsonl`)"
                    .to_owned(),
            ),
            _ => Err("it does not begin with `[`, must be an array of samples".to_owned()),
        }
    }

    /// Whether an element ends at this byte, which is no white space and in no string.
    fn inside(&mut self, byte: u8, at: u64) -> Result<bool, String> {
        if self.depth == 0 && matches!(byte, b',' | b']') {
            let is_last = byte == b']';
            if is_last {
                self.stage = Stage::After;
            }
            return match self.begun {
                Some(_) => Ok(true),
                None if is_last && self.num_found == 0 => Ok(false),
                None => Err(format!("line {}: a sample is missing before `{}`", self.line, byte as char)),
            };
        }
        if self.begun.is_none() {
            self.begun = Some((at, self.line));
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' if self.depth > 0 => self.depth -= 1,
            _ => {}
        }
        Ok(false)
    }

    /// The record that ends with the file.
    pub(super) fn finish(&mut self) -> Result<Option<Extent>, String> {
        match (self.form, self.stage) {
            (Form::Lines, _) => Ok(self.found()),
            (Form::Array, Stage::After) => Ok(None),
            (Form::Array, Stage::Before) => Err("it is empty, must be an array of samples".to_owned()),
            (Form::Array, Stage::Inside) => Err(format!(
                "the array has no end: cut off, or a quote or bracket is odd in sample {} at line {}",
                self.num_found,
                self.begun.map_or(self.line, |(_, line)| line)
            )),
        }
    }
}
