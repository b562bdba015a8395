//! What was said so far, and what comes next.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

use aquila_text::{CheckedParams, GenerateError, Generator, SamplingParams};
use serde_json::{Map, Value, json};

use super::interrupt::Interrupt;
use super::reply::{self, Reply};
use super::settings::Settings;
use crate::error::{Error, Result};

/// Tokens that are kept free for an answer.
const ROOM: usize = 64;

/// A conversation with a model.
pub struct Conversation {
    generator: Generator,
    model: String,
    system: Option<String>,
    max_tokens: Option<usize>,
    /// How answers are chosen, where it differs from what flags and the model say.
    pub settings: Settings,
    /// Questions and their answers, in turn.
    turns: Vec<(String, String)>,
}

impl Conversation {
    /// A conversation that has not begun; refused for models that cannot have one.
    pub fn new(
        generator: Generator,
        model: String,
        system: Option<String>,
        max_tokens: Option<usize>,
    ) -> Result<Self> {
        let (settings, turns) = (Settings::default(), Vec::new());
        let conversation = Self { generator, model, system, max_tokens, settings, turns };
        conversation.prompt("")?;
        Ok(conversation)
    }

    /// Refuses to go on where no question will be answered any more.
    pub fn check_engine(&self) -> Result<()> {
        Error::check(self.generator.engine())
    }

    /// Begins anew.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// Takes the last question and its answer back.
    pub fn undo(&mut self) {
        self.turns.pop();
    }

    /// Has the model be told something else first; refused if its template has no place for it.
    pub fn set_system(&mut self, text: Option<&str>) -> Result<()> {
        let before = std::mem::replace(&mut self.system, text.map(str::to_owned));
        self.prompt("").map(|_| ()).inspect_err(|_| self.system = before)
    }

    /// Writes the conversation to a file that there is not yet; says how much it was.
    pub fn save(&self, path: &Path) -> Result<String> {
        let saved = json!({
            "model": self.model,
            "settings": self.settings.given(),
            "messages": self.messages(),
        });
        let failed = |e: std::io::Error| match e.kind() {
            ErrorKind::AlreadyExists => {
                let why = "there is such a file already: give another name, or remove it";
                Error::Other(format!("{}: {why}", path.display()))
            }
            _ => Error::file(path.display(), e),
        };
        let mut file =
            OpenOptions::new().write(true).create_new(true).open(path).map_err(failed)?;
        writeln!(file, "{saved:#}").map_err(failed)?;
        Ok(match self.turns.len() {
            1 => "1 question and its answer are".into(),
            n => format!("{n} questions and their answers are"),
        })
    }

    /// Asks, prints the answer as it comes, and says how it went. What does not fit into the
    /// context any more is forgotten, oldest first.
    pub fn ask(&mut self, question: &str, interrupt: &Interrupt) -> Result<String> {
        let context = self.generator.engine().config().context_length;
        let mut forgotten = 0;
        let prompt = loop {
            let prompt = self.prompt(question)?;
            if prompt.len() + ROOM.min(context / 2) <= context || self.turns.is_empty() {
                break prompt;
            }
            self.turns.remove(0);
            forgotten += 1;
        };
        let params = self.params(context).map_err(|e| Error::Other(e.to_string()))?;
        let reply = reply::print(&self.generator, prompt, &params, interrupt)?;
        let status = status(&reply, context, forgotten);
        self.turns.push((question.to_owned(), reply.text));
        Ok(status)
    }

    /// What was set, then what the flag says, then all that the context leaves.
    fn params(&self, context: usize) -> std::result::Result<CheckedParams, GenerateError> {
        let unless_set = SamplingParams {
            max_tokens: Some(self.max_tokens.unwrap_or(context)),
            n: Some(1),
            ..SamplingParams::default()
        };
        self.generator.check(self.settings.params()?.or(&unless_set))
    }

    fn prompt(&self, question: &str) -> Result<Vec<u32>> {
        let tokenizer = self.generator.tokenizer().ok_or(GenerateError::NoTokenizer)?;
        let template = tokenizer.chat_template().ok_or_else(|| {
            Error::Other("the model has no chat template: `aquila generate` completes texts".into())
        })?;
        let mut messages = self.messages();
        messages.push(said("user", question));
        let text = template.render(&Value::Array(messages), None, true, &Map::new())?;
        Ok(tokenizer.encode(&text, false)?)
    }

    /// What was said so far, as chat templates and OpenAI's API have it.
    fn messages(&self) -> Vec<Value> {
        let mut messages: Vec<Value> = Vec::new();
        messages.extend(self.system.as_ref().map(|text| said("system", text)));
        for (question, answer) in &self.turns {
            messages.push(said("user", question));
            messages.push(said("assistant", answer));
        }
        messages
    }
}

fn said(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// The line under an answer.
fn status(reply: &Reply, context: usize, forgotten: usize) -> String {
    let mut parts = vec![format!("{} tokens", reply.tokens)];
    if let Some(speed) = reply.tokens_per_second() {
        parts.push(format!("{speed:.1} tokens/s"));
    }
    if reply.spec.proposed_drafts > 0 {
        let (length, rate) = (reply.spec.accept_length(), reply.spec.accept_rate());
        parts.push(format!("{length:.2} tokens per verify, {:.0} % of drafts", rate * 100.0));
    }
    if let Some(first) = reply.first {
        parts.push(format!("first after {:.2} s", first.as_secs_f64()));
    }
    parts.push(format!("context {} of {context}", reply.prompt_tokens + reply.tokens));
    parts.extend(reply.note.clone());
    match forgotten {
        0 => (),
        1 => parts.push("the oldest question was forgotten".into()),
        n => parts.push(format!("the oldest {n} questions were forgotten")),
    }
    parts.join(" · ")
}
