//! What an answer must be, as the fields of OpenAI, SGLang and vLLM say it.

use std::fmt::Write;

use aquila_text::{GrammarSpec, MOST_LARK_BYTES, check_schema_bytes};
use serde_json::{Map, Value, json};

use crate::fields::Fields;
use crate::refusal::Refusal;

/// A grammar, and the field that it came in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Constraint {
    pub field: &'static str,
    pub spec: GrammarSpec,
}

impl Constraint {
    /// Takes SGLang's fields, which are settings of `/generate` too.
    pub fn take_sglang(fields: &mut Fields) -> Result<Option<Self>, Refusal> {
        let mut found = Found::default();
        if let Some(schema) = fields.take::<Value>("json_schema")? {
            found.add("json_schema", GrammarSpec::JsonSchema(schema_of("json_schema", schema)?))?;
        }
        if let Some(regex) = fields.take("regex")? {
            found.add("regex", GrammarSpec::Regex(regex))?;
        }
        if let Some(ebnf) = fields.take("ebnf")? {
            found.add("ebnf", GrammarSpec::Ebnf(ebnf))?;
        }
        if let Some(tag) = fields.take::<Value>("structural_tag")? {
            let tag = parsed("structural_tag", tag)?;
            found.add("structural_tag", structural_tag("structural_tag", tag)?)?;
        }
        Ok(found.0)
    }

    /// Takes the fields of OpenAI's completions: `response_format`, SGLang's and vLLM's.
    pub fn take(fields: &mut Fields) -> Result<Option<Self>, Refusal> {
        let mut found = Found(Self::take_sglang(fields)?);
        if let Some(format) = fields.take("response_format")?
            && let Some(spec) = response_format("response_format", format)?
        {
            found.add("response_format", spec)?;
        }
        if let Some(schema) = fields.take::<Value>("guided_json")? {
            found.add("guided_json", GrammarSpec::JsonSchema(schema_of("guided_json", schema)?))?;
        }
        if let Some(regex) = fields.take("guided_regex")? {
            found.add("guided_regex", GrammarSpec::Regex(regex))?;
        }
        if let Some(choices) = fields.take("guided_choice")? {
            found.add("guided_choice", choice("guided_choice", choices)?)?;
        }
        if let Some(grammar) = fields.take("guided_grammar")? {
            found.add("guided_grammar", GrammarSpec::Ebnf(grammar))?;
        }
        if let Some(outputs) = fields.take("structured_outputs")? {
            found.add_structured_outputs(outputs)?;
        }
        Ok(found.0)
    }
}

/// The one constraint of a body, if it has any.
#[derive(Default)]
struct Found(Option<Constraint>);

impl Found {
    fn add(&mut self, field: &'static str, spec: GrammarSpec) -> Result<(), Refusal> {
        match &self.0 {
            Some(other) if other.field == field => {
                Err(Refusal::param(field, "asks for two constraints at once"))
            }
            Some(other) => {
                let why = format!("cannot be combined with `{}`", other.field);
                Err(Refusal::param(field, why))
            }
            None => {
                self.0 = Some(Constraint { field, spec });
                Ok(())
            }
        }
    }

    /// vLLM's `structured_outputs`.
    fn add_structured_outputs(&mut self, outputs: Map<String, Value>) -> Result<(), Refusal> {
        const FIELD: &str = "structured_outputs";
        let mut outputs = Fields::of(outputs);
        let taken = (|| {
            if let Some(schema) = outputs.take::<Value>("json")? {
                self.add(FIELD, GrammarSpec::JsonSchema(schema_of("json", schema)?))?;
            }
            if let Some(regex) = outputs.take("regex")? {
                self.add(FIELD, GrammarSpec::Regex(regex))?;
            }
            if let Some(choices) = outputs.take("choice")? {
                self.add(FIELD, choice("choice", choices)?)?;
            }
            if let Some(grammar) = outputs.take("grammar")? {
                self.add(FIELD, GrammarSpec::Ebnf(grammar))?;
            }
            if outputs.flag("json_object")? {
                self.add(FIELD, json_object())?;
            }
            if let Some(tag) = outputs.take::<Value>("structural_tag")? {
                let tag = parsed("structural_tag", tag)?;
                self.add(FIELD, structural_tag("structural_tag", tag)?)?;
            }
            Ok(())
        })();
        taken.map_err(|refusal: Refusal| refusal.within(FIELD))?;
        outputs.finish("structured_outputs.", &[])
    }
}

/// A schema: an object or a boolean, or the text of one, as SGLang's clients send it. Whether answers
/// can be held to it is found out when it is compiled.
fn schema_of(field: &'static str, value: Value) -> Result<Value, Refusal> {
    match parsed(field, value)? {
        schema @ (Value::Object(_) | Value::Bool(_)) => match check_schema_bytes(&schema) {
            Ok(_) => Ok(schema),
            Err(why) => Err(Refusal::param(field, why)),
        },
        _ => Err(Refusal::param(field, "must be a JSON schema: an object, or the text of one")),
    }
}

/// Any JSON object.
fn json_object() -> GrammarSpec {
    GrammarSpec::JsonSchema(json!({ "type": "object" }))
}

/// Schemas as parts of one grammar are held to them; they came in `field`.
pub(crate) fn held_schemas(
    field: &'static str,
    schemas: Vec<Value>,
) -> Result<Vec<Value>, Refusal> {
    aquila_text::held_schemas(schemas).map_err(|why| Refusal::param(field, why))
}

/// JSON that may come as its text, whose values nobody has counted.
fn parsed(field: &'static str, value: Value) -> Result<Value, Refusal> {
    match value {
        Value::String(text) if text.len() > MOST_LARK_BYTES => {
            let bytes = text.len();
            Err(Refusal::param(
                field,
                format!("it has {bytes} bytes: at most {MOST_LARK_BYTES} are allowed"),
            ))
        }
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| Refusal::param(field, format!("is not JSON: {error}"))),
        value => Ok(value),
    }
}

fn choice(field: &'static str, choices: Vec<String>) -> Result<GrammarSpec, Refusal> {
    if choices.is_empty() {
        return Err(Refusal::param(field, "must have at least one string"));
    }
    Ok(GrammarSpec::Choice(choices))
}

/// The constraint of a `response_format`, or of the `format` of a response's text.
pub(crate) fn response_format(
    field: &'static str,
    format: Map<String, Value>,
) -> Result<Option<GrammarSpec>, Refusal> {
    let kind = format.get("type").and_then(Value::as_str).unwrap_or_default();
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(json_object())),
        "json_schema" => {
            // OpenAI's responses have the schema beside the type, its chats one level deeper.
            let inner = format.get("json_schema").unwrap_or(&Value::Null);
            let schema = inner.get("schema").or_else(|| format.get("schema"));
            match schema.filter(|schema| !schema.is_null()) {
                Some(schema) => {
                    Ok(Some(GrammarSpec::JsonSchema(schema_of(field, schema.clone())?)))
                }
                None if inner.is_object() || format.contains_key("name") => Ok(Some(json_object())),
                None => Err(Refusal::param(field, "`json_schema` must have a `schema`")),
            }
        }
        "structural_tag" => structural_tag(field, Value::Object(format)).map(Some),
        _ => {
            let why = "its `type` must be `text`, `json_object`, `json_schema` or `structural_tag`";
            Err(Refusal::param(field, why))
        }
    }
}

/// SGLang's structural tag: free text, in which each trigger begins one of the structures.
fn structural_tag(field: &'static str, tag: Value) -> Result<GrammarSpec, Refusal> {
    let text = |value: &Value, key: &str| {
        let found = value.get(key).and_then(Value::as_str).map(str::to_owned);
        found.ok_or_else(|| Refusal::param(field, format!("`{key}` of a structure is missing")))
    };
    let structures = tag.get("structures").and_then(Value::as_array);
    let structures = structures.filter(|list| !list.is_empty()).ok_or_else(|| {
        Refusal::param(field, "must have `structures` with `begin`, `schema` and `end`")
    })?;
    let triggers = tag.get("triggers").and_then(Value::as_array).cloned().unwrap_or_default();
    let mut tags = Vec::new();
    let mut schemas = Vec::new();
    for structure in structures {
        let begin = text(structure, "begin")?;
        if !triggers.iter().filter_map(Value::as_str).any(|trigger| begin.starts_with(trigger)) {
            let why = format!("`begin` {begin:?} begins with none of the `triggers`");
            return Err(Refusal::param(field, why));
        }
        let schema = structure.get("schema").cloned().unwrap_or(Value::Object(Map::new()));
        schemas.push(schema_of(field, schema)?);
        tags.push((begin, text(structure, "end")?));
    }
    let held = tags.into_iter().zip(held_schemas(field, schemas)?);
    let tags: Vec<Tag> = held.map(|((begin, end), schema)| Tag { begin, schema, end }).collect();
    Ok(GrammarSpec::Lark(free_text_with(&tags)))
}

/// A part of an answer that is held to a schema.
#[derive(Debug, Clone)]
pub(crate) struct Tag {
    /// What stands before the JSON.
    pub begin: String,
    pub schema: Value,
    /// What stands behind it.
    pub end: String,
}

/// The grammar of free text in which whatever begins like a tag is one.
pub(crate) fn free_text_with(tags: &[Tag]) -> String {
    let names: Vec<String> = (0..tags.len()).map(|index| format!("tag_{index}")).collect();
    let mut lark = format!("start: ({})* rest\nrest: /(?s:.*)/\n", names.join(" | "));
    for (index, tag) in tags.iter().enumerate() {
        let begin = regex_quoted(&tag.begin);
        let _ = write!(
            lark,
            "tag_{index}: until_{index} json_{index} {}\nuntil_{index}[lazy]: \
             /(?s:.*){begin}/\njson_{index}: %json {}\n",
            quoted(&tag.end),
            tag.schema
        );
    }
    lark
}

/// Calls of an answer that must be calls: a small model that may go on with them may never end.
const MOST_CALLS: usize = 16;

/// The rule `calls`: one of several tags, or several in a row with `between` them.
pub(crate) fn calls_rule(tags: &[Tag], open: &str, between: Option<&str>, close: &str) -> String {
    let names: Vec<String> = (0..tags.len()).map(|index| format!("tag_{index}")).collect();
    let more = |between: &str| format!(" ({} call){{0,{}}}", quoted(between), MOST_CALLS - 1);
    let more = between.map(more).unwrap_or_default();
    let (open, close) = (quoted(open), quoted(close));
    let mut lark = format!("calls: {open} call{more} {close}\ncall: {}\n", names.join(" | "));
    for (index, tag) in tags.iter().enumerate() {
        let (begin, end) = (quoted(&tag.begin), quoted(&tag.end));
        let _ = writeln!(lark, "tag_{index}: {begin} json_{index} {end}");
        let _ = writeln!(lark, "json_{index}: %json {}", tag.schema);
    }
    lark
}

/// A string of a Lark grammar.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text as a regular expression within `/…/`.
fn regex_quoted(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        match c {
            '\n' => regex.push_str("\\n"),
            // Others mean something else behind a backslash, or nothing.
            c if r"\.+*?()|[]{}^$/".contains(c) => regex.extend(['\\', c]),
            c => regex.push(c),
        }
    }
    regex
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquila_model::{Location, resolve};
    use aquila_text::{Grammar, GrammarCompiler, Tokenizer};
    use serde_json::json;

    /// Which of these texts a grammar allows as a whole, by their bytes as tokens.
    fn allowed(lark: String, texts: &[&str]) -> Vec<bool> {
        let Location::Folder(folder) = resolve("tiny").unwrap() else { panic!("it has files") };
        let tokenizer = Tokenizer::load(&folder).unwrap().unwrap();
        let compiler = GrammarCompiler::new(&tokenizer, 8192, &[0, 2]).unwrap();
        let grammar = compiler.compile(&GrammarSpec::Lark(lark)).unwrap();
        let bytes = |id| tokenizer.token_bytes(id).unwrap();
        let token = |byte: u8| (3..8192).find(|&id| bytes(id) == Some(vec![byte])).unwrap();
        let whole = |text: &&str| {
            let mut state = grammar.begin();
            let all =
                text.bytes().all(|byte| !state.is_complete() && state.push(token(byte)).unwrap());
            all && (state.is_complete() || state.push(0).unwrap())
        };
        texts.iter().map(whole).collect()
    }

    fn tag(name: &str) -> Tag {
        let schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } },
            "required": ["a"], "additionalProperties": false });
        let schema = held_schemas("tools", vec![schema]).unwrap().remove(0);
        Tag { begin: format!("<f={name}>"), schema, end: "</f>".into() }
    }

    #[test]
    fn free_text_holds_what_begins_like_a_tag() {
        let lark = free_text_with(&[tag("x"), tag("y")]);
        let texts = [
            "",
            "Any text\n<b> at all",
            "One <f=x>{\"a\": true}</f> and <f=y>{\"a\":false}</f>",
            "One <f=x>true</f>",
            "One <f=x>{\"a\": 1}</f>",
            "One <f=x>{\"a\": true}",
        ];
        assert_eq!(allowed(lark, &texts), [true, true, true, false, false, false]);
    }

    #[test]
    fn calls_are_nothing_but_calls() {
        let one = "<f=x>{\"a\": true}</f>";
        let two = &format!("{one}\n<f=y>{{\n  \"a\":false}}</f>");
        let texts = ["", one, two, "text", &format!("{one}\n"), "<f=x>{          \"a\": true}</f>"];
        let calls = |between| {
            format!("start: calls\n{}", calls_rule(&[tag("x"), tag("y")], "", between, ""))
        };
        let several = allowed(calls(Some("\n")), &texts);
        assert_eq!(several, [false, true, true, false, false, false]);
        assert_eq!(allowed(calls(None), &texts), [false, true, false, false, false, false]);
    }
}
