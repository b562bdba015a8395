//! OpenAI's API.

pub(super) mod chat;
pub(super) mod completions;
mod logprobs;
pub(super) mod models;

use aquila_engine::{FinishReason, Speculation, StopCause, Usage};
use aquila_spec::SpecStats;
use aquila_text::{SamplingParams, spec_fields};
use serde::Serialize;
use serde_json::{Map, Value};

pub(super) use self::logprobs::finite;
use crate::answer::Answer;
use crate::disaggregation::Bootstrap;
use crate::draft_round;
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::unserved::{EVERYWHERE, GRAMMARS, OPENAI, STREAM_OPTIONS};

/// Sampling settings of both kinds of completions: OpenAI's, and those that SGLang adds.
const SAMPLING: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
];

/// What both kinds of completions have in common.
struct Common {
    model: Option<String>,
    stream: bool,
    include_usage: bool,
    skip_special_tokens: bool,
    speculation: Speculation,
    draft_trees: bool,
    priority: Option<i64>,
    /// The name by which the client may abort the request.
    name: Option<String>,
    params: SamplingParams,
    bootstrap: Bootstrap,
}

impl Common {
    fn take(fields: &mut Fields) -> Result<Self, Refusal> {
        for unserved in [GRAMMARS, EVERYWHERE, OPENAI] {
            fields.refuse(unserved)?;
        }
        let stream = fields.flag("stream")?;
        let options: Option<Map<String, Value>> = fields.take("stream_options")?;
        if options.is_some() && !stream {
            return Err(Refusal::param("stream_options", "is only allowed if `stream` is true"));
        }
        Ok(Self {
            model: fields.take("model")?,
            stream,
            include_usage: include_usage(options.unwrap_or_default())?,
            skip_special_tokens: fields.take("skip_special_tokens")?.unwrap_or(true),
            speculation: fields.speculation()?,
            draft_trees: draft_round::take(fields, stream)?,
            priority: fields.take("priority")?,
            name: fields.take("rid")?,
            params: fields.sampling(SAMPLING)?,
            bootstrap: Bootstrap::take(fields)?,
        })
    }
}

/// Whether a stream ends with what the request took.
fn include_usage(options: Map<String, Value>) -> Result<bool, Refusal> {
    let mut options = Fields::of(options);
    let include_usage = options.flag("include_usage")?;
    options.refuse(STREAM_OPTIONS)?;
    options.finish("stream_options.", &["include_obfuscation"])?;
    Ok(include_usage)
}

/// Refuses formats of answers other than text.
fn only_text(fields: &mut Fields) -> Result<(), Refusal> {
    let format: Option<Map<String, Value>> = fields.take("response_format")?;
    match format.as_ref().and_then(|format| format.get("type")).and_then(Value::as_str) {
        None if format.is_none() => Ok(()),
        Some("text") => Ok(()),
        _ => Err(Refusal::param("response_format", "only {\"type\": \"text\"} is supported")),
    }
}

/// What a request took, as OpenAI says it.
#[derive(Debug, Default, Clone, Serialize)]
struct UsageReport {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    /// What speculation did, under SGLang's names, where anything was drafted.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculative: Option<Map<String, Value>>,
    #[serde(skip)]
    spec: SpecStats,
}

#[derive(Debug, Default, Clone, Copy, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl UsageReport {
    /// Adds an answer; a prompt counts once, with its first answer.
    fn add(&mut self, usage: &Usage, first: bool) {
        if first {
            self.prompt_tokens += usage.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += usage.cached_tokens;
        }
        self.completion_tokens += usage.completion_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
        self.spec.add(&usage.spec);
        self.speculative = spec_fields(&self.spec);
    }

    /// Of all answers, `n` to each prompt.
    fn of(answers: &[Answer], n: usize) -> Self {
        let mut report = Self::default();
        for (index, answer) in answers.iter().enumerate() {
            report.add(&answer.usage, index.is_multiple_of(n));
        }
        report
    }
}

/// The name of a finish reason.
fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort(_) | FinishReason::GrammarFailed(_) => "abort",
    }
}

/// What stopped a text, as SGLang adds it: a string or a token.
fn matched_stop(reason: &FinishReason, stop: Option<&String>) -> Value {
    match (reason, stop) {
        (FinishReason::Stop(_), Some(text)) => text.as_str().into(),
        (FinishReason::Stop(StopCause::Token(id)), None) => (*id).into(),
        _ => Value::Null,
    }
}

/// What identifies this build to clients that compare seeded answers.
const FINGERPRINT: &str = concat!("aquila-", env!("CARGO_PKG_VERSION"));
