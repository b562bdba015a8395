//! From logits to a token: one rule for greedy and sampled requests.
//!
//! Logits go through penalties, bias, bans, a grammar, temperature, top-k, top-p and min-p, in that order;
//! the token at position t is the argmax of what is left plus [`noise::gumbel`]`(seed, choice, t, v)`,
//! ties to the lowest id. That is a sample of the filtered softmax which depends on nothing but
//! seed, choice index, position and logits. At temperature 0 there is no noise and no filter.
//!
//! [`definition`] says the same plainly and slowly; [`choose`] answers exactly what it answers.

pub mod definition;
pub mod noise;

mod gumbel;
mod history;
mod params;
mod penalties;
mod row;
mod token_set;
mod top_k_top_p;
mod weight;
mod widest_vectors;

pub use history::History;
pub use params::Sampling;
pub use row::{choose, filtered_probs, topk_candidates};
pub use token_set::TokenSet;

/// What is asked about one row of logits.
#[derive(Debug, Clone, Copy)]
pub struct SampleQuery<'a> {
    /// The row of the logits.
    pub row: usize,
    /// The request's settings.
    pub sampling: &'a Sampling,
    /// The tokens of the request that count for penalties.
    pub history: &'a History,
    /// Tokens after those of `history`, on the path to this row; they count as output.
    pub path: &'a [u32],
    /// The position of the token to be chosen: its index in the whole sequence.
    pub position: u32,
    /// Which of the request's `n` choices this is.
    pub choice: u32,
    /// Tokens that may not be chosen, such as end-of-text before `min_tokens`.
    pub banned: &'a [u32],
    /// The tokens that a grammar allows, if there is one.
    pub allowed: Option<&'a TokenSet>,
    /// How many of the most likely tokens to report, if log-probabilities are wanted at all.
    pub top_logprobs: Option<usize>,
    /// Report on this token instead of choosing one (for log-probabilities of a prompt).
    pub given: Option<u32>,
}

/// A chosen token, and what was asked about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The token. Where every token is impossible or forbidden, the lowest id that the grammar
    /// allows and no ban forbids.
    pub token: u32,
    /// Its log-probability under the model alone, before penalties and filters, where asked for;
    /// minus infinity for a token that the model excludes.
    pub logprob: Option<f32>,
    /// The most likely tokens under the model alone, best first, ties to the lowest id; tokens
    /// that the model excludes are left out.
    pub top: Vec<(u32, f32)>,
}

/// What a draft offers as the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token, in the target's vocabulary.
    pub token: u32,
    /// How likely the draft thinks it is.
    pub probability: f32,
}

/// The filtered distribution of a row: probabilities in proportion to weights.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Weights {
    /// The tokens that are possible, ascending, with their weights: multiples of 2^-34.
    pub tokens: Vec<(u32, f64)>,
    /// The sum of the weights, exact.
    pub total: f64,
}

impl Weights {
    /// Of tokens in any order; those without weight are left out.
    pub fn new(mut tokens: Vec<(u32, f64)>) -> Self {
        tokens.retain(|&(_, weight)| weight > 0.0);
        tokens.sort_unstable_by_key(|&(token, _)| token);
        let total = tokens.iter().map(|&(_, weight)| weight).sum();
        Self { tokens, total }
    }

    /// One token that is certain.
    pub fn certain(token: u32) -> Self {
        Self { tokens: vec![(token, 1.0)], total: 1.0 }
    }
}
