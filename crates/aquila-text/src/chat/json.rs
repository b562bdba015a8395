//! `tojson` as transformers defines it: Python's `json.dumps`, with non-ASCII text left readable.
//!
//! The invariant: the bytes are those of `json.dumps`, since a model was trained on them.

use minijinja::value::{Kwargs, Rest};
use minijinja::{Error, ErrorKind, Value as JinjaValue};
use serde_json::Value;

struct Style {
    ensure_ascii: bool,
    indent: Option<String>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    value: &JinjaValue,
    placed: Rest<JinjaValue>,
    named: Kwargs,
) -> Result<String, Error> {
    const ARGUMENTS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if placed.len() > ARGUMENTS.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut arguments = ARGUMENTS.iter().enumerate().map(|(place, name)| {
        let given: Option<JinjaValue> = match placed.get(place) {
            Some(given) => Some(given.clone()),
            None => named.get(name)?,
        };
        Ok::<_, Error>(given.filter(|given| !given.is_none()))
    });
    let mut argument = || arguments.next().unwrap_or(Ok(None));
    let ensure_ascii = argument()?.is_some_and(|flag| flag.is_true());
    let indent = argument()?;
    let separators = argument()?;
    let sort_keys = argument()?.is_some_and(|flag| flag.is_true());
    named.assert_all_used()?;

    let indent = match indent {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(width) => Some(" ".repeat(usize::try_from(i64::try_from(width)?).unwrap_or(0))),
    };
    let (between_items, after_key) = match separators {
        Some(pair) => {
            (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style { ensure_ascii, indent, between_items, after_key, sort_keys };
    if value.is_undefined() {
        let reason = "an undefined value cannot be written as JSON";
        return Err(Error::new(ErrorKind::UndefinedError, reason));
    }
    let value = serde_json::to_value(value).map_err(|e| {
        Error::new(ErrorKind::InvalidOperation, format!("a value cannot be written as JSON: {e}"))
    })?;
    let mut out = String::new();
    style.write(&value, 0, &mut out);
    Ok(out)
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() => out.push_str(&python_float(float)),
                _ => out.push_str(&number.to_string()),
            },
            Value::String(text) => self.write_string(text, out),
            Value::Array(items) if items.is_empty() => out.push_str("[]"),
            Value::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.begin_item(i, depth + 1, out);
                    self.write(item, depth + 1, out);
                }
                self.new_line(depth, out);
                out.push(']');
            }
            Value::Object(fields) if fields.is_empty() => out.push_str("{}"),
            Value::Object(fields) => {
                let mut fields: Vec<(&String, &Value)> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by_key(|(key, _)| *key);
                }
                out.push('{');
                for (i, (key, field)) in fields.into_iter().enumerate() {
                    self.begin_item(i, depth + 1, out);
                    self.write_string(key, out);
                    out.push_str(&self.after_key);
                    self.write(field, depth + 1, out);
                }
                self.new_line(depth, out);
                out.push('}');
            }
        }
    }

    fn begin_item(&self, place: usize, depth: usize, out: &mut String) {
        if place > 0 {
            out.push_str(&self.between_items);
        }
        self.new_line(depth, out);
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A float as Python writes it: `1e-05` and `1e+16`, where Rust writes `1e-5` and `1e16`.
fn python_float(float: f64) -> String {
    let text = format!("{float:?}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    match exponent.strip_prefix('-') {
        Some(digits) => format!("{mantissa}e-{digits:0>2}"),
        None => format!("{mantissa}e+{exponent:0>2}"),
    }
}
