//! Integers of a section of `config.json`, with the defaults that the section's class has in transformers.

use crate::error::AnalyticError;
use serde_json::Value;

/// A section of `config.json`.
pub(super) struct Section<'a> {
    /// Its dotted path, empty for the whole file.
    pub(super) path: &'static str,
    pub(super) object: &'a Value,
    /// What absent fields are, by the class of the section in transformers 5.23 (`configuration_*.py`).
    pub(super) defaults: &'static [(&'static str, u64)],
}

impl<'a> Section<'a> {
    /// The value of a field; null is as good as missing, as in transformers.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// The whole number in `field`, at least 1; the class's default where it is absent.
    pub(super) fn count(&self, field: &str) -> Result<u64, AnalyticError> {
        match self.given(field)? {
            Some(number) => Ok(number),
            None => match self.defaults.iter().find(|(name, _)| *name == field) {
                Some((_, number)) => Ok(*number),
                None => Err(self.error(field, "must be given")),
            },
        }
    }

    /// The whole number in `field`, where it is there.
    pub(super) fn given(&self, field: &str) -> Result<Option<u64>, AnalyticError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        // Beyond 2^24 a width is a mistake, and products of four such numbers would not fit 128 bits.
        let number = value.as_u64().filter(|number| (1..=1 << 24).contains(number));
        number.map(Some).ok_or_else(|| self.error(field, "must be a whole number from 1 to 16777216"))
    }

    /// A side in pixels: a number, or a pair of equal numbers.
    pub(super) fn side(&self, field: &str) -> Result<u64, AnalyticError> {
        let Some(Value::Array(sides)) = self.get(field) else { return self.count(field) };
        let side = sides.first().and_then(Value::as_u64).filter(|side| (1..=1 << 15).contains(side));
        match side {
            Some(side) if sides.iter().all(|other| other.as_u64() == Some(side)) => Ok(side),
            _ => Err(self.error(field, "must be one side, or equal sides")),
        }
    }

    /// The flag in `field`; `absent` where it is not there.
    pub(super) fn flag(&self, field: &str, absent: bool) -> Result<bool, AnalyticError> {
        match self.get(field) {
            None => Ok(absent),
            Some(value) => value.as_bool().ok_or_else(|| self.error(field, "must be true or false")),
        }
    }

    /// `Ok` if `field` is absent or one of `known`.
    pub(super) fn must_be(&self, field: &str, known: &[&str]) -> Result<(), AnalyticError> {
        match self.get(field) {
            Some(value) if !known.iter().any(|known| value == known) => {
                Err(self.error(field, &format!("must be \"{}\"", known.join("\" or \""))))
            }
            _ => Ok(()),
        }
    }

    /// `part`, which must divide `whole`.
    pub(super) fn divides(&self, field: &str, part: u64, whole: u64) -> Result<u64, AnalyticError> {
        if whole.is_multiple_of(part) {
            Ok(whole / part)
        } else {
            Err(self.error(field, &format!("must divide {whole}")))
        }
    }

    pub(super) fn error(&self, field: &str, rule: &str) -> AnalyticError {
        let name = if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) };
        let value = self.get(field).map_or_else(|| "missing".to_owned(), Value::to_string);
        let value = if value.len() > 60 {
            format!("{}...", value.chars().take(57).collect::<String>())
        } else {
            value
        };
        AnalyticError::Config { field: name, value, rule: rule.to_owned() }
    }
}
