//! The connections of a server: how many there are, and which is closed for a new one.
//!
//! The invariant: no more than the limit are open, but for those that are about to close. Past it,
//! the connection that has waited longest for its client (for a request, or the rest of one) makes
//! place for a new one; connections whose requests are being answered are never closed for others.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::sync::Notify;

/// Files that a process needs beside its connections.
const OTHER_FILES: usize = 64;

/// How many of `wanted` connections the system has files for; asks it for more where it may.
pub fn fitting_connections(wanted: usize) -> usize {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        let files = wanted.saturating_add(OTHER_FILES) as u64;
        let most = limit.maximum.unwrap_or(u64::MAX);
        if limit.current.is_some_and(|now| now < files.min(most)) {
            let before = limit.current;
            limit.current = Some(files.min(most));
            if setrlimit(Resource::Nofile, limit).is_err() {
                limit.current = before;
            }
        }
        let files = limit.current.map_or(usize::MAX, |files| files as usize);
        wanted.min(files.saturating_sub(OTHER_FILES)).max(1)
    }
    #[cfg(not(unix))]
    wanted
}

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct Connections {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: usize,
    /// Counts the times that a connection began to wait for its client.
    waits: u64,
    /// Those that wait for their clients, the longest first.
    waiting: BTreeMap<u64, Arc<Notify>>,
}

impl Connections {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is complete when the lock is given back, so a panic leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection; none if all others are being answered.
    pub fn place(self: &Arc<Self>) -> Option<Arc<Place>> {
        if self.state().open >= self.most && !self.close_one() {
            return None;
        }
        self.state().open += 1;
        let place = Place {
            all: self.clone(),
            wait: Mutex::new(None),
            close: Arc::default(),
            begun: Notify::new(),
        };
        place.set_waiting();
        Some(Arc::new(place))
    }

    /// Closes the connection that has waited longest for its client; false if none waits.
    pub fn close_one(&self) -> bool {
        let longest = self.state().waiting.pop_first();
        longest.inspect(|(_, close)| close.notify_one()).is_some()
    }
}

/// One connection's place; dropping it makes place for another.
#[derive(Debug)]
pub(crate) struct Place {
    all: Arc<Connections>,
    /// Which wait for its client this is, if it is one.
    wait: Mutex<Option<u64>>,
    close: Arc<Notify>,
    /// Hears when it begins to be busy.
    begun: Notify,
}

impl Place {
    /// Notes that the client waits for the server.
    pub fn set_busy(&self) {
        if let Some(wait) = self.wait().take() {
            self.all.state().waiting.remove(&wait);
            self.begun.notify_one();
        }
    }

    /// Waits until the client waits for the server.
    pub async fn busy(&self) {
        while !self.is_busy() {
            self.begun.notified().await;
        }
    }

    fn is_busy(&self) -> bool {
        self.wait().is_none()
    }

    /// Notes that the server waits for the client.
    fn set_waiting(&self) {
        let mut wait = self.wait();
        if wait.is_none() {
            let mut state = self.all.state();
            state.waits += 1;
            let number = state.waits;
            state.waiting.insert(number, self.close.clone());
            *wait = Some(number);
        }
    }

    /// Waits until the connection is to make place for another. Where a request came meanwhile, the
    /// next one that waits makes place instead.
    pub async fn closed(&self) {
        loop {
            self.close.notified().await;
            if !self.is_busy() {
                return;
            }
            self.all.close_one();
        }
    }

    fn wait(&self) -> MutexGuard<'_, Option<u64>> {
        self.wait.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.set_busy();
        self.all.state().open -= 1;
    }
}

/// A response's body, at whose end the connection waits for its client again.
pub(crate) struct Answering {
    pub body: Body,
    pub place: Arc<Place>,
}

impl http_body::Body for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.place.set_waiting();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a connection was told to close.
    fn is_told(place: &Place) -> bool {
        let mut context = Context::from_waker(std::task::Waker::noop());
        std::pin::pin!(place.closed()).poll(&mut context).is_ready()
    }

    #[test]
    fn the_longest_wait_makes_place_and_busy_ones_stay() {
        let all = Connections::new(3);
        let places = [(); 3].map(|()| all.place().unwrap());
        places[0].set_busy();
        let fourth = all.place().unwrap();
        assert_eq!([0, 1, 2].map(|i| is_told(&places[i])), [false, true, false]);
        places[2].set_busy();
        fourth.set_busy();
        assert!(all.place().is_none(), "a connection that is answered was closed");
        places[0].set_waiting();
        assert!(all.place().is_some());
        assert!(is_told(&places[0]));
    }

    #[test]
    fn a_request_that_comes_first_is_not_closed() {
        let all = Connections::new(2);
        let places = [(); 2].map(|()| all.place().unwrap());
        let third = all.place().unwrap();
        places[0].set_busy();
        assert!(!is_told(&places[0]));
        assert!(is_told(&places[1]), "the next one that waits makes place instead");
        assert!(!is_told(&third));
    }
}
