//! What a command reports, and the exit code that goes with it.

use std::process::ExitCode;

use aquila_engine::{EngineHandle, SubmitError};

use crate::flags::named;

/// The command could not run.
const COULD_NOT_RUN: u8 = 1;
/// The flags are wrong.
const WRONG_FLAGS: u8 = 2;
/// Some requests failed, but the command ran.
pub const SOME_FAILED: u8 = 3;
/// What a shell reports of a program that a closed pipe has ended.
const READER_LEFT: u8 = 141;

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
    /// No error: a list that was asked for in place of a run.
    #[error("{0}")]
    Listed(String),
    /// Whoever read standard output has left, as `head` does: nobody needs to be told.
    #[error("nobody reads standard output any more")]
    ReaderLeft,
    /// An error of the model.
    #[error("{}", named::model(.0))]
    Model(#[from] aquila_model::Error),
    /// An error of the backend.
    #[error("{}", named::compute(.0))]
    Compute(#[from] aquila_compute::Error),
    /// An algorithm that there is not, or a draft that does not fit.
    #[error("{}", named::spec(.0))]
    Spec(#[from] aquila_spec::Error),
    /// An error of the engine.
    #[error("{}", named::engine(.0))]
    Engine(#[from] aquila_engine::Error),
    /// Settings that no engine can work with.
    #[error("{}", named::config(.0))]
    Config(#[from] aquila_engine::ConfigError),
    /// What does not fit into memory.
    #[error("{}", named::budget(.0))]
    Budget(#[from] aquila_engine::BudgetError),
    /// A policy that there is not.
    #[error("{}", named::policy(.0))]
    Policy(#[from] aquila_spec::policy::PolicyError),
    /// N-grams that cannot be drafted from so.
    #[error("{}", named::ngram(.0))]
    Ngram(#[from] aquila_spec::ngram::NgramError),
    /// A server that did not start.
    #[error("{}", named::server(.0))]
    Server(#[from] aquila_server::Error),
    /// An error of the tokenizer.
    #[error(transparent)]
    Text(#[from] aquila_text::Error),
    /// An engine that serves no more.
    #[error("the engine has failed: {0}")]
    EngineFailed(#[from] aquila_engine::EngineFailure),
    /// A prompt that was not taken.
    #[error("{}", named::generate(.0))]
    Generate(aquila_text::GenerateError),
    /// A model that does not run on a GPU that no flag has named.
    #[error("{error} (--device auto chose cuda:{ordinal}; --device cpu does without the GPU)")]
    ChosenGpu {
        /// Why it does not run.
        error: Box<Error>,
        /// The number of the GPU.
        ordinal: usize,
    },
    /// Anything else, said in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// The error of a file.
    pub fn file(path: impl ToString, source: std::io::Error) -> Self {
        Error::File { path: path.to_string(), source }
    }

    /// Refuses to go on with an engine that serves no more.
    pub fn check(engine: &EngineHandle) -> Result<()> {
        engine.failure().map_or(Ok(()), |failure| Err(failure.clone().into()))
    }

    /// The error of writing answers to a stream of this name.
    pub fn output(name: impl ToString, source: std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::BrokenPipe => Error::ReaderLeft,
            _ => Error::file(name, source),
        }
    }

    /// The same where `--device auto` chose the GPU, if another device might do.
    pub fn of_chosen_gpu(self, ordinal: usize) -> Self {
        match self.is_of_device() {
            true => Error::ChosenGpu { error: Box::new(self), ordinal },
            false => self,
        }
    }

    /// Whether it is about what a device has or does.
    fn is_of_device(&self) -> bool {
        use aquila_compute::Error as Compute;
        let error = match self {
            Error::Budget(_) => return true,
            Error::Compute(error)
            | Error::Model(aquila_model::Error::Compute(error))
            | Error::Spec(aquila_spec::Error::Model(aquila_model::Error::Compute(error)))
            | Error::Engine(
                aquila_engine::Error::Executor(error)
                | aquila_engine::Error::Model(aquila_model::Error::Compute(error)),
            ) => error,
            _ => return false,
        };
        matches!(
            error,
            Compute::OutOfMemory { .. }
                | Compute::Limit { .. }
                | Compute::Unavailable(_)
                | Compute::NoSuchDevice { .. }
                | Compute::Capability { .. }
                | Compute::Device(_)
                | Compute::DeviceLost(_)
        )
    }

    /// The code that goes with it, as the help of the command lists them.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Error::Usage(_) | Error::Config(_) | Error::Policy(_) | Error::Ngram(_) => WRONG_FLAGS,
            Error::Engine(aquila_engine::Error::Config(_)) => WRONG_FLAGS,
            Error::Compute(aquila_compute::Error::Limit { .. }) => WRONG_FLAGS,
            Error::ChosenGpu { error, .. } => return error.exit_code(),
            Error::Model(aquila_model::Error::Revision { .. }) => WRONG_FLAGS,
            Error::Spec(error) if error.is_usage() => WRONG_FLAGS,
            Error::Generate(_) => SOME_FAILED,
            Error::Listed(_) => 0,
            Error::ReaderLeft => READER_LEFT,
            _ => COULD_NOT_RUN,
        })
    }
}

impl From<aquila_text::GenerateError> for Error {
    fn from(error: aquila_text::GenerateError) -> Self {
        match error {
            // Where settings come from flags alone, a wrong one is a wrong flag.
            aquila_text::GenerateError::Param(error) => error.into(),
            aquila_text::GenerateError::Submit(SubmitError::Failed(failure)) => failure.into(),
            error => Error::Generate(error),
        }
    }
}

impl From<aquila_text::ParamError> for Error {
    fn from(error: aquila_text::ParamError) -> Self {
        let flag = error.name.replace('_', "-");
        Error::Usage(format!("--{flag}: {}", error.why.replace("max_tokens", "--max-tokens")))
    }
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Error>;
