//! Reasoning: what stands between `<think>` and `</think>` at the beginning of an answer.

use super::{Part, held_for};
use crate::GrammarSpec;

/// Where reasoning begins, and where it ends.
pub(crate) const OPEN: &str = "<think>";
pub(crate) const CLOSE: &str = "</think>";

/// How a family of models writes reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// Every answer begins with reasoning, whether or not the model writes `<think>`.
    DeepseekR1,
    /// An answer that begins with `<think>` begins with reasoning.
    Qwen3,
}

impl ReasoningFormat {
    /// SGLang's names, with the format that each means.
    pub const NAMES: [(&str, Self); 3] = [
        ("deepseek-r1", Self::DeepseekR1),
        ("qwen3", Self::Qwen3),
        ("qwen3-thinking", Self::DeepseekR1),
    ];

    /// The format of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// Whether a prompt that ends like this has begun the reasoning.
    pub fn begins_in(self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        // A template that was told not to think writes an empty block.
        prompt.ends_with(OPEN) || (self == Self::DeepseekR1 && !prompt.ends_with(CLOSE))
    }

    /// What an answer to a prompt that ends like this must be like, if `answer` is what must stand
    /// behind the reasoning.
    pub fn before(self, prompt: &str, answer: GrammarSpec) -> GrammarSpec {
        match prompt.trim_end().ends_with(CLOSE) {
            true => answer,
            false => {
                let begun = self.begins_in(prompt);
                GrammarSpec::AfterReasoning { begun, answer: Box::new(answer) }
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but spaces so far; whether reasoning begins without a mark.
    Start { opened: bool },
    /// Within reasoning; whether any of it was handed out.
    Inside { begun: bool },
    /// Behind it, before the first word of the answer.
    Behind,
    /// In the answer.
    Answer,
}

/// Tells reasoning from the answer.
#[derive(Debug, Clone)]
pub(super) struct ReasoningParser {
    state: State,
    held: String,
}

impl ReasoningParser {
    /// At the beginning of an answer; `opened`: the prompt has begun the reasoning.
    pub fn new(opened: bool) -> Self {
        Self { state: State::Start { opened }, held: String::new() }
    }

    /// Whether the text so far ends within reasoning.
    pub fn is_inside(&self) -> bool {
        matches!(self.state, State::Start { opened: true } | State::Inside { .. })
    }

    /// Takes a piece; reasoning goes to `out`, and text of the answer is returned.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) -> String {
        self.held.push_str(text);
        loop {
            match self.state {
                State::Start { opened } => {
                    let word = self.held.trim_start();
                    if let Some(rest) = word.strip_prefix(OPEN) {
                        self.held = rest.to_owned();
                        self.state = State::Inside { begun: false };
                    } else if OPEN.starts_with(word) {
                        return String::new();
                    } else if opened {
                        self.state = State::Inside { begun: false };
                    } else {
                        self.state = State::Answer;
                    }
                }
                State::Inside { begun } => {
                    if !begun {
                        self.held = self.held.trim_start().to_owned();
                    }
                    if let Some(at) = self.held.find(CLOSE) {
                        let rest = self.held.split_off(at + CLOSE.len());
                        self.held.truncate(at);
                        emit(self.held.trim_end().to_owned(), out);
                        self.held = rest;
                        self.state = State::Behind;
                        continue;
                    }
                    let certain = self.held.len() - held_for(&self.held, CLOSE);
                    let certain = self.held[..certain].trim_end().len();
                    let rest = self.held.split_off(certain);
                    let reasoning = std::mem::replace(&mut self.held, rest);
                    self.state = State::Inside { begun: begun || !reasoning.is_empty() };
                    emit(reasoning, out);
                    return String::new();
                }
                State::Behind => {
                    let word = self.held.trim_start();
                    if word.is_empty() {
                        self.held.clear();
                        return String::new();
                    }
                    self.held = word.to_owned();
                    self.state = State::Answer;
                }
                State::Answer => return std::mem::take(&mut self.held),
            }
        }
    }

    /// Ends the text.
    pub fn finish(&mut self, out: &mut Vec<Part>) -> String {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Start { opened: false } | State::Answer => held,
            State::Start { opened: true } | State::Inside { begun: false } => {
                emit(held.trim().to_owned(), out);
                String::new()
            }
            State::Inside { begun: true } => {
                emit(held.trim_end().to_owned(), out);
                String::new()
            }
            State::Behind => String::new(),
        }
    }
}

fn emit(reasoning: String, out: &mut Vec<Part>) {
    if !reasoning.is_empty() {
        out.push(Part::Reasoning(reasoning));
    }
}
