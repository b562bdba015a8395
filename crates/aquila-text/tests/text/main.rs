//! The crate through its public surface.

mod bound;
mod chat_template;
mod generator;
mod grammar;
mod grammar_drafts;
mod grammar_size;
mod parts;
mod pieces;
mod sampling;
mod stop;
mod stream;
mod tokenizer;
