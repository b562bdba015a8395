//! Settings of a `config.json`, read one by one, each refused by its name.
//!
//! The invariant: no value leaves this module unchecked, so nothing downstream meets a zero, a
//! negative number, a NaN or a size that overflows. A setting that is `null` counts as absent.

use serde_json::{Map, Value};

use crate::{Error, Result, Setting};

/// The largest size that any setting may have; far beyond real models, far below overflow.
const LARGEST: u64 = 1 << 30;

/// The settings of one JSON object, and where it came from.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    /// The file, for error texts.
    pub origin: &'a str,
    map: &'a Map<String, Value>,
    within: &'a str,
}

impl<'a> Settings<'a> {
    /// The settings of a whole file.
    pub fn new(origin: &'a str, value: &'a Value) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| Error::Field {
            origin: origin.into(),
            field: "the file".into(),
            problem: format!("must be a JSON object, found {}", kind(value)),
        })?;
        Ok(Self { origin, map, within: "" })
    }

    /// The value of a setting, unless absent.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    /// An error about one setting.
    pub fn wrong(&self, field: &str, problem: impl Into<String>) -> Error {
        let dot = if self.within.is_empty() { "" } else { "." };
        Error::Field {
            origin: self.origin.into(),
            field: format!("{}{dot}{field}", self.within),
            problem: problem.into(),
        }
    }

    /// An error about something that is not supported.
    pub fn unsupported(&self, reason: impl Into<String>) -> Error {
        Error::Unsupported { origin: self.origin.into(), reason: reason.into() }
    }

    /// An error about what would do with another setting of the user's.
    pub fn needs(&self, setting: Setting, reason: impl Into<String>) -> Error {
        Error::Setting { origin: self.origin.into(), reason: reason.into(), setting }
    }

    /// A nested object, unless absent.
    pub fn object(&self, field: &'a str) -> Result<Option<Settings<'a>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Settings { origin: self.origin, map, within: field }))
            }
            Some(other) => {
                Err(self.wrong(field, format!("must be an object, found {}", shown(other))))
            }
        }
    }

    /// A size of at least 1.
    pub fn size(&self, field: &str) -> Result<usize> {
        self.size_if_any(field)?.ok_or_else(|| self.wrong(field, "is missing"))
    }

    /// A size of at least 1, unless absent.
    pub fn size_if_any(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=LARGEST).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.wrong(
                field,
                format!("must be a whole number from 1 to {LARGEST}, found {}", shown(value)),
            )),
        }
    }

    /// A count, which may be 0, unless absent.
    pub fn count(&self, field: &str) -> Result<Option<usize>> {
        self.get(field).map(|value| self.as_count(field, value)).transpose()
    }

    /// Counts, each of which may be 0; none where absent.
    pub fn counts(&self, field: &str) -> Result<Vec<usize>> {
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(|v| self.as_count(field, v)).collect(),
            Some(other) => {
                Err(self.wrong(field, format!("must be a list, found {}", shown(other))))
            }
        }
    }

    fn as_count(&self, field: &str, value: &Value) -> Result<usize> {
        let count = value.as_u64().filter(|n| *n <= LARGEST);
        count.map(|n| n as usize).ok_or_else(|| {
            let found = shown(value);
            self.wrong(field, format!("must be a whole number up to {LARGEST}, found {found}"))
        })
    }

    /// A number above zero, unless absent.
    pub fn positive(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_normal() && x > 0.0 && x < 1e30 => Ok(Some(x)),
            _ => Err(self.wrong(field, format!("must be above zero, found {}", shown(value)))),
        }
    }

    /// A truth value, or `default` where absent.
    pub fn flag(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => {
                Err(self.wrong(field, format!("must be true or false, found {}", shown(other))))
            }
        }
    }

    /// A text, unless absent.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => {
                Err(self.wrong(field, format!("must be a string, found {}", shown(other))))
            }
        }
    }

    /// Token ids: one, a list, or none.
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>> {
        let one = |v: &Value| {
            v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(|| {
                self.wrong(field, format!("must hold token ids, found {}", shown(v)))
            })
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }
}

/// A value as an error text shows it: short, whatever it is.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
