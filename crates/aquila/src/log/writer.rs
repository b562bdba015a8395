//! Standard error, written by a thread of its own: a log that nobody reads keeps no request waiting.
//!
//! Lines wait in a queue that has an end. One that finds no place there is lost, and the next that
//! finds one says how many were.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crate::notice::line;

/// Lines that may wait to be written.
const QUEUE: usize = 4096;
/// How long the last lines of a process may take.
const LAST_LINES: Duration = Duration::from_millis(200);

/// The queue of this process, for its end.
static STARTED: OnceLock<Queue> = OnceLock::new();

enum Job {
    Line(Vec<u8>),
    /// Tells that everything before it is written.
    Tell(mpsc::Sender<()>),
}

/// Where lines wait to be written.
#[derive(Clone)]
pub struct Queue {
    jobs: SyncSender<Job>,
    lost: Arc<AtomicU64>,
}

impl Queue {
    /// Starts the thread that writes to `target`.
    pub fn start(mut target: impl Write + Send + 'static) -> io::Result<Self> {
        let (jobs, queued) = mpsc::sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let queue = Self { jobs, lost: lost.clone() };
        let write = move || {
            for job in queued {
                // A reader that has left is no reason to stop.
                let _ = match job {
                    Job::Line(bytes) => target.write_all(&bytes),
                    Job::Tell(done) => done.send(()).map_err(io::Error::other),
                };
                let lost = lost.swap(0, Relaxed);
                if lost > 0 {
                    let why =
                        line(format_args!("{lost} lines of the log were lost: nobody read it"));
                    let _ = writeln!(target, "{why}");
                }
            }
        };
        thread::Builder::new().name("aquila-log".into()).spawn(write)?;
        Ok(queue)
    }

    /// As [`Queue::start`] on standard error; [`finish`] waits for it.
    pub fn of_process() -> io::Result<Self> {
        let queue = Self::start(io::stderr())?;
        Ok(STARTED.get_or_init(|| queue).clone())
    }
}

/// Waits until what was logged is written, but not for a reader that takes nothing.
pub fn finish() {
    let Some(queue) = STARTED.get() else { return };
    let (tell, told) = mpsc::channel();
    if queue.jobs.try_send(Job::Tell(tell)).is_ok() {
        let _ = told.recv_timeout(LAST_LINES);
    }
}

impl Write for Queue {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.jobs.try_send(Job::Line(bytes.to_vec())).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Takes nothing until it may.
    struct Slow(mpsc::Receiver<()>, Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Once its sender is gone, it waits no more.
            let _ = self.0.recv();
            self.1.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_past_the_queue_are_lost_and_counted() {
        let (go, held) = mpsc::channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let mut queue = Queue::start(Slow(held, written.clone())).unwrap();
        // One may be in the writer's hands already.
        let lines = QUEUE + 1 + 7;
        for number in 0..lines {
            queue.write_all(format!("{number}\n").as_bytes()).unwrap();
        }
        drop(go);
        let (tell, told) = mpsc::channel();
        queue.jobs.send(Job::Tell(tell)).unwrap();
        told.recv().unwrap();
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        let (lost, kept): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.contains("lost"));
        let lost = lost[0].split(' ').next().unwrap().parse::<usize>().unwrap();
        assert!(lost >= 7, "{lost}");
        assert_eq!(kept.len() + lost, lines);
    }
}
