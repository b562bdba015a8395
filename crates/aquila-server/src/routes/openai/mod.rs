//! OpenAI's API.

pub(super) mod chat;
mod chat_stream;
mod completion_object;
pub(super) mod completions;
mod logprobs;
pub(super) mod models;
pub(super) mod refused;
pub(super) mod responses;

use aquila_engine::{FinishReason, StopCause, Usage};
use aquila_spec::SpecStats;
use aquila_text::spec_fields;
use serde::Serialize;
use serde_json::{Map, Value};

use self::completion_object::Reported;
pub(super) use self::logprobs::finite;
use crate::answer::Answer;
use crate::constraint::Constraint;
use crate::disaggregation::Bootstrap;
use crate::draft_round;
use crate::fields::Fields;
use crate::generation::GenerationSettings;
use crate::refusal::Refusal;
use crate::unserved::{EVERYWHERE, OPENAI, STREAM_OPTIONS};

/// What both kinds of completions have in common.
struct OpenAiSettings {
    settings: GenerationSettings,
    reported: Reported,
}

impl OpenAiSettings {
    fn take(fields: &mut Fields) -> Result<Self, Refusal> {
        for unserved in [EVERYWHERE, OPENAI] {
            fields.refuse(unserved)?;
        }
        let stream = fields.flag("stream")?;
        let options: Option<Map<String, Value>> = fields.take("stream_options")?;
        if options.is_some() && !stream {
            return Err(Refusal::param("stream_options", "is only allowed if `stream` is true"));
        }
        let mut params = fields.sampling()?;
        fields.set(&mut params, "stop", "stop")?;
        fields.set(&mut params, "n", "n")?;
        let settings = GenerationSettings {
            model: fields.take("model")?,
            stream,
            show_special_tokens: !fields.take("skip_special_tokens")?.unwrap_or(true),
            speculation: fields.speculation()?,
            draft_trees: draft_round::take(fields, stream)?,
            priority: fields.take("priority")?,
            name: fields.name()?,
            params,
            constraint: Constraint::take(fields)?,
            bootstrap: Bootstrap::take(fields)?,
        };
        let reported = Reported {
            usage: include_usage(options.unwrap_or_default())?,
            spec_details: fields.flag("return_spec_tokens_details")?,
        };
        Ok(Self { settings, reported })
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

/// What a request took, as OpenAI says it.
#[derive(Debug, Default, Clone, Serialize)]
struct UsageReport {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
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

#[derive(Debug, Default, Clone, Copy, Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
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
