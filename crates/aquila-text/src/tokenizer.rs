//! The tokenizer of a checkpoint: text into ids and back.
//!
//! The invariant: every id has an answer. The rows of a language model's head may outnumber the
//! tokenizer's entries; an id without an entry is no text, and never an error.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use crate::bound::bytes_per_token;
use crate::decoding::Decoding;
use crate::folder::TokenizerFolder;
use crate::pieces::{PIECE, may_be_cut, pieces};
use crate::{ChatTemplate, Error, Result, TextStream};

/// A checkpoint's tokenizer, with its chat template; cheap to clone and shared between threads.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    model: tokenizers::Tokenizer,
    decoding: Decoding,
    special: HashSet<u32>,
    vocab_size: usize,
    bytes_per_token: Option<usize>,
    /// What stands before each text, where long texts may be tokenized in pieces.
    before_pieces: Option<Vec<u32>>,
    template: Option<ChatTemplate>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.0.vocab_size).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a checkpoint's folder and what belongs to it: special tokens from
    /// `tokenizer_config.json` and its elders, the chat template from wherever it is kept. A
    /// folder without `tokenizer.json` has no tokenizer: that is `None`.
    pub fn load(folder: &Path) -> Result<Option<Self>> {
        let Some(folder) = TokenizerFolder::read(folder)? else { return Ok(None) };
        let model = folder.tokenizer;
        let special = model
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| model.get_added_vocabulary().is_special_token(&token.content))
            .map(|(id, _)| *id)
            .collect();
        let vocab_size =
            model.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1);
        let decoding = Decoding::new(model.get_decoder());
        let template = folder.templates.map(|named| ChatTemplate::new(named, folder.named_tokens));
        let bytes_per_token = bytes_per_token(&model);
        let before_pieces = if may_be_cut(&model) { before_texts(&model) } else { None };
        let inner = Inner {
            model,
            decoding,
            special,
            vocab_size,
            bytes_per_token,
            before_pieces,
            template,
        };
        Ok(Some(Self(Arc::new(inner))))
    }

    /// The ids of `text`. `add_special` adds what the tokenizer puts around a text (a beginning
    /// of sequence, mostly); a rendered chat template already has it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let ids = self.encode_up_to(text, add_special, usize::MAX)?;
        Ok(ids.expect("no text has so many tokens"))
    }

    /// As [`Self::encode`], but `None` where it turns out on the way that a long text has more
    /// than `most` tokens: the rest of it is then not tokenized.
    pub fn encode_up_to(
        &self,
        text: &str,
        add_special: bool,
        most: usize,
    ) -> Result<Option<Vec<u32>>> {
        let Some(before) = self.0.before_pieces.as_ref().filter(|_| text.len() > PIECE) else {
            return Ok(Some(ids(&self.0.model, text, add_special)?));
        };
        let mut all = if add_special { before.clone() } else { Vec::new() };
        for piece in pieces(text) {
            all.extend(ids(&self.0.model, piece, false)?);
            if all.len() > most {
                return Ok(None);
            }
        }
        Ok(Some(all))
    }

    /// The text of `ids`. Ids beyond the vocabulary are no text; bytes that make no character
    /// become U+FFFD, and spoil none of the characters beside them.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if self.decoding().is_whole() {
            let known: Vec<u32> =
                ids.iter().copied().filter(|id| self.token(*id).is_some()).collect();
            if known.is_empty() {
                return Ok(String::new());
            }
            return guarded(|| self.0.model.decode(&known, skip_special))
                .map_err(|reason| Error::Decode { reason });
        }
        let mut stream = self.stream(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id)?);
        }
        text.push_str(&stream.finish()?);
        Ok(text)
    }

    /// One more than the largest id; some below it may have no token.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// Bytes of the longest text that can have as few as `tokens` tokens: a longer one certainly
    /// has more. `None` where the tokenizer sets no such bound.
    pub fn most_bytes(&self, tokens: usize) -> Option<usize> {
        self.0.bytes_per_token.map(|bytes| bytes.saturating_mul(tokens))
    }

    /// Whether `id` is a special token, such as an end of turn.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.contains(&id)
    }

    /// The token as its vocabulary writes it, or `None` for an id without a token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.0.model.id_to_token(id)
    }

    /// The id of a token as its vocabulary writes it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.model.token_to_id(token)
    }

    /// The bytes that `id` adds within a text, which may be part of a character; `None` for an id
    /// without a token.
    pub fn token_bytes(&self, id: u32) -> Result<Option<Vec<u8>>> {
        let Some(token) = self.token(id) else { return Ok(None) };
        Ok(Some(self.decoding().fragment(token, false, false)?.into_bytes()))
    }

    /// [`Self::token_bytes`] for display: bytes that make no character become U+FFFD.
    pub fn token_text(&self, id: u32) -> Result<Option<String>> {
        let bytes = self.token_bytes(id)?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The chat template, where the checkpoint has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.0.template.as_ref()
    }

    /// A stream at the beginning of a text.
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream::new(self.clone(), skip_special, Vec::new())
    }

    /// As [`Self::stream`], where these special tokens are part of the text in any case.
    pub fn stream_showing(&self, skip_special: bool, shown: Vec<u32>) -> TextStream {
        TextStream::new(self.clone(), skip_special, shown)
    }

    pub(crate) fn decoding(&self) -> &Decoding {
        &self.0.decoding
    }

    /// The token of `id` where it takes part in a text.
    pub(crate) fn shown_token(&self, id: u32, skip_special: bool) -> Option<String> {
        if skip_special && self.is_special(id) { None } else { self.token(id) }
    }
}

fn ids(model: &tokenizers::Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
    let encoding = guarded(|| model.encode_fast(text, add_special))
        .map_err(|reason| Error::Encode { reason })?;
    Ok(encoding.get_ids().to_vec())
}

/// What the tokenizer puts before each text, if it puts nothing behind it.
fn before_texts(model: &tokenizers::Tokenizer) -> Option<Vec<u32>> {
    let before = ids(model, "", true).ok()?;
    let with = ids(model, "a", true).ok()?;
    (with == [before.clone(), ids(model, "a", false).ok()?].concat()).then_some(before)
}

/// Runs the tokenizers library, whose panics on an inconsistent `tokenizer.json` are errors to us:
/// a bad file must not take down the thread that serves others.
pub(crate) fn guarded<T>(
    work: impl FnOnce() -> tokenizers::Result<T>,
) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("the tokenizer contradicts itself: {}", said.unwrap_or("it panicked")))
        }
    }
}
