//! The requests that wait, first come first, with those that were preempted in their old place.

use std::cmp::Reverse;
use std::collections::VecDeque;

use crate::request::RequestId;
use crate::scheduler::request_state::Waiting;

/// Which waiting request is admitted next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdmissionOrder {
    /// The first that came, among those of the highest priority; none is overtaken without end.
    #[default]
    FirstCome,
    /// The one with the longest cached prefix, among those of the highest priority; none
    /// is overtaken without end.
    LongestPrefix,
}

/// By how many others the request that has waited longest may be overtaken before it is next.
pub(crate) const MOST_OVERTAKEN: usize = 64;
/// How many requests are compared by their prefixes; those behind them are compared later.
pub(crate) const COMPARED: usize = 128;

/// Waiting requests, ordered by arrival.
#[derive(Default)]
pub(crate) struct Queue {
    requests: VecDeque<Waiting>,
}

impl Queue {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Puts a request where its arrival belongs: a new one at the end, a preempted one before
    /// all that came after it.
    pub fn put(&mut self, request: Waiting) {
        let at = self.requests.partition_point(|other| other.state.id() < request.state.id());
        self.requests.insert(at, request);
    }

    /// Where the first request at or after `index` stands that `may_go`.
    pub fn find(&self, index: usize, may_go: impl Fn(&Waiting) -> bool) -> Option<usize> {
        (index..self.requests.len()).find(|&at| may_go(&self.requests[at]))
    }

    /// The request at `index`.
    pub fn get(&self, index: usize) -> &Waiting {
        &self.requests[index]
    }

    /// Where the first request of the highest rank stands, of those at or after `index` that
    /// `may_go`.
    pub fn find_highest(&self, index: usize, may_go: impl Fn(&Waiting) -> bool) -> Option<usize> {
        let candidates = (index..self.requests.len()).filter(|&at| may_go(&self.requests[at]));
        candidates.max_by_key(|&at| (self.requests[at].state.rank, Reverse(at)))
    }

    /// The highest rank of those that wait.
    pub fn highest_rank(&self) -> Option<i64> {
        self.requests.iter().map(|request| request.state.rank).max()
    }

    /// Counts for the request that came first that `admitted`, if it came later, overtook it. Those
    /// behind it are not counted for: else a crowd would be due at once, and hold up everybody who
    /// was to go before it.
    pub fn overtake(&mut self, admitted: RequestId) {
        if let Some(first) = self.requests.front_mut().filter(|r| r.state.id() < admitted) {
            first.state.overtaken += 1;
        }
    }

    /// The request of this name.
    pub fn get_by_id(&mut self, id: RequestId) -> Option<&mut Waiting> {
        self.requests.iter_mut().find(|request| request.state.id() == id)
    }

    /// Takes the request at `index`.
    pub fn take(&mut self, index: usize) -> Waiting {
        self.requests.remove(index).expect("an index that find answered")
    }

    /// Takes a request by its name.
    pub fn take_by_id(&mut self, id: RequestId) -> Option<Waiting> {
        let at = self.requests.iter().position(|request| request.state.id() == id)?;
        self.requests.remove(at)
    }

    /// Takes every request for which `condition` holds.
    pub fn take_if(&mut self, condition: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let (gone, kept) =
            std::mem::take(&mut self.requests).into_iter().partition(|r| condition(r));
        self.requests = kept;
        gone.into()
    }
}
