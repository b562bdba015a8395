//! What runs rounds. The scheduler sends a [`ScheduledBatch`] for each round and reads a
//! [`BatchOutput`] for each batch, in order; they share nothing else.
//!
//! Without overlap a batch runs when it is sent, on the scheduler's thread. With overlap the
//! executor has a thread of its own, and the scheduler plans round r + 1 and settles r - 1 while r
//! runs: what a round needs of the one before is in the backend's state. Where operations complete
//! later than they are enqueued, round r + 1 is enqueued before r is read, so that a device has its
//! next round at hand. The batches are the same.

mod batch;
mod graphs;
mod model;
mod runner;
mod stores;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

pub use batch::{
    Admission, BatchOutput, CapturedPart, Departed, Executor, Export, Import, Profile, RequestWork,
    RowWidths, ScheduledBatch, TableChange, Unpack,
};
pub use graphs::{GraphPart, GraphSettings};
pub use model::ModelExecutor;
pub use runner::Runner;

use crate::error::{RoundError, panic_text};
use crate::failure::EngineFailure;
use crate::times::Times;

/// Where the executor is.
pub(crate) enum ExecutorHandle {
    /// On the scheduler's thread.
    Inline { rounds: Rounds, outputs: VecDeque<BatchOutput> },
    /// On a thread of its own, one batch ahead of what the scheduler has read.
    Overlapped(Overlapped),
}

/// The scheduler's end of an executor on a thread of its own.
pub(crate) struct Overlapped {
    messages: Option<Sender<Message>>,
    outputs: Receiver<BatchOutput>,
    thread: Option<JoinHandle<()>>,
    /// Batches that were sent and whose output was not received.
    in_flight: usize,
}

/// What the scheduler tells an executor on a thread of its own.
enum Message {
    /// A round.
    Batch(Box<ScheduledBatch>),
    /// The output of the only round on its way is awaited.
    Finish,
}

/// An executor, and the rounds that it has enqueued and not finished.
pub(crate) struct Rounds {
    executor: Box<dyn Executor>,
    enqueued: VecDeque<Enqueued>,
}

/// A round by its number, or what came of one whose enqueueing panicked.
enum Enqueued {
    Round(u64),
    Failed(BatchOutput),
}

impl Rounds {
    /// Enqueues a round; a panic in it fails the round and not the executor.
    fn enqueue(&mut self, batch: ScheduledBatch) {
        let number = batch.number;
        let enqueued = catch_unwind(AssertUnwindSafe(|| self.executor.enqueue(batch)));
        self.enqueued.push_back(match enqueued {
            Ok(()) => Enqueued::Round(number),
            Err(panic) => Enqueued::Failed(failed(number, panic_text(&panic).into())),
        });
    }

    /// Finishes the oldest round, if more than `left` are enqueued.
    fn finish(&mut self, left: usize) -> Option<BatchOutput> {
        if self.enqueued.len() <= left {
            return None;
        }
        Some(match self.enqueued.pop_front()? {
            Enqueued::Failed(output) => output,
            Enqueued::Round(number) => catch_unwind(AssertUnwindSafe(|| self.executor.finish()))
                .unwrap_or_else(|panic| failed(number, panic_text(&panic).into())),
        })
    }

    /// Runs what the scheduler tells, until what comes of it is not waited for any more.
    fn run(mut self, messages: &Receiver<Message>, outputs: &Sender<BatchOutput>) {
        let finish = |rounds: &mut Self, left| {
            while let Some(output) = rounds.finish(left) {
                outputs.send(output).ok()?;
            }
            Some(())
        };
        for message in messages {
            let told = match message {
                Message::Finish => finish(&mut self, 0),
                Message::Batch(batch) if self.executor.runs_ahead(&batch) => {
                    self.enqueue(*batch);
                    finish(&mut self, 1)
                }
                Message::Batch(batch) => {
                    let told = finish(&mut self, 0);
                    self.enqueue(*batch);
                    told.and_then(|()| finish(&mut self, 0))
                }
            };
            if told.is_none() {
                return;
            }
        }
    }
}

impl ExecutorHandle {
    /// On the thread of the caller.
    pub fn inline(executor: Box<dyn Executor>) -> Self {
        let rounds = Rounds { executor, enqueued: VecDeque::new() };
        ExecutorHandle::Inline { rounds, outputs: VecDeque::new() }
    }

    /// Puts the executor on a thread of its own, if it is not there yet.
    pub fn overlapped(self) -> std::io::Result<Self> {
        let ExecutorHandle::Inline { rounds, .. } = self else { return Ok(self) };
        let (messages, inbox) = mpsc::channel();
        let (outbox, outputs) = mpsc::channel();
        let work = move || rounds.run(&inbox, &outbox);
        let thread = std::thread::Builder::new().name("aquila-executor".into()).spawn(work)?;
        let (messages, thread) = (Some(messages), Some(thread));
        Ok(ExecutorHandle::Overlapped(Overlapped { messages, outputs, thread, in_flight: 0 }))
    }

    /// The executor, while it is on the scheduler's thread.
    pub fn inline_mut(&mut self) -> Option<&mut dyn Executor> {
        match self {
            ExecutorHandle::Inline { rounds, .. } => Some(&mut *rounds.executor),
            ExecutorHandle::Overlapped(_) => None,
        }
    }

    /// How many rounds may be on their way while the next is planned.
    pub fn ahead(&self) -> usize {
        match self {
            ExecutorHandle::Inline { .. } => 0,
            ExecutorHandle::Overlapped(_) => 1,
        }
    }

    /// Sends a round on its way.
    pub fn send(&mut self, batch: ScheduledBatch) {
        match self {
            ExecutorHandle::Inline { rounds, outputs } => {
                rounds.enqueue(batch);
                outputs.extend(rounds.finish(0));
            }
            ExecutorHandle::Overlapped(overlapped) => {
                overlapped.in_flight += 1;
                overlapped.send(Message::Batch(Box::new(batch)));
            }
        }
    }

    /// What came of the round of this number, the oldest that was not received yet.
    pub fn receive(&mut self, number: u64) -> BatchOutput {
        let output = match self {
            ExecutorHandle::Inline { outputs, .. } => outputs.pop_front(),
            ExecutorHandle::Overlapped(overlapped) => {
                if overlapped.in_flight == 1 {
                    overlapped.send(Message::Finish);
                }
                overlapped.in_flight -= 1;
                overlapped.outputs.recv().ok()
            }
        };
        let output = output.unwrap_or_else(|| failed(number, EngineFailure::ExecutorGone.into()));
        assert_eq!(output.number, number, "rounds come back in the order in which they were sent");
        output
    }
}

impl Overlapped {
    fn send(&self, message: Message) {
        if let Some(messages) = &self.messages {
            // An executor that is gone is noticed when its output is awaited.
            let _ = messages.send(message);
        }
    }
}

impl Drop for Overlapped {
    fn drop(&mut self) {
        self.messages = None;
        if let Some(thread) = self.thread.take() {
            // The thread catches the panics of rounds, and has no others to report.
            let _ = thread.join();
        }
    }
}

fn failed(number: u64, why: RoundError) -> BatchOutput {
    let (unpacked, packed) = (Vec::new(), Vec::new());
    BatchOutput { number, outcome: Err(why), unpacked, packed, times: Times::default() }
}
