//! One answer in SGLang's form: a text, its tokens and what is known about them.

use std::sync::Arc;
use std::time::Duration;

use aquila_engine::{HostRows, Token, TokenRows, Usage};
use aquila_text::{Tokenizer, spec_fields};
use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::draft_round::DraftRound;
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
    pub hidden_states: bool,
    /// From which token on experts are reported, if at all.
    pub routed_experts_from: Option<usize>,
}

impl Report {
    /// What is reported of the prompt's tokens.
    pub fn prompt(&self, tokens: &[Token]) -> Arc<[Token]> {
        let from = self.prompt_logprobs_from.unwrap_or(usize::MAX);
        let mut tokens = tokens.get(from..).unwrap_or_default().to_vec();
        // The first reported token has nothing before it that counts.
        if let Some(first) = tokens.first_mut() {
            *first = Token { logprob: None, top: Vec::new(), ..*first };
        }
        tokens.into()
    }
}

/// An answer as far as it is known.
#[derive(Debug)]
pub(super) struct Item {
    report: Report,
    prompt: Arc<[Token]>,
    text: String,
    tokens: Vec<Token>,
    /// The round that came last, where draft trees are asked for.
    round: Option<DraftRound>,
    end: Option<End>,
}

/// How an answer ended.
#[derive(Debug)]
pub(super) struct End {
    pub reason: Value,
    pub usage: Usage,
    pub latency: Duration,
    pub rows: TokenRows,
}

impl Item {
    pub fn new(report: &Report) -> Self {
        let report = report.clone();
        let (prompt, tokens) = (Arc::default(), Vec::new());
        Self { report, prompt, text: String::new(), tokens, round: None, end: None }
    }

    /// Takes what is reported of the prompt's tokens.
    pub fn set_prompt(&mut self, tokens: Arc<[Token]>) {
        self.prompt = tokens;
    }

    /// Takes what came next.
    pub fn add(&mut self, text: &str, tokens: Vec<Token>) {
        self.text.push_str(text);
        self.tokens.extend(tokens);
    }

    /// Takes the round that the next tokens come from.
    pub fn set_round(&mut self, round: Option<DraftRound>) {
        self.round = round;
    }

    /// Takes the end.
    pub fn finish(&mut self, end: End) {
        self.end = Some(end);
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
            finish_reason: end.map(|end| &end.reason),
            prompt_tokens: self.report.prompt_tokens,
            completion_tokens: self.tokens.len(),
            cached_tokens: end.map(|end| end.usage.cached_tokens),
            e2e_latency: end.map(|end| end.latency.as_secs_f64()),
            speculation: end.and_then(|end| spec_fields(&end.usage.spec)),
            input_token_logprobs: reported(logprobs, &self.prompt),
            output_token_logprobs: reported(logprobs, &self.tokens),
            input_top_logprobs: likely(top_logprobs, &self.prompt),
            output_top_logprobs: likely(top_logprobs, &self.tokens),
            hidden_states: end.filter(|_| self.report.hidden_states).map(|end| HiddenStates {
                rows: &end.rows.hidden_states,
                prompt_tokens: self.report.prompt_tokens,
            }),
            routed_experts: end.zip(self.report.routed_experts_from).map(|(end, from)| {
                let ids = &end.rows.routed_experts;
                let first = from.saturating_sub(end.rows.from) * ids.width;
                Int32s(ids.values.get(first..).unwrap_or(&[]))
            }),
            draft_round: self.round.as_ref(),
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
    /// Known at the end, as are the experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden_states: Option<HiddenStates<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts: Option<Int32s<'a>>,
    /// Of the tokens that this event adds alone: all rounds would be written again and again.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_round: Option<&'a DraftRound>,
}

/// Hidden states as SGLang writes them: a list of the prompt's rows, then each row of the answer.
struct HiddenStates<'a> {
    rows: &'a HostRows<f32>,
    prompt_tokens: usize,
}

impl Serialize for HiddenStates<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let rows: Vec<&[f32]> = self.rows.rows().collect();
        let (prompt, answer) = rows.split_at(self.prompt_tokens.min(rows.len()));
        let mut list = to.serialize_seq(Some(1 + answer.len()))?;
        list.serialize_element(prompt)?;
        answer.iter().try_for_each(|row| list.serialize_element(row))?;
        list.end()
    }
}

/// Numbers as the base64 of their int32s, the lowest byte first.
struct Int32s<'a>(&'a [u32]);

impl Serialize for Int32s<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|number| number.to_le_bytes()).collect();
        to.collect_str(&Base64Display::new(&bytes, &STANDARD))
    }
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
