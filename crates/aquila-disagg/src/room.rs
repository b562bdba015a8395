//! Rooms: where the request of a client that came to a prefill worker meets the decode worker that
//! goes on with it.
//!
//! A room is opened by the request and claimed by the decode worker, in either order. The one
//! invariant: a room is opened once and claimed once, and ends: its rows were sent, its request was
//! given up, or nobody claimed it in time.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquila_engine::{HandOver, KvRows, Prefilled, RequestId, TokenRows};

use crate::error::{Error, Result};
use crate::message::Message;

/// A room, as the engine sees it.
pub struct Room {
    number: u64,
    opened: Instant,
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes of all rooms that wait to be sent.
    unsent: Arc<AtomicUsize>,
    /// How many of them may wait before a prompt stops.
    most_unsent: usize,
}

#[derive(Default)]
struct State {
    request: Option<RequestId>,
    claimed: bool,
    /// Whether the last message is queued.
    ended: bool,
    /// Whether nobody takes messages any more.
    closed: bool,
    queue: VecDeque<Message>,
}

/// What a room has for the one who claimed it.
pub(crate) enum Next {
    Message(Message),
    /// Nothing came for so long.
    Nothing,
    /// Nothing will come.
    Over,
}

/// Bytes of a message that count: those of rows.
fn size(message: &Message) -> usize {
    match message {
        Message::Rows(rows) => rows.bytes.len(),
        Message::Prefilled(prefilled) => {
            let TokenRows { hidden_states, routed_experts, .. } = &prefilled.rows;
            size_of_val(&hidden_states.values[..]) + size_of_val(&routed_experts.values[..])
        }
        _ => 0,
    }
}

impl Room {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, message: Message, last: bool) {
        let mut state = self.lock();
        if state.closed || state.ended {
            return;
        }
        self.unsent.fetch_add(size(&message), Ordering::Relaxed);
        state.queue.push_back(message);
        state.ended = last;
        self.changed.notify_all();
    }

    /// The request of this room is in the engine's queue.
    pub fn admitted(&self, request: RequestId) {
        self.lock().request = Some(request);
        self.changed.notify_all();
    }

    /// Claims it for one decode worker.
    pub(crate) fn claim(&self) -> Result<()> {
        let mut state = self.lock();
        if std::mem::replace(&mut state.claimed, true) {
            let why = "another decode worker has claimed it".to_owned();
            return Err(Error::Room { room: self.number, why });
        }
        Ok(())
    }

    /// Waits for its request to be in the engine's queue; none where that did not come to be, or
    /// not in time.
    pub(crate) fn request(&self, patience: Duration) -> Option<RequestId> {
        let state = self.lock();
        let waits = |state: &mut State| state.request.is_none() && !state.ended && !state.closed;
        let (state, _) = self
            .changed
            .wait_timeout_while(state, patience, waits)
            .unwrap_or_else(PoisonError::into_inner);
        state.request
    }

    /// Waits for the next message.
    pub(crate) fn next(&self, patience: Duration) -> Next {
        let state = self.lock();
        let waits = |state: &mut State| state.queue.is_empty() && !state.ended && !state.closed;
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, patience, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match state.queue.pop_front() {
            Some(message) => {
                self.unsent.fetch_sub(size(&message), Ordering::Relaxed);
                Next::Message(message)
            }
            None if state.ended || state.closed => Next::Over,
            None => Next::Nothing,
        }
    }

    /// Drops what is queued; nothing more is taken.
    fn close(&self) {
        let mut state = self.lock();
        let unsent: usize = state.queue.drain(..).map(|message| size(&message)).sum();
        self.unsent.fetch_sub(unsent, Ordering::Relaxed);
        state.closed = true;
        self.changed.notify_all();
    }
}

impl HandOver for Room {
    /// A prompt whose own rows were all sent goes on, so that a slow peer stops no other.
    fn has_room(&self) -> bool {
        self.unsent.load(Ordering::Relaxed) <= self.most_unsent || self.lock().queue.is_empty()
    }

    fn rows(&self, rows: KvRows) {
        self.push(Message::Rows(rows), false);
    }

    fn prefilled(&self, prefilled: Prefilled) {
        self.push(Message::Prefilled(Box::new(prefilled)), true);
    }

    fn failed(&self, why: &str) {
        self.push(Message::Failed(why.to_owned()), true);
    }
}

/// All rooms of a prefill worker.
pub(crate) struct Rooms {
    open: Mutex<HashMap<u64, Arc<Room>>>,
    opened: Condvar,
    unsent: Arc<AtomicUsize>,
    most_unsent: usize,
}

impl Rooms {
    /// Without any; prompts stop while more than `most_unsent` bytes wait to be sent.
    pub(crate) fn new(most_unsent: usize) -> Self {
        let (open, opened) = (Mutex::default(), Condvar::new());
        Self { open, opened, unsent: Arc::default(), most_unsent }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Room>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a room.
    pub(crate) fn open(&self, number: u64) -> Result<Arc<Room>> {
        let room = Arc::new(Room {
            number,
            opened: Instant::now(),
            state: Mutex::default(),
            changed: Condvar::new(),
            unsent: self.unsent.clone(),
            most_unsent: self.most_unsent,
        });
        match self.lock().entry(number) {
            std::collections::hash_map::Entry::Occupied(_) => {
                let why = "another request has opened it".to_owned();
                Err(Error::Room { room: number, why })
            }
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(room.clone());
                self.opened.notify_all();
                Ok(room)
            }
        }
    }

    /// Waits for a room to be opened.
    pub(crate) fn find(&self, number: u64, patience: Duration) -> Option<Arc<Room>> {
        let open = self.lock();
        let (open, _) = self
            .opened
            .wait_timeout_while(open, patience, |open| !open.contains_key(&number))
            .unwrap_or_else(PoisonError::into_inner);
        open.get(&number).cloned()
    }

    /// Ends a room.
    pub(crate) fn close(&self, number: u64) {
        let closed = self.lock().remove(&number);
        if let Some(room) = closed {
            room.close();
        }
    }

    /// Ends the rooms that nobody has claimed for so long; answers their requests.
    pub(crate) fn expire(&self, unclaimed: Duration) -> Vec<(u64, Option<RequestId>)> {
        let old: Vec<Arc<Room>> = {
            let mut open = self.lock();
            let is_old = |room: &Room| room.opened.elapsed() > unclaimed && !room.lock().claimed;
            open.extract_if(|_, room| is_old(room)).map(|(_, room)| room).collect()
        };
        let end = |room: &Arc<Room>| {
            room.close();
            (room.number, room.lock().request)
        };
        old.iter().map(end).collect()
    }

    /// Bytes that wait to be sent.
    pub(crate) fn unsent(&self) -> usize {
        self.unsent.load(Ordering::Relaxed)
    }

    /// Whether another prompt may begin.
    pub(crate) fn have_room(&self) -> bool {
        self.unsent() <= self.most_unsent
    }

    /// How many rooms are open.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }
}
