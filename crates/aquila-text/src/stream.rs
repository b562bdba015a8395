//! Ids into text, one id at a time.
//!
//! The invariant: the pieces and the rest, joined, are what [`Tokenizer::decode`] gives for all
//! the ids at once, and no piece ends within a character. The work for an id does not grow with
//! the ids before it.
//!
//! [`Tokenizer::decode`]: crate::Tokenizer::decode

use crate::Result;
use crate::decoding::Fragment;
use crate::tokenizer::Tokenizer;

/// The text of a growing list of ids.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that are text in any case.
    shown: Vec<u32>,
    first: bool,
    /// Bytes that may yet become a character.
    incomplete: Vec<u8>,
    /// A token whose text depends on whether another follows.
    awaiting: Option<String>,
    /// How many leading characters may still be cut from the text.
    cut_at_start: usize,
    /// Trailing characters that are cut if the text ends here.
    cut_at_end: String,
    /// All ids, where only the whole text can be decoded.
    whole: Vec<u32>,
}

impl TextStream {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special: bool, shown: Vec<u32>) -> Self {
        let cut_at_start = tokenizer.decoding().strip().map_or(0, |strip| strip.start);
        Self {
            tokenizer,
            skip_special,
            shown,
            first: true,
            incomplete: Vec::new(),
            awaiting: None,
            cut_at_start,
            cut_at_end: String::new(),
            whole: Vec::new(),
        }
    }

    /// Takes the next id, and returns the text that it makes certain: often a word, empty while a
    /// character is incomplete, and empty for ids beyond the vocabulary.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.tokenizer.decoding().is_whole() {
            self.whole.push(id);
            return Ok(String::new());
        }
        let skip_special = self.skip_special && !self.shown.contains(&id);
        let Some(token) = self.tokenizer.shown_token(id, skip_special) else {
            return Ok(String::new());
        };
        let fragment = if self.tokenizer.decoding().last_differs() {
            match self.awaiting.replace(token) {
                Some(before) => self.tokenizer.decoding().fragment(before, false, false)?,
                None => return Ok(String::new()),
            }
        } else {
            let first = std::mem::replace(&mut self.first, false);
            self.tokenizer.decoding().fragment(token, first, false)?
        };
        let mut text = String::new();
        match fragment {
            Fragment::Text(fragment) => {
                self.give_up_incomplete(&mut text);
                text.push_str(&fragment);
            }
            Fragment::Bytes(bytes) => {
                self.incomplete.extend(bytes);
                self.take_complete(&mut text);
            }
        }
        Ok(self.cut_ends(text))
    }

    /// Ends the text, and returns what is left of it; an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> Result<String> {
        if self.tokenizer.decoding().is_whole() {
            let ids = std::mem::take(&mut self.whole);
            return self.tokenizer.decode(&ids, self.skip_special);
        }
        let mut text = String::new();
        if let Some(token) = self.awaiting.take()
            && let Fragment::Text(last) = self.tokenizer.decoding().fragment(token, false, true)?
        {
            text.push_str(&last);
        }
        self.give_up_incomplete(&mut text);
        let text = self.cut_ends(text);
        self.cut_at_end.clear();
        Ok(text)
    }

    /// Moves whole characters, and bytes that can never become one, from `incomplete` to `text`.
    fn take_complete(&mut self, text: &mut String) {
        let mut at = 0;
        loop {
            let rest = &self.incomplete[at..];
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.incomplete.clear();
                    return;
                }
                Err(error) => error,
            };
            let (valid, malformed) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            at += valid.len();
            match error.error_len() {
                Some(length) => {
                    self.replace_malformed(length, text);
                    at += length;
                }
                None => {
                    self.incomplete = malformed.to_vec();
                    return;
                }
            }
        }
    }

    fn give_up_incomplete(&mut self, text: &mut String) {
        if !self.incomplete.is_empty() {
            self.replace_malformed(self.incomplete.len(), text);
            self.incomplete.clear();
        }
    }

    fn replace_malformed(&self, length: usize, text: &mut String) {
        let count = self.tokenizer.decoding().replacements(length);
        text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
    }

    fn cut_ends(&mut self, mut text: String) -> String {
        let Some(strip) = self.tokenizer.decoding().strip() else { return text };
        while self.cut_at_start > 0 && !text.is_empty() {
            if text.starts_with(strip.content) {
                text.remove(0);
                self.cut_at_start -= 1;
            } else {
                self.cut_at_start = 0;
            }
        }
        if strip.stop > 0 {
            text.insert_str(0, &self.cut_at_end);
            let trailing = text.chars().rev().take(strip.stop);
            let cut = trailing.take_while(|c| *c == strip.content).count();
            self.cut_at_end = text.split_off(text.len() - cut * strip.content.len_utf8());
        }
        text
    }
}
