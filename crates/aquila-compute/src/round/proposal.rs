//! What a draft proposes after a token: its most likely next tokens as the target would choose
//! them, or tokens drawn from its own distribution.

use std::sync::Arc;

use super::{Proposal, Shape, TreeBuilder};
use crate::DraftIds;
use crate::sampling::{self, Candidate, History, SampleQuery, Sampling, Weights};

/// What a request asks of every token, wherever it is sampled.
#[derive(Debug, Clone, Copy)]
pub struct SamplingContext<'a> {
    /// The request's settings.
    pub sampling: &'a Sampling,
    /// The tokens that count for penalties, the bonus included.
    pub history: &'a History,
    /// Which of the request's answers this is.
    pub choice: u32,
    /// Tokens of prompt and answer, the bonus included: the index of the next token.
    pub tokens: usize,
    /// Tokens that may not be chosen at depths below `banned_depths`.
    pub banned: &'a [u32],
    /// See `banned`.
    pub banned_depths: usize,
    /// Whether drafts are drawn from the draft's own distribution, for rejection sampling.
    pub drawn: bool,
}

impl<'a> SamplingContext<'a> {
    /// The query of a draft about row `row`, after `path` below the bonus.
    pub fn draft(&self, path: &'a [u32], row: usize) -> DraftQuery<'a> {
        DraftQuery { query: self.after(path, row), drawn: self.drawn && !self.sampling.is_greedy() }
    }

    /// The query about row `row`, after `path` below the bonus.
    pub fn after(&self, path: &'a [u32], row: usize) -> SampleQuery<'a> {
        SampleQuery {
            row,
            sampling: self.sampling,
            history: self.history,
            path,
            position: (self.tokens + path.len()) as u32,
            choice: self.choice,
            banned: if path.len() < self.banned_depths { self.banned } else { &[] },
            allowed: None,
            top_logprobs: None,
            given: None,
        }
    }
}

/// What is asked of a row of a draft's logits.
#[derive(Debug, Clone, Copy)]
pub struct DraftQuery<'a> {
    /// As it is asked of the target.
    pub query: SampleQuery<'a>,
    /// Whether tokens are drawn.
    pub drawn: bool,
}

impl DraftQuery<'_> {
    /// Up to `count` candidates by the row's `logits`. `ids` says which tokens a draft knows, if
    /// not all.
    pub fn answer(&self, logits: &[f32], count: usize, ids: Option<DraftIds<'_>>) -> Candidates {
        if !self.drawn {
            let candidates = sampling::topk_candidates(logits, &self.query, count, ids);
            return Candidates { candidates, drawn_from: None };
        }
        let SampleQuery { sampling, choice, position, .. } = self.query;
        let weights = sampling::filtered_probs(logits, &self.query, ids);
        let proposal = Proposal::draw(weights, sampling.seed, choice, position, count);
        let candidate = |(rank, token)| Candidate { token, probability: Proposal::prior(rank) };
        let candidates = proposal.tokens.into_iter().enumerate().map(candidate).collect();
        Candidates { candidates, drawn_from: Some(proposal.from) }
    }
}

/// What a draft proposes after a token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Candidates {
    /// The tokens, best first.
    pub candidates: Vec<Candidate>,
    /// What they were drawn from, if they were.
    pub drawn_from: Option<Arc<Weights>>,
}

impl Candidates {
    /// A tree that begins with what is proposed after the bonus.
    pub fn begin(&self, shape: Shape) -> TreeBuilder {
        let mut builder = TreeBuilder::start(shape, &self.candidates);
        if let Some(from) = &self.drawn_from {
            builder.propose(None, from.clone());
        }
        builder
    }

    /// Adds what is proposed after each node of a tree's beam.
    pub fn grow(builder: &mut TreeBuilder, proposed: Vec<Candidates>) {
        for (at, candidates) in builder.beam().to_vec().into_iter().zip(&proposed) {
            if let Some(from) = &candidates.drawn_from {
                builder.propose(Some(at), from.clone());
            }
        }
        let proposed: Vec<_> = proposed.into_iter().map(|p| p.candidates).collect();
        builder.grow(&proposed);
    }
}
