//! Many jobs of every kind, and what must hold after each. Nothing here depends on how fast the
//! threads are: a test waits for what it needs, however long that takes.

use std::sync::atomic::AtomicU32;

use super::*;

/// Thread counts: the caller alone, one helper, some, and more than most machines have cores.
const THREADS: [usize; 4] = [1, 2, 3, 9];

/// What a job leaves behind. It outlives the pool, so that a task which runs too late is seen.
struct Trace {
    runs: Vec<AtomicU32>,
    /// Set once `Pool::run` has returned.
    over: AtomicBool,
    /// How many tasks ran after that.
    late: AtomicU32,
}

impl Trace {
    fn new(chunks: usize) -> Self {
        let runs = (0..chunks).map(|_| AtomicU32::new(0)).collect();
        Self { runs, over: AtomicBool::new(false), late: AtomicU32::new(0) }
    }

    fn note(&self, chunk: usize) {
        self.runs[chunk].fetch_add(1, Ordering::Relaxed);
        if self.over.load(Ordering::Relaxed) {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether every chunk ran as often as `wanted` says, and none after the end of its job.
    fn check(&self, wanted: impl Fn(u32) -> bool, what: &str) {
        let runs: Vec<u32> = self.runs.iter().map(|r| r.load(Ordering::Relaxed)).collect();
        assert!(runs.iter().all(|&runs| wanted(runs)), "{what}: chunks ran {runs:?} times");
        assert_eq!(self.late.load(Ordering::Relaxed), 0, "{what}: chunks ran after the end");
    }
}

/// Jobs of 0 to 40 chunks, mostly few.
fn traces(jobs: usize) -> Vec<Trace> {
    (0..jobs).map(|job| Trace::new(if job % 8 == 7 { 40 } else { job % 7 })).collect()
}

#[test]
fn short_jobs_run_every_chunk_once_and_none_late() {
    for threads in THREADS {
        let traces = traces(20_000);
        let tasks: Vec<Box<dyn Fn(usize) + Sync>> = traces
            .iter()
            .map(|trace| -> Box<dyn Fn(usize) + Sync> { Box::new(|chunk| trace.note(chunk)) })
            .collect();
        let pool = Pool::new(threads).unwrap();
        for (trace, task) in traces.iter().zip(&tasks) {
            pool.run(trace.runs.len(), task);
            trace.check(|runs| runs == 1, &format!("{threads} threads"));
            trace.over.store(true, Ordering::Relaxed);
        }
        drop(pool);
        traces.iter().for_each(|trace| trace.check(|runs| runs == 1, "after all"));
    }
}

#[test]
fn every_chunk_runs_once() {
    for threads in [1, 2, 5] {
        let pool = Pool::new(threads).unwrap();
        for chunks in [0, 1, 2, 3, 100] {
            let runs: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(chunks, &|i| {
                runs[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn what_tasks_write_the_caller_reads() {
    for threads in THREADS {
        let pool = Pool::new(threads).unwrap();
        let mut values = vec![0usize; 64];
        for job in 1..2000 {
            let at = crate::cpu::memory::Shared::new(values.as_mut_ptr());
            // SAFETY: each chunk writes a value of its own, and the values outlive the job.
            pool.run(values.len(), &|chunk| unsafe { *at.get().add(chunk) = job * chunk });
            assert!(values.iter().enumerate().all(|(chunk, value)| *value == job * chunk));
        }
    }
}

#[test]
fn panicking_jobs_end_as_others_do_and_say_which() {
    for threads in THREADS {
        let traces = traces(2000);
        let pool = Pool::new(threads).unwrap();
        for (job, trace) in traces.iter().enumerate() {
            let chunks = trace.runs.len();
            // Some jobs panic at one chunk, some at every chunk, some not at all.
            let bad = |chunk: usize| match job % 4 {
                0 => false,
                1 => true,
                _ => chunk == job % chunks,
            };
            let task = |chunk: usize| {
                trace.note(chunk);
                if bad(chunk) {
                    // Without the panic hook, which would print thousands of times.
                    resume_unwind(Box::new(chunk));
                }
            };
            let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(chunks, &task)));
            match outcome {
                Ok(()) => {
                    assert!(!(0..chunks).any(bad), "a panic was lost");
                    trace.check(|runs| runs == 1, "a job without panic");
                }
                Err(payload) => {
                    let chunk = *payload.downcast::<usize>().expect("the payload of a task");
                    assert!(bad(chunk), "chunk {chunk} did not panic");
                    trace.check(|runs| runs <= 1, "a job with a panic");
                }
            }
            trace.over.store(true, Ordering::Relaxed);
        }
        drop(pool);
        traces.iter().for_each(|trace| trace.check(|runs| runs <= 1, "after all"));
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_works_on() {
    let pool = Pool::new(3).unwrap();
    for round in 0..200 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|i| assert!(i != round % 8, "chunk {i}"));
        }));
        let payload = outcome.unwrap_err();
        let text = payload.downcast_ref::<String>().unwrap();
        assert_eq!(*text, format!("chunk {}", round % 8));
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}

#[test]
fn no_reference_to_a_task_remains() {
    let pool = Pool::new(3).unwrap();
    let clear = |pool: &Pool| {
        // SAFETY: no job runs, so nobody writes.
        unsafe { &*pool.board.job.get() }.is_none()
    };
    for job in 0..100 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|chunk| {
                if job % 2 == 1 && chunk == 5 {
                    resume_unwind(Box::new(()));
                }
            });
        }));
        assert_eq!(outcome.is_err(), job % 2 == 1);
        assert!(clear(&pool), "job {job} is still there");
    }
}

#[test]
fn pools_end_whatever_their_threads_do() {
    for round in 0..200 {
        let pool = Pool::new(THREADS[round % THREADS.len()]).unwrap();
        match round % 3 {
            // At once, while threads may not have begun.
            0 => {}
            // Right after a job, while threads look out for another.
            1 => pool.run(16, &|_| {}),
            // While all sleep.
            _ => until_asleep(&pool),
        }
    }
}

#[test]
fn a_nested_job_runs_on_the_thread_of_its_caller() {
    let pool = Pool::new(3).unwrap();
    let sum = AtomicUsize::new(0);
    for _ in 0..500 {
        pool.run(6, &|_| {
            let caller = std::thread::current().id();
            pool.run(4, &|_| {
                assert_eq!(std::thread::current().id(), caller);
                sum.fetch_add(1, Ordering::Relaxed);
            });
        });
    }
    assert_eq!(sum.into_inner(), 500 * 6 * 4);
}

#[test]
fn callers_at_once_and_tasks_that_call_back_are_served() {
    let pool = Pool::new(2).unwrap();
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..500 {
                    pool.run(4, &|_| {
                        pool.run(3, &|_| {
                            sum.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 3 * 500 * 4 * 3);
}

#[test]
fn work_after_sleep_is_still_shared_out() {
    let pool = Pool::new(2).unwrap();
    for _ in 0..3 {
        until_asleep(&pool);
        let caller = std::thread::current().id();
        let helped = AtomicBool::new(false);
        // Chunk after chunk, until the helper has taken one.
        while !helped.load(Ordering::Relaxed) {
            pool.run(64, &|_| {
                if std::thread::current().id() != caller {
                    helped.store(true, Ordering::Relaxed);
                }
                std::thread::yield_now();
            });
        }
    }
}

/// Waits until all helpers sleep, or are about to.
fn until_asleep(pool: &Pool) {
    while pool.board.asleep.iter().any(|asleep| !asleep.load(Ordering::SeqCst)) {
        std::thread::yield_now();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn an_idle_pool_uses_no_processor_time() {
    use std::os::unix::thread::JoinHandleExt;

    /// The processor time of a thread, in nanoseconds.
    fn spent(thread: libc::pthread_t) -> u64 {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: the thread lives; both are ours to write.
        unsafe {
            assert_eq!(libc::pthread_getcpuclockid(thread, &mut clock), 0);
            assert_eq!(libc::clock_gettime(clock, &mut time), 0);
        }
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
    let pool = Pool::new(3).unwrap();
    pool.run(3, &|_| {});
    until_asleep(&pool);
    let helpers = || pool.helpers.iter().map(|helper| spent(helper.as_pthread_t())).sum::<u64>();
    // SAFETY: a thread's own handle.
    let own = || spent(unsafe { libc::pthread_self() });
    // Helpers that sleep use nothing while this thread works, however busy the machine is. One that
    // was about to sleep when it was last seen may need another look.
    let quiet = (0..1000).any(|_| {
        let (before, begun) = (helpers(), own());
        while own() - begun < 20_000_000 {
            std::hint::spin_loop();
        }
        helpers() == before
    });
    assert!(quiet, "helpers never stopped using processor time");
}
