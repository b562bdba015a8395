//! `/v1/responses`: OpenAI's responses, in the form of Open Responses. Nothing is stored.

mod input;
mod output;
mod request;

use aquila_engine::{FinishReason, Token, Usage};
use aquila_spec::SpecStats;
use aquila_text::{CheckedParams, Part, spec_fields};
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use self::output::{Event, Output};
use self::request::Body;
use super::completion_object::metrics;
use super::logprobs::ChatLogprobs;
use crate::answer::{Answer, StreamEvent};
use crate::body;
use crate::chat::{AnswerFormat, AnswerParts, ChatAnswer};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::routes::{json as respond, read_past};
use crate::state::{App, Shared, unix_time};
use crate::stream::{self, EventWriter, ResponseFormat};
use crate::submit::RequestGuards;

pub(crate) async fn responses(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let Body { chat, echo } = body.work(|body| Body::take(Fields::parse(body)?)).await?;
    let streams = chat.settings.stream;
    let prepared = app.prepare_chat(body, chat, "input", "resp_").await?;
    if app.hands_over() {
        return app.hand_over(prepared.submissions, "input").await;
    }
    let id = prepared.id;
    let params = prepared.params;
    let output = Output::default();
    let resource = Resource { id: id.clone(), created: unix_time(), echo, output };
    if streams {
        let pieces = app.submit_streaming(prepared.submissions, "input", true)?;
        let parts = AnswerParts::new(&prepared.format, app.generator.tokenizer());
        let events = Events { app, resource, params, parts, begun: false, number: 0 };
        return Ok(stream::respond(pieces, events, &id));
    }
    let answers = app.submit_whole(prepared.submissions, "input").await?;
    let format = prepared.format;
    let write = move |answers: Vec<Answer>| match answers.first() {
        Some(answer) => whole(&app, &params, &format, resource, answer),
        None => Refusal::failed("the engine gave no answer").into_response(),
    };
    answers.respond(write).await
}

/// A whole response.
fn whole(
    app: &App,
    params: &CheckedParams,
    format: &AnswerFormat,
    mut resource: Resource,
    answer: &Answer,
) -> Response {
    let read = ChatAnswer::read(format, app.generator.tokenizer(), &app.identifiers, answer);
    resource.output.add_logprobs(logprobs(app, params, &answer.tokens));
    let reasoning = read.reasoning_tokens;
    let mut events = Vec::new();
    for part in read.into_parts() {
        resource.output.push(&app.identifiers, part, &mut events);
    }
    let end = End { reason: &answer.reason, usage: &answer.usage, reasoning };
    resource.output.finish(&app.identifiers, end.item_status(), &mut events);
    respond(&resource.ended(app, &end), Some(&resource.id))
}

/// A response that was made before: none is kept.
pub(crate) async fn stored(
    State(app): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> Refusal {
    let refusal = Refusal::not_stored(&id);
    read_past(&app, request).await.err().unwrap_or(refusal)
}

fn logprobs(app: &App, params: &CheckedParams, tokens: &[Token]) -> Vec<Value> {
    if params.logprobs.is_none() {
        return Vec::new();
    }
    ChatLogprobs::of(app.generator.tokenizer(), tokens, params).values()
}

/// How an answer ended.
struct End<'a> {
    reason: &'a FinishReason,
    usage: &'a Usage,
    /// Tokens of reasoning.
    reasoning: usize,
}

impl End<'_> {
    fn item_status(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop(_) => "completed",
            _ => "incomplete",
        }
    }
}

/// A response.
struct Resource {
    id: String,
    created: u64,
    /// The fields that it repeats, as the JSON of an object.
    echo: String,
    output: Output,
}

impl Resource {
    fn with(&self, app: &App, status: &str, more: Value) -> Value {
        let mut value = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": null,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "model": app.settings.model.served_name,
            "output": self.output.items(),
            "usage": null,
        });
        if let (Value::Object(value), Value::Object(more)) = (&mut value, more) {
            let echo: Map<String, Value> =
                serde_json::from_str(&self.echo).expect("it was written as an object");
            value.extend(echo);
            value.extend(more);
        }
        value
    }

    fn in_progress(&self, app: &App) -> Value {
        self.with(app, "in_progress", json!({}))
    }

    fn ended(&self, app: &App, end: &End<'_>) -> Value {
        let usage = end.usage;
        let spec: &SpecStats = &usage.spec;
        let mut more = json!({
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": { "cached_tokens": usage.cached_tokens },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": { "reasoning_tokens": end.reasoning },
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        });
        if let Some(fields) = spec_fields(spec) {
            more["usage"]["speculative"] = fields.into();
        }
        if let Some(metrics) = metrics(app, 1, spec) {
            more["metrics"] = metrics;
        }
        let status = match end.reason {
            FinishReason::Stop(_) => {
                more["completed_at"] = unix_time().into();
                "completed"
            }
            FinishReason::Length => {
                more["incomplete_details"] = json!({ "reason": "max_output_tokens" });
                "incomplete"
            }
            FinishReason::Abort(_) | FinishReason::GrammarFailed(_) => "cancelled",
        };
        self.with(app, status, more)
    }
}

/// A response as it is streamed.
struct Events {
    app: Shared,
    resource: Resource,
    params: CheckedParams,
    parts: AnswerParts,
    begun: bool,
    /// The number of the next event.
    number: u64,
}

impl Events {
    fn event(&mut self, kind: &'static str, mut event: Value, out: &mut EventWriter) {
        event["type"] = kind.into();
        event["sequence_number"] = self.number.into();
        self.number += 1;
        out.named(kind, &event);
    }

    fn parts(&mut self, parts: Vec<Part>, out: &mut EventWriter) {
        let mut events: Vec<Event> = Vec::new();
        for part in parts {
            self.resource.output.push(&self.app.identifiers, part, &mut events);
        }
        events.into_iter().for_each(|(kind, event)| self.event(kind, event, out));
    }

    fn begin(&mut self, out: &mut EventWriter) {
        if !std::mem::replace(&mut self.begun, true) {
            let response = self.resource.in_progress(&self.app);
            self.event("response.created", json!({ "response": response }), out);
            self.event("response.in_progress", json!({ "response": response }), out);
        }
    }
}

impl ResponseFormat for Events {
    fn write(&mut self, _: usize, event: StreamEvent, _: &RequestGuards, out: &mut EventWriter) {
        self.begin(out);
        match event {
            StreamEvent::Prompt(_) => {}
            StreamEvent::Delta(delta) => {
                let known = logprobs(&self.app, &self.params, &delta.tokens);
                self.resource.output.add_logprobs(known);
                let parts = self.parts.tokens(&delta.tokens, &delta.text);
                self.parts(parts, out);
            }
            StreamEvent::End(end) => {
                let parts = self.parts.finish(&end.text);
                self.parts(parts, out);
                let reasoning = self.parts.reasoning_tokens();
                let end = End { reason: &end.reason, usage: &end.usage, reasoning };
                let mut events = Vec::new();
                let identifiers = &self.app.identifiers;
                self.resource.output.finish(identifiers, end.item_status(), &mut events);
                events.into_iter().for_each(|(kind, event)| self.event(kind, event, out));
                let response = self.resource.ended(&self.app, &end);
                let kind = match end.reason {
                    FinishReason::Stop(_) => "response.completed",
                    _ => "response.incomplete",
                };
                self.event(kind, json!({ "response": response }), out);
            }
        }
    }

    fn close(&mut self, _: &mut EventWriter) {}

    fn fail(&mut self, refusal: &Refusal, out: &mut EventWriter) {
        self.begin(out);
        let error = json!({ "code": refusal.label(), "message": refusal.message() });
        let response = self.resource.with(&self.app, "failed", json!({ "error": error }));
        self.event("response.failed", json!({ "response": response }), out);
    }
}
