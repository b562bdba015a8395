//! What changes single logits before anything compares them: penalties, bias, bans, grammars.
//!
//! A copy of the row is made only where something changes it.

use super::{SampleQuery, Sampling};

/// Whether the query changes any logit.
pub fn is_needed(query: &SampleQuery<'_>) -> bool {
    query.sampling.has_penalties()
        || !query.sampling.logit_bias.is_empty()
        || !query.banned.is_empty()
        || query.allowed.is_some()
}

/// The row as penalties, bias, bans and the grammar leave it.
pub fn adjust(logits: &[f32], query: &SampleQuery<'_>, out: &mut Vec<f32>) {
    out.clear();
    out.extend_from_slice(logits);
    if query.sampling.has_penalties() {
        penalize(logits, query, out);
    }
    for &(token, bias) in &query.sampling.logit_bias {
        if let Some(l) = out.get_mut(token as usize) {
            *l += bias;
        }
    }
    // Whatever else forbids tokens belongs here, after all that could raise them again.
    for &token in query.banned {
        if let Some(l) = out.get_mut(token as usize) {
            *l = f32::NEG_INFINITY;
        }
    }
    if let Some(allowed) = query.allowed {
        allowed.restrict(out);
    }
}

fn penalize(logits: &[f32], query: &SampleQuery<'_>, out: &mut [f32]) {
    let mut set = |token: u32, output: u32| {
        if let (Some(l), Some(&raw)) = (out.get_mut(token as usize), logits.get(token as usize)) {
            *l = penalized(raw, output, query.sampling);
        }
    };
    for (token, _, output) in query.history.iter() {
        set(token, output);
    }
    // From the raw logit again: a token of the path may be in the history too.
    for &token in query.path {
        let on_path = query.path.iter().filter(|&&t| t == token).count() as u32;
        set(token, query.history.get(token).1 + on_path);
    }
}

/// The logit of a token seen in prompt or output, `output` times in the output.
fn penalized(mut logit: f32, output: u32, sampling: &Sampling) -> f32 {
    let repetition = sampling.repetition_penalty;
    if repetition != 1.0 {
        logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
    }
    if output > 0 {
        logit -= sampling.frequency_penalty * output as f32;
        logit -= sampling.presence_penalty;
    }
    logit
}
