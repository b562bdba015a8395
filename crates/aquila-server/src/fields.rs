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
use crate::unserved::Unserved;

/// Values of one body, each counted once for every prompt.
const MOST_SETTINGS: usize = 1 << 20;
/// Bytes of a request's name, which each of its answers and each event of a stream repeats.
const LONGEST_NAME: usize = 256;

/// Sampling settings that bodies have by our own names.
const SAMPLING: [&str; 12] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
];

/// The fields of a request that were not taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    values: Map<String, Value>,
    prompts: Vec<(&'static str, Prompts)>,
    /// Values that were read, the prompts apart.
    count: usize,
    /// The names that were looked for.
    known: Vec<&'static str>,
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
        Self { values: object, prompts: Vec::new(), count: 0, known: Vec::new() }
    }

    /// Takes the prompts of a field that was read as such.
    pub fn prompts(&mut self, name: &'static str) -> Option<Prompts> {
        self.known.push(name);
        let index = self.prompts.iter().position(|(read, _)| *read == name)?;
        Some(self.prompts.swap_remove(index).1)
    }

    /// Refuses prompts, which came as `param`, of which more than `most` would wait, and settings
    /// that are too many to be kept for each of them.
    pub fn check_prompts(&self, prompts: usize, most: usize, param: &str) -> Result<(), Refusal> {
        if prompts > most {
            return Err(Refusal::too_many_answers(prompts, most, param));
        }
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
    pub fn require_prompts(&mut self, name: &'static str) -> Result<Prompts, Refusal> {
        self.prompts(name).ok_or_else(|| Refusal::param(name, "is required"))
    }

    /// Takes a field; null is as good as absent.
    pub fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, Refusal> {
        match self.value(name) {
            None => Ok(None),
            Some(value) => {
                serde_json::from_value(value).map(Some).map_err(|e| Refusal::param(name, e))
            }
        }
    }

    /// Takes the value of a field, unless it is null.
    pub fn value(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        self.values.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field that must be there.
    pub fn require<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<T, Refusal> {
        self.take(name)?.ok_or_else(|| Refusal::param(name, "is required"))
    }

    /// Takes the name by which the client may abort the request.
    pub fn name(&mut self) -> Result<Option<String>, Refusal> {
        self.take("rid")?.map(checked_name).transpose()
    }

    /// Takes a flag that is off unless given.
    pub fn flag(&mut self, name: &'static str) -> Result<bool, Refusal> {
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

    /// Takes the sampling settings that OpenAI's and Anthropic's APIs have by the same names, and
    /// those that SGLang adds.
    pub fn sampling(&mut self) -> Result<SamplingParams, Refusal> {
        let mut params = SamplingParams::default();
        for name in SAMPLING {
            self.set(&mut params, name, name)?;
        }
        Ok(params)
    }

    /// Takes the field `name` as the sampling setting `key`.
    pub fn set(
        &mut self,
        params: &mut SamplingParams,
        name: &'static str,
        key: &str,
    ) -> Result<(), Refusal> {
        let Some(value) = self.value(name) else { return Ok(()) };
        match params.set(key, &value) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Refusal::param(name, "no such setting")),
            Err(error) => Err(Refusal::param(name, error.why)),
        }
    }

    /// Refuses what would change the answer but is not served; a value that asks for nothing is
    /// taken.
    pub fn refuse(&mut self, fields: &[Unserved]) -> Result<(), Refusal> {
        for unserved in fields {
            if self.value(unserved.name).is_some_and(|value| !unserved.allows(&value)) {
                return Err(Refusal::param(unserved.name, "is not supported by this server"));
            }
        }
        Ok(())
    }

    /// Refuses what was not looked for, but for fields `without_effect` and for nulls; `within`
    /// is the object that these are the fields of, with a dot behind it.
    pub fn finish(mut self, within: &str, without_effect: &[&'static str]) -> Result<(), Refusal> {
        self.known.extend(without_effect);
        let unknown = |(name, value): &(&String, &Value)| {
            !value.is_null() && !self.known.contains(&name.as_str())
        };
        let Some((name, _)) = self.values.iter().find(unknown) else { return Ok(()) };
        let why = match nearest(name, &self.known) {
            Some(meant) => format!("no such setting: is `{meant}` meant?"),
            None => "no such setting".into(),
        };
        Err(Refusal::param(format!("{within}{name}"), why))
    }
}

/// A request's name, unless it is too long.
pub(crate) fn checked_name(name: String) -> Result<String, Refusal> {
    if name.len() <= LONGEST_NAME {
        return Ok(name);
    }
    let why = format!("has {} bytes, but a name has at most {LONGEST_NAME}", name.len());
    Err(Refusal::param("rid", why))
}

/// The name that is most like `typed`, if a few slips explain the difference.
fn nearest(typed: &str, known: &[&'static str]) -> Option<&'static str> {
    // A body may have a name of any length; none that is known is long.
    let typed = typed.get(..typed.len().min(64))?;
    let slips = |name: &&'static str| strsim::damerau_levenshtein(typed, name);
    let most = 1 + typed.len() / 4;
    known.iter().copied().min_by_key(slips).filter(|name| slips(name) <= most)
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

/// One of something that is no list itself, or several.
#[derive(Debug, Clone)]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// By hand, since an error is then about the value: what it is, and what was expected.
impl<'de, T: DeserializeOwned> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let read = match value {
            Value::Array(_) => serde_json::from_value(value).map(Self::Many),
            one => serde_json::from_value(one).map(Self::One),
        };
        read.map_err(serde::de::Error::custom)
    }
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
