//! Log-probabilities in OpenAI's two forms: a list of tokens for chats, columns for completions.

use std::collections::HashSet;

use aquila_engine::Token;
use aquila_text::{CheckedParams, TextStream, Tokenizer};
use serde::{Serialize, Serializer};
use serde_json::Value;

/// How a token reads: its text, and its bytes, which may be part of a character.
fn spelled(tokenizer: Option<&Tokenizer>, id: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.and_then(|tokenizer| tokenizer.token_bytes(id).ok().flatten());
    match bytes {
        Some(bytes) => (String::from_utf8_lossy(&bytes).into_owned(), bytes),
        None => (format!("token_id:{id}"), Vec::new()),
    }
}

/// JSON has no infinity: what the model excludes altogether is written as OpenAI writes it.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// The log-probabilities of a chat's tokens.
#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: Likely,
    top_logprobs: Vec<Likely>,
}

#[derive(Debug, Serialize)]
struct Likely {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Likely {
    fn new(tokenizer: Option<&Tokenizer>, id: u32, logprob: f32) -> Self {
        let (token, bytes) = spelled(tokenizer, id);
        Self { token, logprob: finite(logprob), bytes }
    }
}

impl ChatLogprobs {
    /// Of these tokens, which are all of the completion's; one that ends the text adds no bytes to
    /// it.
    pub fn of(tokenizer: Option<&Tokenizer>, tokens: &[Token], params: &CheckedParams) -> Self {
        let content = tokens.iter().map(|token| {
            let likely = |&(id, logprob): &(u32, f32)| Likely::new(tokenizer, id, logprob);
            let mut own = Likely::new(tokenizer, token.id, token.logprob.unwrap_or(0.0));
            if params.limits.stop_ids.binary_search(&token.id).is_ok() {
                own.bytes.clear();
            }
            ChatToken { token: own, top_logprobs: token.top.iter().map(likely).collect() }
        });
        Self { content: content.collect(), refusal: None }
    }

    /// Each token's, as a value.
    pub fn values(&self) -> Vec<Value> {
        let value = |token| serde_json::to_value(token).expect("numbers and strings are JSON");
        self.content.iter().map(value).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.content.is_empty()
    }
}

/// The log-probabilities of a completion's tokens, in columns.
#[derive(Debug, Default, Serialize)]
pub(super) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Option<Vec<Option<ByText>>>,
    text_offset: Vec<usize>,
}

/// Log-probabilities by the text of their tokens, each text once, best first.
#[derive(Debug)]
struct ByText(Vec<(String, f32)>);

impl ByText {
    fn of(likely: impl Iterator<Item = (String, f32)>) -> Self {
        let mut seen = HashSet::new();
        Self(likely.filter(|(text, _)| seen.insert(text.clone())).collect())
    }
}

impl Serialize for ByText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

impl CompletionLogprobs {
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// Where the next token of a growing text begins, in characters.
#[derive(Debug)]
pub(super) struct Columns {
    tokenizer: Option<Tokenizer>,
    stream: Option<TextStream>,
    offset: usize,
    /// How many of the most likely tokens were asked for.
    top: usize,
    stop_ids: Vec<u32>,
}

impl Columns {
    /// For a text that begins at `offset`; `skips_special` says whether it is without special tokens.
    pub fn new(
        tokenizer: Option<&Tokenizer>,
        offset: usize,
        params: &CheckedParams,
        skips_special: bool,
    ) -> Self {
        let stream = tokenizer.map(|tokenizer| tokenizer.stream(skips_special));
        let (top, stop_ids) = (params.logprobs.unwrap_or(0), params.limits.stop_ids.clone());
        Self { tokenizer: tokenizer.cloned(), stream, offset, top, stop_ids }
    }

    /// Adds the next tokens of a prompt, all of which belong to the text.
    pub fn prompt(&mut self, tokens: &[Token], columns: &mut CompletionLogprobs) {
        tokens.iter().for_each(|token| self.push(token, columns));
    }

    /// Adds the next tokens of an answer; one that ends the text adds nothing to it.
    pub fn answer(&mut self, tokens: &[Token], columns: &mut CompletionLogprobs) {
        tokens.iter().for_each(|token| self.push(token, columns));
    }

    fn push(&mut self, token: &Token, columns: &mut CompletionLogprobs) {
        let spelling = |id| spelled(self.tokenizer.as_ref(), id).0;
        let ends = self.stop_ids.binary_search(&token.id).is_ok();
        columns.tokens.push(if ends { String::new() } else { spelling(token.id) });
        columns.token_logprobs.push(token.logprob.map(finite));
        columns.text_offset.push(self.offset);
        if self.top > 0 {
            let most_likely = token.logprob.map(|own| {
                let likely = token.top.iter().copied().chain([(token.id, own)]);
                ByText::of(likely.map(|(id, logprob)| (spelling(id), finite(logprob))))
            });
            columns.top_logprobs.get_or_insert_default().push(most_likely);
        }
        if let Some(stream) = self.stream.as_mut().filter(|_| !ends) {
            // A token that cannot be decoded is no text.
            self.offset += stream.push(token.id).unwrap_or_default().chars().count();
        }
    }
}
