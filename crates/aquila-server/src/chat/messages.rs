//! Messages of OpenAI's chats as chat templates want them: a role, a text, and calls with their
//! arguments as objects.

use serde_json::{Map, Value};

use crate::refusal::Refusal;

/// Messages as templates want them.
pub(crate) fn messages(messages: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    if messages.is_empty() {
        return Err(Refusal::param("messages", "must have at least one message"));
    }
    let plain = messages.into_iter().enumerate().map(|(index, message)| {
        let at = format!("messages[{index}]");
        match message {
            Value::Object(message) => plain(&at, message).map(Value::Object),
            _ => Err(Refusal::param(at, "must be an object with `role` and `content`")),
        }
    });
    plain.collect()
}

fn plain(at: &str, mut message: Map<String, Value>) -> Result<Map<String, Value>, Refusal> {
    let role = message.get("role").and_then(Value::as_str).filter(|role| !role.is_empty());
    let role = role
        .ok_or_else(|| Refusal::param(format!("{at}.role"), "must be a string such as `user`"))?;
    // OpenAI's newer name, which no template knows.
    let role = if role == "developer" { "system" } else { role };
    message.insert("role".into(), role.into());
    message.retain(|key, value| key != "tool_calls" || !value.is_null());
    let content = match message.get_mut("content").map(Value::take) {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => joined(&format!("{at}.content"), &parts, &["text"])?,
        None | Some(Value::Null) if message.contains_key("tool_calls") => String::new(),
        _ => {
            let why = "must be a string, or a list of parts of type `text`";
            return Err(Refusal::param(format!("{at}.content"), why));
        }
    };
    message.insert("content".into(), content.into());
    if let Some(calls) = message.get_mut("tool_calls") {
        let at = format!("{at}.tool_calls");
        let Value::Array(calls) = calls else {
            return Err(Refusal::param(at, "must be a list of calls"));
        };
        for (number, call) in calls.iter_mut().enumerate() {
            plain_call(&format!("{at}[{number}]"), call)?;
        }
    }
    Ok(message)
}

/// A call with its arguments as an object, where they are one.
fn plain_call(at: &str, call: &mut Value) -> Result<(), Refusal> {
    let function = call.get_mut("function").and_then(Value::as_object_mut);
    let function = function.filter(|function| function.get("name").is_some_and(Value::is_string));
    let function = function.ok_or_else(|| {
        Refusal::param(format!("{at}.function"), "must be an object with a `name` and `arguments`")
    })?;
    let arguments = function.remove("arguments").unwrap_or(Value::Null);
    function.insert("arguments".into(), as_object(arguments));
    Ok(())
}

/// Arguments as an object where their text is one; a model may have written anything.
pub(crate) fn as_object(arguments: Value) -> Value {
    match arguments {
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(object @ Value::Object(_)) => object,
            _ if text.trim().is_empty() => Value::Object(Map::new()),
            _ => Value::String(text),
        },
        Value::Null => Value::Object(Map::new()),
        arguments => arguments,
    }
}

/// The texts of a content in parts of these kinds, each on lines of its own.
pub(crate) fn joined(at: &str, parts: &[Value], kinds: &[&str]) -> Result<String, Refusal> {
    let texts = parts.iter().enumerate().map(|(index, part)| {
        let wrong = |why: String| Refusal::param(format!("{at}[{index}]"), why);
        let text = part.get("text").and_then(Value::as_str);
        match part.get("type").and_then(Value::as_str) {
            Some(kind) if kinds.contains(&kind) => {
                text.ok_or_else(|| wrong("must have a `text`".into()))
            }
            Some("refusal") => {
                let text = part.get("refusal").and_then(Value::as_str);
                text.ok_or_else(|| wrong("must have a `refusal`".into()))
            }
            Some(kind) => {
                Err(wrong(format!("`{kind}` is not supported: the model reads text alone")))
            }
            None => Err(wrong(format!("must have a `type`, such as `{}`", kinds[0]))),
        }
    });
    Ok(texts.collect::<Result<Vec<&str>, _>>()?.join("\n"))
}
