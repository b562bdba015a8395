//! The table: every flag of SGLang's that is known here, and what becomes of it.
//!
//! `docs/sglang-flags.md` is this table for users; a test holds the two together.

mod devices;
mod model;
mod scheduling;
mod server;
mod taken;
mod unserved;
mod values;

pub use values::VALUES;

/// All flags of SGLang's.
pub fn rows() -> impl Iterator<Item = &'static Flags> {
    let parts =
        [taken::ROWS, model::ROWS, devices::ROWS, scheduling::ROWS, server::ROWS, unserved::ROWS];
    parts.into_iter().flatten()
}

const fn flags(fate: Fate, flags: &'static [&'static str]) -> Flags {
    Flags { flags, fate }
}

/// Flags with one fate.
pub struct Flags {
    /// As they are used: `--flag`, `--flag VALUE`, `--flag [VALUE]`, `--flag VALUE…`.
    pub flags: &'static [&'static str],
    /// What becomes of them.
    pub fate: Fate,
}

/// What becomes of a flag.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// It is a flag of Aquila's; what is particular about it, for the page alone.
    #[cfg_attr(not(test), expect(dead_code))]
    Taken(&'static str),
    /// The server starts without it, and says why.
    Ignored(&'static str),
    /// The server does not start, for this reason.
    Refused(&'static str),
    /// These values say what is so here; any other is refused for this reason.
    Only(&'static [&'static str], &'static str),
}

/// Values of a flag of Aquila's that only SGLang has.
pub struct Values {
    /// The flag.
    pub flag: &'static str,
    /// The values.
    pub values: &'static [&'static str],
    /// What becomes of them.
    pub fate: ValueFate,
}

/// What becomes of a value.
#[derive(Debug, Clone, Copy)]
pub enum ValueFate {
    /// It stands for this value of ours, for this reason.
    Means(&'static str, &'static str),
    /// The server does not start, for this reason.
    Refused(&'static str),
}
