//! The end of a scheduler that cannot serve any more: its device is lost, or what runs rounds is gone.
//!
//! The one invariant: every request that was taken ends with the reason, and none waits for a round.

use std::sync::atomic::Ordering::Relaxed;

use crate::failure::EngineFailure;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Why nothing is served any more, if so.
    pub fn failure(&self) -> Option<&EngineFailure> {
        self.failure.get()
    }

    /// Serves nothing from now on, and ends all requests with the reason.
    pub(crate) fn fail_for_good(&mut self, failure: EngineFailure) {
        let cell = self.failure.clone();
        let requests = self.running.len() + self.receiving.len() + self.waiting.len();
        self.stats.failed_rounds.fetch_add(1, Relaxed);
        tracing::error!(%failure, requests, "the engine failed, and serves no more");
        let failure = cell.set(failure);
        self.abort_all(&failure.to_string());
        // Nobody has to be told of them any more.
        self.departed.clear();
    }

    /// Ends the requests that a panic took from where requests are.
    pub(crate) fn end_lost_requests(&mut self, failure: &EngineFailure) {
        self.outputs.end_all(failure.to_string());
    }

    /// Waits for what is still on its way after a failure; nothing of it counts.
    pub(crate) fn drop_in_flight(&mut self) {
        while let Some(in_flight) = self.in_flight.pop_front() {
            drop(self.executor.receive(in_flight.number));
        }
    }
}
