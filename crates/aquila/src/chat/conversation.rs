//! What was said so far, and what comes next.

use aquila_text::{GenerateError, Generator, SamplingParams};
use serde_json::{Map, Value, json};

use super::interrupt::Interrupt;
use super::reply::{self, Reply};
use crate::error::{Error, Result};

/// Tokens that are kept free for an answer.
const ROOM: usize = 64;

/// A conversation with a model.
pub struct Conversation {
    generator: Generator,
    system: Option<String>,
    max_tokens: Option<usize>,
    /// Questions and their answers, in turn.
    turns: Vec<(String, String)>,
}

impl Conversation {
    /// A conversation that has not begun; refused for models that cannot have one.
    pub fn new(
        generator: Generator,
        system: Option<String>,
        max_tokens: Option<usize>,
    ) -> Result<Self> {
        let conversation = Self { generator, system, max_tokens, turns: Vec::new() };
        conversation.prompt("")?;
        Ok(conversation)
    }

    /// Begins anew.
    pub fn clear(&mut self) {
        self.turns.clear();
    }

    /// Takes the last question and its answer back.
    pub fn undo(&mut self) {
        self.turns.pop();
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
        let max_tokens = Some(self.max_tokens.unwrap_or(context));
        let params = SamplingParams { max_tokens, n: Some(1), ..SamplingParams::default() };
        let params = self.generator.check(params)?;
        let reply = reply::print(&self.generator, prompt, &params, interrupt)?;
        let status = status(&reply, context, forgotten);
        self.turns.push((question.to_owned(), reply.text));
        Ok(status)
    }

    fn prompt(&self, question: &str) -> Result<Vec<u32>> {
        let tokenizer = self.generator.tokenizer().ok_or(GenerateError::NoTokenizer)?;
        let template = tokenizer.chat_template().ok_or_else(|| {
            Error::Other("the model has no chat template: `aquila generate` completes texts".into())
        })?;
        let said = |role: &str, content: &str| json!({ "role": role, "content": content });
        let mut messages: Vec<Value> = Vec::new();
        messages.extend(self.system.as_ref().map(|text| said("system", text)));
        for (question, answer) in &self.turns {
            messages.push(said("user", question));
            messages.push(said("assistant", answer));
        }
        messages.push(said("user", question));
        let text = template.render(&Value::Array(messages), None, true, &Map::new())?;
        Ok(tokenizer.encode(&text, false)?)
    }
}

/// The line under an answer.
fn status(reply: &Reply, context: usize, forgotten: usize) -> String {
    let mut parts = vec![format!("{} tokens", reply.tokens)];
    if let Some(speed) = reply.tokens_per_second() {
        parts.push(format!("{speed:.1} tokens/s"));
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
