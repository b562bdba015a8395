//! Prompts as requests write them: a text or several, token ids or several lists of them. They are
//! most of a body, so they are read into what they become, and into nothing else on the way.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

use crate::fields::OneOrMany;
use crate::json::MOST_VALUES;
use crate::refusal::Refusal;

/// What such a field may hold.
const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of such lists";

/// The value of a field of prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
    /// A list of nothing, which may be one of anything.
    Empty,
}

impl Prompts {
    /// A text or several, which came as `name`.
    pub fn texts(self, name: &str) -> Result<OneOrMany<String>, Refusal> {
        match self {
            Prompts::Text(text) => Ok(OneOrMany::One(text)),
            Prompts::Texts(texts) => Ok(OneOrMany::Many(texts)),
            Prompts::Empty => Ok(OneOrMany::Many(Vec::new())),
            _ => Err(Refusal::param(name, "expected a string or a list of strings")),
        }
    }

    /// A list of token ids or several, which came as `name`.
    pub fn ids(self, name: &str) -> Result<OneOrMany<Vec<u32>>, Refusal> {
        match self {
            Prompts::Ids(ids) => Ok(OneOrMany::One(ids)),
            Prompts::ManyIds(lists) => Ok(OneOrMany::Many(lists)),
            Prompts::Empty => Ok(OneOrMany::One(Vec::new())),
            _ => Err(Refusal::param(name, "expected a list of token ids or a list of such lists")),
        }
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Whole;
        impl<'de> Visitor<'de> for Whole {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts::Text(text.into()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Prompts, E> {
                Ok(Prompts::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                Ok(match list.next_element::<Entry>()? {
                    None => Prompts::Empty,
                    Some(Entry::Text(text)) => Prompts::Texts(rest(text, list, |entry| {
                        if let Entry::Text(text) = entry { Some(text) } else { None }
                    })?),
                    Some(Entry::Id(id)) => Prompts::Ids(rest_of_ids(id, list)?),
                    Some(Entry::Ids(ids)) => Prompts::ManyIds(rest(ids, list, |entry| {
                        if let Entry::Ids(ids) = entry { Some(ids) } else { None }
                    })?),
                })
            }
        }
        from.deserialize_any(Whole)
    }
}

/// All entries of a list that begins with `first`.
fn rest<'de, T, A: SeqAccess<'de>>(
    first: T,
    mut list: A,
    alike: impl Fn(Entry) -> Option<T>,
) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(entry) = list.next_element::<Entry>()? {
        let wrong = || {
            Error::custom(format!("entry {} is of another kind, expected {EXPECTED}", all.len()))
        };
        let entry = alike(entry).ok_or_else(wrong)?;
        if all.len() == MOST_VALUES {
            return Err(Error::custom(format!("has more than {MOST_VALUES} prompts")));
        }
        all.push(entry);
    }
    Ok(all)
}

fn rest_of_ids<'de, A: SeqAccess<'de>>(first: u32, mut list: A) -> Result<Vec<u32>, A::Error> {
    let mut ids = vec![first];
    while let Some(id) = list.next_element()? {
        ids.push(id);
    }
    Ok(ids)
}

/// An entry of a list.
enum Entry {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Entry, E> {
                Ok(Entry::Text(text.into()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Entry, E> {
                Ok(Entry::Text(text))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Entry, E> {
                let wrong = |_| E::invalid_value(serde::de::Unexpected::Unsigned(id), &self);
                u32::try_from(id).map(Entry::Id).map_err(wrong)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Entry, A::Error> {
                Ok(Entry::Ids(match list.next_element()? {
                    Some(first) => rest_of_ids(first, list)?,
                    None => Vec::new(),
                }))
            }
        }
        from.deserialize_any(One)
    }
}
