//! Conversations: the one form that chats, responses and messages have in common.
//!
//! Each API reads its own body into a [`ChatRequest`] and writes what comes of it in its own form;
//! from the prompt to the parts of the answer there is one way, which is here.

mod answer;
mod messages;
mod tools;

use std::sync::Arc;

use aquila_text::{CheckedParams, GrammarSpec, Tokenizer, ToolCallFormat};
use serde_json::{Map, Value};

pub(crate) use self::answer::{AnswerFormat, AnswerParts, Call, ChatAnswer};
pub(crate) use self::messages::{as_object, joined, messages};
pub(crate) use self::tools::{Tool, ToolChoice, Tools};
use crate::constraint::Constraint;
use crate::generation::GenerationSettings;
use crate::intake::Received;
use crate::refusal::Refusal;
use crate::state::App;
use crate::submit::Submission;

/// A conversation that is to go on, whichever API it came by.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub settings: GenerationSettings,
    /// As the chat template wants them.
    pub messages: Vec<Value>,
    pub tools: Tools,
    /// Further variables of the chat template.
    pub template_arguments: Map<String, Value>,
    /// Whether reasoning is told from the answer.
    pub separate_reasoning: bool,
    /// Whether it is streamed as it comes.
    pub stream_reasoning: bool,
}

/// A conversation that is ready to be submitted.
pub(crate) struct PreparedChat {
    /// The request's name.
    pub id: String,
    pub submissions: Vec<Submission>,
    pub params: CheckedParams,
    pub format: AnswerFormat,
}

impl App {
    /// Checks a conversation and renders its prompt; the messages came as `param`. `prefix` is that
    /// of the request's name, where it has none.
    pub async fn prepare_chat(
        &self,
        body: Arc<Received>,
        mut chat: ChatRequest,
        param: &'static str,
        prefix: &str,
    ) -> Result<PreparedChat, Refusal> {
        self.check_model(chat.settings.model.as_deref())?;
        let calls = self.tool_calls;
        let find = move |_: &[u8]| {
            chat.settings.constraint = constraint(&mut chat, calls)?;
            Ok(chat)
        };
        let mut chat = body.work(find).await?;
        let reasoning = self.settings.reasoning.filter(|_| chat.separate_reasoning);
        let callable = chat.tools.callable();
        let tools = (!callable.is_empty()).then_some((calls, callable));
        let tokenizer = self.tokenizer(param)?.clone();
        // Marks that are special tokens must show in the text, or they would be lost.
        let marks = tools.iter().map(|(calls, _)| calls.marker());
        let marks = marks.chain(reasoning.iter().flat_map(|_| ["<think>", "</think>"]));
        let shown: Vec<u32> = marks.filter_map(|mark| tokenizer.token_id(mark)).collect();
        let prompt = chat.prompt(self, &body, tokenizer, param).await?;
        if let (Some(format), Some(constraint)) = (reasoning, &mut chat.settings.constraint) {
            constraint.spec = format.before(&prompt.end, constraint.spec.clone());
        }
        let reasoning = reasoning.map(|format| format.begins_in(&prompt.end));
        let context = self.generator.engine().config().context_length;
        let mut params = chat.settings.check(self, Some(context), param).await?;
        params.shown_special_tokens = shown.clone();
        let prompt = prompt.tokens;
        drop(body);

        let id = chat.settings.name.unwrap_or_else(|| self.identifiers.next(prefix));
        let mut submissions = vec![Submission::new(id.clone(), prompt, params.clone())];
        chat.settings.bootstrap.assign(self, &mut submissions)?;
        let format = AnswerFormat {
            reasoning,
            stream_reasoning: chat.stream_reasoning,
            tools,
            parallel: chat.tools.parallel,
            shown_special_tokens: shown,
        };
        Ok(PreparedChat { id, submissions, params, format })
    }
}

/// A rendered prompt.
pub(crate) struct RenderedPrompt {
    pub tokens: Vec<u32>,
    /// The last characters of its text, which say whether reasoning has begun.
    pub end: String,
}

impl ChatRequest {
    /// Renders the prompt, of the messages and of what the tools say.
    pub async fn prompt(
        &self,
        app: &App,
        body: &Arc<Received>,
        tokenizer: Tokenizer,
        param: &'static str,
    ) -> Result<RenderedPrompt, Refusal> {
        let longest_text = app.longest_text;
        let messages = Value::Array(self.messages.clone());
        let (tools, arguments) = (self.tools.for_template(), self.template_arguments.clone());
        let rendered = body.work(move |_| {
            let template = tokenizer.chat_template().ok_or_else(|| {
                Refusal::param(param, "the model has no chat template: use /v1/completions")
            })?;
            let text = template
                .render(&messages, tools.as_ref(), true, &arguments)
                .map_err(|error| Refusal::param(param, error))?;
            // The template has written what the tokenizer would put around a text.
            let tokens = longest_text.encode(&tokenizer, &text, false, param)?;
            let end = text.char_indices().rev().nth(PROMPT_END).map_or(0, |(at, _)| at);
            Ok(RenderedPrompt { tokens, end: text[end..].to_owned() })
        });
        rendered.await
    }
}

/// Characters of a prompt's end that are looked at.
const PROMPT_END: usize = 64;

/// Tells the template how much the model is to think, as OpenAI's clients say it: `none` is not at
/// all.
pub(crate) fn set_effort(effort: Option<&str>, template_arguments: &mut Map<String, Value>) {
    let Some(effort) = effort else { return };
    template_arguments.entry("reasoning_effort").or_insert(effort.into());
    template_arguments.entry("enable_thinking").or_insert((effort != "none").into());
}

/// What the answer must be: what the request says, or what its tools do.
fn constraint(
    chat: &mut ChatRequest,
    calls: ToolCallFormat,
) -> Result<Option<Constraint>, Refusal> {
    let given = chat.settings.constraint.take();
    let schema = match given.as_ref().map(|given| &given.spec) {
        Some(GrammarSpec::JsonSchema(schema)) => Some(schema),
        _ => None,
    };
    let of_tools = chat.tools.constraint(calls, schema)?;
    let (is_schema, forced) = (schema.is_some(), chat.tools.is_forced());
    match given {
        Some(given) if !is_schema && !chat.tools.callable().is_empty() && !forced => {
            // A grammar of the text leaves no room for calls, which the model may want to make.
            let why = "cannot be combined with `tools`, unless `tool_choice` is `none`";
            Err(Refusal::param(given.field, why))
        }
        given => Ok(of_tools.or(given)),
    }
}
