//! Answers to conversations: their reasoning, text and calls, whole or piece by piece.

use aquila_engine::{FinishReason, Token};
use aquila_text::{AnswerParser, Part, TextStream, Tokenizer, ToolCallFormat};

use crate::answer::Answer;
use crate::identifier::Identifiers;

/// How the answers to a conversation are taken apart.
#[derive(Debug, Clone, Default)]
pub(crate) struct AnswerFormat {
    /// Whether reasoning is told apart, and if so, whether the prompt has begun it.
    pub reasoning: Option<bool>,
    /// Whether reasoning is streamed as it comes, and not at its end.
    pub stream_reasoning: bool,
    /// How calls are written, and of which tools.
    pub tools: Option<(ToolCallFormat, Vec<String>)>,
    /// Whether an answer may have several calls.
    pub parallel: bool,
    /// Special tokens that are part of the text.
    pub shown_special_tokens: Vec<u32>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub id: String,
    pub name: String,
    /// JSON, as the model wrote it.
    pub arguments: String,
}

/// A whole answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ChatAnswer {
    pub reasoning: String,
    pub text: String,
    pub calls: Vec<Call>,
    pub reasoning_tokens: usize,
}

impl ChatAnswer {
    /// Takes an answer apart; a call that is not complete stays text.
    pub fn read(
        format: &AnswerFormat,
        tokenizer: Option<&Tokenizer>,
        identifiers: &Identifiers,
        answer: &Answer,
    ) -> Self {
        let mut parts = AnswerParts::new(format, tokenizer);
        let mut out = parts.tokens(&answer.tokens, &answer.text);
        out.extend(parts.finish(""));
        let mut read = Self { reasoning_tokens: parts.reasoning_tokens(), ..Self::default() };
        for part in out {
            match part {
                Part::Reasoning(piece) => read.reasoning.push_str(&piece),
                Part::Text(piece) => read.text.push_str(&piece),
                Part::CallBegin { name, .. } => {
                    let id = identifiers.call();
                    read.calls.push(Call { id, name, arguments: String::new() });
                }
                Part::Arguments { piece, .. } => {
                    if let Some(call) = read.calls.last_mut() {
                        call.arguments.push_str(&piece);
                    }
                }
                Part::CallEnd { .. } => {}
                Part::CallBroken { raw, .. } => {
                    read.calls.pop();
                    read.text.push_str(&raw);
                }
            }
        }
        read
    }

    /// The parts of it, in the order in which APIs with items write them.
    pub fn into_parts(self) -> Vec<Part> {
        let mut parts = Vec::new();
        parts.extend(Some(self.reasoning).filter(|text| !text.is_empty()).map(Part::Reasoning));
        parts.extend(Some(self.text).filter(|text| !text.is_empty()).map(Part::Text));
        for (index, call) in self.calls.into_iter().enumerate() {
            parts.push(Part::CallBegin { index, name: call.name });
            parts.push(Part::Arguments { index, piece: call.arguments });
            parts.push(Part::CallEnd { index });
        }
        parts
    }

    /// Whether it ended to have tools called.
    pub fn calls_tools(&self, reason: &FinishReason) -> bool {
        !self.calls.is_empty() && matches!(reason, FinishReason::Stop(_))
    }
}

/// The parts of one answer as it grows.
#[derive(Debug)]
pub(crate) struct AnswerParts {
    parser: AnswerParser,
    parallel: bool,
    /// Reasoning that is kept until its end, unless it is streamed.
    held_reasoning: Option<String>,
    /// Calls that are complete.
    complete: usize,
    counter: Option<ReasoningCounter>,
}

impl AnswerParts {
    pub fn new(format: &AnswerFormat, tokenizer: Option<&Tokenizer>) -> Self {
        let mut parser = AnswerParser::new();
        if let Some(begun) = format.reasoning {
            parser = parser.with_reasoning(begun);
        }
        if let Some((calls, tools)) = &format.tools {
            parser = parser.with_tools(*calls, tools.clone());
        }
        let counter = format.reasoning.zip(tokenizer).map(|(begun, tokenizer)| ReasoningCounter {
            parser: AnswerParser::new().with_reasoning(begun),
            stream: tokenizer.stream_showing(true, format.shown_special_tokens.clone()),
            tokens: 0,
        });
        Self {
            parser,
            parallel: format.parallel,
            held_reasoning: (!format.stream_reasoning).then(String::new),
            complete: 0,
            counter,
        }
    }

    /// Takes the next tokens, and the text that they made certain.
    pub fn tokens(&mut self, tokens: &[Token], text: &str) -> Vec<Part> {
        if let Some(counter) = &mut self.counter {
            tokens.iter().for_each(|token| counter.push(token.id));
        }
        let mut parts = Vec::new();
        self.parser.push(text, &mut parts);
        self.kept(parts)
    }

    /// Takes the rest of the text.
    pub fn finish(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        self.parser.push(text, &mut parts);
        self.parser.finish(&mut parts);
        let mut parts = self.kept(parts);
        if let Some(held) = self.held_reasoning.take().filter(|held| !held.is_empty()) {
            parts.insert(0, Part::Reasoning(held));
        }
        parts
    }

    /// Tokens of the reasoning, its marks included.
    pub fn reasoning_tokens(&self) -> usize {
        self.counter.as_ref().map_or(0, |counter| counter.tokens)
    }

    /// Whether the answer ended to have tools called.
    pub fn calls_tools(&self, reason: &FinishReason) -> bool {
        self.complete > 0 && matches!(reason, FinishReason::Stop(_))
    }

    fn kept(&mut self, parts: Vec<Part>) -> Vec<Part> {
        let mut kept = Vec::with_capacity(parts.len());
        for part in parts {
            let index = match &part {
                Part::CallBegin { index, .. }
                | Part::Arguments { index, .. }
                | Part::CallEnd { index }
                | Part::CallBroken { index, .. } => *index,
                Part::Reasoning(_) | Part::Text(_) => 0,
            };
            if index > 0 && !self.parallel {
                continue;
            }
            match part {
                Part::Reasoning(piece) if self.held_reasoning.is_some() => {
                    self.held_reasoning.get_or_insert_default().push_str(&piece);
                    continue;
                }
                Part::Reasoning(_) => {}
                _ => {
                    let held = self.held_reasoning.as_mut().map(std::mem::take);
                    kept.extend(held.filter(|held| !held.is_empty()).map(Part::Reasoning));
                }
            }
            self.complete += usize::from(matches!(part, Part::CallEnd { .. }));
            kept.push(part);
        }
        kept
    }
}

/// Counts the tokens of reasoning, which the text alone does not tell.
#[derive(Debug)]
struct ReasoningCounter {
    parser: AnswerParser,
    stream: TextStream,
    tokens: usize,
}

impl ReasoningCounter {
    fn push(&mut self, token: u32) {
        let before = self.parser.in_reasoning();
        // A token that cannot be decoded is no text.
        self.parser.push(&self.stream.push(token).unwrap_or_default(), &mut Vec::new());
        self.tokens += usize::from(before || self.parser.in_reasoning());
    }
}
