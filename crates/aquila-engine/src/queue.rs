//! The requests that wait, first come first, with those that were retracted in their old place.

use std::collections::VecDeque;

use crate::life::Waiting;
use crate::request::RequestId;

/// Who of those that wait is admitted next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdmissionOrder {
    /// Who came first.
    #[default]
    FirstCome,
    /// Whose prompt has the longest cached prefix; but nobody is overtaken without end.
    LongestPrefix,
}

/// By how many others a request may be overtaken before it is next.
pub(crate) const MOST_OVERTAKEN: usize = 64;
/// How many requests are compared by their prefixes; those behind wait their turn.
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

    /// Puts a request where its arrival belongs: a new one at the end, a retracted one before
    /// all that came after it.
    pub fn put(&mut self, request: Waiting) {
        let at = self.requests.partition_point(|other| other.seat.id() < request.seat.id());
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

    /// Counts for every request before `index` that somebody overtook it.
    pub fn overtake(&mut self, index: usize) {
        for request in self.requests.iter_mut().take(index) {
            request.seat.overtaken += 1;
        }
    }

    /// Takes the request at `index`.
    pub fn take(&mut self, index: usize) -> Waiting {
        self.requests.remove(index).expect("an index that find answered")
    }

    /// Takes a request by its name.
    pub fn take_by_id(&mut self, id: RequestId) -> Option<Waiting> {
        let at = self.requests.iter().position(|request| request.seat.id() == id)?;
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
