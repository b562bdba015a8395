//! A request's life in the scheduler, as types: [`Waiting`], then [`Running`]; between them
//! [`Receiving`](super::receive::Receiving) where another engine processes its prompt.
//!
//! Only a request that runs holds KV, so a state without a [`Sequence`] cannot leak one. While a
//! request decodes, all its tokens but the last are committed: the last one, the *bonus*, is
//! certain but has no KV yet. What rounds on their way will bring is known only within bounds.

use std::sync::Arc;
use std::time::Instant;

use aquila_compute::round::{DraftLimits, RequestOutput, RequestParams, Returned};
use aquila_kv::{Group, KvCache, Namespace, Sequence};
use aquila_spec::policy::RequestView;
use aquila_spec::{DraftGroup, MOST_DRAFT_GROUPS, Shape};

use crate::executor::Departed;
use crate::listener::{Listener, Token, TokenRows, Usage};
use crate::request::{Request, RequestId};
use crate::scheduler::hand_over::HandingOver;
use crate::scheduler::params::params_of;
use crate::scheduler::queue::MOST_OVERTAKEN;
use crate::scheduler::receive::Arrived;
use crate::transfer::{Source, Transfer};

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

/// What stays with a request wherever it is.
pub(crate) struct RequestState {
    pub params: Arc<RequestParams>,
    pub namespace: Namespace,
    pub family: Option<u64>,
    pub deadline: Option<Instant>,
    /// Prompt and answer, as far as rounds were settled.
    pub tokens: Vec<u32>,
    /// The prompt's tokens with log-probabilities, as they come.
    pub prompt_tokens: Vec<Token>,
    /// What it gets of the rows of its tokens, as they come.
    pub rows: TokenRows,
    /// The first token whose rows it still misses; none where it gets no rows.
    pub awaited: Option<usize>,
    /// What the last settled round brought, until its listener was heard.
    pub last_round: LastRound,
    pub usage: Usage,
    /// Whether it was admitted before.
    pub seen: bool,
    /// Where its priority puts it, higher first.
    pub rank: i64,
    /// How many that came later were admitted while it was the first that waited.
    pub overtaken: usize,
    /// Whether its answer says what speculation did, be it nothing.
    pub speculates: bool,
    /// What it leaves to the engine that decodes it, if another one does.
    pub handing_over: Option<HandingOver>,
    /// What brings the rows of its prompt, until they are here.
    pub source: Option<Box<dyn Source>>,
}

impl RequestState {
    /// The state of a request that comes, and its listener.
    pub fn new(
        id: RequestId,
        request: Request,
        rank: i64,
        longest: usize,
        limits: DraftLimits,
    ) -> (Self, Box<dyn Listener>) {
        let params = Arc::new(params_of(id, &request, longest, limits));
        let usage = Usage { prompt_tokens: request.prompt.len(), ..Usage::default() };
        let (handing_over, source) = match request.transfer {
            Transfer::None => (None, None),
            Transfer::HandOver(to) => (Some(HandingOver::new(to)), None),
            Transfer::Receive(source) => (None, Some(source)),
        };
        let state = Self {
            speculates: params.drafts(),
            params,
            namespace: request.namespace,
            family: request.family,
            deadline: request.deadline,
            tokens: request.prompt,
            prompt_tokens: Vec::new(),
            rows: TokenRows { from: request.returned_from, ..TokenRows::default() },
            awaited: (request.returned != Returned::default()).then_some(request.returned_from),
            last_round: LastRound::default(),
            usage,
            seen: false,
            rank,
            overtaken: 0,
            handing_over,
            source,
        };
        (state, request.listener)
    }

    /// Nothing is drafted for it after all.
    pub fn decode_plainly(&mut self) {
        Arc::make_mut(&mut self.params).decode_plainly();
    }

    pub fn id(&self) -> RequestId {
        RequestId(self.params.id)
    }

    /// How many more tokens the answer may get.
    pub fn remaining(&self) -> usize {
        self.params.longest - self.tokens.len()
    }

    /// The groups in which it has rows.
    pub fn groups(&self) -> &'static [Group] {
        &GROUPS[..self.params.groups()]
    }

    /// Whether the first token of the answer is still to be chosen. A request that was preempted
    /// while it decoded keeps its bonus, and only rebuilds the rows before it.
    pub fn is_fresh(&self) -> bool {
        self.tokens.len() == self.params.prompt
    }

    /// How many rows a prefill must commit.
    pub fn prefill_goal(&self) -> usize {
        if self.is_fresh() { self.tokens.len() } else { self.tokens.len() - 1 }
    }

    /// How many tokens may come from the prefix cache. A fresh request computes its last row,
    /// whose logits choose the first token, and a request that drafts the last row of each of its
    /// groups, on which its next tree stands; log-probabilities of the prompt need every row, and
    /// rows that are to be reported are computed unless they were before.
    pub fn match_limit(&self) -> usize {
        let anew = self.rows_of_seed();
        if self.source.is_some() {
            return self.tokens.len().saturating_sub(anew);
        }
        let limit = match (self.is_fresh(), self.params.prompt_logprobs) {
            (true, Some(_)) => 0,
            (true, None) => self.tokens.len().saturating_sub(anew.max(1)),
            (false, _) => self.prefill_goal().saturating_sub(anew),
        };
        self.awaited.map_or(limit, |awaited| limit.min(awaited))
    }

    /// How many of its last rows must be run for its draft to have what a tree begins with.
    pub fn rows_of_seed(&self) -> usize {
        if self.params.drafts() { self.params.limits.lookahead.max(1) } else { 0 }
    }

    /// Whether it may be admitted to process its prompt here.
    pub fn may_process_prompt(&self) -> bool {
        let claimed = |handing_over: &HandingOver| handing_over.is_claimed();
        self.source.is_none() && self.handing_over.as_ref().is_none_or(claimed)
    }

    /// Whether it computes rows of its prompt that the cache may have.
    pub fn reads_anew(&self) -> bool {
        self.params.prompt_logprobs.is_some() || self.awaited.is_some()
    }

    /// Keeps what a round brings of the rows of `count` tokens from `first` on, but for those that
    /// it has.
    pub fn keep_rows(&mut self, first: usize, count: usize, output: &mut RequestOutput) {
        let Some(awaited) = &mut self.awaited else { return };
        assert!(first <= *awaited, "rows from {first} came, those from {awaited} are missing");
        let known = (*awaited - first).min(count);
        self.rows.hidden_states.extend(std::mem::take(&mut output.hidden_states), known);
        self.rows.routed_experts.extend(std::mem::take(&mut output.routed_experts), known);
        *awaited = (*awaited).max(first + count);
    }

    /// Whether it was overtaken often enough: it is next, and is not preempted for others.
    pub fn is_overdue(&self) -> bool {
        self.overtaken >= MOST_OVERTAKEN
    }

    pub fn is_expired(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// What a round brought a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LastRound {
    pub tokens: usize,
    /// Drafts that were verified and that were counted as right, if there was a tree.
    pub drafts: Option<(usize, usize)>,
}

/// A request without KV.
pub(crate) struct Waiting {
    pub state: Box<RequestState>,
}

/// Bounds on the tokens that rounds on their way bring a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PendingTokens {
    pub least: usize,
    pub most: usize,
}

/// A request that holds KV.
pub(crate) struct Running {
    pub state: Box<RequestState>,
    pub sequence: Sequence,
    /// How many rows its prefill commits.
    pub goal: usize,
    /// How many of them are committed or on their way.
    pub read: usize,
    /// What rounds on their way bring.
    pub pending: PendingTokens,
    /// How many slots of each group the executor was told; none before it knows the request.
    pub told: Option<Vec<usize>>,
    /// Rounds that its draft has missed since it was paused.
    pub missed: usize,
    /// What came of it from another engine and the executor was not told yet.
    pub arrived: Option<Arrived>,
    /// Whether the executor is still to say that its draft can go on.
    pub unpacking: bool,
}

impl Waiting {
    /// How many slots it must get to be admitted with what `sequence` has found in the cache: those
    /// of the whole prefill and of the row after it, and of its first tree where it is decoded here,
    /// so that it is not preempted before it. `declared` are the draft's groups.
    pub fn rows_to_admit(
        &self,
        sequence: &Sequence,
        group: Group,
        declared: &[DraftGroup],
    ) -> usize {
        let goal = self.state.prefill_goal();
        let mut rows = goal;
        if self.state.remaining() > 0 {
            rows += 1;
            if self.state.handing_over.is_none() {
                rows = rows.max(rows_of_round(&self.state.params, goal + 1, group, declared));
            }
        }
        rows - sequence.committed(group)
    }

    /// Takes the slots that it must get and leaves `headroom` of them to others, or stays as it was.
    pub fn admit(
        self,
        cache: &mut KvCache,
        headroom: usize,
        declared: &[DraftGroup],
    ) -> Result<Running, Waiting> {
        let goal = self.state.prefill_goal();
        let (mut state, sequence) = self.reserve(cache, headroom, declared)?;
        let matched = sequence.committed(TARGET);
        if !state.seen {
            state.seen = true;
            state.usage.cached_tokens = matched;
        }
        Ok(Running::new(state, sequence, goal, matched))
    }

    /// The same, without deciding what becomes of it.
    pub fn reserve(
        self,
        cache: &mut KvCache,
        headroom: usize,
        declared: &[DraftGroup],
    ) -> Result<(Box<RequestState>, Sequence), Waiting> {
        let limit = self.state.match_limit();
        let groups = self.state.groups();
        let mut sequence = cache.admit(&self.state.namespace, &self.state.tokens, limit, groups);
        let fits = |cache: &mut KvCache, sequence: &mut Sequence, group: Group| {
            let wanted = self.rows_to_admit(sequence, group, declared);
            wanted + headroom <= cache.available(group)
                && cache.reserve(sequence, group, wanted).is_ok()
        };
        if !groups.iter().all(|&group| fits(cache, &mut sequence, group)) {
            cache.discard(sequence);
            return Err(self);
        }
        Ok((self.state, sequence))
    }
}

impl Running {
    /// A request that holds KV, `read` of the `goal` rows of its prefill.
    pub fn new(state: Box<RequestState>, sequence: Sequence, goal: usize, read: usize) -> Self {
        let pending = PendingTokens::default();
        let (told, arrived) = (None, None);
        Self { state, sequence, goal, read, pending, told, missed: 0, arrived, unpacking: false }
    }

    /// Rows that are still to be read, by rounds that are not planned yet.
    pub fn unread(&self) -> usize {
        self.goal - self.read
    }

    /// Those of them that the next round may read: none while what it gives away waits to be sent.
    pub fn readable(&self) -> usize {
        let waits = self.state.handing_over.as_ref().is_some_and(|to| !to.has_room());
        if waits { 0 } else { self.unread() }
    }

    /// What the executor is told when it holds nothing any more, if it knows it.
    pub fn departed(&self) -> Option<Departed> {
        let (request, tokens) = (self.state.id(), self.state.tokens.len());
        self.told.is_some().then_some(Departed { request, tokens })
    }

    /// Whether its prompt is still being read: by the next round or by one on its way.
    pub fn is_reading(&self) -> bool {
        self.sequence.committed(TARGET) < self.goal
    }

    /// Whether the next round decodes it. It does not where the rounds on their way are sure to
    /// end it.
    pub fn decodes_next(&self) -> bool {
        self.unread() == 0
            && !self.unpacking
            && self.state.handing_over.is_none()
            && self.state.tokens.len() + self.pending.least < self.state.params.longest
    }

    /// Notes whether its next round pauses its draft.
    pub fn follow_draft(&mut self, paused: bool) {
        self.missed = if paused { self.missed.saturating_add(1) } else { 0 };
    }

    /// What a policy is told of it; `most_missed` is how many rounds its draft may miss.
    pub fn view(&self, most_missed: usize) -> RequestView {
        let steps = self.state.params.most_steps(self.state.tokens.len() + self.pending.least);
        let cap = if self.missed > most_missed { 0 } else { steps };
        RequestView { id: self.state.id().0, cap: Some(cap), behind: self.missed }
    }

    /// How many rows beyond its committed ones the next round may need in each of its groups,
    /// whatever the rounds on their way bring; `declared` are the draft's groups.
    pub fn rows_of_next_round(&self, declared: &[DraftGroup]) -> Vec<usize> {
        let params = &self.state.params;
        let tokens = self.state.tokens.len();
        let most = (tokens + self.pending.most).min(params.longest - 1);
        let rows_of = |&group: &Group| {
            let rounds = tokens + self.pending.least..=most;
            let rows = rounds.map(|tokens| rows_of_round(params, tokens, group, declared)).max();
            rows.unwrap_or(0).saturating_sub(self.sequence.committed(group))
        };
        self.state.groups().iter().map(rows_of).collect()
    }

    /// Gives its KV back, what is committed to the prefix cache, and waits again.
    pub fn preempt(self, cache: &mut KvCache) -> Waiting {
        let mut state = self.release(cache);
        state.usage.preemptions += 1;
        // Log-probabilities of the prompt are collected anew by the next prefill.
        state.prompt_tokens.clear();
        Waiting { state }
    }

    /// Gives its KV back, what is committed to the prefix cache.
    pub fn release(self, cache: &mut KvCache) -> Box<RequestState> {
        cache.release(self.sequence, &self.state.tokens);
        self.state
    }

    /// Gives its KV back, and nothing to the prefix cache.
    pub fn discard(self, cache: &mut KvCache) -> Box<RequestState> {
        cache.discard(self.sequence);
        self.state
    }
}

/// How many rows of a group a round takes that begins with so many tokens.
fn rows_of_round(
    params: &RequestParams,
    tokens: usize,
    group: Group,
    declared: &[DraftGroup],
) -> usize {
    let shape = params.shape_at(tokens);
    let of_draft =
        |draft: &DraftGroup| tokens.saturating_sub(draft.lookahead) + tree_rows(draft, shape);
    match group.index().checked_sub(1) {
        None => tokens - 1 + shape.nodes(),
        Some(draft) => declared.get(draft).map_or(0, of_draft),
    }
}

/// Rows of a draft's group beyond the certain ones. Its tree is gone before its rows of the
/// accepted tokens are made.
fn tree_rows(draft: &DraftGroup, shape: Shape) -> usize {
    draft.tree.of(shape).max(shape.steps() + 1)
}
