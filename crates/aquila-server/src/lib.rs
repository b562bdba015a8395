//! Aquila over HTTP: OpenAI's, Anthropic's and SGLang's APIs, over a [`Generator`].
//!
//! Its one invariant: a client that is gone, or too slow to read, holds no slot of the engine.
//!
//! - [`Server`]: the listener, its connections and its way to stop
//! - [`Address`]: where it will listen, taken before there is a model
//! - [`Settings`], [`Limits`] and [`ModelCard`]: what a server is told at start
//! - `generation`, `constraint`, `chat`: what requests ask for, in one form for all APIs
//! - `routes`: one folder for each API, one file for each thing that can be asked
//! - `submit`, `answer`, `active_requests`: from a checked request to the engine and back
//! - `stream`: answers as server-sent events
//! - [`add_documents`] and [`add_file`]: texts into corpora that drafts come from
//! - [`CorpusFolder`]: the files that clients may name as corpora
//! - `body`, `intake`: bodies, and the memory and threads that they may take
//! - `fields`, `unserved`, `prompts`, `json`, `refusal`: what comes in, and how it is refused
//! - `draft_round`: how the tokens of a stream came, and the trees that were verified
//! - `grammars`, `compile_turns`: compiled grammars, which requests share, and turns to compile
//! - `returned`: room for hidden states and routed experts, until they are sent
//! - [`RequestMemory`]: what all that may take
//! - [`Keys`], [`AllowedOrigins`] and [`Tls`]: who may ask, from where, and unheard by others
//! - `access`: the access log, and the ids of requests
//! - `metrics`, `http_metrics`: counters in Prometheus' form
//! - `traces`: spans for an OpenTelemetry collector
//! - `connection`, `connections`, `unstalled`, `server`, `signals`: sockets, time limits, draining
//!
//! [`Generator`]: aquila_text::Generator

#![forbid(unsafe_code)]

mod access;
mod active_requests;
mod address;
mod answer;
mod body;
mod chat;
mod compile_turns;
mod connection;
mod connections;
mod constraint;
mod corpus;
mod corpus_file;
mod cors;
mod disaggregation;
mod draft_round;
mod error;
mod fields;
mod generation;
mod grammars;
mod http_metrics;
mod identifier;
mod intake;
mod json;
mod keys;
mod memory;
mod metrics;
mod prompts;
mod refusal;
mod returned;
mod routes;
mod server;
mod settings;
mod signals;
mod state;
mod stream;
mod submit;
mod tls;
mod traces;
mod unserved;
mod unstalled;

pub use address::Address;
pub use connections::fitting_connections;
pub use corpus::{Added, CorpusTextError, add_documents, add_file};
pub use corpus_file::CorpusFolder;
pub use cors::AllowedOrigins;
pub use disaggregation::Role;
pub use error::{Error, Result};
pub use keys::{ApiKey, KeyError, Keys};
pub use memory::RequestMemory;
pub use server::{Server, run};
pub use settings::{Limits, ModelCard, Settings, ToolCalls};
pub use tls::{Tls, TlsError};
pub use traces::TraceEndpoint;
