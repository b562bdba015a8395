//! One answer in SGLang's form: a text, its tokens and what is known about them.

use std::time::Duration;

use aquila_engine::{Token, Usage};
use aquila_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::routes::openai::finite;

/// What is reported of an answer.
#[derive(Debug, Clone)]
pub(super) struct Report {
    pub id: String,
    pub prompt_tokens: usize,
    pub logprobs: bool,
    /// From which token of the prompt log-probabilities are reported, if at all.
    pub prompt_logprobs_from: Option<usize>,
    pub top_logprobs: bool,
    /// Whether log-probabilities come with the token's text.
    pub with_text: bool,
}

/// An answer as far as it is known.
#[derive(Debug)]
pub(super) struct Item {
    report: Report,
    prompt: Vec<Token>,
    text: String,
    tokens: Vec<Token>,
    end: Option<(Value, Usage, Duration)>,
}

impl Item {
    pub fn new(report: &Report) -> Self {
        let report = report.clone();
        Self { report, prompt: Vec::new(), text: String::new(), tokens: Vec::new(), end: None }
    }

    /// Takes the prompt's tokens.
    pub fn prompt(&mut self, tokens: &[Token]) {
        let from = self.report.prompt_logprobs_from.unwrap_or(usize::MAX);
        self.prompt = tokens.get(from..).unwrap_or_default().to_vec();
        // The first reported token has nothing before it that counts.
        if let Some(first) = self.prompt.first_mut() {
            *first = Token { id: first.id, logprob: None, top: Vec::new() };
        }
    }

    /// Takes what came next.
    pub fn add(&mut self, text: &str, tokens: Vec<Token>) {
        self.text.push_str(text);
        self.tokens.extend(tokens);
    }

    /// Takes the end.
    pub fn finish(&mut self, reason: Value, usage: &Usage, latency: Duration) {
        self.end = Some((reason, *usage, latency));
    }

    /// The answer so far; `index` says which of several it is.
    pub fn to_json(&self, tokenizer: Option<&Tokenizer>, index: Option<usize>) -> Value {
        let mut object = Map::new();
        if let Some(index) = index {
            object.insert("index".into(), index.into());
        }
        let text = tokenizer.map_or(Value::Null, |_| self.text.as_str().into());
        object.insert("text".into(), text);
        let ids: Vec<u32> = self.tokens.iter().map(|token| token.id).collect();
        object.insert("output_ids".into(), ids.into());
        object.insert("meta_info".into(), self.meta(tokenizer).into());
        object.into()
    }

    fn meta(&self, tokenizer: Option<&Tokenizer>) -> Map<String, Value> {
        let mut meta = Map::new();
        meta.insert("id".into(), self.report.id.as_str().into());
        let reason = self.end.as_ref().map_or(Value::Null, |(reason, ..)| reason.clone());
        meta.insert("finish_reason".into(), reason);
        meta.insert("prompt_tokens".into(), self.report.prompt_tokens.into());
        meta.insert("completion_tokens".into(), self.tokens.len().into());
        if let Some((_, usage, latency)) = &self.end {
            meta.insert("cached_tokens".into(), usage.cached_tokens.into());
            meta.insert("e2e_latency".into(), latency.as_secs_f64().into());
        }
        if self.report.logprobs {
            let tokenizer = tokenizer.filter(|_| self.report.with_text);
            for (side, tokens) in [("input", &self.prompt), ("output", &self.tokens)] {
                let entries = tokens.iter().map(|t| entry(tokenizer, t.id, t.logprob));
                meta.insert(format!("{side}_token_logprobs"), entries.collect());
                if self.report.top_logprobs {
                    let tops = tokens.iter().map(|token| top(tokenizer, token));
                    meta.insert(format!("{side}_top_logprobs"), tops.collect());
                }
            }
        }
        meta
    }
}

/// The most likely tokens at one place.
fn top(tokenizer: Option<&Tokenizer>, token: &Token) -> Value {
    if token.logprob.is_none() {
        return Value::Null;
    }
    token.top.iter().map(|&(id, logprob)| entry(tokenizer, id, Some(logprob))).collect()
}

/// A token as SGLang writes it: log-probability, id, and its text if that is wanted.
fn entry(tokenizer: Option<&Tokenizer>, id: u32, logprob: Option<f32>) -> Value {
    let text = tokenizer.and_then(|tokenizer| tokenizer.token_text(id).ok().flatten());
    json!([logprob.map(finite), id, text])
}
