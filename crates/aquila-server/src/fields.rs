//! A JSON object, taken apart by its keys, so that every error names the key at fault.

use std::cell::Cell;
use std::fmt;

use aquila_engine::Speculation;
use aquila_text::{SamplingParams, speculation};
use serde::Deserialize;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::json::{Counted, MOST_VALUES};
use crate::prompts::Prompts;
use crate::refusal::Refusal;

/// Values of one body, each counted once for every prompt.
const MOST_SETTINGS: usize = 1 << 20;

/// The fields of a request that nobody has taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    values: Map<String, Value>,
    prompts: Vec<(&'static str, Prompts)>,
    /// Values that were read, the prompts apart.
    count: usize,
}

impl Fields {
    /// Reads a body; an error says where the JSON goes wrong.
    pub fn parse(body: &[u8]) -> Result<Self, Refusal> {
        Self::parse_with(body, &[])
    }

    /// As [`Self::parse`], where the fields of these names hold prompts.
    pub fn parse_with(body: &[u8], names: &[&'static str]) -> Result<Self, Refusal> {
        let at = Cell::new(None);
        let mut reader = serde_json::Deserializer::from_slice(body);
        let parsed = Reading { names, at: &at }.deserialize(&mut reader);
        let parsed = parsed.and_then(|fields| reader.end().map(|()| fields));
        parsed.map_err(|error| match at.get() {
            Some(name) if error.is_data() => Refusal::param(name, error),
            None if error.is_data() && body.trim_ascii_start().starts_with(b"{") => {
                Refusal::invalid(error.to_string())
            }
            None if error.is_data() => Refusal::invalid("the body must be a JSON object"),
            _ if body.is_empty() => Refusal::invalid(format!("the body is empty: {error}")),
            _ => Refusal::invalid(format!("the body is not JSON: {error}")),
        })
    }

    /// As [`Self::parse`], but an empty body is an empty object.
    pub fn parse_or_none(body: &[u8]) -> Result<Self, Refusal> {
        if body.is_empty() { Ok(Self::of(Map::new())) } else { Self::parse(body) }
    }

    /// The fields of an object.
    pub fn of(object: Map<String, Value>) -> Self {
        Self { values: object, prompts: Vec::new(), count: 0 }
    }

    /// Takes the prompts of a field that was read as such.
    pub fn prompts(&mut self, name: &str) -> Option<Prompts> {
        let index = self.prompts.iter().position(|(read, _)| *read == name)?;
        Some(self.prompts.swap_remove(index).1)
    }

    /// Refuses settings that are too many to be kept for each of so many prompts.
    pub fn check_settings(&self, prompts: usize) -> Result<(), Refusal> {
        if self.count.saturating_mul(prompts) <= MOST_SETTINGS {
            return Ok(());
        }
        Err(Refusal::invalid(format!(
            "the body has {} values for each of its {prompts} prompts, and more than \
             {MOST_SETTINGS} in all: send fewer prompts at a time",
            self.count
        )))
    }

    /// Takes prompts that must be there.
    pub fn require_prompts(&mut self, name: &str) -> Result<Prompts, Refusal> {
        self.prompts(name).ok_or_else(|| Refusal::param(name, "is required"))
    }

    /// Takes a field; null is as good as absent.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Refusal> {
        match self.values.shift_remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value).map(Some).map_err(|e| Refusal::param(name, e))
            }
        }
    }

    /// Takes a field that must be there.
    pub fn require<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, Refusal> {
        self.take(name)?.ok_or_else(|| Refusal::param(name, "is required"))
    }

    /// Takes a flag that is off unless given.
    pub fn flag(&mut self, name: &str) -> Result<bool, Refusal> {
        Ok(self.take(name)?.unwrap_or(false))
    }

    /// Takes whether tokens may be drafted.
    pub fn speculation(&mut self) -> Result<Speculation, Refusal> {
        let value: Option<Value> = self.take("speculative")?;
        match value.as_ref().map(speculation).transpose() {
            Ok(speculation) => Ok(speculation.unwrap_or_default()),
            Err(error) => Err(Refusal::param(error.name, error.why)),
        }
    }

    /// Takes the sampling settings of these names.
    pub fn sampling(&mut self, names: &[&str]) -> Result<SamplingParams, Refusal> {
        let mut params = SamplingParams::default();
        for name in names {
            self.set(&mut params, name, name)?;
        }
        Ok(params)
    }

    /// Takes the field `name` as the sampling setting `key`.
    pub fn set(
        &mut self,
        params: &mut SamplingParams,
        name: &str,
        key: &str,
    ) -> Result<(), Refusal> {
        let Some(value) = self.values.shift_remove(name).filter(|value| !value.is_null()) else {
            return Ok(());
        };
        match params.set(key, &value) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Refusal::param(name, "no such setting")),
            Err(error) => Err(Refusal::param(name, error.why)),
        }
    }

    /// Refuses what would change the answer but is not there yet.
    pub fn refuse(&mut self, names: &[&str]) -> Result<(), Refusal> {
        for name in names {
            if self.values.shift_remove(*name).is_some_and(|value| !value.is_null()) {
                return Err(Refusal::param(*name, "is not supported by this server"));
            }
        }
        Ok(())
    }

    /// The name of a field that nobody took.
    pub fn untaken(&self) -> Option<&str> {
        self.values.keys().next().map(String::as_str)
    }
}

/// Reads an object, prompts apart from other values.
struct Reading<'a> {
    names: &'a [&'static str],
    /// The prompts that are being read, for errors.
    at: &'a Cell<Option<&'static str>>,
}

impl<'de> DeserializeSeed<'de> for Reading<'_> {
    type Value = Fields;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Fields, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reading<'_> {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a body that is a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Fields, A::Error> {
        let left = Cell::new(MOST_VALUES);
        let mut fields = Fields::of(Map::new());
        while let Some(key) = entries.next_key::<String>()? {
            match self.names.iter().find(|name| **name == key) {
                Some(name) => {
                    self.at.set(Some(*name));
                    let prompts: Option<Prompts> = entries.next_value()?;
                    self.at.set(None);
                    fields.prompts.retain(|(read, _)| read != name);
                    fields.prompts.extend(prompts.map(|prompts| (*name, prompts)));
                }
                None => {
                    let value = entries.next_value_seed(Counted { left: &left })?;
                    fields.values.insert(key, value);
                }
            }
        }
        fields.count = MOST_VALUES - left.get();
        Ok(fields)
    }
}

/// One of something, or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected one, or a list of several")]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> OneOrMany<T> {
    /// One for each of `count`: the same for all, or as many as there are.
    pub fn spread(self, count: usize, name: &str) -> Result<Vec<T>, Refusal> {
        match self {
            OneOrMany::One(one) => Ok(vec![one; count]),
            OneOrMany::Many(many) if many.len() == count => Ok(many),
            OneOrMany::Many(many) => {
                let why = format!("has {} entries for {count} prompts", many.len());
                Err(Refusal::param(name, why))
            }
        }
    }
}
