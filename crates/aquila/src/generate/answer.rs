//! One answer, collected from the engine and written as JSON.

use std::sync::mpsc::Sender;

use aquila_engine::{FinishReason, Token, Usage};
use aquila_spec::SpecStats;
use aquila_text::{AnswerSink, Delta, End, spec_fields};
use serde_json::{Map, Value, json};

use super::feed::{Event, Permit};

/// A complete answer.
pub struct Answer {
    pub prompt: Vec<Token>,
    pub tokens: Vec<Token>,
    pub text: String,
    pub reason: FinishReason,
    pub usage: Usage,
}

/// Collects one answer and sends it, with where it belongs, when it is complete.
pub struct Collector {
    line: u64,
    choice: u32,
    prompt: Vec<Token>,
    tokens: Vec<Token>,
    text: String,
    events: Sender<Event>,
    _permit: Option<Permit>,
}

impl Collector {
    /// For one of the answers to the request of a line.
    pub fn new(line: u64, choice: u32, events: Sender<Event>, permit: Option<Permit>) -> Self {
        let (prompt, tokens, text) = Default::default();
        Self { line, choice, prompt, tokens, text, events, _permit: permit }
    }
}

impl AnswerSink for Collector {
    fn prompt(&mut self, tokens: Vec<Token>) {
        self.prompt = tokens;
    }

    fn delta(&mut self, delta: Delta) -> bool {
        self.tokens.extend(delta.tokens);
        self.text.push_str(&delta.text);
        true
    }

    fn end(self: Box<Self>, end: End) {
        let Self { line, choice, prompt, tokens, mut text, events, .. } = *self;
        text.push_str(&end.text);
        let answer = Answer { prompt, tokens, text, reason: end.reason, usage: end.usage };
        // If nobody waits any more, the answer is not wanted.
        let _ = events.send(Event::Answer(line, choice, answer));
    }
}

/// The name of a finish reason.
pub fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort(_) | FinishReason::GrammarFailed(_) => "abort",
    }
}

/// The output line of a request: one answer, or several under `choices`.
pub fn line(id: &Value, answers: &[Answer], has_text: bool, logprobs: bool) -> Value {
    let usages = || answers.iter().map(|answer| &answer.usage);
    let shared = usages().next().cloned().unwrap_or_default();
    let mut meta = json!({
        "prompt_tokens": shared.prompt_tokens,
        "completion_tokens": usages().map(|usage| usage.completion_tokens).sum::<usize>(),
        "cached_tokens": shared.cached_tokens,
        "retractions": usages().map(|usage| usage.preemptions).sum::<usize>(),
    });
    let mut spec = SpecStats::default();
    answers.iter().for_each(|answer| spec.add(&answer.usage.spec));
    if let (Some(meta), Some(fields)) = (meta.as_object_mut(), spec_fields(&spec)) {
        meta.extend(fields);
    }
    let mut object = Map::new();
    object.insert("id".into(), id.clone());
    let mut bodies = answers.iter().map(|answer| body(answer, has_text, logprobs));
    if answers.len() == 1 {
        object.extend(bodies.by_ref().flatten());
    } else {
        object.insert("choices".into(), bodies.map(Value::Object).collect());
    }
    if let Some(first) = answers.first().filter(|first| !first.prompt.is_empty()) {
        object.insert("prompt_logprobs".into(), first.prompt.iter().map(token).collect());
    }
    object.insert("meta_info".into(), meta);
    object.into()
}

fn body(answer: &Answer, has_text: bool, logprobs: bool) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("token_ids".into(), answer.tokens.iter().map(|token| token.id).collect());
    body.insert("text".into(), if has_text { answer.text.clone().into() } else { Value::Null });
    body.insert("finish_reason".into(), reason_name(&answer.reason).into());
    if let Some(why) = answer.reason.failure() {
        body.insert("error".into(), why.into());
    }
    if logprobs {
        body.insert("logprobs".into(), answer.tokens.iter().map(token).collect());
    }
    body
}

fn token(token: &Token) -> Value {
    let top: Vec<Value> =
        token.top.iter().map(|&(id, logprob)| json!([id, finite(logprob)])).collect();
    json!({ "id": token.id, "logprob": token.logprob.map(finite), "top": top })
}

/// JSON has no infinity: what the model excludes altogether is written as OpenAI writes it.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
