//! Aquila over HTTP: OpenAI's API and SGLang's, over a [`Generator`].
//!
//! Its one invariant: a client that is gone, or too slow to read, holds no slot of the engine.
//!
//! - [`Server`]: the listener, its connections and its way to stop
//! - [`Settings`], [`Limits`] and [`ModelCard`]: what a server is told at start
//! - `routes`: one file for each thing that can be asked, in OpenAI's form and in SGLang's
//! - `ask`, `answer`, `under_way`: from a checked request to the engine and back
//! - `stream`: answers as server-sent events
//! - [`add_documents`] and [`add_file`]: texts into corpora that drafts come from
//! - `fields`, `body`, `refusal`: what comes in, and how it is refused
//! - `metrics`: counters in Prometheus' form
//! - `connection`, `server`: sockets, time limits, draining
//!
//! [`Generator`]: aquila_text::Generator

#![forbid(unsafe_code)]

mod answer;
mod ask;
mod body;
mod connection;
mod corpus;
mod error;
mod fields;
mod identifier;
mod metrics;
mod refusal;
mod routes;
mod server;
mod settings;
mod state;
mod stream;
mod under_way;

pub use corpus::{Added, CorpusTextError, add_documents, add_file};
pub use error::{Error, Result};
pub use server::{Server, run};
pub use settings::{Limits, ModelCard, Settings};
