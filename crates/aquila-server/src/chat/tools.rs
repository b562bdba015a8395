//! Tools that a model may call, whether it must, and how calls are held to their schemas.

use aquila_text::{GrammarSpec, ToolCallFormat};
use serde_json::{Map, Value, json};

use crate::constraint::{Constraint, Tag, calls_rule, free_text_with, held_schemas};
use crate::refusal::Refusal;

/// Tools of a request. OpenAI takes 128.
const MOST_TOOLS: usize = 1024;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// Their JSON schema.
    pub parameters: Map<String, Value>,
    /// Whether calls must fit the schema.
    pub strict: bool,
}

/// Whether tools are called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    None,
    #[default]
    Auto,
    Required,
    /// The tool of this name must be called.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tools {
    pub list: Vec<Tool>,
    pub choice: ToolChoice,
    /// Whether an answer may have several calls.
    pub parallel: bool,
}

impl Default for Tools {
    fn default() -> Self {
        Self { list: Vec::new(), choice: ToolChoice::Auto, parallel: true }
    }
}

impl Tool {
    /// A tool from its fields; `at` says where it stands.
    pub fn new(
        at: &str,
        name: Option<&Value>,
        description: Option<&Value>,
        parameters: Option<&Value>,
        strict: Option<&Value>,
    ) -> Result<Self, Refusal> {
        let name = name.and_then(Value::as_str).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| Refusal::param(format!("{at}.name"), "is required"))?;
        let description = description.filter(|text| !text.is_null());
        let description = description.map(|text| {
            let wrong = || Refusal::param(format!("{at}.description"), "must be a string");
            text.as_str().map(str::to_owned).ok_or_else(wrong)
        });
        let parameters = match parameters {
            None | Some(Value::Null) => Map::from_iter([
                ("type".to_owned(), Value::from("object")),
                ("properties".to_owned(), json!({})),
            ]),
            Some(Value::Object(schema)) => schema.clone(),
            Some(_) => {
                let why = "must be a JSON schema of an object";
                return Err(Refusal::param(format!("{at}.parameters"), why));
            }
        };
        let strict = strict.is_some_and(|strict| *strict == Value::Bool(true));
        Ok(Self { name: name.into(), description: description.transpose()?, parameters, strict })
    }

    /// The schema of its arguments.
    fn schema(&self) -> Value {
        let mut schema = self.parameters.clone();
        // Schemas of parameters that leave it out mean an object all the same.
        if !["type", "anyOf", "oneOf", "allOf", "$ref"].iter().any(|key| schema.contains_key(*key))
        {
            schema.insert("type".into(), "object".into());
        }
        schema.into()
    }

    /// As chat templates want it, which is OpenAI's form.
    fn template_form(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), self.name.clone().into());
        if let Some(description) = &self.description {
            function.insert("description".into(), description.clone().into());
        }
        function.insert("parameters".into(), Value::Object(self.parameters.clone()));
        json!({ "type": "function", "function": function })
    }
}

impl Tools {
    /// Refuses too many tools, and choices that no tool fits; `choice` is the field that it came
    /// in.
    pub fn check(self, choice: &str) -> Result<Self, Refusal> {
        match &self.choice {
            _ if self.list.len() > MOST_TOOLS => {
                let why =
                    format!("has {} tools: at most {MOST_TOOLS} may be given", self.list.len());
                Err(Refusal::param("tools", why))
            }
            ToolChoice::Required if self.list.is_empty() => {
                Err(Refusal::param(choice, "a tool is required, but `tools` has none"))
            }
            ToolChoice::Named(name) if self.list.iter().all(|tool| tool.name != *name) => {
                let why = format!("the tool `{name}` is not among `tools`");
                Err(Refusal::param(choice, why))
            }
            _ => Ok(self),
        }
    }

    /// What the chat template is told about.
    pub fn for_template(&self) -> Option<Value> {
        if self.list.is_empty() || self.choice == ToolChoice::None {
            return None;
        }
        Some(self.list.iter().map(Tool::template_form).collect())
    }

    /// The names of tools that may be called.
    pub fn callable(&self) -> Vec<String> {
        match &self.choice {
            ToolChoice::None => Vec::new(),
            ToolChoice::Named(name) => vec![name.clone()],
            _ => self.list.iter().map(|tool| tool.name.clone()).collect(),
        }
    }

    fn may_call(&self, tool: &Tool) -> bool {
        match &self.choice {
            ToolChoice::None => false,
            ToolChoice::Named(name) => tool.name == *name,
            ToolChoice::Auto | ToolChoice::Required => true,
        }
    }

    /// Whether the answer must be a call.
    pub fn is_forced(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// The grammar that holds calls to their schemas, where one is asked for. `answer` is the schema
    /// of the text, if that must be JSON: it then is either that or calls.
    pub fn constraint(
        &self,
        format: ToolCallFormat,
        answer: Option<&Value>,
    ) -> Result<Option<Constraint>, Refusal> {
        let tools: Vec<&Tool> = self.list.iter().filter(|tool| self.may_call(tool)).collect();
        let strict = tools.iter().any(|tool| tool.strict) && format == ToolCallFormat::Hermes;
        if tools.is_empty() || !(self.is_forced() || answer.is_some() || strict) {
            return Ok(None);
        }
        let schemas = tools.iter().map(|tool| tool.schema()).collect();
        let schemas = held_schemas("tools", schemas)?;
        let tags = tools.iter().zip(schemas).map(|(tool, schema)| tag(tool, schema, format));
        let tags: Vec<Tag> = tags.collect();
        let lark = if self.is_forced() || answer.is_some() {
            let several = self.parallel && !matches!(self.choice, ToolChoice::Named(_));
            let (open, between, close) = match format {
                ToolCallFormat::Hermes => ("", "\n", ""),
                ToolCallFormat::Llama3 => ("", "; ", ""),
                ToolCallFormat::Mistral => (format.marker(), ", ", "]"),
            };
            let open = if open.is_empty() { String::new() } else { format!("{open}[") };
            let calls = calls_rule(&tags, &open, several.then_some(between), close);
            match answer.filter(|_| !self.is_forced()) {
                Some(schema) => {
                    let schemas = held_schemas("response_format", vec![schema.clone()])?;
                    format!("start: calls | answer\nanswer: %json {}\n{calls}", schemas[0])
                }
                None => format!("start: calls\n{calls}"),
            }
        } else {
            free_text_with(&tags)
        };
        Ok(Some(Constraint { field: "tools", spec: GrammarSpec::Lark(lark) }))
    }
}

/// A call of a tool as its family writes it.
fn tag(tool: &Tool, schema: Value, format: ToolCallFormat) -> Tag {
    let name = Value::from(tool.name.as_str());
    let (begin, end) = match format {
        ToolCallFormat::Hermes => (
            format!("<tool_call>\n{{\"name\": {name}, \"arguments\": "),
            "}\n</tool_call>".to_owned(),
        ),
        ToolCallFormat::Llama3 => (format!("{{\"name\": {name}, \"parameters\": "), "}".into()),
        ToolCallFormat::Mistral => (format!("{{\"name\": {name}, \"arguments\": "), "}".into()),
    };
    Tag { begin, schema, end }
}
