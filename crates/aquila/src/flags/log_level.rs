//! How much is logged, and how.

use clap::ValueEnum;

/// SGLang's levels, which are Python's.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    Debug,
    Info,
    #[value(alias = "warn")]
    Warning,
    Error,
    Critical,
}

impl LogLevel {
    /// The filter of the log. Libraries are asked for no more than warnings: what they do is no
    /// part of what a server does.
    pub fn filter(self) -> &'static str {
        match self {
            LogLevel::Debug => "warn,aquila=debug",
            LogLevel::Info => "warn,aquila=info",
            LogLevel::Warning => "warn",
            LogLevel::Error | LogLevel::Critical => "error",
        }
    }
}

/// What lines of the log look like.
#[derive(ValueEnum, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// An object on each line, for programs.
    Json,
}
