//! `/v1/chat/completions`: a conversation, and what comes next in it.

use aquila_engine::Token;
use aquila_text::{CheckedParams, Delta, Part, Tokenizer};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value};

use super::logprobs::ChatLogprobs;
use super::{
    FINGERPRINT, OpenAiSettings, UsageReport, finish_reason, matched_stop, metrics, sglext,
};
use crate::answer::{Answer, StreamEvent};
use crate::body;
use crate::chat::{
    AnswerFormat, AnswerParts, Call, ChatAnswer, ChatRequest, Tool, ToolChoice, Tools, messages,
    set_effort,
};
use crate::draft_round::{DraftRound, RoundReporter};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared, unix_time};
use crate::stream::{self, EventWriter, ResponseFormat};
use crate::submit::RequestGuards;
use crate::unserved::{CHAT, WITHOUT_EFFECT};

/// A body, checked.
struct Body {
    chat: ChatRequest,
    include_usage: bool,
    spec_details: bool,
}

impl Body {
    fn take(mut fields: Fields) -> Result<Self, Refusal> {
        let messages = messages(fields.require("messages")?)?;
        let OpenAiSettings { mut settings, include_usage, spec_details } =
            OpenAiSettings::take(&mut fields)?;
        let params = &mut settings.params;
        fields.set(params, "max_tokens", "max_tokens")?;
        fields.set(params, "max_completion_tokens", "max_tokens")?;
        if params.max_tokens == Some(0) {
            return Err(Refusal::param("max_completion_tokens", "must be at least 1"));
        }
        fields.set(params, "logprobs", "logprobs")?;
        fields.set(params, "top_logprobs", "top_logprobs")?;
        if params.top_logprobs.is_some_and(|top| top > 0) && params.logprobs != Some(true) {
            return Err(Refusal::param("top_logprobs", "is only allowed if `logprobs` is true"));
        }
        let tools = tools(&mut fields)?;
        let mut template_arguments: Map<String, Value> =
            fields.take("chat_template_kwargs")?.unwrap_or_default();
        let effort: Option<String> = fields.take("reasoning_effort")?;
        set_effort(effort.as_deref(), &mut template_arguments);
        let chat = ChatRequest {
            settings,
            messages,
            tools,
            template_arguments,
            separate_reasoning: fields.take("separate_reasoning")?.unwrap_or(true),
            stream_reasoning: fields.take("stream_reasoning")?.unwrap_or(true),
        };
        fields.refuse(CHAT)?;
        fields.finish("", WITHOUT_EFFECT)?;
        Ok(Self { chat, include_usage, spec_details })
    }
}

/// The tools, in OpenAI's form.
fn tools(fields: &mut Fields) -> Result<Tools, Refusal> {
    let list: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let list = list.iter().enumerate().map(|(index, tool)| {
        let at = format!("tools[{index}]");
        if tool.get("type").is_some_and(|kind| kind != "function") {
            return Err(Refusal::param(format!("{at}.type"), "must be `function`"));
        }
        let function = tool.get("function").filter(|function| function.is_object());
        let at = format!("{at}.function");
        let function = function.ok_or_else(|| Refusal::param(&at, "must be an object"))?;
        let field = |name| function.get(name);
        Tool::new(&at, field("name"), field("description"), field("parameters"), field("strict"))
    });
    let list = list.collect::<Result<Vec<Tool>, Refusal>>()?;
    let choice = match fields.take::<Value>("tool_choice")? {
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(Refusal::param("tool_choice", CHOICES)),
        },
        Some(choice) => {
            let name = choice.get("function").and_then(|function| function.get("name"));
            let name = name.and_then(Value::as_str).filter(|_| choice["type"] == "function");
            let name = name.ok_or_else(|| Refusal::param("tool_choice", CHOICES))?;
            ToolChoice::Named(name.into())
        }
    };
    let parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    Tools { list, choice, parallel }.check("tool_choice")
}

const CHOICES: &str = "must be `none`, `auto`, `required`, or \
                       {\"type\": \"function\", \"function\": {\"name\": …}}";

pub(crate) async fn chat(State(app): State<Shared>, request: Request) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let taken = body.work(|body| Body::take(Fields::parse(body)?)).await?;
    let Body { chat, include_usage, spec_details } = taken;
    let streams = chat.settings.stream;
    let prepared = app.prepare_chat(body, chat, "messages", "chatcmpl-").await?;
    if app.hands_over() {
        return app.hand_over(prepared.asks, "messages").await;
    }
    let head = Head { id: prepared.id, created: unix_time() };
    let (params, format) = (prepared.params, prepared.format);
    if streams {
        let pieces = app.submit_streaming(prepared.asks, "messages")?;
        let progress = || Progress {
            begun: false,
            parts: AnswerParts::new(&format, app.generator.tokenizer()),
        };
        let answers = std::iter::repeat_with(progress).take(params.n as usize).collect();
        let rounds = RoundReporter::for_answers(&app, &params, params.n as usize);
        let name = head.id.clone();
        let usage = UsageReport::default();
        let format =
            Chunks { app, head, params, include_usage, spec_details, answers, rounds, usage };
        return Ok(stream::respond(pieces, format, &name));
    }
    let answers = app.ask_for_all(prepared.asks, "messages").await?;
    Ok(respond(&whole(&app, &head, &params, &format, spec_details, &answers), Some(&head.id)))
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
    choices: Vec<Choice>,
    usage: UsageReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    sglext: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Value>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
    matched_stop: Value,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    refusal: Option<()>,
    /// SGLang's name and vLLM's.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<WholeCall>,
}

#[derive(Serialize)]
struct WholeCall {
    id: String,
    r#type: &'static str,
    function: WholeFunction,
}

#[derive(Serialize)]
struct WholeFunction {
    name: String,
    arguments: String,
}

impl Message {
    fn of(answer: ChatAnswer) -> Self {
        let ChatAnswer { reasoning, text, calls, .. } = answer;
        let call = |Call { id, name, arguments }| WholeCall {
            id,
            r#type: "function",
            function: WholeFunction { name, arguments },
        };
        let reasoning = Some(reasoning).filter(|reasoning| !reasoning.is_empty());
        Self {
            role: "assistant",
            content: Some(text).filter(|text| !text.is_empty() || calls.is_empty()),
            refusal: None,
            reasoning_content: reasoning.clone(),
            reasoning,
            tool_calls: calls.into_iter().map(call).collect(),
        }
    }
}

fn whole<'a>(
    app: &'a App,
    head: &'a Head,
    params: &CheckedParams,
    format: &AnswerFormat,
    spec_details: bool,
    answers: &[Answer],
) -> Whole<'a> {
    let tokenizer = app.generator.tokenizer();
    let mut usage = UsageReport::of(answers, params.n as usize);
    let mut choices = Vec::with_capacity(answers.len());
    for (index, answer) in answers.iter().enumerate() {
        let read = ChatAnswer::read(format, tokenizer, &app.identifiers, answer);
        usage.completion_tokens_details.reasoning_tokens += read.reasoning_tokens;
        let calls = read.calls_tools(&answer.reason);
        choices.push(Choice {
            index,
            logprobs: logprobs(tokenizer, params, &answer.tokens),
            finish_reason: if calls { "tool_calls" } else { finish_reason(&answer.reason) },
            matched_stop: matched_stop(&answer.reason, answer.stop.as_ref()),
            message: Message::of(read),
        });
    }
    Whole {
        id: &head.id,
        object: "chat.completion",
        created: head.created,
        model: &app.settings.model.served_name,
        system_fingerprint: FINGERPRINT,
        choices,
        sglext: sglext(spec_details, &usage.spec),
        metrics: metrics(app, answers.len(), &usage.spec),
        usage,
    }
}

fn logprobs(
    tokenizer: Option<&Tokenizer>,
    params: &CheckedParams,
    tokens: &[Token],
) -> Option<ChatLogprobs> {
    params.logprobs.map(|_| ChatLogprobs::of(tokenizer, tokens, params))
}

/// A conversation's answers in chunks: for each a role, parts and a finish reason.
struct Chunks {
    app: Shared,
    head: Head,
    params: CheckedParams,
    include_usage: bool,
    spec_details: bool,
    answers: Vec<Progress>,
    /// Of each answer, where draft trees are asked for.
    rounds: Vec<RoundReporter>,
    usage: UsageReport,
}

/// How far one answer is told.
struct Progress {
    begun: bool,
    parts: AnswerParts,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: &'a [ChunkChoice],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sglext: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Value>,
}

#[derive(Serialize)]
struct ChunkChoice {
    index: usize,
    delta: ChunkDelta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    matched_stop: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_round: Option<DraftRound>,
}

#[derive(Serialize, Default)]
struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ChunkCall; 1]>,
}

#[derive(Serialize)]
struct ChunkCall {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: ChunkFunction,
}

#[derive(Serialize)]
struct ChunkFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ChunkDelta {
    /// What a part says; none for the end of a call, which the next part or the end tells.
    fn of(app: &App, part: Part) -> Option<Self> {
        let call = |index, named: Option<(String, String)>, arguments| {
            let (id, name) = named.unzip();
            let r#type = id.is_some().then_some("function");
            let function = ChunkFunction { name, arguments };
            Self {
                tool_calls: Some([ChunkCall { index, id, r#type, function }]),
                ..Self::default()
            }
        };
        match part {
            Part::Text(text) => Some(Self { content: Some(text), ..Self::default() }),
            Part::Reasoning(text) => Some(Self {
                reasoning_content: Some(text.clone()),
                reasoning: Some(text),
                ..Self::default()
            }),
            Part::CallBegin { index, name } => {
                Some(call(index, Some((app.identifiers.call(), name)), String::new()))
            }
            Part::Arguments { index, piece } => Some(call(index, None, piece)),
            Part::CallEnd { .. } | Part::CallBroken { .. } => None,
        }
    }
}

impl ChunkChoice {
    fn new(index: usize, delta: ChunkDelta) -> Self {
        Self {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            matched_stop: Value::Null,
            draft_round: None,
        }
    }
}

impl Chunks {
    fn chunk<'a>(&'a self, choices: &'a [ChunkChoice]) -> Chunk<'a> {
        Chunk {
            id: &self.head.id,
            object: "chat.completion.chunk",
            created: self.head.created,
            model: &self.app.settings.model.served_name,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: self.include_usage.then_some(None),
            sglext: None,
            metrics: None,
        }
    }

    /// Parts as chunks, the first with what is known of the tokens.
    fn parts(&self, index: usize, parts: Vec<Part>, mut known: Known, out: &mut EventWriter) {
        for delta in parts.into_iter().filter_map(|part| ChunkDelta::of(&self.app, part)) {
            out.event(&self.chunk(&[known.take().with(index, delta)]));
        }
        if !known.is_empty() {
            let nothing = ChunkDelta { content: Some(String::new()), ..ChunkDelta::default() };
            out.event(&self.chunk(&[known.with(index, nothing)]));
        }
    }

    fn delta(&mut self, index: usize, delta: &Delta, out: &mut EventWriter) {
        let parts = self.answers[index].parts.tokens(&delta.tokens, &delta.text);
        let logprobs = logprobs(self.app.generator.tokenizer(), &self.params, &delta.tokens);
        let known = Known {
            logprobs: logprobs.filter(|logprobs| !logprobs.is_empty()),
            draft_round: self.rounds.get_mut(index).map(|rounds| rounds.report(delta)),
        };
        self.parts(index, parts, known, out);
    }
}

/// What is known of the tokens of a piece, beside its text.
#[derive(Default)]
struct Known {
    logprobs: Option<ChatLogprobs>,
    draft_round: Option<DraftRound>,
}

impl Known {
    fn is_empty(&self) -> bool {
        self.logprobs.is_none() && self.draft_round.is_none()
    }

    fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    fn with(self, index: usize, delta: ChunkDelta) -> ChunkChoice {
        let Self { logprobs, draft_round } = self;
        ChunkChoice { logprobs, draft_round, ..ChunkChoice::new(index, delta) }
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
        if !std::mem::replace(&mut self.answers[index].begun, true) {
            let role = Some("assistant");
            let role = ChunkDelta { role, content: Some(String::new()), ..ChunkDelta::default() };
            out.event(&self.chunk(&[ChunkChoice::new(index, role)]));
        }
        match event {
            StreamEvent::Prompt(_) => (),
            StreamEvent::Delta(delta) => self.delta(index, &delta, out),
            StreamEvent::End(end) => {
                let parts = self.answers[index].parts.finish(&end.text);
                self.parts(index, parts, Known::default(), out);
                let answer = &self.answers[index].parts;
                let calls = answer.calls_tools(&end.reason);
                let reasoning = answer.reasoning_tokens();
                let reason = if calls { "tool_calls" } else { finish_reason(&end.reason) };
                let last = ChunkChoice {
                    finish_reason: Some(reason),
                    matched_stop: matched_stop(&end.reason, end.stop.as_ref()),
                    ..ChunkChoice::new(index, ChunkDelta::default())
                };
                out.event(&self.chunk(&[last]));
                self.usage.add(&end.usage, index == 0);
                self.usage.completion_tokens_details.reasoning_tokens += reasoning;
            }
        }
    }

    fn close(&mut self, out: &mut EventWriter) {
        let sglext = sglext(self.spec_details, &self.usage.spec);
        if self.include_usage || sglext.is_some() {
            let usage = self.include_usage.then(|| Some(self.usage.clone()));
            let metrics = metrics(&self.app, self.answers.len(), &self.usage.spec);
            out.event(&Chunk { usage, sglext, metrics, ..self.chunk(&[]) });
        }
    }
}
