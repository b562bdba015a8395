//! What a command says beside its answers, on standard error.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::log;

/// Whether lines are objects, as those of the log are then.
static AS_JSON: AtomicBool = AtomicBool::new(false);

/// Has lines be JSON from now on.
pub fn speak_json() {
    AS_JSON.store(true, Ordering::Relaxed);
}

/// Writes a line to standard error. A reader that has left is no reason to fail.
pub fn notice(text: Arguments<'_>) {
    let mut stderr = std::io::stderr();
    let _ = if AS_JSON.load(Ordering::Relaxed) {
        let line = log::notice_line(&text.to_string());
        writeln!(stderr, "{line}")
    } else {
        writeln!(stderr, "{text}")
    };
}
