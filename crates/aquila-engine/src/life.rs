//! A request's life as types: [`Waiting`], then [`Running`] in one [`Phase`] or the other.
//!
//! Only a request that runs holds KV, so a state without a [`Sequence`] cannot leak one. While a
//! request decodes, all its tokens but the last are committed: the last one, the *bonus*, is
//! certain but has no KV yet.

use std::time::Instant;

use aquila_compute::choose::History;
use aquila_kv::{Group, KvCache, Sequence};
use aquila_spec::{Asking, Seed, Shape};

use crate::listener::{Token, Usage};
use crate::request::{Request, RequestId, Speculation};

/// The KV group of the target model.
pub(crate) const TARGET: Group = Group::new(0);
/// The KV group of the draft, where there is one.
pub(crate) const DRAFT: Group = Group::new(1);

/// What stays with a request wherever it is.
pub(crate) struct Seat {
    pub id: RequestId,
    pub request: Request,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Tokens of prompt and answer together that end it.
    pub longest: usize,
    /// What penalties count; kept only if there are any.
    pub history: History,
    /// The prompt's tokens with log-probabilities, as they come.
    pub prompt_tokens: Vec<Token>,
    pub usage: Usage,
    /// Whether it was admitted before.
    pub seen: bool,
    /// The largest tree that may be drafted for it; plain if none may.
    pub shape: Shape,
}

impl Seat {
    pub fn new(id: RequestId, request: Request, longest: usize, shape: Shape) -> Self {
        let shape = match request.speculation {
            Speculation::Free => shape,
            Speculation::Off => Shape::PLAIN,
            Speculation::Steps(steps) => shape.capped(steps),
        };
        let history = if request.sampling.has_penalties() {
            History::of_prompt(&request.prompt)
        } else {
            History::default()
        };
        let usage = Usage { prompt_tokens: request.prompt.len(), ..Usage::default() };
        let longest = longest.min(request.prompt.len().saturating_add(request.limits.max_tokens));
        let tokens = request.prompt.clone();
        Self {
            id,
            request,
            tokens,
            longest,
            history,
            prompt_tokens: Vec::new(),
            usage,
            seen: false,
            shape,
        }
    }

    /// Tokens of the answer so far.
    pub fn answered(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// How many more tokens the answer may get.
    pub fn remaining(&self) -> usize {
        self.longest - self.tokens.len()
    }

    /// What is asked of the tokens after those that are there.
    pub fn asking(&self) -> Asking<'_> {
        Asking {
            sampling: &self.request.sampling,
            history: &self.history,
            choice: self.request.choice,
            tokens: self.tokens.len(),
            banned: &self.request.limits.stop_ids,
            banned_depths: self.request.limits.min_tokens.saturating_sub(self.answered()),
        }
    }

    /// Whether tokens are drafted for it.
    pub fn drafts(&self) -> bool {
        self.shape != Shape::PLAIN
    }

    /// The groups in which it has rows.
    pub fn groups(&self) -> &'static [Group] {
        if self.drafts() { &[TARGET, DRAFT] } else { &[TARGET] }
    }

    /// The tree of its next round: no deeper than the answer can still become.
    pub fn next_shape(&self) -> Shape {
        self.shape.capped(self.remaining().saturating_sub(1))
    }

    /// Adds a token of the answer.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.usage.completion_tokens += 1;
        if self.request.sampling.has_penalties() {
            self.history.push(token);
        }
    }

    /// Whether the first token of the answer is still to be chosen. A request that was retracted
    /// while it decoded keeps its bonus, and only rebuilds the rows before it.
    pub fn is_fresh(&self) -> bool {
        self.answered() == 0
    }

    /// How many rows a prefill must commit.
    pub fn prefill_goal(&self) -> usize {
        if self.is_fresh() { self.tokens.len() } else { self.tokens.len() - 1 }
    }

    /// How many tokens may come from the prefix cache. A fresh request computes its last row,
    /// whose logits choose the first token, and a request that drafts the row before its bonus,
    /// on which its next tree stands; log-probabilities of the prompt need every row.
    pub fn match_limit(&self) -> usize {
        match (self.is_fresh(), self.request.prompt_logprobs) {
            (true, Some(_)) => 0,
            (true, None) => self.tokens.len() - 1,
            (false, _) => self.prefill_goal() - usize::from(self.drafts()),
        }
    }

    pub fn is_expired(&self, now: Instant) -> bool {
        self.request.deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// A request without KV.
pub(crate) struct Waiting {
    pub seat: Box<Seat>,
}

/// What a request that holds KV does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its tokens are being read, until `goal` rows are committed.
    Prefilling { goal: usize },
    /// Its answer is being written.
    Decoding,
}

/// A request that holds KV.
pub(crate) struct Running {
    pub seat: Box<Seat>,
    pub sequence: Sequence,
    pub phase: Phase,
    /// Where its next tree begins.
    pub seed: Option<Seed>,
}

impl Waiting {
    /// Takes the slots of the whole prefill and of the row after it and leaves `headroom` of them
    /// to others, or stays as it was.
    pub fn admit(mut self, cache: &mut KvCache, headroom: usize) -> Result<Running, Waiting> {
        let goal = self.seat.prefill_goal();
        let namespace = self.seat.request.namespace.clone();
        let limit = self.seat.match_limit();
        let groups = self.seat.groups();
        let mut sequence = cache.admit(&namespace, &self.seat.tokens, limit, groups);
        let matched = sequence.committed(TARGET);
        let next = usize::from(self.seat.remaining() > 0);
        let fits = |cache: &mut KvCache, sequence: &mut Sequence, group: Group| {
            let wanted = goal - sequence.committed(group) + next;
            wanted + headroom <= cache.available(group)
                && cache.reserve(sequence, group, wanted).is_ok()
        };
        if !groups.iter().all(|&group| fits(cache, &mut sequence, group)) {
            cache.discard(sequence);
            return Err(self);
        }
        if !self.seat.seen {
            self.seat.seen = true;
            self.seat.usage.cached_tokens = matched;
        }
        let phase = if matched == goal { Phase::Decoding } else { Phase::Prefilling { goal } };
        Ok(Running { seat: self.seat, sequence, phase, seed: None })
    }
}

impl Running {
    /// Rows that it has still to read.
    pub fn unread(&self) -> usize {
        match self.phase {
            Phase::Prefilling { goal } => goal - self.sequence.committed(TARGET),
            Phase::Decoding => 0,
        }
    }

    /// Gives its KV back, what is committed to the prefix cache, and waits again.
    pub fn retract(self, cache: &mut KvCache) -> Waiting {
        let mut seat = self.release(cache);
        seat.usage.retractions += 1;
        // Log-probabilities of the prompt are collected anew by the next prefill.
        seat.prompt_tokens.clear();
        Waiting { seat }
    }

    /// Gives its KV back, what is committed to the prefix cache.
    pub fn release(self, cache: &mut KvCache) -> Box<Seat> {
        cache.release(self.sequence, &self.seat.tokens);
        self.seat
    }

    /// Gives its KV back, and nothing to the prefix cache.
    pub fn discard(self, cache: &mut KvCache) -> Box<Seat> {
        cache.discard(self.sequence);
        self.seat
    }
}
