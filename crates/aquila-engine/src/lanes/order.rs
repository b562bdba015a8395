//! What a request asks, as both lanes know it: it never changes while the request lives.

use aquila_compute::choose::Sampling;
use aquila_spec::{DraftGroup, MOST_DRAFT_GROUPS, Shape, Verify};

use crate::request::{Limits, Request, RequestId, Speculation};

/// What is drafted for a request.
#[derive(Debug, Clone, Copy)]
pub struct DraftRoom {
    /// The largest tree; plain if nothing drafts.
    pub shape: Shape,
    /// How many KV groups the draft has.
    pub groups: usize,
    /// The farthest that its rows look ahead.
    pub lookahead: usize,
    /// How many tokens a draft is asked for after the last one.
    pub candidates: usize,
    /// How drafts are verified.
    pub verify: Verify,
}

impl DraftRoom {
    /// That of an engine in which nothing drafts.
    pub const NONE: DraftRoom = DraftRoom {
        shape: Shape::PLAIN,
        groups: 0,
        lookahead: 0,
        candidates: 1,
        verify: Verify::Match,
    };
}

/// What a request asks of every round.
#[derive(Debug, Clone)]
pub struct Order {
    /// The request's name.
    pub id: RequestId,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How drafts are chosen, where that is not how tokens are.
    pub draft_sampling: Option<Sampling>,
    /// Which of several answers to one prompt this is.
    pub choice: u32,
    /// When the answer ends.
    pub limits: Limits,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of prompt and answer together that end it.
    pub longest: usize,
    /// Likely tokens to report with each token of the answer.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// What may be drafted for it: a plain shape if nothing.
    pub room: DraftRoom,
}

impl Order {
    /// What `request` asks; `longest` and `room` are the engine's.
    pub(crate) fn new(
        id: RequestId,
        request: &Request,
        longest: usize,
        mut room: DraftRoom,
    ) -> Self {
        room.shape = match request.speculation {
            Speculation::Free => room.shape,
            Speculation::Off => Shape::PLAIN,
            Speculation::Steps(steps) => room.shape.capped(steps),
        };
        // The target's choice without noise is the only one: nothing is left to probability.
        if room.shape == Shape::PLAIN || request.sampling.is_greedy() {
            room.verify = Verify::Match;
        }
        let likely = || Sampling { temperature: 0.0, ..request.sampling.clone() };
        let prompt = request.prompt.len();
        Self {
            id,
            sampling: request.sampling.clone(),
            draft_sampling: matches!(room.verify, Verify::TargetOnly { .. }).then(likely),
            choice: request.choice,
            limits: request.limits.clone(),
            prompt,
            longest: longest.min(prompt.saturating_add(request.limits.max_tokens)),
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            room,
        }
    }

    /// Nothing is drafted for it after all.
    pub(crate) fn decode_plainly(&mut self) {
        self.room = DraftRoom::NONE;
        self.draft_sampling = None;
    }

    /// Whether tokens are drafted for it.
    pub fn drafts(&self) -> bool {
        self.room.shape != Shape::PLAIN
    }

    /// How many KV groups it has rows in: the target's, then the draft's.
    pub fn groups(&self) -> usize {
        if self.drafts() { 1 + self.room.groups.min(MOST_DRAFT_GROUPS) } else { 1 }
    }

    /// The largest tree of a round that begins with so many tokens: no deeper than the answer can
    /// still become.
    pub fn shape_at(&self, tokens: usize) -> Shape {
        self.granted(self.room.shape, tokens)
    }

    /// What it takes of a tree that is granted to a round that begins with so many tokens.
    pub fn granted(&self, shape: Shape, tokens: usize) -> Shape {
        shape.capped(self.most_steps(tokens))
    }

    /// The deepest tree of such a round.
    pub fn most_steps(&self, tokens: usize) -> usize {
        self.room.shape.steps().min(self.longest.saturating_sub(tokens + 1))
    }

    /// How many rows of a draft's group are certain, with `tokens` of the text known and `read`
    /// rows of the target committed; `whole` says whether that is all of the text.
    pub(crate) fn certain_rows(
        draft: &DraftGroup,
        tokens: usize,
        read: usize,
        whole: bool,
    ) -> usize {
        let certain = tokens.saturating_sub(draft.lookahead);
        if whole { certain } else { certain.min(read) }
    }
}
