//! Requests whose prompt is processed by another engine.
//!
//! Such a request reserves slots for its whole prompt, then its rows come, in pieces that the next
//! batch writes. The first token of its answer is handed out as soon as it is known; when all rows
//! are there as well, the request gets a place, its draft takes what the other engine has packed,
//! and it decodes as a request would that was preempted and has rebuilt its rows. The invariant: a
//! row is committed when all of them were written, and never before.

use std::cmp::Reverse;
use std::sync::atomic::Ordering::Relaxed;

use aquila_compute::KvShape;
use aquila_compute::round::RequestParams;
use aquila_kv::{Group, KvCache, Sequence};
use aquila_spec::DraftGroup;

use crate::error::Failure;
use crate::executor::{Import, RowWidths, ScheduledBatch, Unpack};
use crate::listener::{FinishReason, Outcome, Token, TokenRows};
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use crate::scheduler::output_processor::Last;
use crate::scheduler::plan::Planning;
use crate::scheduler::preempt::Way;
use crate::scheduler::request_state::{LastRound, RequestState, Running, TARGET, Waiting};
use crate::transfer::{Claim, Delivery, KvRows, Prefilled};

/// A request that has slots and no rows yet.
pub(crate) struct Receiving {
    pub state: Box<RequestState>,
    pub sequence: Sequence,
    /// How many rows every layer has got, by group, store and layer.
    got: Vec<Vec<Vec<usize>>>,
    /// Rows that the executor was not told yet.
    rows: Vec<KvRows>,
    /// What it gets of the rows of its prompt's tokens, as far as it came.
    returned: TokenRows,
    /// What was packed for its draft, once its prompt is processed.
    prefilled: Option<Option<Vec<u8>>>,
}

/// What came from another engine and the executor was not told yet.
pub(crate) struct Arrived {
    rows: Vec<KvRows>,
    /// What was packed; none where the draft's last rows are run again.
    packed: Option<Vec<u8>>,
}

impl Receiving {
    fn new(state: Box<RequestState>, sequence: Sequence, kv: &[Vec<KvShape>]) -> Self {
        let have = sequence.committed(TARGET);
        let stores = |shapes: &Vec<KvShape>| {
            shapes.iter().map(|shape| vec![have; shape.layers]).collect::<Vec<_>>()
        };
        let got = kv.iter().map(stores).collect();
        let returned = TokenRows { from: state.rows.from, ..TokenRows::default() };
        Self { state, sequence, got, rows: Vec::new(), returned, prefilled: None }
    }

    /// Takes rows, or says what is wrong with them.
    fn take(
        &mut self,
        rows: KvRows,
        kv: &[Vec<KvShape>],
        declared: &[DraftGroup],
    ) -> Result<(), String> {
        let there = || format!("store {} of group {}", rows.store, rows.group);
        let shape = kv.get(rows.group).and_then(|stores| stores.get(rows.store));
        let Some(shape) = shape else { return Err(format!("there is no {}", there())) };
        if rows.layers.start >= rows.layers.end || rows.layers.end > shape.layers {
            let (layers, all) = (&rows.layers, shape.layers);
            return Err(format!("layers {layers:?} of {}, which has {all}", there()));
        }
        let mut goal = goal_of(self.state.params.prompt, rows.group, declared);
        if let Some(&group) = self.state.groups().get(rows.group) {
            // A peer may have been asked for another answer, with more rows.
            goal = goal.min(self.sequence.reserved(group));
        }
        let got = &mut self.got[rows.group][rows.store][rows.layers.clone()];
        if got.iter().any(|&got| got != rows.rows.start)
            || rows.rows.start > rows.rows.end
            || rows.rows.end > goal
        {
            let (from, wanted) = (&rows.rows, got[0]..goal);
            return Err(format!("rows {from:?} of {}, not of {wanted:?}", there()));
        }
        let bytes = rows.layers.len() * rows.rows.len() * shape.bytes_per_layer();
        if rows.bytes.len() != bytes {
            return Err(format!("{} bytes of {}, not {bytes}", rows.bytes.len(), there()));
        }
        got.fill(rows.rows.end);
        // A draft's rows are of no use to a request that does not draft.
        if rows.group < self.state.groups().len() {
            self.rows.push(rows);
        }
        Ok(())
    }

    /// Takes rows of the prompt's tokens behind those that came, or says what is wrong with them;
    /// `whole` says whether they are the last.
    fn take_returned(
        &mut self,
        rows: TokenRows,
        widths: RowWidths,
        whole: bool,
    ) -> Result<(), String> {
        self.returned.hidden_states.extend(rows.hidden_states, 0);
        self.returned.routed_experts.extend(rows.routed_experts, 0);
        check_rows(&self.state, &self.returned, widths, whole)
    }

    /// Whether all rows came that it goes on with.
    fn has_all_rows(&self, declared: &[DraftGroup]) -> bool {
        let prompt = self.state.params.prompt;
        let groups = self.got.iter().take(self.state.groups().len()).enumerate();
        let all = |(group, stores): (usize, &Vec<Vec<usize>>)| {
            let goal = goal_of(prompt, group, declared);
            stores.iter().flatten().all(|&got| got == goal)
        };
        { groups }.all(all)
    }

    /// The same as a request that runs, with what the executor is to be told.
    fn run(self) -> Running {
        let Self { mut state, sequence, rows, prefilled, .. } = self;
        state.source = None;
        let packed = prefilled.flatten().or((!state.params.drafts()).then(Vec::new));
        let goal = state.prefill_goal();
        let mut running = Running::new(state, sequence, goal, goal);
        running.unpacking = packed.is_some();
        if packed.is_none() {
            running.read = goal.saturating_sub(running.state.rows_of_seed());
        }
        running.arrived = Some(Arrived { rows, packed });
        running
    }

    /// Adds the rows that came since the last batch; answers whose they are, if there are any.
    pub fn import(&mut self, batch: &mut ScheduledBatch) -> Option<RequestId> {
        let any = !self.rows.is_empty();
        import(&mut self.rows, &self.sequence, batch);
        any.then(|| self.state.id())
    }

    /// Gives its slots back and waits again, to process its prompt here.
    pub fn preempt(self, cache: &mut KvCache) -> Waiting {
        let mut state = self.discard(cache);
        state.source = None;
        state.usage.preemptions += 1;
        Waiting { state }
    }

    /// Gives its slots back.
    pub fn discard(self, cache: &mut KvCache) -> Box<RequestState> {
        cache.discard(self.sequence);
        self.state
    }
}

impl Running {
    /// Lets its last rows be run again, on which its next tree stands.
    fn run_last_rows_again(&mut self, cache: &mut KvCache) {
        self.read = self.goal.saturating_sub(self.state.rows_of_seed());
        for &group in self.state.groups() {
            let rows = self.read - self.sequence.committed(group);
            cache.commit(&mut self.sequence, group, rows);
        }
    }
}

/// Refuses tokens of a prompt that are not those of `tokens`, and any that were not `wanted`.
fn check_prompt(tokens: &[u32], wanted: bool, prompt: &[Token]) -> Result<(), String> {
    let tokens = if wanted { tokens } else { &[] };
    if !prompt.iter().map(|token| token.id).eq(tokens.iter().copied()) {
        return Err("log-probabilities of another prompt".into());
    }
    Ok(())
}

/// Refuses rows of a prompt's tokens that are not as many or as wide as the request asked for; where
/// they are not the `whole` of them, only more.
fn check_rows(
    state: &RequestState,
    rows: &TokenRows,
    widths: RowWidths,
    whole: bool,
) -> Result<(), String> {
    let RequestParams { returned, prompt, .. } = *state.params;
    let count = prompt.saturating_sub(state.rows.from);
    let check = |what: &str, asked: bool, width: usize, given: (usize, usize)| {
        let values = if asked { count * width } else { 0 };
        let are_right = if whole { given.1 == values } else { given.1 <= values };
        let is_right = are_right && (given.1 == 0 || given.0 == width);
        let (given_width, given) = given;
        is_right
            .then_some(())
            .ok_or_else(|| format!("{given} values of {what}, {given_width} a row, not {values}"))
    };
    let TokenRows { hidden_states, routed_experts, .. } = rows;
    let given = (hidden_states.width, hidden_states.values.len());
    check("hidden states", returned.hidden_states, widths.hidden_states, given)?;
    let given = (routed_experts.width, routed_experts.values.len());
    check("routed experts", returned.routed_experts, widths.routed_experts, given)
}

/// Why a request ends whose prompt does not come.
fn not_received(why: &str) -> FinishReason {
    FinishReason::Abort(format!("its prompt was not received: {why}"))
}

/// How many rows of a group the prompt leaves, the first token known.
fn goal_of(prompt: usize, group: usize, declared: &[DraftGroup]) -> usize {
    let certain = |draft: &DraftGroup| draft.certain_rows(prompt + 1, prompt, true);
    group.checked_sub(1).map_or(prompt, |draft| declared.get(draft).map_or(0, certain))
}

impl Scheduler {
    /// Takes what comes for a request that is received; false if there is none of that name.
    pub fn deliver(&mut self, id: RequestId, delivery: Delivery) -> bool {
        let Some(at) = self.receiving_at(id) else {
            // Before it has slots nothing comes but that nothing will come.
            let Delivery::Failed(why) = delivery else { return false };
            let waits = self.waiting.get_by_id(id).is_some_and(|w| w.state.source.is_some());
            if waits && let Some(waiting) = self.waiting.take_by_id(id) {
                self.finish(waiting.state, not_received(&why));
            }
            return waits;
        };
        let taken = match delivery {
            Delivery::Rows(rows) => {
                let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
                self.receiving[at].take(rows, &self.profile.kv, declared)
            }
            Delivery::Returned(rows) => {
                self.receiving[at].take_returned(rows, self.profile.row_widths, false)
            }
            Delivery::Prefilled(prefilled) => self.take_prefilled(id, *prefilled),
            Delivery::Failed(why) => Err(why),
        };
        if let Err(why) = taken
            && let Some(at) = self.receiving_at(id)
        {
            let state = self.receiving.remove(at).discard(&mut self.cache);
            self.finish(state, not_received(&why));
        }
        self.count();
        true
    }

    fn receiving_at(&self, id: RequestId) -> Option<usize> {
        self.receiving.iter().position(|receiving| receiving.state.id() == id)
    }

    /// The prompt is processed: hands out the first token.
    fn take_prefilled(&mut self, id: RequestId, prefilled: Prefilled) -> Result<(), String> {
        // Listeners are told nothing before it is known what they said to the round before.
        let replies = self.outputs.replies();
        self.follow_listeners(replies);
        let Some(at) = self.receiving_at(id) else { return Ok(()) };
        let (vocabulary, widths) = (self.vocabulary(), self.profile.row_widths);
        let receiving = &mut self.receiving[at];
        let Prefilled { tokens, ended, prompt, rows, groups, cached_tokens, draft: packed } =
            prefilled;
        if receiving.prefilled.is_some() {
            return Err("its prompt was processed twice".into());
        }
        let is_token = |id: u32| (id as usize) < vocabulary;
        if tokens.len() > 1
            || tokens.is_empty() && ended.is_none()
            || !tokens.iter().all(|token| is_token(token.id))
        {
            return Err("the first token is none".into());
        }
        let RequestState { tokens: known, params, .. } = &*receiving.state;
        check_prompt(known, params.prompt_logprobs.is_some(), &prompt)?;
        receiving.take_returned(rows, widths, true)?;
        receiving.prefilled = Some(packed);
        let Receiving { state, returned, .. } = receiving;
        if let Some(awaited) = &mut state.awaited {
            *awaited = (*awaited).max(state.params.prompt);
            state.rows = std::mem::take(returned);
        }
        state.seen = true;
        state.usage.cached_tokens = cached_tokens.min(state.params.prompt);
        state.usage.completion_tokens = tokens.len();
        state.tokens.extend(tokens.iter().map(|token| token.id));
        state.last_round = LastRound { tokens: tokens.len(), drafts: None };
        if state.params.drafts() && groups < state.groups().len() {
            state.decode_plainly();
            self.stats.lost_drafts.fetch_add(1, Relaxed);
        }
        // Rows come before it, so what is missing now will never come.
        let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
        if ended.is_none() && !self.receiving[at].has_all_rows(declared) {
            return Err("not all of its rows were sent".into());
        }
        let state = &mut self.receiving[at].state;
        if state.params.prompt_logprobs.is_some() {
            self.outputs.prompt(id, prompt);
        }
        self.stats.received.fetch_add(1, Relaxed);
        let full = state.tokens.len() >= state.params.longest;
        match ended.or(full.then_some(FinishReason::Length)) {
            None => self.outputs.tokens(id, tokens),
            Some(reason) => {
                let state = self.receiving.remove(at).discard(&mut self.cache);
                if tokens.is_empty() {
                    self.finish(state, reason);
                } else {
                    self.drafting.leave(id.0);
                    let RequestState { usage, rows, .. } = *state;
                    let outcome = Outcome { reason, usage, rows };
                    self.outputs.last(id, Last { tokens, outcome, drafts: None });
                }
            }
        }
        let replies = self.outputs.round_ends();
        self.follow_listeners(replies);
        Ok(())
    }

    /// Gives a place to requests whose rows are all there; reserves slots for requests that are to
    /// be received, in their order, while memory lasts. Those of lower priority may be preempted
    /// for either.
    pub(crate) fn plan_receiving(&mut self) -> Planning {
        while let Some(at) = self.next_complete() {
            if self.running.len() >= self.config.max_running_requests {
                match self.make_place(self.receiving[at].state.rank) {
                    Way::Made => (),
                    Way::None => break,
                    Way::NeedsResult => return Planning::NeedsResult,
                }
            }
            let running = self.receiving.remove(at).run();
            if !running.unpacking {
                self.stats.rebuilt_drafts.fetch_add(1, Relaxed);
            }
            self.running.push(running);
        }
        while self.receiving.len() < self.config.max_running_requests {
            let Some(at) = self.next_to_receive() else { break };
            let kept_back = self.kept_back();
            let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
            match self.waiting.take(at).reserve(&mut self.cache, kept_back, declared) {
                Ok((mut state, sequence)) => {
                    self.waiting.overtake(state.id());
                    let claim = Claim {
                        have: sequence.committed(TARGET),
                        seed: state.params.sampling.seed,
                        candidates: state.params.limits.candidates,
                    };
                    let id = state.id();
                    if let Some(source) = &mut state.source {
                        source.begin(id, claim);
                    }
                    self.receiving.push(Receiving::new(state, sequence, &self.profile.kv));
                }
                Err(Waiting { state }) if self.running.is_empty() && self.receiving.is_empty() => {
                    let why = Failure::DoesNotFit(state.id()).to_string();
                    self.finish(state, FinishReason::Abort(why));
                }
                Err(waiting) => {
                    self.waiting.put(waiting);
                    match self.make_way(at, false) {
                        Way::Made => (),
                        Way::None => break,
                        Way::NeedsResult => return Planning::NeedsResult,
                    }
                }
            }
        }
        Planning::Ready
    }

    /// Which received request runs next: of those whose rows are all there the first of the highest
    /// priority.
    fn next_complete(&self) -> Option<usize> {
        let all = self.receiving.iter().enumerate();
        let complete = all.filter(|(_, receiving)| receiving.prefilled.is_some());
        complete.max_by_key(|(at, r)| (r.state.rank, Reverse(*at))).map(|(at, _)| at)
    }

    /// Which waiting request reserves slots next to be received: none while one goes before it that
    /// processes its prompt here, as those do that were preempted.
    fn next_to_receive(&self) -> Option<usize> {
        // Requests of one family have the same prompt, which the cache will then have.
        let is_received = |waiting: &Waiting| {
            let family = waiting.state.family;
            let running = self.running.iter().filter(|r| r.is_reading()).map(|r| &r.state);
            let mut all = running.chain(self.receiving.iter().map(|r| &r.state));
            family.is_some() && all.any(|state| state.family == family)
        };
        let next = |waiting: &Waiting| waiting.state.source.is_some() && !is_received(waiting);
        let at = self.waiting.find_highest(0, next)?;
        let first = &self.waiting.get(at).state;
        let goes_before = |waiting: &Waiting| {
            let state = &waiting.state;
            let is_first = (state.rank, Reverse(state.id())) > (first.rank, Reverse(first.id()));
            state.may_process_prompt() && (state.is_overdue() || is_first)
        };
        self.waiting.find(0, goes_before).is_none().then_some(at)
    }

    /// Commits the rows of requests whose drafts have taken what was packed, or lets their last rows
    /// be run again.
    pub(crate) fn settle_unpacked(&mut self, requests: &[RequestId], unpacked: &[bool]) {
        for (&id, &unpacked) in requests.iter().zip(unpacked) {
            let at = self.running.iter().position(|r| r.state.id() == id && r.unpacking);
            let Some(at) = at else { continue };
            let request = &mut self.running[at];
            request.unpacking = false;
            if !unpacked {
                let departed = request.departed();
                request.told = None;
                request.run_last_rows_again(&mut self.cache);
                self.departed.extend(departed);
                self.stats.rebuilt_drafts.fetch_add(1, Relaxed);
                continue;
            }
            let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
            let Running { state, sequence, told, .. } = request;
            for &group in state.groups() {
                let goal = goal_of(state.params.prompt, group.index(), declared);
                let rows = goal - sequence.committed(group);
                self.cache.commit(sequence, group, rows);
            }
            self.cache.publish(sequence, &state.tokens);
            // Slots of committed rows may be others now.
            told.iter_mut().flatten().for_each(|told| *told = 0);
        }
    }
}

/// Moves rows to the batch that writes them.
fn import(rows: &mut Vec<KvRows>, sequence: &Sequence, batch: &mut ScheduledBatch) {
    for rows in rows.drain(..) {
        let mut slots = Vec::new();
        sequence.extend_slots(Group::new(rows.group), rows.rows.clone(), &mut slots);
        batch.imports.push(Import { rows, slots });
    }
}

/// Adds what came for a request to the batch that writes it. Where nothing was packed for its
/// draft, its last rows are run again.
pub(crate) fn import_arrived(
    request: &mut Running,
    cache: &mut KvCache,
    batch: &mut ScheduledBatch,
) -> bool {
    let Some(Arrived { mut rows, packed }) = request.arrived.take() else { return false };
    import(&mut rows, &request.sequence, batch);
    match packed {
        Some(packed) => {
            let (request, tokens) = (request.state.id(), request.state.tokens.clone());
            batch.unpack.push(Unpack { request, tokens, packed });
        }
        None => request.run_last_rows_again(cache),
    }
    true
}
