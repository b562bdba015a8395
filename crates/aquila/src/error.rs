//! What a command reports, and the exit code that goes with it.

use std::process::ExitCode;

/// Some requests failed, but the command ran.
pub const SOME_FAILED: u8 = 3;

/// Why a command did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Flags that cannot be used together or have impossible values.
    #[error("{0}")]
    Usage(String),
    /// A file that could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] aquila_model::Error),
    /// An error of the backend.
    #[error(transparent)]
    Compute(#[from] aquila_compute::Error),
    /// An error of the engine.
    #[error(transparent)]
    Engine(#[from] aquila_engine::Error),
    /// An error of the tokenizer.
    #[error(transparent)]
    Text(#[from] aquila_text::Error),
    /// A prompt that was not taken.
    #[error(transparent)]
    Generate(#[from] aquila_text::GenerateError),
    /// Anything else, said in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// The error of a file.
    pub fn file(path: impl ToString, source: std::io::Error) -> Self {
        Error::File { path: path.to_string(), source }
    }

    /// 2 for wrong flags, 1 for the rest.
    pub fn exit_code(&self) -> ExitCode {
        let settings =
            matches!(self, Error::Usage(_) | Error::Engine(aquila_engine::Error::Config(_)));
        ExitCode::from(if settings { 2 } else { 1 })
    }
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Error>;
