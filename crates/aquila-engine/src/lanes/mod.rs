//! The two lanes of an engine: the host lane plans rounds and hands out what they yield, the
//! compute lane runs them.
//!
//! They share nothing but two queues, of jobs and of what came of them. What a round needs of the
//! one before stays on the compute lane, in the relay, so the host may plan a round while the
//! last one runs. Joined, the lanes take turns on one thread, with the same jobs.

mod compute;
mod job;
mod params;
mod runner;
mod stores;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

pub use compute::Lane;
pub use job::{Admission, Compute, Done, Job, Left, Part, Profile, TableChange, Yield};
pub(crate) use params::params_of;
pub use runner::Runner;

use crate::error::panic_text;
use crate::times::Times;

/// Where the compute lane is.
pub(crate) enum Lanes {
    /// On the thread of the host lane: a job is run when it is sent.
    Joined { compute: Box<dyn Compute>, done: VecDeque<Done> },
    /// On a thread of its own, one job ahead of what the host lane has read.
    Apart(Apart),
}

/// The host lane's end of a compute lane on a thread of its own.
pub(crate) struct Apart {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Lanes {
    /// Both lanes on the thread of whoever asks.
    pub fn joined(compute: Box<dyn Compute>) -> Self {
        Lanes::Joined { compute, done: VecDeque::new() }
    }

    /// Puts the compute lane on a thread of its own, if it is not there yet.
    pub fn apart(self) -> std::io::Result<Self> {
        let Lanes::Joined { mut compute, .. } = self else { return Ok(self) };
        let (jobs, inbox) = mpsc::channel();
        let (outbox, done) = mpsc::channel();
        let work = move || {
            for job in inbox {
                if outbox.send(run(&mut *compute, job)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("aquila-compute".into()).spawn(work)?;
        Ok(Lanes::Apart(Apart { jobs: Some(jobs), done, thread: Some(thread) }))
    }

    /// What computes, while it is on the thread of the host lane.
    pub fn joined_mut(&mut self) -> Option<&mut dyn Compute> {
        match self {
            Lanes::Joined { compute, .. } => Some(&mut **compute),
            Lanes::Apart(_) => None,
        }
    }

    /// How many rounds may be on their way while the next is planned.
    pub fn ahead(&self) -> usize {
        match self {
            Lanes::Joined { .. } => 0,
            Lanes::Apart(_) => 1,
        }
    }

    /// Sends a round on its way.
    pub fn send(&mut self, job: Job) {
        match self {
            Lanes::Joined { compute, done } => done.push_back(run(&mut **compute, job)),
            Lanes::Apart(Apart { jobs, .. }) => {
                if let Some(jobs) = jobs {
                    // A lane that is gone is noticed when its answer is awaited.
                    let _ = jobs.send(job);
                }
            }
        }
    }

    /// What came of the round of this number, the oldest that was not received yet.
    pub fn receive(&mut self, number: u64) -> Done {
        let done = match self {
            Lanes::Joined { done, .. } => done.pop_front(),
            Lanes::Apart(Apart { done, .. }) => done.recv().ok(),
        };
        let done = done.unwrap_or_else(|| failed(number, "the compute lane is gone".into()));
        assert_eq!(done.number, number, "rounds come back in the order in which they were sent");
        done
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The thread catches the panics of rounds, and has no others to report.
            let _ = thread.join();
        }
    }
}

/// Runs a job; a panic in it fails the round and not the lane.
fn run(compute: &mut dyn Compute, job: Job) -> Done {
    let number = job.number;
    catch_unwind(AssertUnwindSafe(|| compute.run(job)))
        .unwrap_or_else(|panic| failed(number, panic_text(&panic)))
}

fn failed(number: u64, why: String) -> Done {
    Done { number, outcome: Err(why), times: Times::default() }
}
