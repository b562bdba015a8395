//! Threads that share one operation at a time. The caller is one of them.
//!
//! Work is a number of chunks. Each thread has a share of its own, one chunk behind the other, so
//! that what it asked for ahead is what it comes to next; whoever is done helps with the shares of
//! others. A thread that finds no work looks out for some tens of microseconds, since a forward
//! pass brings the next operation soon, then sleeps until it is woken. Which thread runs a chunk
//! never changes a result.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread looks out for work before it sleeps.
const LOOKOUT: Duration = Duration::from_micros(60);

/// Set in `state` while a job takes helpers; below it, the number of helpers at work; above it,
/// the number of the job.
const OPEN: u64 = 1 << 31;
const HELPERS: u64 = OPEN - 1;
const JOB: u64 = 1 << 32;

type Task<'a> = &'a (dyn Fn(usize) + Sync);

struct Job {
    task: Task<'static>,
    chunks: usize,
}

/// The next chunk of one thread's share, on a cache line of its own and of the line that is
/// fetched with it.
#[repr(align(128))]
struct Next(AtomicUsize);

struct Board {
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// One for each thread; the caller's comes first.
    next: Vec<Next>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    asleep: Vec<AtomicBool>,
}

// SAFETY: `job` is written only while `state` is closed with no helpers, and read only by threads
// that joined while it was open.
unsafe impl Sync for Board {}
// SAFETY: what `job` points to is shared with helpers only while `Pool::run` waits for them.
unsafe impl Send for Board {}

/// A fixed number of threads.
pub(crate) struct Pool {
    board: Arc<Board>,
    helpers: Vec<JoinHandle<()>>,
    wake: Vec<Thread>,
    turn: Mutex<()>,
}

impl Pool {
    /// The answer to every query, shared out to the threads.
    pub(crate) fn map<Q: Sync, T: Send + Sync>(
        &self,
        queries: &[Q],
        answer: impl Fn(&Q) -> T + Sync,
    ) -> Vec<T> {
        let answers: Vec<OnceLock<T>> = queries.iter().map(|_| OnceLock::new()).collect();
        self.run(queries.len(), &|index| {
            answers[index].get_or_init(|| answer(&queries[index]));
        });
        let answers = answers.into_iter().map(OnceLock::into_inner);
        answers.map(|answer| answer.expect("every query was answered")).collect()
    }

    /// A pool of `threads` threads, the caller's included.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let helpers = threads.max(1) - 1;
        let board = Arc::new(Board {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: (0..=helpers).map(|_| Next(AtomicUsize::new(0))).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self {
            board: board.clone(),
            helpers: Vec::new(),
            wake: Vec::new(),
            turn: Mutex::new(()),
        };
        for index in 0..helpers {
            let board = board.clone();
            let handle = std::thread::Builder::new()
                .name(format!("compute-{}", index + 1))
                .spawn(move || board.help(index))?;
            pool.wake.push(handle.thread().clone());
            pool.helpers.push(handle);
        }
        Ok(pool)
    }

    /// How many threads there are, the caller's included.
    pub(super) fn threads(&self) -> usize {
        self.wake.len() + 1
    }

    /// Runs `task` once for each of `0..chunks` and returns when all are done.
    ///
    /// # Panics
    /// If a task panics, with its payload, once no thread works any more.
    pub(super) fn run(&self, chunks: usize, task: Task<'_>) {
        // A second caller, or a task that calls back, does its work alone rather than wait.
        let turn = match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        };
        if chunks <= 1 || self.wake.is_empty() || turn.is_none() {
            (0..chunks).for_each(task);
            return;
        }
        let board = &*self.board;
        // SAFETY: the lifetime is hidden only until helpers have left and the job is cleared, below.
        // The board is closed and without helpers, and `turn` keeps other callers out.
        unsafe {
            let task = std::mem::transmute::<Task<'_>, Task<'static>>(task);
            *board.job.get() = Some(Job { task, chunks });
        }
        for (thread, next) in board.next.iter().enumerate() {
            next.0.store(board.share(thread, chunks).start, Ordering::Relaxed);
        }
        let number = board.state.load(Ordering::Relaxed) / JOB;
        board.state.store((number + 1) % JOB * JOB + OPEN, Ordering::SeqCst);
        for (asleep, thread) in board.asleep.iter().zip(&self.wake).take(chunks - 1) {
            if asleep.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| board.take_chunks(0, task, chunks)));
        if outcome.is_err() {
            board.give_up();
        }
        board.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0u32;
        while board.state.load(Ordering::Acquire) & HELPERS != 0 {
            looks += 1;
            // A helper that was set aside by the system needs the core that this would burn.
            if looks < 4000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        // SAFETY: the board is closed and the last helper has left, so that nobody reads the job;
        // without it no reference to the caller's task outlives this call.
        unsafe { *board.job.get() = None };
        let theirs = board.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Err(payload) = outcome {
            resume_unwind(payload);
        }
        if let Some(payload) = theirs {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.board.stop.store(true, Ordering::SeqCst);
        self.wake.iter().for_each(Thread::unpark);
        for helper in self.helpers.drain(..) {
            // A helper catches what its tasks throw, so there is nothing to learn here.
            let _ = helper.join();
        }
    }
}

impl Board {
    /// The chunks of one thread's own.
    fn share(&self, thread: usize, chunks: usize) -> Range<usize> {
        let threads = self.next.len();
        thread * chunks / threads..(thread + 1) * chunks / threads
    }

    /// Runs what is left of the thread's own share, then of the others'.
    fn take_chunks(&self, thread: usize, task: Task<'_>, chunks: usize) {
        let threads = self.next.len();
        for owner in (thread..threads).chain(0..thread) {
            let (next, end) = (&self.next[owner].0, self.share(owner, chunks).end);
            while next.load(Ordering::Relaxed) < end {
                let chunk = next.fetch_add(1, Ordering::Relaxed);
                if chunk < end {
                    task(chunk);
                }
            }
        }
    }

    /// Leaves nothing to take.
    fn give_up(&self) {
        for next in &self.next {
            next.0.store(usize::MAX / 2, Ordering::Relaxed);
        }
    }

    fn help(&self, index: usize) {
        let mut seen = 0;
        while let Some(number) = self.join(index, seen) {
            seen = number;
            // Whatever panics, the helper leaves: the caller waits for that.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: the job stands while a thread that joined it has not left.
                let job = unsafe { &*self.job.get() }.as_ref().expect("an open board has a job");
                self.take_chunks(index + 1, job.task, job.chunks);
            }));
            if let Err(payload) = outcome {
                self.give_up();
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(payload);
            }
            self.state.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits for a job after the one numbered `seen` and joins it; `None` when the pool ends.
    fn join(&self, index: usize, seen: u64) -> Option<u64> {
        let mut since = Instant::now();
        loop {
            for _ in 0..64 {
                let state = self.state.load(Ordering::Acquire);
                if state & OPEN != 0 && state / JOB != seen {
                    let joined = self.state.compare_exchange_weak(
                        state,
                        state + 1,
                        Ordering::AcqRel,
                        Ordering::Relaxed,
                    );
                    if joined.is_ok() {
                        return Some(state / JOB);
                    }
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if since.elapsed() < LOOKOUT {
                continue;
            }
            self.asleep[index].store(true, Ordering::SeqCst);
            // A job opened before the flag was seen is noticed here, one opened after unparks.
            let state = self.state.load(Ordering::SeqCst);
            let work = state & OPEN != 0 && state / JOB != seen;
            if !work && !self.stop.load(Ordering::SeqCst) {
                std::thread::park();
            }
            self.asleep[index].store(false, Ordering::SeqCst);
            since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests;
