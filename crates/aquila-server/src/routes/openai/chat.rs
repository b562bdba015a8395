//! `/v1/chat/completions`: a conversation, and what comes next in it.

use aquila_text::{CheckedParams, Delta, Tokenizer};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value};

use super::logprobs::ChatLogprobs;
use super::{Common, FINGERPRINT, UsageReport, finish_reason, matched_stop, only_text};
use crate::answer::{Answer, StreamEvent};
use crate::body;
use crate::draft_round::{DraftRound, RoundReporter};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared, unix_time};
use crate::stream::{self, EventWriter, ResponseFormat};
use crate::submit::{Ask, RequestGuards};
use crate::unserved::{CHAT, WITHOUT_EFFECT};

/// A conversation, checked.
struct Chat {
    common: Common,
    messages: Value,
    tools: Option<Value>,
    template_arguments: Map<String, Value>,
}

impl Chat {
    fn take(mut fields: Fields) -> Result<Self, Refusal> {
        let messages = messages(fields.require("messages")?)?;
        let mut common = Common::take(&mut fields)?;
        let params = &mut common.params;
        fields.set(params, "max_tokens", "max_tokens")?;
        fields.set(params, "max_completion_tokens", "max_tokens")?;
        if params.max_tokens == Some(0) {
            return Err(Refusal::param("max_completion_tokens", "must be at least 1"));
        }
        fields.set(params, "logprobs", "logprobs")?;
        fields.set(params, "top_logprobs", "top_logprobs")?;
        if params.top_logprobs.is_some() && params.logprobs != Some(true) {
            return Err(Refusal::param("top_logprobs", "is only allowed if `logprobs` is true"));
        }
        only_text(&mut fields)?;
        let tools = tools(&mut fields)?;
        let template_arguments = fields.take("chat_template_kwargs")?.unwrap_or_default();
        fields.refuse(CHAT)?;
        fields.finish("", WITHOUT_EFFECT)?;
        Ok(Self { common, messages, tools, template_arguments })
    }
}

/// Messages as templates want them: objects with a role and a text.
fn messages(messages: Vec<Value>) -> Result<Value, Refusal> {
    if messages.is_empty() {
        return Err(Refusal::param("messages", "must have at least one message"));
    }
    let plain = messages.into_iter().enumerate().map(|(index, message)| {
        let at = |key: &str| format!("messages[{index}]{key}");
        let Value::Object(mut message) = message else {
            return Err(Refusal::param(at(""), "must be an object with `role` and `content`"));
        };
        if message.get("role").and_then(Value::as_str).is_none_or(str::is_empty) {
            return Err(Refusal::param(at(".role"), "must be a string such as `user`"));
        }
        let content = match message.get_mut("content").map(Value::take) {
            Some(Value::String(text)) => text,
            Some(Value::Array(parts)) => joined_parts(parts)
                .map_err(|(part, why)| Refusal::param(at(&format!(".content[{part}]")), why))?,
            None | Some(Value::Null) if message.contains_key("tool_calls") => String::new(),
            _ => {
                let why = "must be a string, or a list of parts of type `text`";
                return Err(Refusal::param(at(".content"), why));
            }
        };
        message.insert("content".into(), content.into());
        Ok(Value::Object(message))
    });
    plain.collect::<Result<Vec<Value>, Refusal>>().map(Value::Array)
}

/// The texts of a message in parts, each on lines of its own.
fn joined_parts(parts: Vec<Value>) -> Result<String, (usize, &'static str)> {
    let texts = parts.iter().enumerate().map(|(index, part)| {
        let text = part.get("text").and_then(Value::as_str);
        match (part.get("type").and_then(Value::as_str), text) {
            (Some("text"), Some(text)) => Ok(text),
            (Some("text"), None) => Err((index, "must have a `text`")),
            _ => Err((index, "must be of type `text`: the model reads nothing else")),
        }
    });
    Ok(texts.collect::<Result<Vec<&str>, _>>()?.join("\n"))
}

/// The tools that the template is told about; the model is left to use them or not.
fn tools(fields: &mut Fields) -> Result<Option<Value>, Refusal> {
    let tools: Option<Vec<Value>> = fields.take("tools")?;
    let choice: Option<Value> = fields.take("tool_choice")?;
    match choice.as_ref().map(|choice| choice.as_str()) {
        None | Some(Some("auto")) => Ok(tools.filter(|tools| !tools.is_empty()).map(Value::Array)),
        Some(Some("none")) => Ok(None),
        _ => Err(Refusal::param("tool_choice", "only `auto` and `none` are supported")),
    }
}

pub(crate) async fn chat(State(app): State<Shared>, request: Request) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let chat = body.work(|body| Chat::take(Fields::parse(body)?)).await?;
    app.check_model(chat.common.model.as_deref())?;
    let mut params = chat.common.params;
    let context = app.generator.engine().config().context_length;
    let longest = app.settings.default_max_tokens.unwrap_or(context);
    params.max_tokens.get_or_insert(longest);
    let mut params = app.generator.check(params).map_err(|error| Refusal::of(error, "messages"))?;
    params.skip_special_tokens = chat.common.skip_special_tokens;
    params.speculation = chat.common.speculation;
    params.draft_trees = chat.common.draft_trees;
    params.priority = chat.common.priority;

    let tokenizer = app.tokenizer("messages")?.clone();
    let longest_text = app.longest_text;
    let prompt = body.work(move |_| {
        let template = tokenizer.chat_template().ok_or_else(|| {
            Refusal::param("messages", "the model has no chat template: use /v1/completions")
        })?;
        let text = template
            .render(&chat.messages, chat.tools.as_ref(), true, &chat.template_arguments)
            .map_err(|error| Refusal::param("messages", error))?;
        // The template has written what the tokenizer would put around a text.
        longest_text.encode(&tokenizer, &text, false, "messages")
    });
    let prompt = prompt.await?;
    drop(body);

    let id = chat.common.name.unwrap_or_else(|| app.identifiers.next("chatcmpl-"));
    let mut asks =
        vec![Ask { name: id.clone(), prompt, params: params.clone(), prefill: Vec::new() }];
    chat.common.bootstrap.assign(&app, &mut asks)?;
    if app.hands_over() {
        return app.hand_over(asks, "messages").await;
    }
    let head = Head { id, created: unix_time() };
    if chat.common.stream {
        let pieces = app.submit_streaming(asks, "messages")?;
        let include_usage = chat.common.include_usage;
        let begun = vec![false; params.n as usize];
        let rounds = RoundReporter::for_answers(&app, &params, begun.len());
        let usage = UsageReport::default();
        let name = head.id.clone();
        let format = Chunks { app, head, params, include_usage, begun, rounds, usage };
        return Ok(stream::respond(pieces, format, &name));
    }
    let answers = app.ask_for_all(asks, "messages").await?;
    Ok(respond(&whole(&app, &head, &params, &answers), Some(&head.id)))
}

struct Head {
    id: String,
    created: u64,
}

#[derive(Serialize)]
struct Whole<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: Vec<Choice<'a>>,
    usage: UsageReport,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
    matched_stop: Value,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

fn whole<'a>(
    app: &'a App,
    head: &'a Head,
    params: &CheckedParams,
    answers: &'a [Answer],
) -> Whole<'a> {
    let choices = answers.iter().enumerate().map(|(index, answer)| Choice {
        index,
        message: Message { role: "assistant", content: &answer.text, refusal: None },
        logprobs: logprobs(app.generator.tokenizer(), params, answer.tokens.as_slice()),
        finish_reason: finish_reason(&answer.reason),
        matched_stop: matched_stop(&answer.reason, answer.stop.as_ref()),
    });
    Whole {
        id: &head.id,
        object: "chat.completion",
        created: head.created,
        model: &app.settings.model.served_name,
        system_fingerprint: FINGERPRINT,
        choices: choices.collect(),
        usage: UsageReport::of(answers, params.n as usize),
    }
}

fn logprobs(
    tokenizer: Option<&Tokenizer>,
    params: &CheckedParams,
    tokens: &[aquila_engine::Token],
) -> Option<ChatLogprobs> {
    params.logprobs.map(|_| ChatLogprobs::of(tokenizer, tokens, &params.limits.stop_ids))
}

/// A conversation's answers in chunks: for each a role, texts and a finish reason.
struct Chunks {
    app: Shared,
    head: Head,
    params: CheckedParams,
    include_usage: bool,
    /// Which answers have begun.
    begun: Vec<bool>,
    /// Of each answer, where draft trees are asked for.
    rounds: Vec<RoundReporter>,
    usage: UsageReport,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageReport>>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: ChunkDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    matched_stop: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_round: Option<DraftRound>,
}

#[derive(Serialize, Default)]
struct ChunkDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl<'a> ChunkChoice<'a> {
    fn new(index: usize, delta: ChunkDelta<'a>) -> Self {
        Self {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            matched_stop: Value::Null,
            draft_round: None,
        }
    }

    fn text(index: usize, text: &'a str) -> Self {
        Self::new(index, ChunkDelta { role: None, content: Some(text) })
    }
}

impl Chunks {
    fn chunk(
        &self,
        choices: &[ChunkChoice<'_>],
        usage: Option<UsageReport>,
        out: &mut EventWriter,
    ) {
        out.event(&Chunk {
            id: &self.head.id,
            object: "chat.completion.chunk",
            created: self.head.created,
            model: &self.app.settings.model.served_name,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: self.include_usage.then_some(usage),
        });
    }

    fn delta(&mut self, index: usize, delta: &Delta, out: &mut EventWriter) {
        let draft_round = self.rounds.get_mut(index).map(|rounds| rounds.report(delta));
        let logprobs = logprobs(self.app.generator.tokenizer(), &self.params, &delta.tokens);
        let logprobs = logprobs.filter(|logprobs| !logprobs.is_empty());
        if delta.text.is_empty() && logprobs.is_none() && draft_round.is_none() {
            return;
        }
        let choice = ChunkChoice { logprobs, draft_round, ..ChunkChoice::text(index, &delta.text) };
        self.chunk(&[choice], None, out);
    }
}

impl ResponseFormat for Chunks {
    fn write(
        &mut self,
        index: usize,
        event: StreamEvent,
        _: &RequestGuards,
        out: &mut EventWriter,
    ) {
        if !std::mem::replace(&mut self.begun[index], true) {
            let role = ChunkDelta { role: Some("assistant"), content: Some("") };
            self.chunk(&[ChunkChoice::new(index, role)], None, out);
        }
        match event {
            StreamEvent::Prompt(_) => (),
            StreamEvent::Delta(delta) => self.delta(index, &delta, out),
            StreamEvent::End(end) => {
                if !end.text.is_empty() {
                    self.chunk(&[ChunkChoice::text(index, &end.text)], None, out);
                }
                let last = ChunkChoice {
                    finish_reason: Some(finish_reason(&end.reason)),
                    matched_stop: matched_stop(&end.reason, end.stop.as_ref()),
                    ..ChunkChoice::new(index, ChunkDelta::default())
                };
                self.chunk(&[last], None, out);
                self.usage.add(&end.usage, index == 0);
            }
        }
    }

    fn close(&mut self, out: &mut EventWriter) {
        if self.include_usage {
            self.chunk(&[], Some(self.usage.clone()), out);
        }
    }
}
