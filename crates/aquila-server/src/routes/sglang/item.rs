//! One answer in SGLang's form: a text, its tokens and what is known about them.

use std::time::Duration;

use aquila_engine::{Token, Usage};
use aquila_text::{Tokenizer, spec_fields};
use serde::Serialize;
use serde_json::{Map, Value};

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
        self.end = Some((reason, usage.clone(), latency));
    }

    /// The answer so far; `index` says which of several it is.
    pub fn so_far(&self, tokenizer: Option<&Tokenizer>, index: Option<usize>) -> SoFar<'_> {
        let end = self.end.as_ref();
        let named = tokenizer.filter(|_| self.report.with_text);
        let reported = |wanted: bool, tokens: &[Token]| wanted.then(|| entries(named, tokens));
        let likely = |wanted: bool, tokens: &[Token]| wanted.then(|| tops(named, tokens));
        let Report { logprobs, top_logprobs, .. } = self.report;
        let meta_info = Meta {
            id: &self.report.id,
            finish_reason: end.map(|(reason, ..)| reason),
            prompt_tokens: self.report.prompt_tokens,
            completion_tokens: self.tokens.len(),
            cached_tokens: end.map(|(_, usage, _)| usage.cached_tokens),
            e2e_latency: end.map(|(.., latency)| latency.as_secs_f64()),
            speculation: end.and_then(|(_, usage, _)| spec_fields(&usage.spec)),
            input_token_logprobs: reported(logprobs, &self.prompt),
            output_token_logprobs: reported(logprobs, &self.tokens),
            input_top_logprobs: likely(top_logprobs, &self.prompt),
            output_top_logprobs: likely(top_logprobs, &self.tokens),
        };
        let output_ids = self.tokens.iter().map(|token| token.id).collect();
        SoFar { index, text: tokenizer.map(|_| self.text.as_str()), output_ids, meta_info }
    }
}

/// An answer as it is written.
#[derive(Serialize)]
pub(super) struct SoFar<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    text: Option<&'a str>,
    output_ids: Vec<u32>,
    meta_info: Meta<'a>,
}

#[derive(Serialize)]
struct Meta<'a> {
    id: &'a str,
    finish_reason: Option<&'a Value>,
    prompt_tokens: usize,
    completion_tokens: usize,
    /// Known at the end, as is the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_latency: Option<f64>,
    #[serde(flatten)]
    speculation: Option<Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_token_logprobs: Option<Vec<Entry>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs: Option<Vec<Entry>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_top_logprobs: Option<Vec<Option<Vec<Entry>>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<Vec<Option<Vec<Entry>>>>,
}

/// A token as SGLang writes it: log-probability, id, and its text if that is wanted.
type Entry = (Option<f32>, u32, Option<String>);

fn entry(tokenizer: Option<&Tokenizer>, id: u32, logprob: Option<f32>) -> Entry {
    let text = tokenizer.and_then(|tokenizer| tokenizer.token_text(id).ok().flatten());
    (logprob.map(finite), id, text)
}

fn entries(tokenizer: Option<&Tokenizer>, tokens: &[Token]) -> Vec<Entry> {
    tokens.iter().map(|token| entry(tokenizer, token.id, token.logprob)).collect()
}

/// The most likely tokens at each place that has any.
fn tops(tokenizer: Option<&Tokenizer>, tokens: &[Token]) -> Vec<Option<Vec<Entry>>> {
    let top = |token: &Token| {
        let likely = token.top.iter();
        likely.map(|&(id, logprob)| entry(tokenizer, id, Some(logprob))).collect()
    };
    tokens.iter().map(|token| token.logprob.map(|_| top(token))).collect()
}
