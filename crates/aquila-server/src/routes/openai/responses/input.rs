//! The items of a response's input, as messages of a conversation.

use serde_json::{Map, Value, json};

use crate::chat::{as_object, joined};
use crate::refusal::Refusal;

/// Kinds of content that are text.
const TEXTS: &[&str] = &["input_text", "output_text", "text"];

/// The messages of an input, after the instructions if there are any.
pub(super) fn messages(instructions: Option<&str>, input: Value) -> Result<Vec<Value>, Refusal> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = instructions {
        conversation.add(json!({ "role": "system", "content": instructions }));
    }
    match input {
        Value::String(text) => conversation.add(json!({ "role": "user", "content": text })),
        Value::Array(items) if !items.is_empty() => {
            for (index, item) in items.into_iter().enumerate() {
                let at = format!("input[{index}]");
                match item {
                    Value::Object(item) => conversation.item(&at, item)?,
                    _ => return Err(Refusal::param(at, "must be an object with a `type`")),
                }
            }
        }
        _ => return Err(Refusal::param("input", "must be a string or a list of items")),
    }
    Ok(conversation.messages)
}

/// Messages, with calls joined to the assistant's message that they belong to.
#[derive(Default)]
struct Conversation {
    messages: Vec<Value>,
    /// Reasoning that belongs to the assistant's next message.
    reasoning: Option<String>,
}

impl Conversation {
    fn add(&mut self, message: Value) {
        self.messages.push(message);
    }

    fn item(&mut self, at: &str, item: Map<String, Value>) -> Result<(), Refusal> {
        let kind = item.get("type").and_then(Value::as_str);
        match kind {
            Some("message") | None if item.contains_key("role") => self.message(at, &item),
            Some("function_call") => self.call(at, &item),
            Some("function_call_output") => {
                let output = match item.get("output") {
                    Some(Value::String(text)) => text.clone(),
                    Some(Value::Array(parts)) => joined(&format!("{at}.output"), parts, TEXTS)?,
                    _ => {
                        let why = "must be a string, or a list of parts of type `input_text`";
                        return Err(Refusal::param(format!("{at}.output"), why));
                    }
                };
                let id = text(at, &item, "call_id")?;
                self.add(json!({ "role": "tool", "tool_call_id": id, "content": output }));
                Ok(())
            }
            Some("reasoning") => {
                let mut texts = Vec::new();
                for key in ["content", "summary"] {
                    let parts = item.get(key).and_then(Value::as_array);
                    let parts = parts.into_iter().flatten();
                    texts.extend(parts.filter_map(|part| part.get("text")?.as_str()));
                    if !texts.is_empty() {
                        break;
                    }
                }
                self.reasoning = Some(texts.join("\n")).filter(|text| !text.is_empty());
                Ok(())
            }
            Some("item_reference") => {
                let why = "responses are not stored: send the item itself";
                Err(Refusal::param(format!("{at}.type"), why))
            }
            Some(kind) => {
                let why = format!("items of type `{kind}` are not supported");
                Err(Refusal::param(format!("{at}.type"), why))
            }
            None => Err(Refusal::param(format!("{at}.type"), "is required")),
        }
    }

    fn message(&mut self, at: &str, item: &Map<String, Value>) -> Result<(), Refusal> {
        let role = match text(at, item, "role")? {
            "developer" => "system",
            role @ ("user" | "assistant" | "system" | "tool") => role,
            _ => {
                let why = "must be `user`, `assistant`, `system` or `developer`";
                return Err(Refusal::param(format!("{at}.role"), why));
            }
        };
        let content = match item.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => joined(&format!("{at}.content"), parts, TEXTS)?,
            _ => {
                let why = "must be a string, or a list of parts of type `input_text`";
                return Err(Refusal::param(format!("{at}.content"), why));
            }
        };
        let mut message = json!({ "role": role, "content": content });
        if role == "assistant"
            && let Some(reasoning) = self.reasoning.take()
        {
            message["reasoning_content"] = reasoning.into();
        }
        self.add(message);
        Ok(())
    }

    fn call(&mut self, at: &str, item: &Map<String, Value>) -> Result<(), Refusal> {
        let arguments = as_object(item.get("arguments").cloned().unwrap_or_default());
        let call = json!({
            "id": text(at, item, "call_id")?,
            "type": "function",
            "function": { "name": text(at, item, "name")?, "arguments": arguments },
        });
        let is_assistant = |message: &&mut Value| message["role"] == "assistant";
        if let Some(message) = self.messages.last_mut().filter(is_assistant) {
            match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => message["tool_calls"] = json!([call]),
            }
            return Ok(());
        }
        let mut message = json!({ "role": "assistant", "content": "", "tool_calls": [call] });
        if let Some(reasoning) = self.reasoning.take() {
            message["reasoning_content"] = reasoning.into();
        }
        self.add(message);
        Ok(())
    }
}

fn text<'a>(at: &str, item: &'a Map<String, Value>, key: &str) -> Result<&'a str, Refusal> {
    let text = item.get(key).and_then(Value::as_str);
    text.ok_or_else(|| Refusal::param(format!("{at}.{key}"), "must be a string"))
}
