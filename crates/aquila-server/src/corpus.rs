//! Texts into corpora that drafts come from: documents as they are, or those of a file.
//!
//! A file has one JSON object a line, `{"text": …}`, or a JSON string a line, and each is a
//! document; any other file is one document of plain text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquila_spec::ngram::{Corpora, CorpusError, Load};
use aquila_text::Tokenizer;
use serde_json::Value;

use crate::corpus_file::Lines;

/// Bytes of text that are tokenized at a time. A corpus is only drafted from, so the tokens where two
/// blocks meet may be others than those of the whole text.
const BLOCK: usize = 64 << 10;

/// Why a corpus was not added.
#[derive(Debug, thiserror::Error)]
pub enum CorpusTextError {
    /// The file cannot be read.
    #[error("cannot read the corpus {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is none that clients may name.
    #[error("the corpus {path} is no regular file below the folder of corpora")]
    Outside {
        /// The path as the client named it.
        path: PathBuf,
    },
    /// A line is no document.
    #[error("line {line} of the corpus {path} {why}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The tokenizer failed.
    #[error("the corpus cannot be tokenized: {0}")]
    Text(#[from] aquila_text::Error),
    /// The corpora do not take it.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
}

/// A corpus that was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// Its tokens.
    pub tokens: usize,
    /// Whether some were left out for want of room.
    pub truncated: bool,
}

/// Adds a corpus of documents.
pub fn add_documents(
    corpora: &Arc<Corpora>,
    tokenizer: &Tokenizer,
    name: &str,
    documents: &[String],
) -> Result<Added, CorpusTextError> {
    let mut load = corpora.load(name)?;
    for document in documents {
        if !push_document(&mut load, tokenizer, document)? {
            break;
        }
    }
    finish(load)
}

/// Takes in a document; says whether more is wanted.
fn push_document(
    load: &mut Load,
    tokenizer: &Tokenizer,
    document: &str,
) -> Result<bool, CorpusTextError> {
    let wanted = push_text(load, tokenizer, document)?;
    load.end_document();
    Ok(wanted)
}

/// Takes in a part of a document; says whether more is wanted.
fn push_text(load: &mut Load, tokenizer: &Tokenizer, text: &str) -> Result<bool, CorpusTextError> {
    for block in blocks(text) {
        if !load.push(&tokenizer.encode(block, false)?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A text in blocks, which end at spaces where there are any.
fn blocks(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let most = text.floor_char_boundary(BLOCK);
        let space = text[..most].rfind([' ', '\n']).filter(|&at| at > 0);
        let end = if most == text.len() { most } else { space.unwrap_or(most) };
        let (block, rest) = text.split_at(end);
        text = rest;
        (!block.is_empty()).then_some(block)
    })
}

/// Adds the corpus of a file.
pub fn add_file(
    corpora: &Arc<Corpora>,
    tokenizer: &Tokenizer,
    name: &str,
    path: &Path,
) -> Result<Added, CorpusTextError> {
    add_lines(corpora, tokenizer, name, Lines::open(path)?)
}

/// Adds the corpus of an open file.
pub(crate) fn add_lines(
    corpora: &Arc<Corpora>,
    tokenizer: &Tokenizer,
    name: &str,
    mut lines: Lines,
) -> Result<Added, CorpusTextError> {
    let mut load = corpora.load(name)?;
    let mut documents: Option<bool> = None;
    let mut block = String::new();
    while let Some(line) = lines.next()? {
        if documents.is_none() && !line.trim().is_empty() {
            documents = Some(document(line).is_some());
        }
        let wanted = if documents == Some(true) {
            if line.trim().is_empty() {
                continue;
            }
            let Some(text) = document(line) else {
                return Err(lines.wrong("must be {\"text\": …}, as the first one is"));
            };
            push_document(&mut load, tokenizer, &text)?
        } else {
            block.push_str(line);
            block.len() < BLOCK || {
                let wanted = push_text(&mut load, tokenizer, &block)?;
                block.clear();
                wanted
            }
        };
        if !wanted {
            break;
        }
    }
    push_text(&mut load, tokenizer, &block)?;
    finish(load)
}

fn finish(load: Load) -> Result<Added, CorpusTextError> {
    let added = Added { tokens: load.tokens(), truncated: load.truncated() };
    load.finish()?;
    Ok(added)
}

/// The text of a line that is a document in JSON.
fn document(line: &str) -> Option<String> {
    match serde_json::from_str(line).ok()? {
        Value::String(text) => Some(text),
        Value::Object(mut fields) => match fields.remove("text")? {
            Value::String(text) => Some(text),
            _ => None,
        },
        _ => None,
    }
}
