//! What the next round does: which requests decode, which are admitted, which rows are read, and
//! their slots.
//!
//! A round is planned while one may still be on its way, so slots are reserved for whatever that
//! one may bring. Where they do not suffice, that round is settled first, and only then a request
//! is preempted.

use std::cmp::Reverse;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use aquila_compute::round::RowWork;
use aquila_spec::Shape;
use aquila_spec::known_bugs::spoil_footprint;
use aquila_spec::policy::{Decision, RequestView, RoundView};

use crate::error::Failure;
use crate::executor::{Admission, RequestWork, ScheduledBatch, TableChange};
use crate::listener::FinishReason;
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use crate::scheduler::hand_over::plan_exports;
use crate::scheduler::preempt::Way;
use crate::scheduler::queue::{AdmissionOrder, COMPARED};
use crate::scheduler::receive::import_arrived;
use crate::scheduler::request_state::{PendingTokens, RequestState, Running, TARGET, Waiting};
use crate::scheduler::settle::{InFlightBatch, InFlightRow};

/// Slots kept back for each request that decodes before another one is admitted, so that a
/// newcomer is not preempted at once.
const HEADROOM: usize = 16;

/// Whether a round can be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planning {
    /// A round can be planned now.
    Ready,
    /// Not before the oldest round on its way is settled.
    NeedsResult,
}

/// What may still be put into a round.
struct Room {
    prefill_rows: usize,
    outputs: usize,
}

impl Scheduler {
    /// Makes room for the next round, as far as that goes without a result of the one on its way.
    pub(crate) fn plan(&mut self) -> Planning {
        match self.make_room() {
            Planning::Ready => match self.plan_receiving() {
                Planning::Ready => self.admit(),
                planning => planning,
            },
            planning => planning,
        }
    }

    /// Reserves the slots of the next round of every request that it decodes; where they do not
    /// suffice and nothing is on its way, a request is preempted.
    fn make_room(&mut self) -> Planning {
        let mut index = 0;
        while index < self.running.len() {
            if self.reserve_next_round(index) {
                index += 1;
            } else if self.in_flight.is_empty() {
                self.preempt_first();
                index = 0;
            } else {
                return Planning::NeedsResult;
            }
        }
        Planning::Ready
    }

    fn reserve_next_round(&mut self, index: usize) -> bool {
        let request = &mut self.running[index];
        if !request.decodes_next() {
            return true;
        }
        let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
        let mut rows = request.rows_of_next_round(declared);
        let shape = request.state.params.shape_at(request.state.tokens.len());
        for rows in rows.iter_mut().skip(1) {
            *rows = spoil_footprint(*rows, shape, self.config.page_size);
        }
        let mut groups = request.state.groups().iter().zip(rows);
        groups.all(|(&group, rows)| self.cache.reserve(&mut request.sequence, group, rows).is_ok())
    }

    /// Admits waiting requests, in their order, while rows and memory last; running ones of lower
    /// priority may be preempted for them.
    fn admit(&mut self) -> Planning {
        let mut index = 0;
        while self.running.iter().map(Running::readable).sum::<usize>()
            < self.config.chunked_prefill_size
        {
            let is_full = self.running.len() >= self.config.max_running_requests;
            if is_full && !self.a_waiting_request_may_displace() {
                break;
            }
            let Some(at) = self.next_to_admit(index) else { break };
            if is_full {
                match self.make_way(at, true) {
                    Way::Made => continue,
                    Way::None => break,
                    Way::NeedsResult => return Planning::NeedsResult,
                }
            }
            let kept_back = self.kept_back();
            let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
            match self.waiting.take(at).admit(&mut self.cache, kept_back, declared) {
                Ok(request) => {
                    let cached = request.sequence.committed(TARGET) as u64;
                    self.stats.cached_tokens.fetch_add(cached, Relaxed);
                    self.waiting.overtake(request.state.id());
                    self.running.push(request);
                    index = at;
                }
                Err(Waiting { state }) if self.running.is_empty() && self.receiving.is_empty() => {
                    let why = Failure::DoesNotFit(state.id()).to_string();
                    self.finish(state, FinishReason::Abort(why));
                }
                Err(waiting) => {
                    self.waiting.put(waiting);
                    match self.make_way(at, false) {
                        Way::Made => {}
                        Way::None => break,
                        Way::NeedsResult => return Planning::NeedsResult,
                    }
                }
            }
        }
        Planning::Ready
    }

    /// Which waiting request is admitted next; under first come first served none before `index`.
    fn next_to_admit(&self, index: usize) -> Option<usize> {
        let may_go = |waiting: &Waiting| {
            waiting.state.may_process_prompt() && !reads_the_same_prompt(&self.running, waiting)
        };
        let ranked = self.priorities.are_ranked();
        let in_turn = !ranked && self.admission_order == AdmissionOrder::FirstCome;
        let oldest = self.waiting.find(if in_turn { index } else { 0 }, may_go)?;
        if in_turn || self.waiting.get(oldest).state.is_overdue() {
            return Some(oldest);
        }
        let first = if ranked { self.waiting.find_highest(oldest, may_go)? } else { oldest };
        match self.admission_order {
            AdmissionOrder::FirstCome => Some(first),
            AdmissionOrder::LongestPrefix => {
                let cached = |at: &usize| {
                    let state = &self.waiting.get(*at).state;
                    let limit = state.match_limit();
                    self.cache.peek(&state.namespace, &state.tokens, limit, state.groups())
                };
                let rank = self.waiting.get(first).state.rank;
                let equals = (first..self.waiting.len())
                    .filter(|&at| self.waiting.get(at).state.rank == rank)
                    .take(COMPARED);
                let candidates = equals.filter(|&at| may_go(self.waiting.get(at)));
                candidates.max_by_key(|at| (cached(at), Reverse(*at)))
            }
        }
    }

    /// What the policy decides for the requests that decode in the next round. This is the only
    /// place where the size of trees changes.
    fn decide(&mut self) -> Decision {
        let most_missed = self.most_missed();
        let decode = self.running.iter().filter(|r| r.decodes_next());
        let requests: Vec<RequestView> = decode.map(|r| r.view(most_missed)).collect();
        let decision = self.drafting.choose(&RoundView { requests: &requests });
        debug_assert_eq!(decision.shapes.len(), requests.len(), "a shape for each request");
        decision
    }

    /// Sends the next round on its way, if there is one; departures are told in any case.
    pub(crate) fn send_round(&mut self, began: Instant) -> bool {
        let decision = self.decide();
        let row_budget = decision.rows;
        let fill_trees = self.fill_trees;
        let (number, epoch) = (self.batches, self.epoch);
        let mut batch =
            ScheduledBatch { number, epoch, row_budget, fill_trees, ..ScheduledBatch::default() };
        let mut parts = Vec::with_capacity(self.running.len());
        let most_missed = self.most_missed();
        let mut left_plain = 0;
        let mut shapes = decision.shapes.iter().copied().enumerate();
        let mut room = Room {
            prefill_rows: self.config.chunked_prefill_size,
            outputs: self.config.max_outputs() - decision.most_rows(),
        };
        let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
        let received = self.receiving.iter_mut();
        let mut importing: Vec<RequestId> =
            received.filter_map(|receiving| receiving.import(&mut batch)).collect();
        for request in &mut self.running {
            if import_arrived(request, &mut self.cache, &mut batch) {
                importing.push(request.state.id());
                if request.unpacking {
                    tell(request, &mut batch);
                    continue;
                }
            }
            let work = if request.unread() > 0 {
                next_chunk(request, &mut room)
            } else if request.decodes_next() {
                let granted = shapes.next();
                granted.map(|(at, shape)| {
                    let rate = decision.weights.get(at).copied().unwrap_or(1.0);
                    next_tree(shape, rate, decision.pause)
                })
            } else {
                None
            };
            let Some((work, pending)) = work else { continue };
            tell(request, &mut batch);
            plan_exports(request, &work, declared, &mut batch);
            match &work {
                RowWork::Prefill { rows, .. } => request.read = rows.end,
                RowWork::Decode { shape, pause, .. } => {
                    let paused = *pause && shape.steps() == 0;
                    if paused && request.missed == most_missed && request.state.params.drafts() {
                        left_plain += 1;
                    }
                    request.follow_draft(paused);
                }
            }
            request.pending.least += pending.least;
            request.pending.most += pending.most;
            let id = request.state.id();
            parts.push(InFlightRow { request: id, work: work.clone(), pending });
            batch.requests.push(RequestWork { request: id, work });
        }
        if left_plain > 0 {
            self.stats.change_drafting(|state| state.left_plain += left_plain);
        }
        if parts.is_empty() && importing.is_empty() && self.departed.is_empty() {
            return false;
        }
        let is_round = !parts.is_empty();
        batch.departed = std::mem::take(&mut self.departed);
        let Decision { setting, expected, .. } = decision;
        if self.in_flight.is_empty() {
            self.stats.awaited.begin(began.max(self.settled));
        }
        self.in_flight.push_back(InFlightBatch {
            number: self.batches,
            epoch: self.epoch,
            began,
            parts,
            importing,
            unpacking: batch.unpack.iter().map(|unpack| unpack.request).collect(),
            packing: batch.pack.clone(),
            setting,
            expected,
        });
        self.batches += 1;
        self.executor.send(batch);
        is_round
    }
}

/// Slots that are kept back for a request that holds some before another one gets any.
pub(crate) fn headroom(state: &RequestState) -> usize {
    state.remaining().min(HEADROOM)
}

/// A tree of this shape, and what that brings.
fn next_tree(shape: Shape, rate: f32, pause: bool) -> (RowWork, PendingTokens) {
    (RowWork::Decode { shape, rate, pause }, PendingTokens { least: 1, most: shape.steps() + 1 })
}

/// The chunk that a request reads in the next round, and what that brings.
fn next_chunk(request: &Running, room: &mut Room) -> Option<(RowWork, PendingTokens)> {
    let params = &request.state.params;
    let (read, fresh) = (request.read, request.state.is_fresh());
    let all = fresh && params.prompt_logprobs.is_some();
    let mut rows = request.readable().min(room.prefill_rows);
    if all {
        rows = rows.min(room.outputs);
    }
    let last = rows == request.unread();
    let chooses = last && fresh && request.state.remaining() > 0;
    if rows == 0 || (chooses && room.outputs == 0) {
        return None;
    }
    // The last row of a prompt says nothing if no answer is wanted.
    let end = if chooses || !last { read + rows } else { read + rows - 1 };
    let outputs = match (all, chooses) {
        (true, _) => read..end,
        (false, true) => end - 1..end,
        (false, false) => end..end,
    };
    room.prefill_rows -= rows;
    room.outputs -= outputs.len();
    let bonus = usize::from(chooses);
    let pending = PendingTokens { least: bonus, most: bonus };
    Some((RowWork::Prefill { rows: read..read + rows, outputs, last }, pending))
}

/// Tells the executor what it does not know yet of a request: that it is there, and its slots.
fn tell(request: &mut Running, batch: &mut ScheduledBatch) {
    let Running { state, sequence, told, unpacking, .. } = request;
    let id = state.id();
    let told = told.get_or_insert_with(|| {
        batch.admitted.push(Admission {
            params: state.params.clone(),
            tokens: state.tokens.clone(),
            matched: sequence.committed(TARGET),
            complete: *unpacking,
            rounds: state.usage.spec.verify_ct,
        });
        vec![0; state.groups().len()]
    });
    for ((index, &group), told) in state.groups().iter().enumerate().zip(told) {
        let reserved = sequence.reserved(group);
        if *told < reserved {
            let first = batch.slots.len();
            sequence.extend_slots(group, *told..reserved, &mut batch.slots);
            let slots = first..batch.slots.len();
            batch.tables.push(TableChange { request: id, group: index, from: *told, slots });
            *told = reserved;
        }
    }
}

/// Whether a request of the same family is reading the prompt, which the cache will then have.
fn reads_the_same_prompt(running: &[Running], waiting: &Waiting) -> bool {
    let family = waiting.state.family;
    family.is_some()
        && !waiting.state.reads_anew()
        && running.iter().any(|r| r.is_reading() && r.state.family == family)
}
