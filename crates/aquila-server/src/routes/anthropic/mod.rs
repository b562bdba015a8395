//! Anthropic's API: messages, and how many tokens they have.

mod blocks;
pub(super) mod errors;
pub(super) mod messages;
mod request;
