//! What templates borrow from Python and from transformers: methods, and the `generation` tag.
//!
//! The invariant: only what reads a value exists here. Templates run in an immutable sandbox, so
//! `append`, `update` and their like stay unknown.

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// A method of a Python string, list or dictionary.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => match string_method(text, name, args) {
            Some(result) => result,
            None => pycompat::unknown_method_callback(state, value, name, args),
        },
        (ValueKind::Seq, _) if name == "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from).ok_or_else(|| refused("the list has no such item"))
        }
        (ValueKind::Seq | ValueKind::Map, _) if name == "copy" => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// String methods that the compatibility layer lacks.
fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let result = match name {
        "removeprefix" => from_args(args)
            .map(|(prefix,): (&str,)| Value::from(text.strip_prefix(prefix).unwrap_or(text))),
        "removesuffix" => from_args(args)
            .map(|(suffix,): (&str,)| Value::from(text.strip_suffix(suffix).unwrap_or(text))),
        "partition" => from_args(args).map(|(by,): (&str,)| match text.split_once(by) {
            Some((before, after)) => tuple([before, by, after]),
            None => tuple([text, "", ""]),
        }),
        "rpartition" => from_args(args).map(|(by,): (&str,)| match text.rsplit_once(by) {
            Some((before, after)) => tuple([before, by, after]),
            None => tuple(["", "", text]),
        }),
        "rsplit" => rsplit(text, args),
        "index" => from_args(args).and_then(|(part,): (&str,)| match text.find(part) {
            Some(at) => Ok(Value::from(text[..at].chars().count())),
            None => Err(refused("substring not found")),
        }),
        "casefold" => from_args(args).map(|()| Value::from(text.to_lowercase())),
        "zfill" => from_args(args).map(|(width,): (usize,)| {
            let (sign, digits) = match text.strip_prefix(['-', '+']) {
                Some(digits) => (&text[..1], digits),
                None => ("", text),
            };
            let zeros = width.saturating_sub(text.chars().count());
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }),
        _ => return None,
    };
    Some(result)
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (by, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match by {
        Some("") => return Err(refused("empty separator")),
        Some(by) => text.rsplitn(most.saturating_add(1), by).collect(),
        None => {
            let mut parts = Vec::new();
            let mut rest = text.trim_end();
            while !rest.is_empty() && parts.len() < most {
                let word = rest.rsplit(char::is_whitespace).next().unwrap_or(rest);
                parts.push(word);
                rest = rest[..rest.len() - word.len()].trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

fn tuple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn refused(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// The `length` filter; an undefined value has none of anything.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// Jinja2's `sequence` asks for a length and items, which strings and dictionaries have too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// Whether a loop over the value would run, as Python sees it: undefined is an empty loop.
pub(super) fn is_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined) || is_sequence(value)
}

/// The template in the language of the engine: line ends as Jinja2 reads them, and without
/// `{% generation %}`, the tag of transformers that marks an assistant's words for training. Its
/// blocks become blocks that change nothing, with the same whitespace control.
pub(super) fn as_plain_jinja(template: &str) -> String {
    let template = template.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(template.len());
    let mut rest = template.as_str();
    while let Some(open) = rest.find("{%") {
        let inside = &rest[open + 2..];
        let Some(close) = inside.find("%}") else { break };
        let tag = &inside[..close];
        let word = tag.trim_matches(['-', '+']).trim();
        let plain = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..open + 2]);
        match plain {
            Some(plain) => {
                out.push_str(&tag.replace(word, plain));
                rest = &inside[close..];
            }
            None => rest = inside,
        }
    }
    out.push_str(rest);
    out
}
