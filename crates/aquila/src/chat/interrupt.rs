//! Ctrl-C, as a wish that an answer stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Whether Ctrl-C was pressed.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on; Ctrl-C does not end the program any more.
    pub fn listen() -> Result<Self> {
        let failed = |error| Error::Other(format!("cannot listen for Ctrl-C: {error}"));
        let pressed = Arc::new(AtomicBool::new(false));
        let flag = pressed.clone();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(failed)?;
        let listening = std::thread::Builder::new().name("ctrl-c".into()).spawn(move || {
            runtime.block_on(async {
                while tokio::signal::ctrl_c().await.is_ok() {
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
