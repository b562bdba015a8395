//! Ctrl-C, as a wish that an answer stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Whether Ctrl-C was pressed.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on; Ctrl-C does not end the program any more. This comes before the line
    /// editor's first line: the editor puts back the handler that it finds.
    pub fn listen() -> Result<Self> {
        let failed = |error| Error::Other(format!("cannot listen for Ctrl-C: {error}"));
        let pressed = Arc::new(AtomicBool::new(false));
        let flag = pressed.clone();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(failed)?;
        let mut presses = {
            let _entered = runtime.enter();
            Presses::listen().map_err(failed)?
        };
        let listening = std::thread::Builder::new().name("ctrl-c".into()).spawn(move || {
            runtime.block_on(async {
                while presses.recv().await.is_some() {
                    flag.store(true, Ordering::Release);
                }
            });
        });
        listening.map_err(failed)?;
        Ok(Self(pressed))
    }

    /// Forgets what was pressed before.
    pub fn forget(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Whether Ctrl-C was pressed since.
    pub fn pressed(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(unix)]
struct Presses(tokio::signal::unix::Signal);
#[cfg(windows)]
struct Presses(tokio::signal::windows::CtrlC);

impl Presses {
    #[cfg(unix)]
    fn listen() -> std::io::Result<Self> {
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt()).map(Self)
    }

    #[cfg(windows)]
    fn listen() -> std::io::Result<Self> {
        tokio::signal::windows::ctrl_c().map(Self)
    }

    async fn recv(&mut self) -> Option<()> {
        self.0.recv().await
    }
}
