//! `/v1/messages`, and `/v1/messages/count_tokens`.

use aquila_engine::FinishReason;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::blocks::{Blocks, Event};
use super::errors::error;
use super::request;
use crate::answer::StreamEvent;
use crate::body;
use crate::chat::{AnswerParts, ChatAnswer};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared};
use crate::stream::{self, EventWriter, ResponseFormat};
use crate::submit::RequestGuards;

pub(crate) async fn messages(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let chat = body.work(|body| request::take(Fields::parse(body)?, false)).await?;
    let streams = chat.settings.stream;
    let prepared = app.prepare_chat(body, chat, "messages", "msg_").await?;
    if app.hands_over() {
        return app.hand_over(prepared.submissions, "messages").await;
    }
    let id = prepared.id;
    let input_tokens = prepared.submissions[0].prompt.len();
    if streams {
        let pieces = app.submit_streaming(prepared.submissions, "messages", false)?;
        let parts = AnswerParts::new(&prepared.format, app.generator.tokenizer());
        let name = id.clone();
        let blocks = Blocks::default();
        let events = Events { app, id, input_tokens, parts, blocks, begun: false };
        return Ok(stream::respond(pieces, events, &name));
    }
    let answers = app.submit_whole(prepared.submissions, "messages").await?;
    let answer = answers.list.into_iter().next();
    let answer = answer.ok_or_else(|| Refusal::failed("the engine gave no answer"))?;
    let read =
        ChatAnswer::read(&prepared.format, app.generator.tokenizer(), &app.identifiers, &answer);
    let (reason, stop) =
        stop_reason(&answer.reason, answer.stop.as_deref(), read.calls_tools(&answer.reason));
    let thinking = read.reasoning_tokens;
    let (mut blocks, mut events) = (Blocks::default(), Vec::new());
    for part in read.into_parts() {
        blocks.push(&app.identifiers, part, &mut events);
    }
    blocks.finish(&mut events);
    let mut message = message(&app, &id, blocks.into_blocks());
    message["stop_reason"] = reason.into();
    message["stop_sequence"] = stop;
    message["usage"] = usage(answer.usage.prompt_tokens, answer.usage.completion_tokens, thinking);
    Ok(respond(&message, Some(&id)))
}

/// The tokens of a prompt that is not answered.
pub(crate) async fn count_tokens(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let chat = body.work(|body| request::take(Fields::parse(body)?, true)).await?;
    app.check_model(chat.settings.model.as_deref())?;
    let tokenizer = app.tokenizer("messages")?.clone();
    let prompt = chat.prompt(&app, &body, tokenizer, "messages").await?;
    Ok(respond(&json!({ "input_tokens": prompt.tokens.len() }), None))
}

fn message(app: &App, id: &str, content: Vec<Value>) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": app.settings.model.served_name,
        "content": content,
        "stop_reason": null,
        "stop_sequence": null,
        "stop_details": null,
        "container": null,
    })
}

/// What a message took. No client asks for caching, and what is cached anyway is part of the input.
fn usage(input_tokens: usize, output_tokens: usize, thinking_tokens: usize) -> Value {
    json!({
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": { "thinking_tokens": thinking_tokens },
        "cache_creation": null,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "server_tool_use": null,
        "inference_geo": null,
        "service_tier": "standard",
    })
}

/// Why a message ended, and the string that ended it.
fn stop_reason(
    reason: &FinishReason,
    stop: Option<&str>,
    calls_tools: bool,
) -> (&'static str, Value) {
    match (reason, stop) {
        _ if calls_tools => ("tool_use", Value::Null),
        (FinishReason::Stop(_), Some(stop)) => ("stop_sequence", stop.into()),
        (FinishReason::Length, _) => ("max_tokens", Value::Null),
        _ => ("end_turn", Value::Null),
    }
}

/// A message as it is streamed.
struct Events {
    app: Shared,
    id: String,
    input_tokens: usize,
    parts: AnswerParts,
    blocks: Blocks,
    begun: bool,
}

fn send(events: Vec<Event>, out: &mut EventWriter) {
    events.into_iter().for_each(|(name, event)| out.named(name, &event));
}

impl Events {
    fn begin(&mut self, out: &mut EventWriter) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let mut message = message(&self.app, &self.id, Vec::new());
        message["usage"] = usage(self.input_tokens, 0, 0);
        let start = json!({ "type": "message_start", "message": message });
        send(vec![("message_start", start), ("ping", json!({ "type": "ping" }))], out);
    }
}

impl ResponseFormat for Events {
    fn write(&mut self, _: usize, event: StreamEvent, _: &RequestGuards, out: &mut EventWriter) {
        self.begin(out);
        let mut events = Vec::new();
        match event {
            StreamEvent::Prompt(_) => {}
            StreamEvent::Delta(delta) => {
                for part in self.parts.tokens(&delta.tokens, &delta.text) {
                    self.blocks.push(&self.app.identifiers, part, &mut events);
                }
            }
            StreamEvent::End(end) => {
                for part in self.parts.finish(&end.text) {
                    self.blocks.push(&self.app.identifiers, part, &mut events);
                }
                self.blocks.finish(&mut events);
                let calls = self.parts.calls_tools(&end.reason);
                let (reason, stop) = stop_reason(&end.reason, end.stop.as_deref(), calls);
                let delta = json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": reason, "stop_sequence": stop },
                    "usage": usage(
                        end.usage.prompt_tokens,
                        end.usage.completion_tokens,
                        self.parts.reasoning_tokens(),
                    ),
                });
                events.push(("message_delta", delta));
                events.push(("message_stop", json!({ "type": "message_stop" })));
            }
        }
        send(events, out);
    }

    fn close(&mut self, _: &mut EventWriter) {}

    fn fail(&mut self, refusal: &Refusal, out: &mut EventWriter) {
        out.named("error", &error(refusal));
    }

    fn done(&mut self, _: &mut EventWriter) {}
}
