//! SGLang's flags that Aquila has no flag for: what becomes of each.
//!
//! Launch lines of SGLang start here. Before clap reads a command line, [`take`] takes out of it
//! the flags of [`table`] and says what became of them. The one invariant: a flag is either clap's,
//! and then it is in the help, or the table's, and then it is ignored or refused with a reason. A
//! flag that neither knows is refused, and all of those at once.

mod table;

use std::ffi::OsString;

use clap::Command;

use crate::error::{Error, Result};
use table::{Fate, Flags, VALUES, ValueFate, rows};

/// Where users find what becomes of SGLang's flags.
const PAGE: &str = "docs/sglang-flags.md";

/// A command line that clap can read.
#[derive(Debug)]
pub struct Taken {
    /// The arguments that are left.
    pub args: Vec<OsString>,
    /// A line for each flag that is not taken as given.
    pub notes: Vec<String>,
}

/// Takes out of `args` what the table knows; refuses, all at once, what would change what is served
/// and what nobody knows. `program` is what clap knows.
pub fn take(args: impl IntoIterator<Item = OsString>, mut program: Command) -> Result<Taken> {
    program.build();
    let mut left = args.into_iter().peekable();
    let mut taken = Taken { args: left.next().into_iter().collect(), notes: Vec::new() };
    let mut command = &program;
    while let Some(next) = left.peek().and_then(|arg| command.find_subcommand(arg)) {
        command = next;
        taken.args.extend(left.next());
    }
    if command.has_subcommands() {
        // Nothing that takes flags was named: clap says what there is.
        taken.args.extend(left);
        return Ok(taken);
    }
    let (mut unknown, mut refused, mut asks_for_help) = (Vec::new(), Vec::new(), false);
    while let Some(arg) = left.next() {
        asks_for_help |= arg == "--help" || arg == "-h";
        let text = arg.to_str().unwrap_or_default();
        if arg == "--" {
            // What follows is no flag, whatever it looks like.
            taken.args.push(arg);
            taken.args.extend(left);
            break;
        }
        if !text.starts_with("--") {
            taken.args.push(arg);
            continue;
        }
        let (name, mut value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text, None),
        };
        if knows(command, name) {
            let given = value.clone().or_else(|| Some(left.peek()?.to_str()?.to_owned()));
            match given.and_then(|given| Some((table_value(name, &given)?, given))) {
                None => taken.args.push(arg),
                Some((ValueFate::Refused(why), given)) => {
                    refused.push(format!("{name} {given}: {why}"));
                }
                Some((ValueFate::Means(ours, why), given)) => {
                    taken.notes.push(format!("{name} {given} means {ours} here: {why}"));
                    if value.is_none() {
                        left.next();
                    }
                    taken.args.push(format!("{name}={ours}").into());
                }
            }
            continue;
        }
        let Some((flags, takes)) = find(name) else {
            let similar = similar(command, name).map(|ours| format!(" (is {ours} meant?)"));
            unknown.push(format!("{name}{}", similar.unwrap_or_default()));
            continue;
        };
        if value.is_none() {
            let is_value = |arg: &OsString| !arg.to_string_lossy().starts_with("--");
            value = match takes {
                Takes::Nothing => None,
                Takes::One | Takes::Perhaps => {
                    left.next_if(is_value).map(|value| value.to_string_lossy().into_owned())
                }
                Takes::Several => {
                    while left.next_if(is_value).is_some() {}
                    None
                }
            };
            if value.is_none() && takes == Takes::One {
                refused.push(format!("{name} needs a value"));
                continue;
            }
        }
        match flags.fate {
            // The flag of another command.
            Fate::Taken(_) => unknown.push(name.to_owned()),
            Fate::Ignored(why) => taken.notes.push(format!("{name} is ignored: {why}")),
            Fate::Refused(why) => refused.push(format!("{name}: {why}")),
            Fate::Only(so, why) => {
                let value = value.unwrap_or_default();
                if !so.contains(&value.as_str()) {
                    refused.push(format!("{name} {value}: {why}"));
                }
            }
        }
    }
    if !unknown.is_empty() {
        let what = if unknown.len() == 1 { "no such flag:" } else { "no such flags:" };
        let help = command.get_display_name().unwrap_or("aquila").replace('-', " ");
        refused.push(format!(
            "{what} {}; `{help} --help` lists what there is, {PAGE} what becomes of SGLang's flags",
            unknown.join(", ")
        ));
    }
    if refused.is_empty() || asks_for_help {
        return Ok(taken);
    }
    Err(Error::Usage(refused.join("\naquila: ")))
}

/// What follows a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    Nothing,
    One,
    Perhaps,
    Several,
}

/// The row of the table that has `name`, and what follows it.
fn find(name: &str) -> Option<(&'static Flags, Takes)> {
    rows().find_map(|row| {
        let usage = row.flags.iter().find(|usage| flag_of(usage) == name)?;
        let takes = match usage.split_once(' ').map(|(_, values)| values) {
            None => Takes::Nothing,
            Some(values) if values.ends_with('…') => Takes::Several,
            Some(values) if values.starts_with('[') => Takes::Perhaps,
            Some(_) => Takes::One,
        };
        Some((row, takes))
    })
}

/// The flag of a usage such as `--tp-size N`.
fn flag_of(usage: &str) -> &str {
    usage.split(' ').next().unwrap_or(usage)
}

fn table_value(flag: &str, value: &str) -> Option<ValueFate> {
    let row = VALUES.iter().find(|row| row.flag == flag && row.values.contains(&value))?;
    Some(row.fate)
}

fn knows(command: &Command, name: &str) -> bool {
    longs(command).any(|long| name.strip_prefix("--") == Some(long))
}

/// The long flags of a command, hidden aliases included.
fn longs(command: &Command) -> impl Iterator<Item = &str> {
    command.get_arguments().flat_map(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long().into_iter().chain(aliases)
    })
}

/// The one flag that differs from `name` by one slip of the keyboard.
fn similar(command: &Command, name: &str) -> Option<String> {
    let typed = name.strip_prefix("--")?;
    let mut near = longs(command).filter(|long| long.len() > 3 && one_slip(typed, long));
    let found = near.next()?;
    near.next().is_none().then(|| format!("--{found}"))
}

/// Whether one letter was changed, left out, doubled or swapped with its neighbour.
fn one_slip(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[same..], &b[same..]);
    match (a, b) {
        ([_, rest @ ..], _) if rest == b => true,
        (_, [_, rest @ ..]) if a == rest => true,
        ([_, a @ ..], [_, b @ ..]) if a == b => true,
        ([a0, a1, a @ ..], [b0, b1, b @ ..]) => a0 == b1 && a1 == b0 && a == b,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
