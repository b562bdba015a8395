//! Lists of the tokens that are worth drafting, as FR-Spec publishes them: a file that `torch.save`
//! wrote of a list or a tensor of ids, or a JSON list.

use std::path::Path;

use bytes::Bytes;
use serde_json::Value;

use crate::{Error, Result, mapped, torch_file};

/// The tokens that a draft may offer, by their ids in the target's vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMap {
    ids: Vec<u32>,
}

impl TokenMap {
    /// Reads a list of tokens of a vocabulary of `vocabulary`; refuses what is no token of it, what
    /// is named twice, and an empty list.
    pub fn open(path: &Path, vocabulary: usize) -> Result<Self> {
        let file = mapped::map(path)?;
        let numbers = if file.trim_ascii_start().starts_with(b"[") {
            json_numbers(path, &file)?
        } else {
            torch_file::read_numbers(path, &file)?
        };
        let wrong = |problem: String| Err(Error::file(path, problem));
        if numbers.is_empty() {
            return wrong("names no token".into());
        }
        let mut ids = Vec::with_capacity(numbers.len().min(vocabulary));
        for (rank, &number) in numbers.iter().enumerate() {
            match u32::try_from(number) {
                Ok(id) if (id as usize) < vocabulary && rank < vocabulary => ids.push(id),
                Ok(id) if (id as usize) < vocabulary => {
                    return wrong(format!("names more than all {vocabulary} tokens of the target"));
                }
                _ => {
                    return wrong(format!(
                        "names {number}, which is no token of the target: it has {vocabulary}"
                    ));
                }
            }
        }
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return wrong(format!("names token {} twice", pair[0]));
        }
        Ok(Self { ids })
    }

    /// The tokens, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

fn json_numbers(path: &Path, file: &Bytes) -> Result<Vec<i64>> {
    let list: Vec<Value> = serde_json::from_slice(file)
        .map_err(|e| Error::file(path, format!("not a valid JSON list: {e}")))?;
    let number = |value: &Value| {
        let wrong = || Error::file(path, format!("holds {}", crate::config::shown(value)));
        value.as_i64().ok_or_else(wrong)
    };
    list.iter().map(number).collect()
}
