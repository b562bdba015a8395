//! What bodies may take until the engine has their requests: memory while they are read, threads
//! while they are parsed and tokenized.
//!
//! The invariant: the bytes of all long bodies together are bounded, from their first byte to the
//! last token of their prompts, and few of them are worked on at a time. A body that finds no room
//! is refused; short ones need none, and bodies of a middle size have room and threads of their
//! own, so that normal requests do not wait for the longest.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::refusal::Refusal;

/// Bytes up to which a body is short: it is worked on where it arrives, and bounded by the number
/// of connections.
pub(crate) const SHORT: usize = 16 << 10;
/// Bytes up to which a body is no long one.
pub(crate) const MIDDLE: usize = 256 << 10;
/// Bytes of all bodies of a middle size together.
pub(crate) const MIDDLE_ROOM: usize = 16 << 20;
/// Bodies of a middle size that are worked on at a time.
pub(crate) const MIDDLE_WORKERS: usize = 2;
/// Long bodies that are worked on at a time.
pub(crate) const LONG_WORKERS: usize = 1;

/// Room and threads for bodies.
#[derive(Debug)]
pub(crate) struct Intake {
    middle: Arc<SizeClass>,
    long: Arc<SizeClass>,
}

/// Room and threads for bodies of one size.
#[derive(Debug)]
struct SizeClass {
    bytes: usize,
    room: Arc<Semaphore>,
    workers: Arc<Semaphore>,
}

impl SizeClass {
    fn new(bytes: usize, workers: usize) -> Arc<Self> {
        let bytes = bytes.min(u32::MAX as usize);
        let (room, workers) = (Arc::new(Semaphore::new(bytes)), Arc::new(Semaphore::new(workers)));
        Arc::new(Self { bytes, room, workers })
    }
}

/// Room for one body.
#[derive(Debug)]
pub(crate) struct Room {
    class: Arc<SizeClass>,
    _bytes: OwnedSemaphorePermit,
}

impl Intake {
    /// Room for `long_room` bytes of long bodies.
    pub fn new(long_room: usize) -> Self {
        let middle = SizeClass::new(MIDDLE_ROOM, MIDDLE_WORKERS);
        Self { middle, long: SizeClass::new(long_room, LONG_WORKERS) }
    }

    /// Room for a body of `bytes`; short ones need none.
    pub fn room(&self, bytes: usize) -> Result<Option<Room>, Refusal> {
        if bytes <= SHORT {
            return Ok(None);
        }
        let class = if bytes <= MIDDLE { &self.middle } else { &self.long };
        let full = |_| {
            Refusal::busy(format!(
                "no room for a body of {bytes} bytes: others of its size have most of the {} bytes \
                 that they may take together",
                class.bytes
            ))
        };
        let wanted = u32::try_from(bytes).unwrap_or(u32::MAX);
        let taken = class.room.clone().try_acquire_many_owned(wanted).map_err(full)?;
        Ok(Some(Room { class: class.clone(), _bytes: taken }))
    }
}

/// A body that has arrived, with the room that it takes.
#[derive(Debug)]
pub(crate) struct Received {
    bytes: Bytes,
    room: Option<Room>,
}

impl Received {
    pub fn new(bytes: Bytes, room: Option<Room>) -> Arc<Self> {
        Arc::new(Self { bytes, room })
    }

    /// Works on the body, or on what came of it: a long one when a worker of its size is free, and
    /// on a thread where it keeps no other request waiting. The body keeps its room until the work
    /// is done, also when its client is gone.
    pub async fn work<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&[u8]) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let Some(room) = &self.room else { return work(&self.bytes) };
        let worker = room.class.workers.clone().acquire_owned().await;
        let worker = worker.expect("nothing closes the semaphore");
        let body = self.clone();
        let working = tokio::task::spawn_blocking(move || {
            let worked = work(&body.bytes);
            drop((body, worker));
            worked
        });
        working.await.map_err(|_| Refusal::failed("the request could not be read"))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_past_the_room_are_refused_until_others_leave() {
        let intake = Intake::new(3 * MIDDLE);
        let first = intake.room(2 * MIDDLE).unwrap();
        assert!(intake.room(2 * MIDDLE).is_err());
        // Those of other sizes have room of their own.
        assert!(intake.room(SHORT).unwrap().is_none());
        assert!(intake.room(MIDDLE).unwrap().is_some());
        drop(first);
        assert!(intake.room(2 * MIDDLE).unwrap().is_some());
    }
}
