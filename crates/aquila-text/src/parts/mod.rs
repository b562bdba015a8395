//! The parts of an answer: reasoning, text and tool calls, told apart while the text grows.
//!
//! The invariant: however a text is cut into pieces, its parts are the same but for where they are
//! cut. So a stream and a whole answer agree.
//!
//! A call becomes certain where it names a tool that was offered and its arguments begin; from
//! there on its arguments are handed out as they come. What looks like a call but is none (another
//! name, JSON that does not parse, an end before the arguments) stays text.

mod call_body;
mod json_scan;
mod reasoning;
mod tool_calls;

pub use reasoning::ReasoningFormat;
pub(crate) use reasoning::{CLOSE, OPEN};
pub use tool_calls::ToolCallFormat;

use reasoning::ReasoningParser;
use tool_calls::ToolCallParser;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// A call of a tool begins.
    CallBegin {
        /// Which of the answer's calls, counted from 0.
        index: usize,
        /// The tool.
        name: String,
    },
    /// The next piece of a call's arguments: JSON, as the model writes it.
    Arguments {
        /// Which call.
        index: usize,
        /// The piece.
        piece: String,
    },
    /// A call is complete.
    CallEnd {
        /// Which call.
        index: usize,
    },
    /// A call that had begun turned out to be none: its JSON is wrong, or the text ended within it.
    CallBroken {
        /// Which call.
        index: usize,
        /// The text of it, for answers that are not out yet.
        raw: String,
    },
}

/// Takes a text apart as it grows.
#[derive(Debug, Clone, Default)]
pub struct AnswerParser {
    reasoning: Option<ReasoningParser>,
    calls: Option<ToolCallParser>,
}

impl AnswerParser {
    /// For an answer that is text alone, so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tells reasoning apart; `begun`: whether the prompt has already begun it.
    pub fn with_reasoning(mut self, begun: bool) -> Self {
        self.reasoning = Some(ReasoningParser::new(begun));
        self
    }

    /// Tells calls of these tools apart.
    pub fn with_tools(mut self, format: ToolCallFormat, tools: Vec<String>) -> Self {
        self.calls = Some(ToolCallParser::new(format, tools));
        self
    }

    /// Takes the next piece of the text, and adds what it makes certain to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        let answer = match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text, out),
            None => text.to_owned(),
        };
        match &mut self.calls {
            Some(calls) => calls.push(&answer, out),
            None => push_text(answer, out),
        }
    }

    /// Whether the text so far ends within reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningParser::is_inside)
    }

    /// Ends the text, and adds what was held back.
    pub fn finish(&mut self, out: &mut Vec<Part>) {
        let answer = self.reasoning.as_mut().map(|reasoning| reasoning.finish(out));
        let answer = answer.unwrap_or_default();
        match &mut self.calls {
            Some(calls) => {
                calls.push(&answer, out);
                calls.finish(out);
            }
            None => push_text(answer, out),
        }
    }
}

fn push_text(text: String, out: &mut Vec<Part>) {
    if !text.is_empty() {
        out.push(Part::Text(text));
    }
}

/// Bytes at the end of `text` that may yet become `marker`.
fn held_for(text: &str, marker: &str) -> usize {
    let longest = text.len().min(marker.len().saturating_sub(1));
    let may_become = |&length: &usize| {
        text.is_char_boundary(text.len() - length)
            && marker.as_bytes().starts_with(&text.as_bytes()[text.len() - length..])
    };
    (1..=longest).rev().find(may_become).unwrap_or(0)
}
