//! From lines to requests, on a thread of its own: a prompt that arrives late on a pipe delays no
//! answer to those before it.
//!
//! The invariant: of the requests and lines whose answers are not written yet, no more are held
//! than there is room for, however long the input is.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquila_engine::SubmitError;
use aquila_text::{CheckedParams, GenerateError, Generator};
use serde_json::Value;

use super::answer::{Answer, Collector};
use super::input::{Ask, Line, Lines};
use crate::error::{Error, Result};
use crate::flags::named;

/// What the writer of answers hears.
pub enum Event {
    /// A line was taken; the answers to it follow. Lines come in their order.
    Taken(Taken),
    /// An answer of a line, by its index.
    Answer(u64, u32, Answer),
    /// A line that was taken got no answers, for this reason.
    Refused(u64, String),
    /// The input has ended, or could not be read further.
    End(Result<()>),
}

/// A line of the input, and what became of it.
pub struct Taken {
    /// What names the request in the output.
    pub id: Value,
    /// Bytes of the line.
    pub bytes: u64,
    /// What is awaited, or why the line was refused.
    pub awaited: std::result::Result<Awaited, String>,
}

/// The answers that a line asks for.
pub struct Awaited {
    /// How many.
    pub answers: usize,
    /// Whether log-probabilities are reported.
    pub logprobs: bool,
}

/// Reads `lines` to their end and submits what they ask for as `room` allows.
pub fn feed(generator: &Generator, mut lines: Lines, room: &Room, events: &Sender<Event>) {
    let (mut number, mut ids) = (0, Ids::default());
    let ended = loop {
        match lines.next() {
            Ok(Some(mut line)) => {
                ids.check(&mut line);
                if take(generator, number, line, room, events).is_err() {
                    // Nobody writes answers any more.
                    return;
                }
                number += 1;
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    // The same.
    let _ = events.send(Event::End(ended));
}

/// The ids of requests so far, as hashes, and the lines that they are from: of a long input, all
/// that is kept. Two ids of ten million are taken for one with a chance of one in a million.
#[derive(Default)]
struct Ids {
    lines: HashMap<u64, u64>,
    hashes: RandomState,
}

impl Ids {
    /// Refuses a request whose id another has, so that no two answers have the same.
    fn check(&mut self, line: &mut Line) {
        if line.ask.is_err() {
            return;
        }
        let (id, number) = (&line.id, line.number);
        let first = *self.lines.entry(self.hashes.hash_one(id)).or_insert(number);
        if first != number {
            line.ask = Err(format!(
                "line {number}: its id {id} is that of line {first}: ids must differ, and a line \
                 without one has its number"
            ));
        }
    }
}

struct NobodyListens;

fn take(
    generator: &Generator,
    number: u64,
    line: Line,
    room: &Room,
    events: &Sender<Event>,
) -> std::result::Result<(), NobodyListens> {
    let Line { id, number: place, bytes, ask } = line;
    let refused = |error: GenerateError| format!("line {place}: {}", named::generate(&error));
    let prepared = ask.and_then(|ask| prepare(generator, ask).map_err(refused));
    let tell = |awaited| {
        let taken = Taken { id, bytes, awaited };
        events.send(Event::Taken(taken)).map_err(|_| NobodyListens)
    };
    let (prompt, params) = match prepared {
        Ok(prepared) => prepared,
        Err(why) => {
            drop(room.enter(0));
            return tell(Err(why));
        }
    };
    let mut permits = room.enter(params.n as usize);
    tell(Ok(Awaited { answers: params.n as usize, logprobs: params.logprobs.is_some() }))?;
    let submitted = generator.submit(prompt, &params, None, |choice| {
        Box::new(Collector::new(number, choice, events.clone(), permits.pop()))
    });
    let event = match submitted {
        Ok(_) => return Ok(()),
        Err(GenerateError::Submit(SubmitError::ShuttingDown)) => {
            Event::End(Err(Error::Other("the engine ended before all prompts were read".into())))
        }
        Err(GenerateError::Submit(SubmitError::Failed(failure))) => Event::End(Err(failure.into())),
        Err(error) => Event::Refused(number, refused(error)),
    };
    events.send(event).map_err(|_| NobodyListens)
}

fn prepare(
    generator: &Generator,
    ask: Ask,
) -> std::result::Result<(Vec<u32>, CheckedParams), GenerateError> {
    let mut params = generator.check(ask.params)?;
    params.speculation = ask.speculation;
    params.priority = ask.priority;
    Ok((generator.tokens(ask.prompt)?, params))
}

/// How many requests may be under way, and how many lines may wait to be written.
#[derive(Clone)]
pub struct Room(Arc<Shared>);

struct Shared {
    most: usize,
    held: Mutex<Held>,
    freed: Condvar,
}

#[derive(Default)]
struct Held {
    requests: usize,
    lines: usize,
}

impl Room {
    /// Room for `most` requests, and as many lines; at least one.
    pub fn new(most: usize) -> Self {
        let held = Mutex::new(Held::default());
        Self(Arc::new(Shared { most: most.max(1), held, freed: Condvar::new() }))
    }

    /// Waits for room for a line with so many requests, and gives a permit for each; a line that
    /// asks for more than there ever is goes in alone.
    fn enter(&self, requests: usize) -> Vec<Permit> {
        let most = self.0.most;
        // Where no request is under way, all lines are about to be written.
        let crowded = |held: &mut Held| {
            held.requests > 0 && (held.lines >= most || held.requests + requests > most)
        };
        let held = self.0.freed.wait_while(self.0.held(), crowded);
        let mut held = held.unwrap_or_else(PoisonError::into_inner);
        held.requests += requests;
        held.lines += 1;
        (0..requests).map(|_| Permit(self.clone())).collect()
    }

    /// A line was written.
    pub fn line_written(&self) {
        self.0.held().lines -= 1;
        self.0.freed.notify_one();
    }
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The room of one request; it is free again when the request is gone, however it ended.
pub struct Permit(Room);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.0.held().requests -= 1;
        self.0.0.freed.notify_one();
    }
}
