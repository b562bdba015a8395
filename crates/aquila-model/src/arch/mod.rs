//! The architectures: each a page that maps a `config.json` to a [`ModelSpec`].

mod gemma;
mod llama;
mod qwen;
mod qwen_moe;

use serde_json::Value;

use crate::config::Settings;
use crate::{ModelSpec, Result, Setting, draft_head};

type Read = fn(&Settings<'_>) -> Result<ModelSpec>;

/// Name in `architectures`, `model_type`, and how its config is read.
const ARCHITECTURES: &[(&str, &str, Read)] = &[
    (llama::NAME, "llama", llama::read),
    (qwen::NAME_2, "qwen2", qwen::read_2),
    (qwen::NAME_3, "qwen3", qwen::read_3),
    (qwen_moe::NAME, "qwen3_moe", qwen_moe::read),
    (gemma::NAME, "gemma3_text", gemma::read),
];

/// What the names of draft heads have in them, by their publishers' defaults.
const DRAFT_HEADS: &[&str] = &["Eagle", "MTP", "Speculator", "DraftModel"];

/// The names of all architectures that can be served.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, ..)| *name)
}

/// The architecture that a config names, or its model type where it names none.
pub(crate) fn named(config: &Value) -> Option<&str> {
    let first = config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    first.or_else(|| config.get("model_type").and_then(Value::as_str))
}

/// The spec of a config from `origin`.
pub(crate) fn read(origin: &str, config: &Value) -> Result<ModelSpec> {
    let settings = Settings::new(origin, config)?;
    let Some(name) = named(config) else {
        return Err(settings.wrong("architectures", "is missing, and so is model_type"));
    };
    if draft_head::is_eagle3(config) {
        let reason = format!(
            "architecture {name:?} is a draft head (EAGLE-3): it drafts for a model and cannot \
             serve alone"
        );
        return Err(settings.needs(Setting::Draft(Some("EAGLE3")), reason));
    }
    let known = ARCHITECTURES.iter().find(|(arch, kind, _)| [*arch, *kind].contains(&name));
    if let Some((_, _, read)) = known {
        return read(&settings)?.checked(&settings);
    }
    if DRAFT_HEADS.iter().any(|mark| name.contains(mark)) {
        let reason = format!(
            "architecture {name:?} is a draft head: it drafts for a model and cannot serve alone"
        );
        return Err(settings.needs(Setting::Draft(None), reason));
    }
    Err(settings.unsupported(format!(
        "architecture {name:?} is not supported; supported are {}",
        supported_architectures().collect::<Vec<_>>().join(", ")
    )))
}
