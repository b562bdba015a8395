//! The signals that end a process: the first asks the server to drain, the second ends the process
//! at once.
//!
//! The invariant: nothing that the server does, or that is stuck, can keep a signal from being
//! heard. So signals have a thread of their own, which writes nothing itself: standard error may
//! be a pipe that nobody reads.

use std::fmt::Arguments;
use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;

/// How long the last words of a process may take.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Writes a line for whoever watches the process.
pub(crate) type Say = fn(Arguments<'_>);

/// Listens from now on; `stop` hears of the first signal.
pub(crate) fn listen(stop: oneshot::Sender<()>, say: Say) -> io::Result<()> {
    let (tell, told) = mpsc::channel();
    let listening = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => return tell.send(Err(error)),
        };
        runtime.block_on(async {
            let mut signals = match Signals::listen() {
                Ok(signals) => signals,
                Err(error) => return tell.send(Err(error)),
            };
            let begun = tell.send(Ok(()));
            let name = signals.next().await;
            tell_of(
                say,
                format!("{name}: finishing what is under way; a second signal ends at once"),
            );
            // A server that has ended already needs no telling.
            let _ = stop.send(());
            let name = signals.next().await;
            let said = tell_of(say, format!("{name}: ended with requests under way"));
            // Words that nobody takes in time are not worth waiting for.
            let _ = said.recv_timeout(LAST_WORDS);
            if begun.is_ok() {
                std::process::exit(1);
            }
            begun
        })
    };
    // The thread ends with the process, or when nobody waits for what it has to tell.
    thread::Builder::new().name("aquila-signals".into()).spawn(listening)?;
    told.recv().unwrap_or_else(|_| Err(io::Error::other("the thread of signals ended")))
}

/// Says something on a thread of its own; who receives hears when it is said.
fn tell_of(say: Say, text: String) -> mpsc::Receiver<()> {
    let (tell, told) = mpsc::channel();
    let saying = move || {
        say(format_args!("{text}"));
        // Nobody needs to wait for it.
        let _ = tell.send(());
    };
    // A system without a thread to spare goes without the words.
    let _ = thread::Builder::new().name("aquila-signals".into()).spawn(saying);
    told
}

/// The signals that ask a process to end.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(not(unix))]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {})
    }

    async fn next(&mut self) -> &'static str {
        // Where the system has no such signal, nothing ever comes.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        "Ctrl-C"
    }
}
