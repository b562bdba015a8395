//! The log, on standard error: how much of it, and what its lines look like.

mod json;
mod lines;
mod repeats;
mod writer;

use std::io::IsTerminal;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

pub use self::json::notice_line;
use self::lines::Lines;
use self::writer::Queue;
pub use self::writer::finish;
use crate::error::{Error, Result};
use crate::flags::LogFormat;
use crate::notice;

/// How much is logged, where no flag says so.
const VARIABLE: &str = "AQUILA_LOG";

/// Sends the log to standard error: as much of it as `level` says, or the environment, or
/// `unless_told`.
pub fn start(format: LogFormat, level: Option<&str>, unless_told: &str) -> Result<()> {
    let told = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let told = told.map(|value| filter(&value.to_string_lossy())).transpose()?;
    let filter = match (level, told) {
        (Some(level), _) => EnvFilter::new(level),
        (None, Some(told)) => told,
        (None, None) => EnvFilter::new(unless_told),
    };
    if format == LogFormat::Json {
        notice::speak_json();
    }
    let colours = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let queue = Queue::of_process();
    let queue =
        queue.map_err(|why| Error::Other(format!("cannot start the log's thread: {why}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colours)
        .event_format(Lines::new(format, colours))
        .with_writer(move || queue.clone())
        .init();
    Ok(())
}

/// Reads a filter. A word that is no level would be taken for a target that nothing has, and
/// silence the log, so that targets without a level must be ours.
fn filter(text: &str) -> Result<EnvFilter> {
    let wrong = |why: String| {
        Error::Usage(format!(
            "{VARIABLE}={text}: {why}; give a level (off, error, warn, info, debug, trace), or \
             targets with levels such as warn,aquila_engine=debug"
        ))
    };
    let words = text.split(',').map(str::trim).filter(|word| !word.contains(['=', '[']));
    for word in words {
        if word.parse::<LevelFilter>().is_err() && !word.starts_with("aquila") {
            return Err(wrong(format!("`{word}` is no level")));
        }
    }
    EnvFilter::try_new(text).map_err(|why| wrong(why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_without_sense_are_refused() {
        for good in
            ["debug", "WARN", "off", "warn,aquila_engine=debug", "aquila_server", "hyper=trace"]
        {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["verbose", "debug,loud", "aquila=loud", "=", "aquila_engine==debug"] {
            let error = filter(bad).unwrap_err().to_string();
            assert!(error.starts_with(&format!("AQUILA_LOG={bad}: ")), "{error}");
        }
    }
}
