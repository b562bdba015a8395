//! The requests under way: who may be aborted by name, and when none is left.
//!
//! A request is accepted before it is read, and begins when it is submitted. The invariant: a request that ends in any way, by its last token or because its client is gone,
//! leaves this list and gives up what the engine still does for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquila_engine::{EngineHandle, RequestId};
use tokio::sync::Notify;

/// All requests under way.
#[derive(Debug, Default)]
pub(crate) struct ActiveRequests {
    entries: Mutex<Entries>,
    none_left: Notify,
    begun: Notify,
}

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    /// Requests whose handlers have not answered yet.
    accepted: usize,
    by_key: HashMap<u64, Entry>,
}

impl Entries {
    fn is_empty(&self) -> bool {
        self.accepted == 0 && self.by_key.is_empty()
    }
}

#[derive(Debug)]
struct Entry {
    name: String,
    ids: Vec<RequestId>,
    aborted: Arc<AtomicBool>,
}

impl ActiveRequests {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        // Every change of the map is a single step, so a panic leaves it whole.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, whose client may name it `name`.
    pub fn begin(self: &Arc<Self>, engine: &EngineHandle, name: &str) -> Hold {
        let aborted = Arc::new(AtomicBool::new(false));
        let mut entries = self.entries();
        let key = entries.next;
        entries.next += 1;
        let entry = Entry { name: name.into(), ids: Vec::new(), aborted: aborted.clone() };
        entries.by_key.insert(key, entry);
        let is_first = entries.by_key.len() == 1;
        drop(entries);
        if is_first {
            self.begun.notify_waiters();
        }
        Hold { list: self.clone(), engine: engine.clone(), key, aborted, complete: false }
    }

    /// Aborts every request of this name, or all of them; answers how many.
    pub fn abort(&self, engine: &EngineHandle, name: Option<&str>) -> usize {
        let entries = self.entries();
        let chosen = entries.by_key.values().filter(|e| name.is_none_or(|name| e.name == name));
        chosen
            .map(|entry| {
                entry.aborted.store(true, Ordering::Release);
                entry.ids.iter().for_each(|&id| engine.abort(id));
            })
            .count()
    }

    /// Counts a request as under way until it is answered or has begun to be.
    pub fn accept(self: &Arc<Self>) -> Accepted {
        self.entries().accepted += 1;
        Accepted(self.clone())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.entries().by_key.len()
    }

    /// Waits until there is none, not even one that is accepted.
    pub async fn wait_for_none(&self) {
        self.wait(&self.none_left, Entries::is_empty).await;
    }

    /// Waits until there is one.
    pub async fn wait_for_some(&self) {
        self.wait(&self.begun, |entries| !entries.by_key.is_empty()).await;
    }

    async fn wait(&self, changed: &Notify, wished: impl Fn(&Entries) -> bool) {
        loop {
            let mut told = std::pin::pin!(changed.notified());
            // Enabled before the count, so that no change is missed between the two.
            told.as_mut().enable();
            if wished(&self.entries()) {
                return;
            }
            told.await;
        }
    }
}

/// A request that is accepted, until it is dropped.
pub(crate) struct Accepted(Arc<ActiveRequests>);

impl Drop for Accepted {
    fn drop(&mut self) {
        let mut entries = self.0.entries();
        entries.accepted -= 1;
        let is_last = entries.is_empty();
        drop(entries);
        if is_last {
            self.0.none_left.notify_waiters();
        }
    }
}

/// One request's place in the list; dropping it gives the request up.
pub(crate) struct Hold {
    list: Arc<ActiveRequests>,
    engine: EngineHandle,
    key: u64,
    aborted: Arc<AtomicBool>,
    complete: bool,
}

impl Hold {
    /// Adds what the engine does for this request.
    pub fn add(&self, ids: Vec<RequestId>) {
        let mut entries = self.list.entries();
        if let Some(entry) = entries.by_key.get_mut(&self.key) {
            entry.ids.extend(&ids);
        }
        // An abort by name may have come between submission and now.
        if self.was_aborted() {
            ids.into_iter().for_each(|id| self.engine.abort(id));
        }
    }

    /// Whether it was aborted by name.
    pub fn was_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Notes that the engine has nothing left to do for it.
    pub fn complete(&mut self) {
        self.complete = true;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut entries = self.list.entries();
        let entry = entries.by_key.remove(&self.key);
        let is_last = entries.is_empty();
        drop(entries);
        if let Some(entry) = entry.filter(|_| !self.complete) {
            entry.ids.into_iter().for_each(|id| self.engine.abort(id));
        }
        if is_last {
            self.list.none_left.notify_waiters();
        }
    }
}
