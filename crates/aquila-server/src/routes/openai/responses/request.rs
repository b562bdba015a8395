//! A body of `/v1/responses`, as a conversation and what its answer says of it.

use serde_json::{Map, Value, json};

use super::input;
use crate::chat::{ChatRequest, Tool, ToolChoice, Tools};
use crate::constraint::{Constraint, response_format};
use crate::disaggregation::Bootstrap;
use crate::fields::Fields;
use crate::generation::GenerationSettings;
use crate::refusal::Refusal;
use crate::unserved::{EVERYWHERE, RESPONSES, WITHOUT_EFFECT};

/// What is stored nowhere cannot be referred to.
const NOT_STORED: &str =
    "responses are not stored: send the whole conversation as `input` with `store` false";

/// Pairs of a response's metadata, and characters of a key and of a value, as OpenAI has them.
const METADATA: (usize, usize, usize) = (16, 64, 512);
/// Characters of a name of OpenAI's for users and caches.
const LONGEST_NAME: usize = 512;
/// Bytes of the fields that a response repeats, in each of its states.
const MOST_ECHOED: usize = 1 << 20;

/// A body, checked.
pub(super) struct Body {
    pub chat: ChatRequest,
    /// The fields that a response repeats, as the JSON of an object: values take many times that.
    pub echo: String,
}

impl Body {
    pub fn take(mut fields: Fields) -> Result<Self, Refusal> {
        fields.refuse(EVERYWHERE)?;
        for name in ["previous_response_id", "conversation", "prompt"] {
            if fields.value(name).is_some() {
                return Err(Refusal::param(name, NOT_STORED));
            }
        }
        fields.refuse(RESPONSES)?;
        let instructions: Option<String> = fields.take("instructions")?;
        let messages = input::messages(instructions.as_deref(), fields.require("input")?)?;
        let mut params = fields.sampling()?;
        fields.set(&mut params, "stop", "stop")?;
        fields.set(&mut params, "max_output_tokens", "max_tokens")?;
        if params.max_tokens == Some(0) {
            return Err(Refusal::param("max_output_tokens", "must be at least 1"));
        }
        fields.set(&mut params, "top_logprobs", "top_logprobs")?;
        params.logprobs = Some(includes_logprobs(&mut fields)?);
        if params.logprobs != Some(true) {
            params.top_logprobs = None;
        }
        // A response is one answer, whatever the server's default.
        params.n = Some(1);
        let (tools, tools_echo) = tools(&mut fields)?;
        let tool_choice = tool_choice_echo(&tools.choice);
        let (format, text) = text(&mut fields)?;
        let mut template_arguments: Map<String, Value> =
            fields.take("chat_template_kwargs")?.unwrap_or_default();
        let reasoning = reasoning(&mut fields, &mut template_arguments)?;
        let sampled = |value: Option<f32>, usual: f32| json!(value.unwrap_or(usual));
        let echo = json!({
            "instructions": instructions,
            "max_output_tokens": params.max_tokens,
            "temperature": sampled(params.temperature, 1.0),
            "top_p": sampled(params.top_p, 1.0),
            "presence_penalty": sampled(params.presence_penalty, 0.0),
            "frequency_penalty": sampled(params.frequency_penalty, 0.0),
            "top_logprobs": params.top_logprobs.unwrap_or(0),
            "tools": tools_echo,
            "tool_choice": tool_choice,
            "parallel_tool_calls": tools.parallel,
            "text": text,
            "reasoning": reasoning,
            "metadata": metadata(&mut fields)?,
            "safety_identifier": name(&mut fields, "safety_identifier")?,
            "prompt_cache_key": name(&mut fields, "prompt_cache_key")?,
            "user": name(&mut fields, "user")?,
            "truncation": "disabled",
            "previous_response_id": null,
            "max_tool_calls": null,
            "store": false,
            "background": false,
            "service_tier": "default",
        });
        let echo = echo.to_string();
        let bytes = echo.len();
        if bytes > MOST_ECHOED {
            return Err(Refusal::invalid(format!(
                "a response repeats its request's `tools`, `text` and `instructions`, which take \
                 {bytes} bytes, but at most {MOST_ECHOED} are repeated"
            )));
        }
        let stream = fields.flag("stream")?;
        let _: Option<Map<String, Value>> = fields.take("stream_options")?;
        let settings = GenerationSettings {
            model: fields.take("model")?,
            stream,
            show_special_tokens: !fields.take("skip_special_tokens")?.unwrap_or(true),
            speculation: fields.speculation()?,
            draft_trees: false,
            priority: fields.take("priority")?,
            name: fields.name()?,
            params,
            constraint: format,
            bootstrap: Bootstrap::take(&mut fields)?,
        };
        fields.finish("", WITHOUT_EFFECT)?;
        let chat = ChatRequest {
            settings,
            messages,
            tools,
            template_arguments,
            separate_reasoning: true,
            stream_reasoning: true,
        };
        Ok(Self { chat, echo })
    }
}

fn metadata(fields: &mut Fields) -> Result<Map<String, Value>, Refusal> {
    let metadata: Map<String, Value> = fields.take("metadata")?.unwrap_or_default();
    let (pairs, key, value) = METADATA;
    let characters = |value: &Value| match value {
        Value::String(text) => text.chars().count(),
        other => other.to_string().chars().count(),
    };
    let fits = |(k, v): (&String, &Value)| k.chars().count() <= key && characters(v) <= value;
    if metadata.len() > pairs || !metadata.iter().all(fits) {
        let why = format!(
            "has at most {pairs} pairs, with keys of {key} characters and values of {value}"
        );
        return Err(Refusal::param("metadata", why));
    }
    Ok(metadata)
}

fn name(fields: &mut Fields, field: &'static str) -> Result<Option<String>, Refusal> {
    let name: Option<String> = fields.take(field)?;
    if name.as_ref().is_some_and(|name| name.chars().count() > LONGEST_NAME) {
        let why = format!("must have at most {LONGEST_NAME} characters");
        return Err(Refusal::param(field, why));
    }
    Ok(name)
}

/// Whether log-probabilities are asked for; other inclusions need tools that are not here.
fn includes_logprobs(fields: &mut Fields) -> Result<bool, Refusal> {
    let include: Vec<String> = fields.take("include")?.unwrap_or_default();
    let mut logprobs = false;
    for wanted in include {
        match wanted.as_str() {
            "message.output_text.logprobs" => logprobs = true,
            // Reasoning comes as it is.
            "reasoning.encrypted_content" => {}
            _ => return Err(Refusal::param("include", format!("`{wanted}` is not supported"))),
        }
    }
    Ok(logprobs)
}

/// The tools, and how a response repeats them.
fn tools(fields: &mut Fields) -> Result<(Tools, Vec<Value>), Refusal> {
    let given: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let mut list = Vec::with_capacity(given.len());
    for (index, tool) in given.iter().enumerate() {
        let at = format!("tools[{index}]");
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(kind) => {
                let why = format!("`{kind}` is not supported: tools must be of type `function`");
                return Err(Refusal::param(format!("{at}.type"), why));
            }
            None => return Err(Refusal::param(format!("{at}.type"), "must be `function`")),
        }
        let field = |name| tool.get(name);
        let (name, parameters) = (field("name"), field("parameters"));
        list.push(Tool::new(&at, name, field("description"), parameters, field("strict"))?);
    }
    let echo = list.iter().zip(&given).map(|(tool, given)| {
        json!({
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": given.get("parameters").cloned().unwrap_or_default(),
            "strict": tool.strict,
        })
    });
    let echo = echo.collect();
    let choice = match fields.take::<Value>("tool_choice")? {
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => plain_choice(&choice)?,
        Some(choice) => match (choice["type"].as_str(), choice["name"].as_str()) {
            (Some("function"), Some(name)) => ToolChoice::Named(name.into()),
            (Some("allowed_tools"), None) => {
                let allowed = choice["tools"].as_array().into_iter().flatten();
                let allowed: Vec<&str> =
                    allowed.filter_map(|tool| tool.get("name")?.as_str()).collect();
                list.retain(|tool| allowed.contains(&tool.name.as_str()));
                plain_choice(choice["mode"].as_str().unwrap_or("auto"))?
            }
            _ => return Err(Refusal::param("tool_choice", CHOICES)),
        },
    };
    let parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
    Ok((Tools { list, choice, parallel }.check("tool_choice")?, echo))
}

const CHOICES: &str = "must be `none`, `auto`, `required`, {\"type\": \"function\", \"name\": …}, \
                       or {\"type\": \"allowed_tools\", \"mode\": …, \"tools\": […]}";

fn plain_choice(choice: &str) -> Result<ToolChoice, Refusal> {
    match choice {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => Err(Refusal::param("tool_choice", CHOICES)),
    }
}

fn tool_choice_echo(choice: &ToolChoice) -> Value {
    match choice {
        ToolChoice::None => "none".into(),
        ToolChoice::Auto => "auto".into(),
        ToolChoice::Required => "required".into(),
        ToolChoice::Named(name) => json!({ "type": "function", "name": name }),
    }
}

/// The format of the text, and how a response repeats it.
fn text(fields: &mut Fields) -> Result<(Option<Constraint>, Value), Refusal> {
    const FIELD: &str = "text.format";
    let text: Option<Map<String, Value>> = fields.take("text")?;
    let mut text = Fields::of(text.unwrap_or_default());
    let verbosity: Option<String> = text.take("verbosity")?;
    if verbosity.is_some_and(|verbosity| verbosity != "medium") {
        return Err(Refusal::param("text.verbosity", "is not supported by this server"));
    }
    let format: Option<Map<String, Value>> = text.take("format")?;
    text.finish("text.", &[])?;
    let Some(format) = format else {
        return Ok((None, json!({ "format": { "type": "text" } })));
    };
    let spec = response_format(FIELD, format.clone())?;
    let mut echo = format;
    if echo.get("type").is_some_and(|kind| kind == "json_schema") {
        for (key, usual) in
            [("description", Value::Null), ("strict", false.into()), ("name", "answer".into())]
        {
            echo.entry(key).or_insert(usual);
        }
    }
    let constraint = spec.map(|spec| Constraint { field: FIELD, spec });
    Ok((constraint, json!({ "format": echo })))
}

/// Whether the model thinks, and how a response repeats it.
fn reasoning(fields: &mut Fields, template: &mut Map<String, Value>) -> Result<Value, Refusal> {
    let reasoning: Option<Map<String, Value>> = fields.take("reasoning")?;
    let mut reasoning = Fields::of(reasoning.unwrap_or_default());
    let effort: Option<String> = reasoning.take("effort")?;
    let summary: Option<String> = reasoning.take("summary")?;
    reasoning.finish("reasoning.", &["generate_summary"])?;
    crate::chat::set_effort(effort.as_deref(), template);
    Ok(json!({ "effort": effort, "summary": summary }))
}
