//! One answer, collected from the engine and written as JSON.

use std::sync::mpsc::Sender;

use aquila_engine::{FinishReason, Token, Usage};
use aquila_text::{AnswerSink, Delta, End};
use serde_json::{Map, Value, json};

/// A complete answer.
#[derive(Default)]
pub struct Answer {
    pub prompt: Vec<Token>,
    pub tokens: Vec<Token>,
    pub text: String,
    pub end: Option<(FinishReason, Usage)>,
}

/// Collects one answer and sends it, with where it belongs, when it is complete.
pub struct Collector {
    pub line: u64,
    pub choice: u32,
    pub answer: Answer,
    pub done: Sender<(u64, u32, Answer)>,
}

impl AnswerSink for Collector {
    fn prompt(&mut self, tokens: Vec<Token>) {
        self.answer.prompt = tokens;
    }

    fn delta(&mut self, delta: Delta) -> bool {
        self.answer.tokens.extend(delta.tokens);
        self.answer.text.push_str(&delta.text);
        true
    }

    fn end(mut self: Box<Self>, end: End) {
        self.answer.text.push_str(&end.text);
        self.answer.end = Some((end.reason, end.usage));
        // If nobody waits any more, the answer is not wanted.
        let _ = self.done.send((self.line, self.choice, self.answer));
    }
}

/// The name of a finish reason.
pub fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort(_) => "abort",
    }
}

/// The output line of a request: one answer, or several under `choices`.
pub fn line(id: &Value, answers: &[Answer], has_text: bool, logprobs: bool) -> Value {
    let mut meta = Map::new();
    let mut completion = 0;
    let mut retractions = 0;
    for (_, usage) in answers.iter().filter_map(|answer| answer.end.as_ref()) {
        meta.entry("prompt_tokens").or_insert(usage.prompt_tokens.into());
        meta.entry("cached_tokens").or_insert(usage.cached_tokens.into());
        completion += usage.completion_tokens;
        retractions += usage.retractions;
    }
    meta.insert("completion_tokens".into(), completion.into());
    meta.insert("retractions".into(), retractions.into());
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
    object.insert("meta_info".into(), meta.into());
    object.into()
}

fn body(answer: &Answer, has_text: bool, logprobs: bool) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("token_ids".into(), answer.tokens.iter().map(|token| token.id).collect());
    body.insert("text".into(), if has_text { answer.text.clone().into() } else { Value::Null });
    if let Some((reason, _)) = &answer.end {
        body.insert("finish_reason".into(), reason_name(reason).into());
        if let FinishReason::Abort(why) = reason {
            body.insert("error".into(), why.clone().into());
        }
    }
    if logprobs {
        body.insert("logprobs".into(), answer.tokens.iter().map(token).collect());
    }
    body
}

fn token(token: &Token) -> Value {
    let top: Vec<Value> = token.top.iter().map(|&(id, logprob)| json!([id, logprob])).collect();
    json!({ "id": token.id, "logprob": token.logprob.map(finite), "top": top })
}

/// JSON has no infinity: what the model excludes altogether is written as OpenAI writes it.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
