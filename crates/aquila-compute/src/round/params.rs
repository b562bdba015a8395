//! What a request queries of every round, and what a draft keeps for it.

use std::sync::Arc;

use super::{Grammar, Shape, Verify};
use crate::sampling::Sampling;

/// Keys and values that a draft keeps for its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftGroup {
    /// How many tokens beyond its position a row depends on: its row p consumes token
    /// p + lookahead, so with n tokens certain it has n - lookahead certain rows.
    pub lookahead: usize,
    /// Rows that a tree takes here while it is drafted.
    pub tree: TreeRows,
}

impl DraftGroup {
    /// How many rows are certain, with `tokens` of the text known and `read` rows of the target
    /// committed; `whole` says whether that is all of the text.
    pub fn certain_rows(&self, tokens: usize, read: usize, whole: bool) -> usize {
        let certain = tokens.saturating_sub(self.lookahead);
        if whole { certain } else { certain.min(read) }
    }
}

/// How many rows of a group a tree takes while it is drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeRows {
    /// One for each node that goes on, at every level.
    EveryLevel,
    /// Those of one level: as many for each node that goes on there as it is deep.
    Level(usize),
}

impl TreeRows {
    /// The rows of a tree of this shape.
    pub fn of(self, shape: Shape) -> usize {
        match self {
            TreeRows::EveryLevel => shape.draft_rows(),
            TreeRows::Level(depth) if depth < shape.steps() => shape.topk() * depth,
            TreeRows::Level(_) => 0,
        }
    }
}

/// The most groups that an algorithm may declare.
pub const MOST_DRAFT_GROUPS: usize = 15;

/// What may be drafted for a request.
#[derive(Debug, Clone, Copy)]
pub struct DraftLimits {
    /// The largest tree; plain if nothing drafts.
    pub shape: Shape,
    /// How many KV groups the draft has.
    pub groups: usize,
    /// The farthest that its rows look ahead.
    pub lookahead: usize,
    /// How many candidates a draft proposes after the last token.
    pub candidates: usize,
    /// How drafts are verified.
    pub verify: Verify,
}

impl DraftLimits {
    /// Those of an engine in which nothing drafts.
    pub const NONE: DraftLimits = DraftLimits {
        shape: Shape::PLAIN,
        groups: 0,
        lookahead: 0,
        candidates: 1,
        verify: Verify::Match,
    };
}

/// What a request gets of the target's rows of its tokens, beside tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Returned {
    /// What the language-model head reads: the stream after the final norm.
    pub hidden_states: bool,
    /// The experts that a row goes to in each layer.
    pub routed_experts: bool,
}

/// What a request queries of every round. It never changes while the request runs.
#[derive(Debug, Clone)]
pub struct RequestParams {
    /// The request's number.
    pub id: u64,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How drafts are chosen, where that is not how tokens are.
    pub draft_sampling: Option<Sampling>,
    /// Which of several answers to one prompt this is.
    pub choice: u32,
    /// Tokens that end the text.
    pub stop_ids: Vec<u32>,
    /// Tokens of the answer before which none of those may be chosen.
    pub min_tokens: usize,
    /// What the answer must be like.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of prompt and answer together that end it.
    pub longest: usize,
    /// Likely tokens to report with each token of the answer.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// What it gets of the rows of its tokens.
    pub returned: Returned,
    /// Whether it gets the trees that are verified for it.
    pub draft_trees: bool,
    /// What may be drafted for it.
    pub limits: DraftLimits,
}

impl RequestParams {
    /// Nothing is drafted for it after all.
    pub fn decode_plainly(&mut self) {
        self.limits = DraftLimits::NONE;
        self.draft_sampling = None;
    }

    /// Chooses with this seed from now on, drafts too.
    pub fn set_seed(&mut self, seed: u64) {
        self.sampling.seed = seed;
        self.draft_sampling.iter_mut().for_each(|sampling| sampling.seed = seed);
    }

    /// Whether tokens are drafted for it.
    pub fn drafts(&self) -> bool {
        self.limits.shape != Shape::PLAIN
    }

    /// How many KV groups it has rows in: the target's, then the draft's.
    pub fn groups(&self) -> usize {
        if self.drafts() { 1 + self.limits.groups.min(MOST_DRAFT_GROUPS) } else { 1 }
    }

    /// The largest tree of a round that begins with so many tokens: no deeper than the answer can
    /// still become.
    pub fn shape_at(&self, tokens: usize) -> Shape {
        self.granted(self.limits.shape, tokens)
    }

    /// What it takes of a tree that is granted to a round that begins with so many tokens.
    pub fn granted(&self, shape: Shape, tokens: usize) -> Shape {
        shape.capped(self.most_steps(tokens))
    }

    /// The deepest tree of such a round.
    pub fn most_steps(&self, tokens: usize) -> usize {
        self.limits.shape.steps().min(self.longest.saturating_sub(tokens + 1))
    }
}
