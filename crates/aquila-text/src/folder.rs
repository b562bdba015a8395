//! The files of a checkpoint that say how its text works, read and reconciled as Hugging Face
//! reconciles them.
//!
//! The invariant: a file that is there is either understood or named in an error.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::chat::TemplateSource;
use crate::tokenizer::guarded;
use crate::{Error, Result};

/// Keys of `tokenizer_config.json` that name one special token.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const MORE_TOKENS: &str = "additional_special_tokens";

/// What a checkpoint's folder says about text.
pub(crate) struct TokenizerFolder {
    pub tokenizer: tokenizers::Tokenizer,
    /// Special tokens by their role (`bos_token` and so on), as a chat template sees them.
    pub named_tokens: Map<String, Value>,
    pub templates: Option<Vec<TemplateSource>>,
}

impl TokenizerFolder {
    /// Reads the folder; `None` where there is no `tokenizer.json`.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join("tokenizer.json");
        let Some(bytes) = read(&path)? else { return Ok(None) };
        // Said first, since the library's own message about broken JSON names no place in it.
        serde_json::from_slice::<IgnoredAny>(&bytes)
            .map_err(|source| Error::Json { path: path.clone(), source })?;
        let unusable = |reason: String| Error::Tokenizer { path: path.clone(), reason };
        let mut tokenizer =
            guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(unusable)?;
        // Both are settings of a training run; a prompt is neither cut nor filled up.
        tokenizer.with_truncation(None).map_err(|e| unusable(e.to_string()))?;
        tokenizer.with_padding(None);

        // A description can be well formed and still fail on every text.
        guarded(|| tokenizer.encode_fast("a trial", true)).map_err(unusable)?;

        let config = Config::read(folder.join("tokenizer_config.json"))?;
        let named_tokens = named_tokens(folder, &config)?;
        add_tokens(folder, &config, &mut tokenizer)?;
        mark_special(&named_tokens, &mut tokenizer).map_err(unusable)?;
        let templates = templates(folder, &config)?;
        Ok(Some(Self { tokenizer, named_tokens, templates }))
    }
}

/// A configuration file: an object, empty where the file is not there.
struct Config {
    path: PathBuf,
    values: Map<String, Value>,
}

impl Config {
    fn read(path: PathBuf) -> Result<Self> {
        let values = match read(&path)? {
            None => Map::new(),
            Some(bytes) => match serde_json::from_slice(&bytes) {
                Ok(Value::Object(values)) => values,
                Ok(_) => return Err(wrong(&path, "the file", "must be a JSON object")),
                Err(source) => return Err(Error::Json { path, source }),
            },
        };
        Ok(Self { path, values })
    }

    /// The value of a key, where it is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, reason: &str) -> Error {
        wrong(&self.path, key, reason)
    }

    /// A token's text, whether written as a string or as an object with its `content`.
    fn token(&self, key: &str, value: &Value) -> Result<String> {
        let content = value.as_object().and_then(|token| token.get("content")).unwrap_or(value);
        let reason = "must be a token: a string, or an object with `content`";
        content.as_str().map(str::to_owned).ok_or_else(|| self.wrong(key, reason))
    }
}

fn wrong(path: &Path, key: &str, reason: &str) -> Error {
    Error::Config { path: path.to_owned(), key: key.to_owned(), reason: reason.to_owned() }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.to_owned(), source }),
    }
}

fn read_text(path: &Path) -> Result<Option<String>> {
    let Some(bytes) = read(path)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|_| wrong(path, "the file", "must be UTF-8 text"));
    text.map(Some)
}

/// Special tokens by role. `special_tokens_map.json` counts only beside a configuration that does
/// not list its added tokens, and then before it.
fn named_tokens(folder: &Path, config: &Config) -> Result<Map<String, Value>> {
    let elder = if config.get("added_tokens_decoder").is_none() {
        Config::read(folder.join("special_tokens_map.json"))?
    } else {
        Config { path: PathBuf::new(), values: Map::new() }
    };
    let mut named = Map::new();
    for source in [config, &elder] {
        for key in NAMED_TOKENS {
            if let Some(value) = source.get(key) {
                named.insert(key.to_owned(), source.token(key, value)?.into());
            }
        }
        match source.get(MORE_TOKENS) {
            None => {}
            Some(Value::Array(tokens)) => {
                let tokens: Result<Vec<String>> =
                    tokens.iter().map(|token| source.token(MORE_TOKENS, token)).collect();
                named.insert(MORE_TOKENS.to_owned(), tokens?.into());
            }
            Some(_) => return Err(source.wrong(MORE_TOKENS, "must be a list of tokens")),
        }
    }
    Ok(named)
}

/// Adds the tokens that the configuration lists and `tokenizer.json` lacks, each at the id that it
/// declares.
fn add_tokens(folder: &Path, config: &Config, tokenizer: &mut tokenizers::Tokenizer) -> Result<()> {
    let mut listed: BTreeMap<u32, AddedToken> = BTreeMap::new();
    let key = "added_tokens_decoder";
    let path = match config.get(key) {
        Some(Value::Object(tokens)) => {
            for (id, token) in tokens {
                let bad = |reason: &str| config.wrong(&format!("{key}.{id}"), reason);
                let id = id.parse().map_err(|_| bad("must be named by a token id"))?;
                let token: AddedToken = serde_json::from_value(token.clone())
                    .map_err(|e| bad(&format!("is not an added token: {e}")))?;
                listed.insert(id, token);
            }
            config.path.clone()
        }
        Some(_) => return Err(config.wrong(key, "must be an object from id to token")),
        None => {
            let elder = Config::read(folder.join("added_tokens.json"))?;
            for (content, id) in &elder.values {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.ok_or_else(|| elder.wrong(content, "must be a token id"))?;
                listed.insert(id, AddedToken::from(content.clone(), false));
            }
            elder.path
        }
    };
    for (id, token) in listed {
        if tokenizer.token_to_id(&token.content).is_some() {
            continue;
        }
        let content = token.content.clone();
        let failed = |reason: String| wrong(&path, &content, &reason);
        tokenizer.add_tokens([token]).map_err(|e| failed(format!("cannot be added: {e}")))?;
        let given = tokenizer.token_to_id(&content);
        if given != Some(id) {
            let reason = format!(
                "is declared with id {id}, but tokenizer.json lacks it and its next free id is \
                 {given:?}: add the token to tokenizer.json or remove it here"
            );
            return Err(failed(reason));
        }
    }
    Ok(())
}

/// Tokens with a role are special, whatever `tokenizer.json` says of them.
fn mark_special(
    named: &Map<String, Value>,
    tokenizer: &mut tokenizers::Tokenizer,
) -> std::result::Result<(), String> {
    let more = named.get(MORE_TOKENS).and_then(Value::as_array).into_iter().flatten();
    let contents = named.values().chain(more).filter_map(Value::as_str);
    let mut special = Vec::new();
    for content in contents {
        let Some(id) = tokenizer.token_to_id(content) else { continue };
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        match added {
            Some(token) if token.special => {}
            Some(token) => special.push(token.clone().special(true)),
            None => special.push(AddedToken::from(content.to_owned(), true)),
        }
    }
    tokenizer.add_special_tokens(special).map(drop).map_err(|e| e.to_string())
}

/// The chat templates: files of their own before `chat_template.json` before the configuration.
fn templates(folder: &Path, config: &Config) -> Result<Option<Vec<TemplateSource>>> {
    let file = folder.join("chat_template.jinja");
    if let Some(text) = read_text(&file)? {
        let mut named = vec![TemplateSource::new("default", text, &file)];
        named.extend(additional_templates(&folder.join("additional_chat_templates"))?);
        return Ok(Some(named));
    }
    let elder = Config::read(folder.join("chat_template.json"))?;
    for source in [&elder, config] {
        if let Some(value) = source.get("chat_template") {
            return templates_in(source, value).map(Some);
        }
    }
    Ok(None)
}

fn additional_templates(folder: &Path) -> Result<Vec<TemplateSource>> {
    let unreadable = |source| Error::Read { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unreadable(e)),
    };
    let mut named = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.and_then(|name| name.strip_suffix(".jinja"))
            && let Some(text) = read_text(&path)?
        {
            named.push(TemplateSource::new(name, text, &path));
        }
    }
    Ok(named)
}

fn templates_in(source: &Config, value: &Value) -> Result<Vec<TemplateSource>> {
    let reason = "must be a template or a list of objects with `name` and `template`";
    let wrong = || source.wrong("chat_template", reason);
    match value {
        Value::String(text) => Ok(vec![TemplateSource::new("default", text.clone(), &source.path)]),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| {
                let field = |key| entry.get(key).and_then(Value::as_str).ok_or_else(wrong);
                Ok(TemplateSource::new(field("name")?, field("template")?.to_owned(), &source.path))
            })
            .collect(),
        _ => Err(wrong()),
    }
}
