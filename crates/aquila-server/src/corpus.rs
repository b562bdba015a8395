//! Texts into corpora that drafts come from: documents as they are, or those of a file.
//!
//! A file has one JSON object a line, `{"text": …}`, or a JSON string a line, and each is a
//! document; any other file is one document of plain text.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquila_spec::ngram::{Corpora, CorpusError, Load};
use aquila_text::Tokenizer;
use serde_json::Value;

/// Bytes of plain text that are tokenized at a time.
const BLOCK: usize = 64 << 10;
/// Bytes of the longest line.
const LONGEST_LINE: u64 = 64 << 20;

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
        let wanted = load.push(&tokenizer.encode(document, false)?);
        load.end_document();
        if !wanted {
            break;
        }
    }
    finish(load)
}

/// Adds the corpus of a file.
pub fn add_file(
    corpora: &Arc<Corpora>,
    tokenizer: &Tokenizer,
    name: &str,
    path: &Path,
) -> Result<Added, CorpusTextError> {
    let mut lines = Lines::open(path)?;
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
            let wanted = load.push(&tokenizer.encode(&text, false)?);
            load.end_document();
            wanted
        } else {
            block.push_str(line);
            block.len() < BLOCK || {
                let tokens = tokenizer.encode(&block, false)?;
                block.clear();
                load.push(&tokens)
            }
        };
        if !wanted {
            break;
        }
    }
    if !block.is_empty() {
        load.push(&tokenizer.encode(&block, false)?);
    }
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

/// The lines of a file, none of them too long.
struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    number: usize,
    bytes: Vec<u8>,
}

impl Lines {
    fn open(path: &Path) -> Result<Self, CorpusTextError> {
        let failed = |source| CorpusTextError::Read { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        // A pipe or a device might never end.
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(std::io::Error::other("it is no regular file")));
        }
        Ok(Self { path: path.into(), file: BufReader::new(file), number: 0, bytes: Vec::new() })
    }

    /// The next line with its end, if there is one.
    fn next(&mut self) -> Result<Option<&str>, CorpusTextError> {
        self.bytes.clear();
        self.number += 1;
        let mut limited = (&mut self.file).take(LONGEST_LINE);
        let read = limited
            .read_until(b'\n', &mut self.bytes)
            .map_err(|source| CorpusTextError::Read { path: self.path.clone(), source })?;
        if read as u64 == LONGEST_LINE && !self.bytes.ends_with(b"\n") {
            return Err(self.wrong("is longer than 64 MiB"));
        }
        if read == 0 {
            return Ok(None);
        }
        match std::str::from_utf8(&self.bytes) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(wrong(&self.path, self.number, "is not UTF-8")),
        }
    }

    fn wrong(&self, why: &'static str) -> CorpusTextError {
        wrong(&self.path, self.number, why)
    }
}

fn wrong(path: &Path, line: usize, why: &'static str) -> CorpusTextError {
    CorpusTextError::Line { path: path.into(), line, why }
}
