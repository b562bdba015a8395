//! The requests that wait, first come first, with those that were retracted in their old place.

use std::collections::VecDeque;

use crate::life::Waiting;
use crate::request::RequestId;

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
