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

/// A text as a line of standard error, without its end.
pub fn line(text: Arguments<'_>) -> String {
    let text = text.to_string();
    if AS_JSON.load(Ordering::Relaxed) { log::notice_line(&text) } else { text }
}

/// Writes a line to standard error. A reader that has left is no reason to fail.
pub fn notice(text: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{}", line(text));
}
