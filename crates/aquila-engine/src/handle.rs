//! The engine on a thread of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::config::EngineConfig;
use crate::error::{SubmitError, panic_text};
use crate::executor::{Profile, RowWidths};
use crate::failure::{EngineFailure, FailureCell};
use crate::request::{Request, RequestId};
use crate::scheduler::Priorities;
use crate::scheduler::Scheduler;
use crate::stats::Stats;
use crate::transfer::{Claim, Delivery};

/// What the engine's thread is told.
enum Command {
    Submit(RequestId, Box<Request>),
    Abort(RequestId),
    Claim(RequestId, Claim),
    Deliver(RequestId, Delivery),
    Flush(Sender<usize>),
    /// Finish what is there, then stop.
    Drain,
    /// Stop now.
    Stop,
}

/// A way to a running engine; clones reach the same one.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

struct Shared {
    config: EngineConfig,
    profile: Profile,
    algorithm: Option<&'static str>,
    draft_groups: usize,
    overlaps: bool,
    priorities: Priorities,
    stats: Arc<Stats>,
    failure: Arc<FailureCell>,
    next_id: AtomicU64,
    /// Requests that were submitted but are not admitted yet.
    queued: Arc<AtomicUsize>,
    /// Set before the command that closes is sent.
    closing: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl EngineHandle {
    /// Puts `engine` on a thread of its own, and with overlap its listeners on another: without
    /// it, computing wants all cores.
    pub fn start(engine: Scheduler) -> std::io::Result<Self> {
        let engine = if engine.overlaps() { engine.with_output_thread()? } else { engine };
        let (commands, inbox) = mpsc::channel();
        let shared = Shared {
            config: engine.config().clone(),
            profile: engine.profile.clone(),
            algorithm: engine.algorithm(),
            draft_groups: engine.draft_limits().groups,
            overlaps: engine.overlaps(),
            priorities: engine.priorities(),
            stats: engine.stats(),
            failure: engine.failure.clone(),
            next_id: AtomicU64::new(0),
            queued: Arc::new(AtomicUsize::new(0)),
            closing: Arc::default(),
            thread: Mutex::new(None),
        };
        let (queued, closing) = (shared.queued.clone(), shared.closing.clone());
        let thread = std::thread::Builder::new()
            .name("aquila-engine".into())
            .spawn(move || serve(engine, &inbox, &queued, &closing))?;
        *shared.thread.lock().expect("nobody else has the lock yet") = Some(thread);
        Ok(Self { commands, shared: Arc::new(shared) })
    }

    /// Takes a request, or says why not.
    pub fn submit(&self, request: Request) -> Result<RequestId, SubmitError> {
        let config = &self.shared.config;
        request.check(&self.shared.profile, config, self.shared.priorities)?;
        if let Some(failure) = self.failure() {
            return Err(failure.clone().into());
        }
        if self.shared.closing.load(Ordering::Acquire) {
            return Err(SubmitError::ShuttingDown);
        }
        let limit = config.max_queued_requests;
        self.shared
            .queued
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < limit).then_some(n + 1))
            .map_err(SubmitError::QueueFull)?;
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let command = Command::Submit(id, Box::new(request));
        let ended = |_| self.failure().cloned().map_or(SubmitError::ShuttingDown, Into::into);
        self.commands.send(command).map_err(ended)?;
        Ok(id)
    }

    /// Gives a request up, if it has not ended.
    pub fn abort(&self, id: RequestId) {
        // A stopped engine has no request left to abort.
        let _ = self.commands.send(Command::Abort(id));
    }

    /// The engine that is to decode a request has slots for it.
    pub fn claim(&self, id: RequestId, claim: Claim) {
        // A stopped engine has given the request up.
        let _ = self.commands.send(Command::Claim(id, claim));
    }

    /// Hands in what comes for a request that is received.
    pub fn deliver(&self, id: RequestId, delivery: Delivery) {
        let _ = self.commands.send(Command::Deliver(id, delivery));
    }

    /// Drops every cached prefix that no request uses; answers how many pages that were.
    pub fn flush_cache(&self) -> usize {
        let (reply, answer) = mpsc::channel();
        let sent = self.commands.send(Command::Flush(reply));
        sent.ok().and_then(|()| answer.recv().ok()).unwrap_or(0)
    }

    /// The engine's settings.
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    /// The size of the model's vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.shared.profile.vocabulary
    }

    /// How wide the rows are that requests may get.
    pub fn row_widths(&self) -> RowWidths {
        self.shared.profile.row_widths
    }

    /// The name of the algorithm that drafts, if one does.
    pub fn algorithm(&self) -> Option<&'static str> {
        self.shared.algorithm
    }

    /// In how many groups the draft keeps keys and values: one for each layer of an MTP head that
    /// the largest tree runs.
    pub fn draft_groups(&self) -> usize {
        self.shared.draft_groups
    }

    /// Whether the engine's rounds overlap.
    pub fn overlaps(&self) -> bool {
        self.shared.overlaps
    }

    /// What becomes of priorities.
    pub fn priorities(&self) -> Priorities {
        self.shared.priorities
    }

    /// The engine's counters.
    pub fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    /// Why the engine serves no more, if so.
    pub fn failure(&self) -> Option<&EngineFailure> {
        self.shared.failure.get()
    }

    /// Has `hears` called when the engine fails for good, on the engine's thread, or now if it did.
    pub fn when_failed(&self, hears: impl FnOnce(&EngineFailure) + Send + 'static) {
        self.shared.failure.when_set(Box::new(hears));
    }

    /// Takes no more requests, finishes those that are there, and waits for the end.
    pub fn drain(&self) {
        self.close(Command::Drain);
    }

    /// Takes no more requests, gives up those that are there, and waits for the end.
    pub fn stop(&self) {
        self.close(Command::Stop);
    }

    fn close(&self, command: Command) {
        self.shared.closing.store(true, Ordering::Release);
        // An engine that has ended already needs no telling.
        let _ = self.commands.send(command);
        let thread = self.shared.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread {
            // The thread reports its own panics.
            let _ = thread.join();
        }
    }
}

/// How long an engine sleeps that waits for others.
const STALLED: Duration = Duration::from_millis(10);

fn serve(
    mut engine: Scheduler,
    inbox: &Receiver<Command>,
    queued: &AtomicUsize,
    closing: &AtomicBool,
) {
    let ended = catch_unwind(AssertUnwindSafe(|| run(&mut engine, inbox, queued)));
    if let Err(panic) = ended {
        let failure = EngineFailure::Panicked(panic_text(&panic));
        // What the panic left may panic once more.
        let _ = catch_unwind(AssertUnwindSafe(|| engine.fail_for_good(failure)));
    }
    if let Some(failure) = engine.failure().cloned() {
        engine.end_lost_requests(&failure);
        refuse(inbox, &failure, closing);
    }
}

/// Ends what is still submitted to an engine that has failed, until it is told to stop.
fn refuse(inbox: &Receiver<Command>, failure: &EngineFailure, closing: &AtomicBool) {
    // The command that closes may have been read before the engine failed.
    let next = || match closing.load(Ordering::Acquire) {
        true => inbox.try_recv().ok(),
        false => inbox.recv().ok(),
    };
    while let Some(command) = next() {
        match command {
            Command::Submit(_, request) => request.refuse(&failure.to_string()),
            Command::Flush(reply) => {
                // Whoever asked may have left.
                let _ = reply.send(0);
            }
            Command::Abort(_) | Command::Claim(..) | Command::Deliver(..) => (),
            Command::Drain | Command::Stop => (),
        }
    }
}

/// Does what the engine is told, until it is told to stop, or fails for good.
fn run(engine: &mut Scheduler, inbox: &Receiver<Command>, queued: &AtomicUsize) {
    let mut draining = false;
    // Whether there was nothing to do when it was last looked for.
    let mut stalled = false;
    // How many requests of this engine `queued` counts; more may be on their way here.
    let mut counted = 0;
    loop {
        // An idle engine sleeps until it is told something; a busy one only looks.
        let command = if engine.is_idle() && !draining {
            inbox.recv().map_err(|_| TryRecvError::Disconnected)
        } else if stalled {
            // Deadlines pass while other engines are waited for.
            inbox.recv_timeout(STALLED).map_err(|error| match error {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            })
        } else {
            inbox.try_recv()
        };
        stalled &= command.is_err();
        match command {
            Ok(Command::Submit(id, request)) => {
                engine.enqueue(id, *request);
                counted += 1;
                continue;
            }
            Ok(Command::Abort(id)) => {
                engine.abort(id);
            }
            Ok(Command::Claim(id, claim)) => {
                engine.claim(id, claim);
            }
            Ok(Command::Deliver(id, delivery)) => {
                engine.deliver(id, delivery);
            }
            Ok(Command::Flush(reply)) => {
                // Whoever asked may have left.
                let _ = reply.send(engine.flush_cache());
            }
            Ok(Command::Drain) => draining = true,
            Ok(Command::Stop) => {
                engine.abort_all("the engine was stopped");
                return;
            }
            Err(TryRecvError::Disconnected) if engine.is_idle() => return,
            Err(TryRecvError::Disconnected | TryRecvError::Empty) => {
                if draining && engine.is_idle() {
                    return;
                }
                engine.step();
                if engine.failure().is_some() {
                    return;
                }
                stalled = engine.is_stalled();
            }
        }
        let waiting = engine.waiting();
        if waiting < counted {
            queued.fetch_sub(counted - waiting, Ordering::AcqRel);
        } else {
            queued.fetch_add(waiting - counted, Ordering::AcqRel);
        }
        counted = waiting;
    }
}
