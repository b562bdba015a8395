//! A conversation into a prompt, as Hugging Face renders it.
//!
//! The invariant: a template renders to the bytes that Jinja2 gives under the settings of
//! Hugging Face's transformers, since a model was trained on them. Known to differ: `loop.last` and
//! `loop.length` over the characters of a string, floats beyond 1e16 printed without `tojson`, and
//! the `%` operator on strings, which is an error here.

mod clock;
mod json;
mod python;

use std::fmt;
use std::path::Path;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value as JinjaValue};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// A template as a file holds it.
pub(crate) struct TemplateSource {
    name: String,
    text: String,
    origin: String,
}

impl TemplateSource {
    pub(crate) fn new(name: &str, text: String, file: &Path) -> Self {
        let origin = match name {
            "default" => file.display().to_string(),
            name => format!("{} (`{name}`)", file.display()),
        };
        Self { name: name.to_owned(), text, origin }
    }
}

/// The chat templates of a checkpoint.
pub struct ChatTemplate {
    environment: Environment<'static>,
    templates: Vec<Compiled>,
    named_tokens: Map<String, Value>,
}

struct Compiled {
    name: String,
    /// As the checkpoint has it.
    source: String,
    origin: String,
    /// Kept until the template is used: a checkpoint may serve without its template.
    syntax_error: Option<String>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.templates.iter().map(|t| t.name.as_str()).collect();
        f.debug_struct("ChatTemplate").field("templates", &names).finish_non_exhaustive()
    }
}

/// What `raise_exception` carries through the template engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    pub(crate) fn new(sources: Vec<TemplateSource>, named_tokens: Map<String, Value>) -> Self {
        let mut environment = environment();
        let templates = sources
            .into_iter()
            .map(|source| {
                let plain = python::as_plain_jinja(&source.text);
                let added = environment.add_template_owned(source.name.clone(), plain);
                Compiled {
                    name: source.name,
                    source: source.text,
                    origin: source.origin,
                    syntax_error: added.err().map(|e| describe(&e)),
                }
            })
            .collect();
        Self { environment, templates, named_tokens }
    }

    /// The templates as the checkpoint has them.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        self.templates.iter().map(|template| template.source.as_str())
    }

    /// The prompt for `messages`, an array of objects with `role` and `content` as the template
    /// wants them. `extra` holds further variables (`documents`, `enable_thinking`, …), and goes
    /// before the special tokens of the same names.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        self.render_at(SystemTime::now(), messages, tools, add_generation_prompt, extra)
    }

    /// [`Self::render`] as of a given time, for templates that write the date (in UTC).
    pub fn render_at(
        &self,
        now: SystemTime,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let chosen = self.choose(tools.is_some())?;
        if let Some(reason) = &chosen.syntax_error {
            let (origin, reason) = (chosen.origin.clone(), reason.clone());
            return Err(Error::TemplateSyntax { origin, reason });
        }
        let mut variables: Vec<(&str, JinjaValue)> = vec![("documents", JinjaValue::from(()))];
        let given = self.named_tokens.iter().chain(extra);
        variables.extend(given.map(|(key, v)| (key.as_str(), jinja(v))));
        variables.push(("messages", jinja(messages)));
        variables.push(("tools", tools.map_or_else(|| JinjaValue::from(()), jinja)));
        variables.push(("add_generation_prompt", add_generation_prompt.into()));
        let strftime = move |format: &str| clock::strftime(now, format);
        variables.push(("strftime_now", JinjaValue::from_function(strftime)));

        let rendered = self
            .environment
            .get_template(&chosen.name)
            .and_then(|template| template.render(JinjaValue::from_pairs(variables)));
        rendered.map_err(|error| match raised(&error) {
            Some(message) => Error::TemplateRaised { message },
            None => {
                Error::TemplateFailed { origin: chosen.origin.clone(), reason: describe(&error) }
            }
        })
    }

    fn choose(&self, with_tools: bool) -> Result<&Compiled> {
        let named = |name: &str| self.templates.iter().find(|template| template.name == name);
        let for_tools = if with_tools { named("tool_use") } else { None };
        for_tools.or_else(|| named("default")).ok_or_else(|| Error::NoDefaultTemplate {
            names: self.templates.iter().map(|template| template.name.clone()).collect(),
        })
    }
}

/// Jinja as transformers sets it up.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(python::method);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_iterable);
    environment.add_function("raise_exception", |message: String| -> std::result::Result<(), _> {
        let error = minijinja::Error::new(ErrorKind::InvalidOperation, message.clone());
        Err(error.with_source(Raised(message)))
    });
    environment
}

fn jinja(value: &Value) -> JinjaValue {
    JinjaValue::from(Serde(value))
}

fn raised(error: &minijinja::Error) -> Option<String> {
    let mut at: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = at {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        at = error.source();
    }
    None
}

/// An error of the template engine on one line: its kind, detail and line.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        text = format!("{text}: {detail}");
    }
    match error.line() {
        Some(line) => format!("{text} (line {line})"),
        None => text,
    }
}
