//! `/v1/chat/completions`: a conversation, and what comes next in it.

use aquila_engine::Token;
use aquila_text::{CheckedParams, Tokenizer};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value};

use super::chat_stream::Chunks;
use super::completion_object::{CompletionHead, Reported};
use super::logprobs::ChatLogprobs;
use super::{OpenAiSettings, UsageReport, finish_reason, matched_stop};
use crate::answer::Answer;
use crate::body;
use crate::chat::{
    AnswerFormat, Call, ChatAnswer, ChatRequest, Tool, ToolChoice, Tools, messages, set_effort,
};
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared};
use crate::stream;
use crate::unserved::{CHAT, WITHOUT_EFFECT};

/// A body, checked.
struct Body {
    chat: ChatRequest,
    reported: Reported,
}

impl Body {
    fn take(mut fields: Fields) -> Result<Self, Refusal> {
        let messages = messages(fields.require("messages")?)?;
        let OpenAiSettings { mut settings, reported } = OpenAiSettings::take(&mut fields)?;
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
        Ok(Self { chat, reported })
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
    let Body { chat, reported } = taken;
    let streams = chat.settings.stream;
    let prepared = app.prepare_chat(body, chat, "messages", "chatcmpl-").await?;
    if app.hands_over() {
        return app.hand_over(prepared.submissions, "messages").await;
    }
    let object = if streams { "chat.completion.chunk" } else { "chat.completion" };
    let head = CompletionHead::new(prepared.id, object, reported);
    let (params, format) = (prepared.params, prepared.format);
    if streams {
        let pieces = app.submit_streaming(prepared.submissions, "messages", false)?;
        let name = head.id.clone();
        return Ok(stream::respond(pieces, Chunks::new(app, head, params, &format), &name));
    }
    let answers = app.submit_whole(prepared.submissions, "messages").await?;
    let write = move |answers: Vec<Answer>| {
        let (choices, usage) = choices(&app, &params, &format, &answers);
        respond(&head.whole(&app, &choices, usage), Some(&head.id))
    };
    answers.respond(write).await
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

fn choices(
    app: &App,
    params: &CheckedParams,
    format: &AnswerFormat,
    answers: &[Answer],
) -> (Vec<Choice>, UsageReport) {
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
    (choices, usage)
}

pub(super) fn logprobs(
    tokenizer: Option<&Tokenizer>,
    params: &CheckedParams,
    tokens: &[Token],
) -> Option<ChatLogprobs> {
    params.logprobs.map(|_| ChatLogprobs::of(tokenizer, tokens, params))
}
