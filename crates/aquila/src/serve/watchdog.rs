//! Ends the process where a round does not come back: a device that hangs cannot be recovered in it,
//! and who started the process can start it again.
//!
//! The one invariant: a thread of its own looks, and waits for nothing that may hang.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use aquila_engine::EngineHandle;

use crate::log;

/// How long the process may take to end: the driver may wait for the device that hangs, and a log for
/// its reader.
const LAST_ACTS: Duration = Duration::from_secs(10);

/// Watches over the rounds of `engine` from now on.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(engine: EngineHandle, limit: Duration) -> io::Result<()> {
    let watch = move || {
        let mut suspected = false;
        loop {
            match look(engine.stats().awaited(Instant::now()), limit, suspected) {
                Look::Again(pause) => {
                    suspected = false;
                    thread::sleep(pause);
                }
                Look::Once(pause) => {
                    suspected = true;
                    thread::sleep(pause);
                }
                Look::Hangs(time) => end(time),
            }
        }
    };
    thread::Builder::new().name("aquila-watchdog".into()).spawn(watch)?;
    Ok(())
}

/// What a look at the engine comes to.
#[derive(Debug, PartialEq)]
enum Look {
    /// All is well; look again after this time.
    Again(Duration),
    /// The round is late. Look once more after this time: the whole process may have been stopped, as
    /// by a debugger, and the round with it.
    Once(Duration),
    /// The round hangs, and has been awaited for so long.
    Hangs(Duration),
}

/// What a look comes to, where a round has been `awaited` for so long and was `suspected` before.
fn look(awaited: Option<Duration>, limit: Duration, suspected: bool) -> Look {
    match awaited {
        // One that begins now is late at the end of that time.
        None => Look::Again(limit),
        Some(time) if time < limit => Look::Again(limit - time),
        Some(time) if suspected => Look::Hangs(time),
        Some(_) => Look::Once(limit / 10),
    }
}

/// Says why and ends the process.
fn end(time: Duration) -> ! {
    // A system without a thread to spare goes without the bound.
    let _ = thread::Builder::new().name("aquila-watchdog".into()).spawn(|| {
        thread::sleep(LAST_ACTS);
        std::process::abort()
    });
    tracing::error!(
        seconds = time.as_secs(),
        "a round has not come back: the device hangs, and the process ends (--watchdog-timeout)"
    );
    log::finish();
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(300);

    fn after(awaited: Option<u64>, suspected: bool) -> Look {
        look(awaited.map(Duration::from_secs), LIMIT, suspected)
    }

    #[test]
    fn a_look_comes_when_a_round_may_be_late() {
        for suspected in [false, true] {
            assert_eq!(after(None, suspected), Look::Again(LIMIT));
            assert_eq!(after(Some(0), suspected), Look::Again(LIMIT));
            assert_eq!(after(Some(299), suspected), Look::Again(Duration::from_secs(1)));
        }
    }

    #[test]
    fn a_round_hangs_that_is_late_twice() {
        assert_eq!(after(Some(300), false), Look::Once(Duration::from_secs(30)));
        assert_eq!(after(Some(330), true), Look::Hangs(Duration::from_secs(330)));
        // Another one is awaited by then.
        assert_eq!(after(Some(2), true), Look::Again(Duration::from_secs(298)));
    }
}
