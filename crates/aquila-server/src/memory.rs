//! What requests may take beside the engine: told at start, as the engine's own budget is.

use aquila_text::Generator;

use crate::connection::BUFFER;
use crate::intake::{LONG_WORKERS, MIDDLE, MIDDLE_ROOM, MIDDLE_WORKERS, SHORT};
use crate::json::MOST_VALUES;
use crate::settings::Settings;
use crate::state::LongestText;

/// Bytes of a connection beside its buffer and a short body.
const CONNECTION: usize = 16 << 10;
/// Bytes of a connection's TLS, beside what it buffers of its answers.
const TLS: usize = 32 << 10;
/// Bytes for each byte of a body: as it came, and as its prompts were read from it.
const PER_BODY_BYTE: usize = 3;
/// Bytes of a JSON value, with its key.
const PER_VALUE: usize = 160;
/// Bytes for each byte of a text while it is tokenized: measured on texts of one character to the
/// word, which take the most.
const PER_TEXT_BYTE: usize = 400;

/// Memory that requests may take, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestMemory {
    /// Connections, with their buffers and short bodies.
    pub connections: u64,
    /// Longer bodies, until their prompts are tokenized, and the values of those that are worked on
    /// at a time. The values of others, which were parsed and wait for a worker, are not counted:
    /// they may take up to 160 bytes for every two of their bodies.
    pub bodies: u64,
    /// Texts while they are tokenized.
    pub tokenizing: u64,
    /// Hidden states, routed experts and log-probabilities that are returned.
    pub returned: u64,
    /// Compiled grammars, beside what they take while they are compiled and answers are written.
    pub grammars: u64,
}

impl RequestMemory {
    /// What requests to `generator` may take with these settings.
    pub fn of(generator: &Generator, settings: &Settings) -> Self {
        let limits = &settings.limits;
        let tls = if settings.tls.is_some() { TLS + BUFFER } else { 0 };
        let bodies = limits.bodies_bytes.max(limits.body_bytes).saturating_add(MIDDLE_ROOM);
        let values = (LONG_WORKERS + MIDDLE_WORKERS) * MOST_VALUES * PER_VALUE;
        let longest = LongestText::of(generator, limits.prompt_tokens).bytes;
        let longest = longest.unwrap_or(usize::MAX).min(limits.body_bytes);
        let texts = (LONG_WORKERS * longest).saturating_add(MIDDLE_WORKERS * longest.min(MIDDLE));
        let bytes = |bytes: usize| bytes as u64;
        Self {
            connections: bytes(
                limits.connections.saturating_mul(BUFFER + SHORT + CONNECTION + tls),
            ),
            bodies: bytes(bodies.saturating_mul(PER_BODY_BYTE).saturating_add(values)),
            tokenizing: bytes(texts.saturating_mul(PER_TEXT_BYTE)),
            returned: bytes(limits.returned_bytes),
            grammars: bytes(limits.grammar_bytes),
        }
    }

    /// Bytes of all parts together.
    pub fn total(&self) -> u64 {
        let parts = [self.connections, self.bodies, self.tokenizing, self.returned, self.grammars];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}
