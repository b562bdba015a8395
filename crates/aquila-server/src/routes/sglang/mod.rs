//! SGLang's own API, and what its router asks of a worker.

pub(super) mod control;
pub(super) mod corpus;
pub(super) mod generate;
pub(super) mod health;
pub(super) mod info;
mod item;
pub(super) mod tokens;
