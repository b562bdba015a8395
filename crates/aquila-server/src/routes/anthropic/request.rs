//! A body of Anthropic's messages, as a conversation.

use serde_json::{Map, Value, json};

use crate::chat::{ChatRequest, Tool, ToolChoice, Tools, joined};
use crate::constraint::{Constraint, response_format};
use crate::fields::Fields;
use crate::generation::GenerationSettings;
use crate::refusal::Refusal;
use crate::unserved::{EVERYWHERE, MESSAGES, WITHOUT_EFFECT};

/// Takes a body; one whose tokens are only counted needs no `max_tokens`.
pub(super) fn take(mut fields: Fields, is_counted: bool) -> Result<ChatRequest, Refusal> {
    fields.refuse(EVERYWHERE)?;
    fields.refuse(MESSAGES)?;
    let mut messages = Vec::new();
    match fields.take::<Value>("system")? {
        None => {}
        Some(Value::String(text)) => messages.push(json!({ "role": "system", "content": text })),
        Some(Value::Array(blocks)) => {
            let text = joined("system", &blocks, &["text"])?;
            messages.push(json!({ "role": "system", "content": text }));
        }
        Some(_) => {
            let why = "must be a string, or a list of blocks of type `text`";
            return Err(Refusal::param("system", why));
        }
    }
    let given: Vec<Value> = fields.require("messages")?;
    if given.is_empty() {
        return Err(Refusal::param("messages", "must have at least one message"));
    }
    for (index, message) in given.iter().enumerate() {
        add(&format!("messages[{index}]"), message, &mut messages)?;
    }
    let mut params = fields.sampling()?;
    fields.set(&mut params, "stop_sequences", "stop")?;
    fields.set(&mut params, "max_tokens", "max_tokens")?;
    match params.max_tokens {
        None if !is_counted => return Err(Refusal::param("max_tokens", "is required")),
        Some(0) => return Err(Refusal::param("max_tokens", "must be at least 1")),
        _ => {}
    }
    // A message is one answer, whatever the server's default.
    params.n = Some(1);
    let tools = tools(&mut fields)?;
    let mut template_arguments: Map<String, Value> =
        fields.take("chat_template_kwargs")?.unwrap_or_default();
    if let Some(thinking) = fields.take::<Map<String, Value>>("thinking")? {
        let thinks = match thinking.get("type").and_then(Value::as_str) {
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            _ => return Err(Refusal::param("thinking.type", "must be `enabled` or `disabled`")),
        };
        template_arguments.entry("enable_thinking").or_insert(thinks.into());
    }
    let settings = GenerationSettings {
        model: fields.take("model")?,
        stream: fields.flag("stream")?,
        speculation: fields.speculation()?,
        priority: fields.take("priority")?,
        name: fields.name()?,
        params,
        constraint: constraint(&mut fields)?,
        ..GenerationSettings::default()
    };
    fields.finish("", WITHOUT_EFFECT)?;
    Ok(ChatRequest {
        settings,
        messages,
        tools,
        template_arguments,
        separate_reasoning: true,
        stream_reasoning: true,
    })
}

/// The format of the answer, in its two places.
fn constraint(fields: &mut Fields) -> Result<Option<Constraint>, Refusal> {
    let config: Option<Map<String, Value>> = fields.take("output_config")?;
    let mut config = Fields::of(config.unwrap_or_default());
    let inner: Option<Map<String, Value>> = config.take("format")?;
    config.finish("output_config.", &[])?;
    let outer: Option<Map<String, Value>> = fields.take("output_format")?;
    let (field, format) = match (inner, outer) {
        (Some(format), _) => ("output_config.format", format),
        (None, Some(format)) => ("output_format", format),
        (None, None) => return Ok(None),
    };
    Ok(response_format(field, format)?.map(|spec| Constraint { field, spec }))
}

/// Adds a message of Anthropic's: one for its text, and one for each result of a tool.
fn add(at: &str, message: &Value, messages: &mut Vec<Value>) -> Result<(), Refusal> {
    let role = match message.get("role").and_then(Value::as_str) {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err(Refusal::param(format!("{at}.role"), "must be `user` or `assistant`")),
    };
    let blocks = match message.get("content") {
        Some(Value::String(text)) => {
            messages.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => {
            let why = "must be a string or a list of blocks";
            return Err(Refusal::param(format!("{at}.content"), why));
        }
    };
    let mut texts = Vec::new();
    let mut reasoning = Vec::new();
    let mut calls = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{index}]");
        let text = |key: &str| {
            let text = block.get(key).and_then(Value::as_str);
            text.ok_or_else(|| Refusal::param(format!("{at}.{key}"), "must be a string"))
        };
        match (block.get("type").and_then(Value::as_str), role) {
            (Some("text"), _) => texts.push(text("text")?),
            (Some("thinking"), "assistant") => reasoning.push(text("thinking")?),
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => {
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                calls.push(json!({
                    "id": text("id")?,
                    "type": "function",
                    "function": { "name": text("name")?, "arguments": input },
                }));
            }
            (Some("tool_result"), "user") => {
                let content = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(Value::String(text)) => text.clone(),
                    Some(Value::Array(parts)) => {
                        joined(&format!("{at}.content"), parts, &["text"])?
                    }
                    Some(_) => {
                        let why = "must be a string or a list of blocks of type `text`";
                        return Err(Refusal::param(format!("{at}.content"), why));
                    }
                };
                let failed = block.get("is_error").and_then(Value::as_bool) == Some(true);
                let content = if failed { format!("Error: {content}") } else { content };
                let id = text("tool_use_id")?;
                messages.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            (Some(kind), role) => {
                let why = format!(
                    "blocks of type `{kind}` are not supported in messages of role `{role}`: the \
                     model reads text alone"
                );
                return Err(Refusal::param(at, why));
            }
            (None, _) => return Err(Refusal::param(at, "must have a `type`, such as `text`")),
        }
    }
    if texts.is_empty() && calls.is_empty() && role == "user" && !blocks.is_empty() {
        // It held results of tools alone.
        return Ok(());
    }
    let mut message = json!({ "role": role, "content": texts.join("\n") });
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.join("\n").into();
    }
    messages.push(message);
    Ok(())
}

/// The tools, in Anthropic's form.
fn tools(fields: &mut Fields) -> Result<Tools, Refusal> {
    let list: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let list = list.iter().enumerate().map(|(index, tool)| {
        let at = format!("tools[{index}]");
        if let Some(kind) = tool.get("type").filter(|kind| !kind.is_null() && *kind != "custom") {
            let why = format!("{kind} is not supported: tools must have an `input_schema`");
            return Err(Refusal::param(format!("{at}.type"), why));
        }
        let schema = tool.get("input_schema").filter(|schema| schema.is_object());
        let schema = schema.ok_or_else(|| {
            Refusal::param(format!("{at}.input_schema"), "must be a JSON schema of an object")
        })?;
        let field = |name| tool.get(name);
        Tool::new(&at, field("name"), field("description"), Some(schema), field("strict"))
    });
    let list = list.collect::<Result<Vec<Tool>, Refusal>>()?;
    let choice: Option<Map<String, Value>> = fields.take("tool_choice")?;
    let choice = choice.unwrap_or_default();
    let name = choice.get("name").and_then(Value::as_str);
    let kind = choice.get("type").map(|kind| kind.as_str().unwrap_or_default());
    let parallel = choice.get("disable_parallel_tool_use") != Some(&Value::Bool(true));
    let choice = match (kind, name) {
        (None | Some("auto"), _) => ToolChoice::Auto,
        (Some("any"), _) => ToolChoice::Required,
        (Some("none"), _) => ToolChoice::None,
        (Some("tool"), Some(name)) => ToolChoice::Named(name.into()),
        _ => {
            let why = "its `type` must be `auto`, `any`, `none`, or `tool` with a `name`";
            return Err(Refusal::param("tool_choice", why));
        }
    };
    Tools { list, choice, parallel }.check("tool_choice")
}
