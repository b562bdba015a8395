//! Text and tokens: everything between what a user writes and the ids a model reads.
//!
//! Its one invariant: text that was handed out is never taken back, so what a stream shows is what
//! the finished answer says.
//!
//! - [`Tokenizer`]: text into ids and back, from a checkpoint's folder
//! - [`TextStream`]: ids into text, one id at a time
//! - [`StopStrings`] and [`StopMatcher`]: where a text must end
//! - [`ChatTemplate`]: a conversation into a prompt
//! - [`AnswerParser`]: reasoning, text and tool calls of an answer, told apart
//! - [`SamplingParams`]: settings as users write them; [`CheckedParams`]: checked
//! - [`GrammarSpec`], [`GrammarCompiler`] and [`CompiledGrammar`]: what an answer must be like
//! - [`Generator`]: text in, text out, over an engine that knows only tokens

mod bound;
mod chat;
mod checked_params;
mod decoding;
mod error;
mod folder;
mod generator;
mod grammar;
mod parts;
mod pieces;
mod sampling_params;
mod stop;
mod stream;
mod tokenizer;

pub use chat::ChatTemplate;
pub use checked_params::CheckedParams;
pub use error::{Error, Result};
pub use generator::{AnswerSink, Delta, End, GenerateError, Generator, Prompt, spec_fields};
pub use grammar::{
    CompiledGrammar, Grammar, GrammarCompiler, GrammarSpec, MOST_LARK_BYTES, check_schema_bytes,
    held_schema, held_schemas,
};
pub use parts::{AnswerParser, Part, ReasoningFormat, ToolCallFormat};
pub use sampling_params::{ParamError, SamplingParams, speculation};
pub use stop::{Piece, StopMatcher, StopStrings};
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
