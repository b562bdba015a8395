//! The server as its clients see it: raw sockets against the shipped model.

mod bad_input;
mod corpora;
mod disaggregation;
mod draft_trees;
mod draining;
mod failures;
mod gate;
mod grammars;
mod hostile;
mod keys;
mod load;
mod messages;
mod observed;
mod openai;
mod openapi;
mod page;
mod priorities;
mod responses;
mod returned;
mod sglang;
mod speculation;
mod support;
mod tls;
mod tools;
mod traces;
