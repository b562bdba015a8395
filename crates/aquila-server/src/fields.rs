//! A JSON object, taken apart by its keys, so that every error names the key at fault.

use aquila_engine::Speculation;
use aquila_text::{SamplingParams, speculation};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::refusal::Refusal;

/// The fields of a request that nobody has taken yet.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a body; an error says where the JSON goes wrong.
    pub fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            let hint = if body.is_empty() { "the body is empty" } else { "the body is not JSON" };
            Refusal::invalid(format!("{hint}: {error}"))
        })?;
        match value {
            Value::Object(fields) => Ok(Self(fields)),
            _ => Err(Refusal::invalid("the body must be a JSON object")),
        }
    }

    /// As [`Self::parse`], but an empty body is an empty object.
    pub fn parse_or_none(body: &[u8]) -> Result<Self, Refusal> {
        if body.is_empty() { Ok(Self(Map::new())) } else { Self::parse(body) }
    }

    /// The fields of an object.
    pub fn of(object: Map<String, Value>) -> Self {
        Self(object)
    }

    /// Takes a field; null is as good as absent.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Refusal> {
        match self.0.shift_remove(name) {
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
        let Some(value) = self.0.shift_remove(name).filter(|value| !value.is_null()) else {
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
            if self.0.shift_remove(*name).is_some_and(|value| !value.is_null()) {
                return Err(Refusal::param(*name, "is not supported by this server"));
            }
        }
        Ok(())
    }

    /// The name of a field that nobody took.
    pub fn untaken(&self) -> Option<&str> {
        self.0.keys().next().map(String::as_str)
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
