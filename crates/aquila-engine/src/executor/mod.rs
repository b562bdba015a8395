//! What runs rounds. The scheduler sends a [`ScheduledBatch`] for each round and reads a
//! [`BatchOutput`] for each batch, in order; they share nothing else.
//!
//! Without overlap a batch runs when it is sent, on the scheduler's thread. With overlap the
//! executor has a thread of its own, and the scheduler plans round r + 1 and settles r - 1 while r
//! runs: what a round needs of the one before is in the backend's state. The batches are the same.

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
    Inline { executor: Box<dyn Executor>, outputs: VecDeque<BatchOutput> },
    /// On a thread of its own, one batch ahead of what the scheduler has read.
    Overlapped(Overlapped),
}

/// The scheduler's end of an executor on a thread of its own.
pub(crate) struct Overlapped {
    batches: Option<Sender<ScheduledBatch>>,
    outputs: Receiver<BatchOutput>,
    thread: Option<JoinHandle<()>>,
}

impl ExecutorHandle {
    /// On the thread of the caller.
    pub fn inline(executor: Box<dyn Executor>) -> Self {
        ExecutorHandle::Inline { executor, outputs: VecDeque::new() }
    }

    /// Puts the executor on a thread of its own, if it is not there yet.
    pub fn overlapped(self) -> std::io::Result<Self> {
        let ExecutorHandle::Inline { mut executor, .. } = self else { return Ok(self) };
        let (batches, inbox) = mpsc::channel();
        let (outbox, outputs) = mpsc::channel();
        let work = move || {
            for batch in inbox {
                if outbox.send(run(&mut *executor, batch)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("aquila-executor".into()).spawn(work)?;
        let (batches, thread) = (Some(batches), Some(thread));
        Ok(ExecutorHandle::Overlapped(Overlapped { batches, outputs, thread }))
    }

    /// The executor, while it is on the scheduler's thread.
    pub fn inline_mut(&mut self) -> Option<&mut dyn Executor> {
        match self {
            ExecutorHandle::Inline { executor, .. } => Some(&mut **executor),
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
            ExecutorHandle::Inline { executor, outputs } => {
                outputs.push_back(run(&mut **executor, batch));
            }
            ExecutorHandle::Overlapped(Overlapped { batches, .. }) => {
                if let Some(batches) = batches {
                    // An executor that is gone is noticed when its output is awaited.
                    let _ = batches.send(batch);
                }
            }
        }
    }

    /// What came of the round of this number, the oldest that was not received yet.
    pub fn receive(&mut self, number: u64) -> BatchOutput {
        let output = match self {
            ExecutorHandle::Inline { outputs, .. } => outputs.pop_front(),
            ExecutorHandle::Overlapped(Overlapped { outputs, .. }) => outputs.recv().ok(),
        };
        let output = output.unwrap_or_else(|| failed(number, EngineFailure::ExecutorGone.into()));
        assert_eq!(output.number, number, "rounds come back in the order in which they were sent");
        output
    }
}

impl Drop for Overlapped {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // The thread catches the panics of rounds, and has no others to report.
            let _ = thread.join();
        }
    }
}

/// Runs a batch; a panic in it fails the round and not the executor.
fn run(executor: &mut dyn Executor, batch: ScheduledBatch) -> BatchOutput {
    let number = batch.number;
    catch_unwind(AssertUnwindSafe(|| executor.run(batch)))
        .unwrap_or_else(|panic| failed(number, panic_text(&panic).into()))
}

fn failed(number: u64, why: RoundError) -> BatchOutput {
    let (unpacked, packed) = (Vec::new(), Vec::new());
    BatchOutput { number, outcome: Err(why), unpacked, packed, times: Times::default() }
}
