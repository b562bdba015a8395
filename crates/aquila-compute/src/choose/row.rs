//! The choice for one row of logits.

use super::{Ask, Choice};

/// Chooses for one row; `logits` are that row's.
pub fn choose(logits: &[f32], ask: &Ask<'_>) -> Choice {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    Choice { token: ask.given.unwrap_or(best as u32), logprob: None, top: Vec::new() }
}
