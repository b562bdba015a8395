//! A request's life as types: [`Waiting`], then [`Running`] in one [`Phase`] or the other.
//!
//! Only a request that runs holds KV, so a state without a [`Sequence`] cannot leak one. While a
//! request decodes, all its tokens but the last are committed: the last one, the *bonus*, is
//! certain but has no KV yet.

use std::time::Instant;

use aquila_compute::choose::{History, Sampling};
use aquila_kv::{Group, KvCache, Sequence};
use aquila_spec::{Asking, MOST_DRAFT_GROUPS, Seed, Shape, Verify};

use crate::listener::{Token, Usage};
use crate::request::{Request, RequestId, Speculation};

/// The KV group of the target model.
pub(crate) const TARGET: Group = Group::new(0);
/// The target's group, then those of the draft.
const GROUPS: [Group; 1 + MOST_DRAFT_GROUPS] = {
    let mut groups = [TARGET; 1 + MOST_DRAFT_GROUPS];
    let mut index = 1;
    while index < groups.len() {
        groups[index] = Group::new(index);
        index += 1;
    }
    groups
};

/// What is drafted for a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftRoom {
    /// The largest tree; plain if nothing drafts.
    pub shape: Shape,
    /// How many KV groups the draft has.
    pub groups: usize,
    /// The farthest that its rows look ahead.
    pub lookahead: usize,
    /// How drafts are verified.
    pub verify: Verify,
}

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
    /// What may be drafted for it: a plain shape if nothing.
    pub room: DraftRoom,
    /// What is asked of a draft, where that is not what is asked of the target.
    draft_sampling: Option<Sampling>,
}

impl Seat {
    pub fn new(id: RequestId, request: Request, longest: usize, mut room: DraftRoom) -> Self {
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
        let draft_sampling = matches!(room.verify, Verify::TargetOnly { .. }).then(likely);
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
            room,
            draft_sampling,
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
            drawn: false,
        }
    }

    /// What is asked of a draft: what the target would choose, what it would most likely choose,
    /// or a draw, as the verification needs.
    pub fn draft_asking(&self) -> Asking<'_> {
        Asking {
            sampling: self.draft_sampling.as_ref().unwrap_or(&self.request.sampling),
            drawn: self.room.verify == Verify::Rejection,
            ..self.asking()
        }
    }

    /// Whether tokens are drafted for it.
    pub fn drafts(&self) -> bool {
        self.room.shape != Shape::PLAIN
    }

    /// The groups in which it has rows.
    pub fn groups(&self) -> &'static [Group] {
        &GROUPS[..1 + self.draft_groups().len()]
    }

    /// The groups in which a draft has rows for it.
    pub fn draft_groups(&self) -> &'static [Group] {
        if self.drafts() { &GROUPS[1..=self.room.groups] } else { &[] }
    }

    /// The tree of its next round: no deeper than the answer can still become.
    pub fn next_shape(&self) -> Shape {
        self.room.shape.capped(self.remaining().saturating_sub(1))
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
    /// whose logits choose the first token, and a request that drafts the last row of each of its
    /// groups, on which its next tree stands; log-probabilities of the prompt need every row.
    pub fn match_limit(&self) -> usize {
        let anew = if self.drafts() { self.room.lookahead.max(1) } else { 0 };
        match (self.is_fresh(), self.request.prompt_logprobs) {
            (true, Some(_)) => 0,
            (true, None) => self.tokens.len().saturating_sub(anew.max(1)),
            (false, _) => self.prefill_goal().saturating_sub(anew),
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
    /// How many tokens the draft knew when it last took some in.
    pub extended: usize,
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
        Ok(Running { seat: self.seat, sequence, phase, seed: None, extended: 0 })
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
