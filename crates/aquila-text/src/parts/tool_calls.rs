//! Calls of tools in a growing text, in the formats of the model families.

use super::call_body::{CallBody, Progress};
use super::{Part, held_for, push_text};
use crate::ChatTemplate;

/// How the templates of Llama 3 tell the model to write a call.
const LLAMA3_WORDS: &str = "\"parameters\": dictionary";

/// How a family of models writes calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": …}` and nothing else, several with `;` between them, perhaps
    /// after `<|python_tag|>`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}, …]`: Mistral.
    Mistral,
}

impl ToolCallFormat {
    /// SGLang's names, with the format that each means.
    pub const NAMES: [(&str, Self); 5] = [
        ("qwen25", Self::Hermes),
        ("qwen", Self::Hermes),
        ("hermes", Self::Hermes),
        ("llama3", Self::Llama3),
        ("mistral", Self::Mistral),
    ];

    /// The format of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    /// The format that chat templates ask their model for, where they show one.
    pub fn of_template(template: &ChatTemplate) -> Option<Self> {
        let shows = |mark: &str| template.sources().any(|source| source.contains(mark));
        let formats = [Self::Hermes, Self::Mistral, Self::Llama3];
        let marked = formats.into_iter().find(|format| shows(format.marker()));
        marked.or_else(|| shows(LLAMA3_WORDS).then_some(Self::Llama3))
    }

    /// The format that models of this `model_type` are trained on, where the template shows none.
    pub fn of_model_type(model_type: &str) -> Option<Self> {
        match model_type {
            "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" => Some(Self::Hermes),
            "mistral" | "mixtral" | "mistral3" => Some(Self::Mistral),
            _ => None,
        }
    }

    /// The name that SGLang has for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
        }
    }

    /// What announces calls; where it is a special token, it must be part of the text.
    pub fn marker(self) -> &'static str {
        match self {
            Self::Hermes => "<tool_call>",
            Self::Llama3 => "<|python_tag|>",
            Self::Mistral => "[TOOL_CALLS]",
        }
    }
}

#[derive(Debug, Clone)]
enum State {
    /// Nothing but spaces so far.
    Start,
    /// In text.
    Text,
    /// Before the object of a call; whether a list is still to be opened.
    Opening { list: bool },
    /// In the object of a call.
    Body(Box<CallBody>),
    /// Behind one.
    Between,
}

/// Tells calls from text.
#[derive(Debug, Clone)]
pub(super) struct ToolCallParser {
    format: ToolCallFormat,
    tools: Vec<String>,
    state: State,
    input: String,
    /// Text that was taken for the beginning of a call, which may yet turn out to be none.
    pending: String,
    /// Spaces that belong to the text if text goes on, and to nothing if a call comes.
    space: String,
    /// Calls that were announced.
    calls: usize,
}

impl ToolCallParser {
    pub fn new(format: ToolCallFormat, tools: Vec<String>) -> Self {
        Self {
            format,
            tools,
            state: State::Start,
            input: String::new(),
            pending: String::new(),
            space: String::new(),
            calls: 0,
        }
    }

    /// Takes the next piece of the text.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.input.push_str(text);
        while self.step(out) {}
    }

    /// Ends the text.
    pub fn finish(&mut self, out: &mut Vec<Part>) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Body(body) if body.has_begun() => self.give_up(*body, out),
            State::Body(body) => self.pending.push_str(&body.into_raw()),
            _ => {}
        }
        let text = std::mem::take(&mut self.pending) + &std::mem::take(&mut self.input);
        // Spaces behind the last call are nobody's.
        let is_text = !text.is_empty() || self.calls == 0;
        let space = std::mem::take(&mut self.space);
        push_text(if is_text { space + &text } else { String::new() }, out);
    }

    /// Goes on as far as one state allows; false where it must wait for more.
    fn step(&mut self, out: &mut Vec<Part>) -> bool {
        match &mut self.state {
            State::Start => self.start(),
            State::Text => self.text(out),
            State::Opening { list } => {
                let list = *list;
                self.opening(list, out)
            }
            State::Body(_) => self.body(out),
            State::Between => self.between(),
        }
    }

    fn start(&mut self) -> bool {
        let word = self.take_space();
        if word == 0 {
            return false;
        }
        let bare = self.format == ToolCallFormat::Llama3 && self.input.starts_with('{');
        self.state = if bare { State::Opening { list: false } } else { State::Text };
        true
    }

    fn text(&mut self, out: &mut Vec<Part>) -> bool {
        if self.input.is_empty() {
            return false;
        }
        let marker = self.format.marker();
        if let Some(at) = self.input.find(marker) {
            let rest = self.input.split_off(at + marker.len());
            self.input.truncate(at);
            let text = std::mem::replace(&mut self.input, rest);
            self.emit(&text, out);
            self.pending.push_str(marker);
            self.state = State::Opening { list: self.format == ToolCallFormat::Mistral };
            return true;
        }
        let certain = self.input.len() - held_for(&self.input, marker);
        let rest = self.input.split_off(certain);
        let text = std::mem::replace(&mut self.input, rest);
        self.emit(&text, out);
        false
    }

    fn opening(&mut self, list: bool, out: &mut Vec<Part>) -> bool {
        let word = self.input.trim_start_matches(is_space);
        let Some(first) = word.chars().next() else { return false };
        let space = self.input.len() - word.len();
        let rest = self.input.split_off(space);
        self.pending.push_str(&self.input);
        self.input = rest;
        match (list, first) {
            (true, '[') => {
                self.input.remove(0);
                self.pending.push('[');
                self.state = State::Opening { list: false };
            }
            (false, '{') => self.state = State::Body(Box::new(CallBody::new(self.calls))),
            _ => self.no_call(out),
        }
        true
    }

    fn body(&mut self, out: &mut Vec<Part>) -> bool {
        if self.input.is_empty() {
            return false;
        }
        let State::Body(body) = &mut self.state else { return false };
        let had_begun = body.has_begun();
        let progress = body.push(&self.input, &self.tools, out);
        if !had_begun && body.has_begun() {
            self.calls += 1;
            self.space.clear();
        }
        let taken = match progress {
            Progress::Going => {
                self.input.clear();
                return false;
            }
            Progress::Call(taken) | Progress::NoCall(taken) => taken,
        };
        let rest = self.input.split_off(taken);
        self.input = rest;
        let State::Body(body) = std::mem::replace(&mut self.state, State::Between) else {
            return false;
        };
        match progress {
            Progress::Call(_) => self.pending.clear(),
            _ if body.has_begun() => {
                self.give_up(*body, out);
                self.state = State::Text;
            }
            _ => {
                self.pending.push_str(&body.into_raw());
                self.no_call(out);
            }
        }
        true
    }

    /// Behind a call: its end mark, or what leads to the next one.
    fn between(&mut self) -> bool {
        if self.take_space() == 0 {
            return false;
        }
        let end = match self.format {
            ToolCallFormat::Hermes => "</tool_call>",
            ToolCallFormat::Llama3 => ";",
            ToolCallFormat::Mistral => "]",
        };
        if self.input.starts_with(end) {
            self.input.drain(..end.len());
            self.space.clear();
            self.state = match self.format {
                ToolCallFormat::Llama3 => {
                    self.pending.push(';');
                    State::Opening { list: false }
                }
                _ => State::Text,
            };
        } else if self.format == ToolCallFormat::Mistral && self.input.starts_with(',') {
            self.input.remove(0);
            self.pending.push(',');
            self.state = State::Opening { list: false };
        } else if end.starts_with(self.input.as_str()) {
            return false;
        } else {
            self.state = State::Text;
        }
        true
    }

    /// Moves spaces at the beginning of the input aside; how much is left.
    fn take_space(&mut self) -> usize {
        let word = self.input.trim_start_matches(is_space).len();
        let rest = self.input.split_off(self.input.len() - word);
        self.space.push_str(&self.input);
        self.input = rest;
        word
    }

    /// What was taken for a call is text.
    fn no_call(&mut self, out: &mut Vec<Part>) {
        let text = std::mem::take(&mut self.pending);
        self.emit(&text, out);
        self.state = State::Text;
    }

    /// A call that was announced is none.
    fn give_up(&mut self, body: CallBody, out: &mut Vec<Part>) {
        let raw = std::mem::take(&mut self.pending) + &body.into_raw();
        out.push(Part::CallBroken { index: self.calls - 1, raw });
    }

    /// Hands out text, but for the spaces at its end.
    fn emit(&mut self, text: &str, out: &mut Vec<Part>) {
        let word = text.trim_end_matches(is_space).len();
        if word > 0 {
            let before = std::mem::take(&mut self.space);
            push_text(before + &text[..word], out);
        }
        self.space.push_str(&text[word..]);
    }
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}
