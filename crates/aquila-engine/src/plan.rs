//! What the next round does: who decodes, who is admitted, which rows are read, which slots they
//! have.
//!
//! A round is planned while one may still be on its way, so slots are reserved for whatever that
//! one may bring. Where they do not suffice, it is settled first, and only then somebody loses.

use std::cmp::Reverse;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use aquila_compute::round::RowWork;
use aquila_spec::Shape;
#[cfg(feature = "known-bugs")]
use aquila_spec::known_bugs::spoil_footprint;
use aquila_spec::policy::{Decision, RequestView, RoundView};

use crate::engine::Scheduler;
use crate::error::Failure;
use crate::lanes::{Admission, Job, Part, TableChange};
use crate::life::{Coming, Running, TARGET, Waiting};
use crate::listener::FinishReason;
use crate::queue::{AdmissionOrder, COMPARED};
use crate::retract::Way;
use crate::settle::{Flight, Planned};

/// Slots kept back for each request that decodes before another one is admitted, so that a
/// newcomer is not retracted at once.
const HEADROOM: usize = 16;

/// Whether a round can be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planning {
    /// It can.
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
            Planning::Ready => self.admit(),
            planning => planning,
        }
    }

    /// Reserves the slots of the next round of every request that it decodes; where they do not
    /// suffice and nothing is on its way, somebody loses its own.
    fn make_room(&mut self) -> Planning {
        let mut index = 0;
        while index < self.running.len() {
            if self.reserve_next_round(index) {
                index += 1;
            } else if self.flights.is_empty() {
                self.retract_first_loser();
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
        let rows = request.rows_of_next_round(declared);
        #[cfg(feature = "known-bugs")]
        let rows: Vec<usize> = {
            let shape = request.seat.params.shape_at(request.seat.tokens.len());
            let spoil = |(at, rows)| match at {
                0 => rows,
                _ => spoil_footprint(rows, shape, self.config.page_size),
            };
            rows.into_iter().enumerate().map(spoil).collect()
        };
        let mut groups = request.seat.groups().iter().zip(rows);
        groups.all(|(&group, rows)| self.cache.reserve(&mut request.sequence, group, rows).is_ok())
    }

    /// Admits waiting requests, in their order, while rows and memory last; running ones of lower
    /// priority may have to make way.
    fn admit(&mut self) -> Planning {
        let mut index = 0;
        while self.running.iter().map(Running::unread).sum::<usize>()
            < self.config.chunked_prefill_size
        {
            let is_full = self.running.len() >= self.config.max_running_requests;
            if is_full && !self.somebody_may_displace() {
                break;
            }
            let Some(at) = self.next_to_admit(index) else { break };
            if is_full {
                match self.make_way(at) {
                    Way::Made => continue,
                    Way::None => break,
                    Way::NeedsResult => return Planning::NeedsResult,
                }
            }
            let kept_back = self.running.iter().map(headroom).sum();
            match self.waiting.take(at).admit(&mut self.cache, kept_back) {
                Ok(request) => {
                    let cached = request.sequence.committed(TARGET) as u64;
                    self.stats.cached_tokens.fetch_add(cached, Relaxed);
                    self.waiting.overtake(request.seat.id());
                    self.running.push(request);
                    index = at;
                }
                Err(Waiting { seat }) if self.running.is_empty() => {
                    let why = Failure::DoesNotFit(seat.id()).to_string();
                    self.finish(seat, FinishReason::Abort(why));
                }
                Err(waiting) => {
                    self.waiting.put(waiting);
                    match self.make_way(at) {
                        Way::Made => {}
                        Way::None => break,
                        Way::NeedsResult => return Planning::NeedsResult,
                    }
                }
            }
        }
        Planning::Ready
    }

    /// Who is admitted next; nobody before `index` may go where first come is first.
    fn next_to_admit(&self, index: usize) -> Option<usize> {
        let may_go = |waiting: &Waiting| !reads_the_same_prompt(&self.running, waiting);
        let ranked = self.priorities.are_ranked();
        let in_turn = !ranked && self.admission_order == AdmissionOrder::FirstCome;
        let oldest = self.waiting.find(if in_turn { index } else { 0 }, may_go)?;
        if in_turn || self.waiting.get(oldest).seat.is_overdue() {
            return Some(oldest);
        }
        let first = if ranked { self.waiting.find_highest(oldest, may_go)? } else { oldest };
        match self.admission_order {
            AdmissionOrder::FirstCome => Some(first),
            AdmissionOrder::LongestPrefix => {
                let cached = |at: &usize| {
                    let seat = &self.waiting.get(*at).seat;
                    let limit = seat.match_limit();
                    self.cache.peek(&seat.namespace, &seat.tokens, limit, seat.groups())
                };
                let rank = self.waiting.get(first).seat.rank;
                let equals = (first..self.waiting.len())
                    .filter(|&at| self.waiting.get(at).seat.rank == rank)
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

    /// Sends the next round on its way, if there is one; who left is told in any case.
    pub(crate) fn send_round(&mut self, began: Instant) -> bool {
        let decision = self.decide();
        let row_budget = decision.rows;
        let fill_trees = self.fill_trees;
        let (number, era) = (self.jobs, self.era);
        let mut job = Job { number, era, row_budget, fill_trees, ..Job::default() };
        let mut parts = Vec::with_capacity(self.running.len());
        let most_missed = self.most_missed();
        let mut left_plain = 0;
        let mut shapes = decision.shapes.iter().copied().enumerate();
        let mut room = Room {
            prefill_rows: self.config.chunked_prefill_size,
            outputs: self.config.max_outputs() - decision.most_rows(),
        };
        for request in &mut self.running {
            let task = if request.unread() > 0 {
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
            let Some((task, coming)) = task else { continue };
            tell(request, &mut job);
            match &task {
                RowWork::Prefill { rows, .. } => request.read = rows.end,
                RowWork::Decode { shape, pause, .. } => {
                    let paused = *pause && shape.steps() == 0;
                    if paused && request.missed == most_missed && request.seat.params.drafts() {
                        left_plain += 1;
                    }
                    request.follow_draft(paused);
                }
            }
            request.coming.least += coming.least;
            request.coming.most += coming.most;
            let id = request.seat.id();
            parts.push(Planned { request: id, task: task.clone(), coming });
            job.parts.push(Part { request: id, task });
        }
        if left_plain > 0 {
            self.stats.change_drafting(|state| state.left_plain += left_plain);
        }
        if parts.is_empty() && self.left.is_empty() {
            return false;
        }
        let is_round = !parts.is_empty();
        job.left = std::mem::take(&mut self.left);
        let Decision { setting, expected, .. } = decision;
        self.flights.push_back(Flight {
            number: self.jobs,
            era: self.era,
            began,
            parts,
            setting,
            expected,
        });
        self.jobs += 1;
        self.lanes.send(job);
        is_round
    }
}

/// Slots that are kept back for a running request before another one is admitted.
pub(crate) fn headroom(request: &Running) -> usize {
    request.seat.remaining().min(HEADROOM)
}

/// A tree of this shape, and what that brings.
fn next_tree(shape: Shape, rate: f32, pause: bool) -> (RowWork, Coming) {
    (RowWork::Decode { shape, rate, pause }, Coming { least: 1, most: shape.steps() + 1 })
}

/// The chunk that a request reads in the next round, and what that brings.
fn next_chunk(request: &Running, room: &mut Room) -> Option<(RowWork, Coming)> {
    let params = &request.seat.params;
    let (read, fresh) = (request.read, request.seat.is_fresh());
    let all = fresh && params.prompt_logprobs.is_some();
    let mut rows = request.unread().min(room.prefill_rows);
    if all {
        rows = rows.min(room.outputs);
    }
    let last = rows == request.unread();
    let chooses = last && fresh && request.seat.remaining() > 0;
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
    let coming = Coming { least: bonus, most: bonus };
    Some((RowWork::Prefill { rows: read..read + rows, outputs, last }, coming))
}

/// Tells the compute lane what it does not know yet of a request: that it is there, and its slots.
fn tell(request: &mut Running, job: &mut Job) {
    let Running { seat, sequence, told, .. } = request;
    let id = seat.id();
    let told = told.get_or_insert_with(|| {
        job.admitted.push(Admission {
            params: seat.params.clone(),
            tokens: seat.tokens.clone(),
            matched: sequence.committed(TARGET),
            rounds: seat.usage.spec.verify_ct,
        });
        vec![0; seat.groups().len()]
    });
    for ((index, &group), told) in seat.groups().iter().enumerate().zip(told) {
        let reserved = sequence.reserved(group);
        if *told < reserved {
            let first = job.slots.len();
            sequence.extend_slots(group, *told..reserved, &mut job.slots);
            let slots = first..job.slots.len();
            job.tables.push(TableChange { request: id, group: index, from: *told, slots });
            *told = reserved;
        }
    }
}

/// Whether a request of the same family is reading the prompt, which the cache will then have.
fn reads_the_same_prompt(running: &[Running], waiting: &Waiting) -> bool {
    let family = waiting.seat.family;
    family.is_some()
        && waiting.seat.params.prompt_logprobs.is_none()
        && running.iter().any(|r| r.is_reading() && r.seat.family == family)
}
