//! Which requests lose their KV to others: where a round finds no slots, and where a request of
//! higher priority waits for slots or for a place.
//!
//! The scheduler preempts the youngest request of the lowest priority first, and of equals one that
//! is still received, which has least to lose; a request that was overtaken as often as any may be
//! comes last of all, so that it ends. A request is preempted only when no round is on its way, and
//! keeps its tokens, so its text does not change.

use std::sync::atomic::Ordering::Relaxed;

use aquila_kv::{Group, Sequence};

use crate::error::Failure;
use crate::listener::FinishReason;
use crate::scheduler::Scheduler;
use crate::scheduler::plan::headroom;
use crate::scheduler::request_state::RequestState;

/// Whether a waiting request got a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// There may be one now.
    Made,
    /// There is none.
    None,
    /// Not before the oldest round on its way is settled.
    NeedsResult,
}

/// The slots of one group, while it is counted whose going would free how many.
struct Slots {
    group: Group,
    /// Those that the waiting request needs beyond what it finds in the cache.
    wanted: usize,
    available: usize,
    /// How many sequences hold each slot: cached prefixes are shared.
    holders: Vec<u32>,
}

impl Slots {
    fn of(sequence: &Sequence, group: Group) -> Vec<u32> {
        let mut slots = Vec::new();
        sequence.extend_slots(group, 0..sequence.reserved(group), &mut slots);
        slots
    }

    fn hold(&mut self, sequence: &Sequence) {
        for slot in Self::of(sequence, self.group) {
            self.holders[slot as usize] += 1;
        }
    }

    fn let_go(&mut self, sequence: &Sequence) {
        for slot in Self::of(sequence, self.group) {
            let holders = &mut self.holders[slot as usize];
            *holders -= 1;
            self.available += usize::from(*holders == 0);
        }
    }
}

/// A request that holds slots, by its place in the scheduler's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    Running(usize),
    Receiving(usize),
}

impl Scheduler {
    /// Preempts the first in that order; a request that does not fit alone is given up.
    pub(crate) fn preempt_first(&mut self) {
        let losers = self.losing_order(|_, _| true);
        let is_alone = self.running.len() == 1;
        // The only one that runs goes on if any other holds slots.
        let mut losers =
            losers.into_iter().filter(|&loser| !is_alone || loser != Holder::Running(0));
        if let Some(loser) = losers.next() {
            return self.preempt(loser);
        }
        let request = self.running.pop().expect("the request that found no slot runs");
        let why = Failure::DoesNotFit(request.state.id()).to_string();
        self.leave(&request);
        let state = request.discard(&mut self.cache);
        self.finish(state, FinishReason::Abort(why));
    }

    /// Preempts requests that the waiting one at `at` may displace, if that gives it slots, and a
    /// place among those that run where it `needs_place`: no more of them than it takes, and none
    /// if all would not do. A round on its way must be settled first, which may do as well.
    pub(crate) fn make_way(&mut self, at: usize, needs_place: bool) -> Way {
        let rank = self.waiting.get(at).state.rank;
        let mut losers = self.displaced_by(rank, needs_place);
        let Some(count) = self.fewest_losers(at, &losers) else { return Way::None };
        if !self.in_flight.is_empty() {
            return Way::NeedsResult;
        }
        losers.truncate(count);
        // From the end, so that the others stay where they are.
        losers.sort_unstable();
        losers.into_iter().rev().for_each(|loser| self.preempt(loser));
        Way::Made
    }

    /// Preempts a running request for one of this rank whose rows were all received, if it may
    /// displace any.
    pub(crate) fn make_place(&mut self, rank: i64) -> Way {
        let Some(&loser) = self.displaced_by(rank, true).first() else { return Way::None };
        if !self.in_flight.is_empty() {
            return Way::NeedsResult;
        }
        self.preempt(loser);
        Way::Made
    }

    /// Whether a waiting request outranks a running one by enough to take its place.
    pub(crate) fn a_waiting_request_may_displace(&self) -> bool {
        if !self.priorities.are_ranked() {
            return false;
        }
        let losing = self.running.iter().map(|request| &request.state);
        let lowest = losing.filter(|state| !state.is_overdue()).map(|state| state.rank).min();
        let highest = self.waiting.highest_rank();
        highest.zip(lowest).is_some_and(|(high, low)| self.priorities.may_displace(high, low))
    }

    /// Slots that are kept back for requests that hold some before another one gets any.
    pub(crate) fn kept_back(&self) -> usize {
        let running = self.running.iter().map(|request| &request.state);
        running.chain(self.receiving.iter().map(|r| &r.state)).map(|state| headroom(state)).sum()
    }

    fn state(&self, holder: Holder) -> &RequestState {
        match holder {
            Holder::Running(at) => &self.running[at].state,
            Holder::Receiving(at) => &self.receiving[at].state,
        }
    }

    fn sequence(&self, holder: Holder) -> &Sequence {
        match holder {
            Holder::Running(at) => &self.running[at].sequence,
            Holder::Receiving(at) => &self.receiving[at].sequence,
        }
    }

    /// The requests that one of this rank may displace, only running ones where it `needs_place`,
    /// in the order of being preempted.
    fn displaced_by(&self, rank: i64, needs_place: bool) -> Vec<Holder> {
        self.losing_order(|holder, state| {
            !state.is_overdue()
                && self.priorities.may_displace(rank, state.rank)
                && !(needs_place && matches!(holder, Holder::Receiving(_)))
        })
    }

    /// The requests that hold slots and `may_lose`, in the order of being preempted.
    fn losing_order(&self, may_lose: impl Fn(Holder, &RequestState) -> bool) -> Vec<Holder> {
        // Those that are received first, and the youngest of each.
        let received = (0..self.receiving.len()).rev().map(Holder::Receiving);
        let all = received.chain((0..self.running.len()).rev().map(Holder::Running));
        let mut losers: Vec<Holder> =
            all.filter(|&holder| may_lose(holder, self.state(holder))).collect();
        let key = |holder: &Holder| {
            let state = self.state(*holder);
            (state.is_overdue(), state.rank)
        };
        losers.sort_by_key(key);
        losers
    }

    /// How many of `losers`, the first ones, must be preempted for the waiting request at `at` to have a
    /// place.
    fn fewest_losers(&mut self, at: usize, losers: &[Holder]) -> Option<usize> {
        if losers.is_empty() {
            return None;
        }
        let waiting = self.waiting.get(at);
        let state = &waiting.state;
        // What it finds in the cache is locked while slots are counted, as it will be.
        let limit = state.match_limit();
        let sequence = self.cache.admit(&state.namespace, &state.tokens, limit, state.groups());
        let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
        let count_slots = |&group: &Group| Slots {
            group,
            wanted: waiting.rows_to_admit(&sequence, group, declared),
            available: self.cache.available(group),
            holders: Vec::new(),
        };
        let mut groups: Vec<Slots> = state.groups().iter().map(count_slots).collect();
        // Cheap, and mostly the answer where there is too little to be had.
        let may_do = groups.iter().all(|slots| {
            let held = losers.iter().map(|&at| self.sequence(at).reserved(slots.group));
            slots.wanted <= slots.available + held.sum::<usize>()
        });
        let mut fewest = None;
        if may_do {
            for slots in &mut groups {
                slots.holders.resize(self.config.slots(), 0);
                let held = self.running.iter().map(|request| &request.sequence);
                let received = self.receiving.iter().map(|receiving| &receiving.sequence);
                held.chain(received).chain([&sequence]).for_each(|sequence| slots.hold(sequence));
            }
            let mut kept_back = self.kept_back();
            fewest = losers.iter().position(|&loser| {
                kept_back -= headroom(self.state(loser));
                groups.iter_mut().for_each(|slots| slots.let_go(self.sequence(loser)));
                groups.iter().all(|slots| slots.wanted + kept_back <= slots.available)
            });
        }
        self.cache.discard(sequence);
        fewest.map(|last| last + 1)
    }

    /// Takes its slots from a request, which waits again. One that is still received processes its
    /// prompt here, later.
    fn preempt(&mut self, holder: Holder) {
        let waiting = match holder {
            Holder::Running(at) => {
                let request = self.running.remove(at);
                self.leave(&request);
                request.preempt(&mut self.cache)
            }
            Holder::Receiving(at) => self.receiving.remove(at).preempt(&mut self.cache),
        };
        tracing::debug!(id = %waiting.state.id(), "preempted");
        self.stats.preemptions.fetch_add(1, Relaxed);
        self.waiting.put(waiting);
    }
}
