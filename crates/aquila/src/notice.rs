//! What a command says beside its answers, on standard error.

use std::fmt::Arguments;
use std::io::Write;

/// Writes a line to standard error. A reader that has left is no reason to fail.
pub fn notice(text: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
