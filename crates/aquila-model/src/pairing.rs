//! Whether two models speak of the same tokens.

use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};

/// Whether two folders' tokenizers give every token the same id; true where one has none.
pub fn same_tokens(target: Option<&Path>, draft: Option<&Path>) -> Result<bool> {
    let read = |folder: Option<&Path>| -> Result<Option<Value>> {
        let Some(path) = folder.map(|f| f.join("tokenizer.json")).filter(|p| p.exists()) else {
            return Ok(None);
        };
        let text = std::fs::read(&path).map_err(|e| Error::file(&path, e))?;
        serde_json::from_slice(&text).map(Some).map_err(|e| Error::file(&path, e))
    };
    let (Some(target), Some(draft)) = (read(target)?, read(draft)?) else { return Ok(true) };
    let tokens = |json: &Value| (json["model"]["vocab"].clone(), json["added_tokens"].clone());
    Ok(tokens(&target) == tokens(&draft))
}
