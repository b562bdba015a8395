//! JSON into values, in bounded memory: a value takes up to forty times the bytes that wrote it.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Values of one body, its prompts apart.
pub(crate) const MOST_VALUES: usize = 1 << 17;

/// Reads one value, and counts it and those in it.
#[derive(Clone, Copy)]
pub(crate) struct Counted<'a> {
    /// Values that may still be read.
    pub left: &'a Cell<usize>,
}

impl Counted<'_> {
    fn count<E: Error>(self) -> Result<(), E> {
        match self.left.get().checked_sub(1) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => {
                let why = format!("the body has more than {MOST_VALUES} values beside its prompts");
                Err(E::custom(why))
            }
        }
    }

    fn one<E: Error>(self, value: impl Into<Value>) -> Result<Value, E> {
        self.count()?;
        Ok(value.into())
    }
}

impl<'de> DeserializeSeed<'de> for Counted<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Counted<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.one(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        self.one(value)
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.one(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        self.count()?;
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        self.count()?;
        let mut values = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(self)?;
            values.insert(key, value);
        }
        Ok(Value::Object(values))
    }
}
