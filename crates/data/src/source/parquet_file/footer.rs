//! The footer of a Parquet file, looked over before its decoder takes it apart.
//!
//! The decoder builds the schema by calling itself level after level, up to the end of the stack, makes room for as many
//! children as a column claims, and walks over lists of any length that it does not know. So the footer, one struct of
//! Thrift's compact protocol, is walked once for these alone.

/// Levels of the schema, at most.
const MAX_DEPTH: usize = 64;
/// Levels of Thrift's structs and lists, at most: a footer has six.
const MAX_NESTING: usize = 32;

/// Nothing where the decoder can read the footer without more stack or memory than the footer's bytes are worth.
///
/// # Errors
/// What the footer claims, and what it may.
pub(super) fn check(footer: &[u8]) -> Result<(), String> {
    let mut rest = Compact { bytes: footer };
    rest.fields(|rest, field, kind| match (field, kind) {
        (SCHEMA, Compact::LIST) => rest.schema(),
        _ => rest.skip_value(kind, 0),
    })
}

/// The field of the footer that holds the schema: its elements, parents before their children.
const SCHEMA: i16 = 2;
/// The field of a schema's element that holds the number of its children.
const NUM_CHILDREN: i16 = 5;

/// What is left of the footer, or of the header of a page.
pub(super) struct Compact<'b> {
    pub(super) bytes: &'b [u8],
}

impl Compact<'_> {
    pub(super) const I32: u8 = 5;
    const LIST: u8 = 9;
    const STRUCT: u8 = 12;

    fn byte(&mut self) -> Result<u8, String> {
        let (first, rest) = self.bytes.split_first().ok_or("its footer is cut off")?;
        self.bytes = rest;
        Ok(*first)
    }

    fn skip(&mut self, num_bytes: u64) -> Result<(), String> {
        let rest = usize::try_from(num_bytes).ok().and_then(|num_bytes| self.bytes.get(num_bytes..));
        self.bytes = rest.ok_or_else(|| {
            format!("its footer claims {num_bytes} bytes of a value, {} are left", self.bytes.len())
        })?;
        Ok(())
    }

    /// A number of seven bits a byte, the lowest first.
    fn number(&mut self) -> Result<u64, String> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err("its footer has a number of more than 64 bits".to_owned())
    }

    /// A number whose last bit is its sign.
    pub(super) fn signed(&mut self) -> Result<i64, String> {
        let number = self.number()?;
        Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    /// The fields of a struct up to its end, by number and kind; `field` takes the value.
    pub(super) fn fields(
        &mut self,
        mut field: impl FnMut(&mut Self, i16, u8) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut last = 0_i16;
        loop {
            let head = self.byte()?;
            let (step, kind) = (head >> 4, head & 0x0f);
            if kind == 0 {
                return Ok(());
            }
            last = match step {
                0 => self.signed()? as i16,
                step => last.wrapping_add(step.into()),
            };
            // A truth value stands in the head.
            if kind > 2 {
                field(self, last, kind)?;
            }
        }
    }

    /// Length and kind of a list: a value takes a byte or more.
    fn list(&mut self) -> Result<(u64, u8), String> {
        let head = self.byte()?;
        let length = match head >> 4 {
            15 => self.number()?,
            length => length.into(),
        };
        self.check_length(length)?;
        Ok((length, head & 0x0f))
    }

    fn check_length(&self, length: u64) -> Result<(), String> {
        let left = self.bytes.len();
        if length <= left as u64 {
            return Ok(());
        }
        Err(format!("its footer claims a list of {length} values, {left} bytes are left"))
    }

    pub(super) fn skip_value(&mut self, kind: u8, depth: usize) -> Result<(), String> {
        if depth > MAX_NESTING {
            return Err(format!("its footer nests more than {MAX_NESTING} levels"));
        }
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.number().map(drop),
            7 => self.skip(8),
            8 => {
                let length = self.number()?;
                self.skip(length)
            }
            // A list, or a set.
            9 | 10 => {
                let (length, kind) = self.list()?;
                (0..length).try_for_each(|_| self.skip_value(kind, depth + 1))
            }
            11 => {
                let length = self.number()?;
                self.check_length(length)?;
                let kinds = if length == 0 { 0 } else { self.byte()? };
                (0..length).try_for_each(|_| {
                    self.skip_value(kinds >> 4, depth + 1)?;
                    self.skip_value(kinds & 0x0f, depth + 1)
                })
            }
            Self::STRUCT => self.fields(|rest, _, kind| rest.skip_value(kind, depth + 1)),
            13 => self.skip(16),
            kind => Err(format!("its footer has a value of the unknown kind {kind}")),
        }
    }

    fn schema(&mut self) -> Result<(), String> {
        let (length, kind) = self.list()?;
        if kind != Self::STRUCT {
            return Err("its schema is no list of columns".to_owned());
        }
        // Children to come, of each parent.
        let mut parents: Vec<u64> = Vec::new();
        for index in 0..length {
            let mut num_children = 0;
            self.fields(|rest, field, kind| match (field, kind) {
                (NUM_CHILDREN, Self::I32) => {
                    num_children = rest.signed()?;
                    Ok(())
                }
                _ => rest.skip_value(kind, 0),
            })?;
            if let Some(children) = parents.last_mut() {
                *children -= 1;
            }
            let left = length - index - 1;
            match u64::try_from(num_children) {
                Ok(0) => {}
                Ok(children) if children <= left => parents.push(children),
                _ => {
                    return Err(format!(
                        "its schema claims {num_children} columns inside one, {left} are left"
                    ));
                }
            }
            if parents.len() > MAX_DEPTH {
                return Err(format!("its schema has more than {MAX_DEPTH} levels"));
            }
            while parents.pop_if(|children| *children == 0).is_some() {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer with a schema of `columns`, each a struct without its end.
    fn footer(columns: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes =
            vec![0x15, 2, 0x19, 0xfc, columns.len() as u8 & 0x7f | 0x80, (columns.len() >> 7) as u8];
        for column in columns {
            bytes.extend_from_slice(column);
            bytes.push(0);
        }
        bytes.push(0);
        bytes
    }

    /// A column of the name `a` with so many children.
    fn column(num_children: u8) -> Vec<u8> {
        vec![0x35, 0, 0x18, 1, b'a', 0x15, num_children * 2]
    }

    #[test]
    fn levels_and_children_are_bounded() {
        let nested = |levels: usize| {
            let mut columns = vec![column(1); levels];
            columns.push(column(0));
            check(&footer(&columns))
        };
        assert_eq!(nested(1), Ok(()));
        assert_eq!(nested(64), Ok(()));
        assert_eq!(nested(65), Err("its schema has more than 64 levels".to_owned()));
        // Many side by side are not deep.
        let mut columns = vec![column(60)];
        columns.extend((0..30).flat_map(|_| [column(1), column(0)]));
        columns.extend(vec![column(0); 30]);
        assert_eq!(check(&footer(&columns)), Ok(()));
        let claim = [column(2), column(0)];
        assert_eq!(
            check(&footer(&claim)),
            Err("its schema claims 2 columns inside one, 1 are left".to_owned())
        );
    }

    #[test]
    fn lists_have_no_more_values_than_bytes() {
        // A list of 2^28 truth values in field 9.
        let list = [0x99, 0xf1, 0x80, 0x80, 0x80, 0x80, 0x01, 1, 0];
        assert_eq!(
            check(&list),
            Err("its footer claims a list of 268435456 values, 2 bytes are left".to_owned())
        );
        let map = [0x9b, 0x80, 0x80, 0x80, 0x80, 0x01, 0x33, 0];
        assert!(check(&map).unwrap_err().contains("a list of 268435456 values"));
        let text = [0x98, 0x80, 0x01, b'a', 0];
        assert_eq!(check(&text), Err("its footer claims 128 bytes of a value, 2 are left".to_owned()));
        let nested = [0x99].into_iter().chain([0x19; 100]).collect::<Vec<u8>>();
        assert_eq!(check(&nested), Err("its footer nests more than 32 levels".to_owned()));
        assert_eq!(check(&[0x15]), Err("its footer is cut off".to_owned()));
        assert_eq!(check(&[0x1e]), Err("its footer has a value of the unknown kind 14".to_owned()));
        let long = [&[0x16][..], &[0xff; 10], &[1, 0]].concat();
        assert_eq!(check(&long), Err("its footer has a number of more than 64 bits".to_owned()));
        // Each kind once, then fields that do not ascend.
        let sound = [
            0x11, 0x12, 0x13, 7, 0x14, 1, 0x17, 0, 0, 0, 0, 0, 0, 0, 0, 0x1a, 0x13, 7, 0x1b, 0, 0x1b, 1,
            0x35, 7, 2, 0x1c, 0x11, 0, 0x05, 2, 4, 0x29, 0x21, 1, 2, 0,
        ];
        assert_eq!(check(&sound), Ok(()));
    }
}
