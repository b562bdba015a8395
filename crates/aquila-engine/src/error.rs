//! What an engine refuses, and why.

use aquila_spec::MOST_DRAFT_GROUPS;

use crate::config::ConfigError;
use crate::executor::CapturedPart;
use crate::failure::EngineFailure;
use crate::request::RequestId;

/// Why an engine did not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Rounds before anything is served that cannot be run.
    #[error("{0}")]
    WarmUp(&'static str),
    /// A round that failed before anything was served, and why.
    #[error("before anything was served, {0}")]
    WarmUpRound(String),
    /// A tree that no request may get.
    #[error("{0} drafted a tree that is larger than its shape or has unknown tokens")]
    Draft(&'static str),
    /// More KV groups than a request can have.
    #[error("{0} declares {1} KV groups; an algorithm may have {MOST_DRAFT_GROUPS}")]
    DraftGroups(&'static str, usize),
    /// Experts of a model that has none.
    #[error("routed experts cannot be returned: the model has no layer with experts")]
    NoExperts,
    /// An error of the model or of the backend below it.
    #[error(transparent)]
    Model(#[from] aquila_model::Error),
    /// An error of the backend.
    #[error(transparent)]
    Executor(#[from] aquila_compute::Error),
    /// A graph that did not do what launching its operations does.
    #[error("a replay of {part} differs from its launch in {what}")]
    Replay {
        /// What was captured.
        part: CapturedPart,
        /// The memory that differs.
        what: String,
    },
    /// An error of the KV pool's settings.
    #[error(transparent)]
    Kv(#[from] aquila_kv::Error),
    /// A failure after which nothing can be served.
    #[error(transparent)]
    Failed(#[from] EngineFailure),
}

impl Error {
    /// As an error of the backend whose operations failed.
    pub(crate) fn of_backend(self) -> aquila_compute::Error {
        match self {
            Error::Executor(error) | Error::Model(aquila_model::Error::Compute(error)) => error,
            other => aquila_compute::Error::Device(other.to_string()),
        }
    }
}

/// Why a round failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoundError {
    /// It panicked, or an operation failed; rounds of a later epoch may succeed.
    #[error("{0}")]
    Failed(String),
    /// No later round can succeed.
    #[error(transparent)]
    Fatal(#[from] EngineFailure),
}

impl From<String> for RoundError {
    fn from(why: String) -> Self {
        RoundError::Failed(why)
    }
}

impl From<&str> for RoundError {
    fn from(why: &str) -> Self {
        RoundError::Failed(why.into())
    }
}

impl From<Error> for RoundError {
    fn from(error: Error) -> Self {
        match error {
            Error::Executor(aquila_compute::Error::DeviceLost(why))
            | Error::Model(aquila_model::Error::Compute(aquila_compute::Error::DeviceLost(why))) => {
                RoundError::Fatal(EngineFailure::DeviceLost(why))
            }
            Error::Failed(failure) => RoundError::Fatal(failure),
            other => RoundError::Failed(other.to_string()),
        }
    }
}

/// The result of starting an engine.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a request was not taken. Nothing was changed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests wait as may wait.
    #[error("the queue is full: {0} requests are waiting")]
    QueueFull(usize),
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine serves no more.
    #[error("the engine has failed and must be restarted: {0}")]
    Failed(#[from] EngineFailure),
    /// A priority where none may be given.
    #[error(
        "this engine takes no priorities: leave `priority` out, or start it with priority \
         scheduling"
    )]
    NoPriorities,
    /// Rows that the engine does not keep.
    #[error("{0} are not returned: leave them out, or start the server with {name}", name = .0.setting())]
    NotReturned(ReturnedKind),
    /// A grammar where none can be followed.
    #[error(
        "grammars (JSON schemas, regular expressions) are not followed where acceptance is simulated"
    )]
    NoGrammars,
    /// A prompt without tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A prompt that leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, but at most {limit} fit ({bound})")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// The most that would be taken.
        limit: usize,
        /// Which setting the limit comes from.
        bound: PromptBound,
    },
    /// A token id outside the vocabulary.
    #[error("{place} has token id {id}, but the vocabulary has {vocabulary} tokens")]
    InvalidToken {
        /// Where the id was found.
        place: String,
        /// The id.
        id: u32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
}

/// Rows of the target that a request may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReturnedKind {
    /// What the language-model head reads.
    #[error("hidden states")]
    HiddenStates,
    /// Which experts rows go to.
    #[error("routed experts")]
    RoutedExperts,
}

impl ReturnedKind {
    /// The setting that has an engine return them.
    pub fn setting(self) -> &'static str {
        match self {
            ReturnedKind::HiddenStates => "enable-return-hidden-states",
            ReturnedKind::RoutedExperts => "enable-return-routed-experts",
        }
    }
}

/// What bounds a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PromptBound {
    /// The longest sequence that an engine takes.
    #[error("the context length")]
    Context,
    /// The slots that there are for all requests.
    #[error("the tokens of the KV pool")]
    Pool,
}

/// Why a request ended without an answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// A round that panicked or whose backend failed.
    #[error("the round failed: {0}")]
    Round(String),
    /// A request that does not fit although it is alone.
    #[error("request {0} does not fit into the KV pool")]
    DoesNotFit(RequestId),
}

/// What a panic says.
pub(crate) fn panic_text(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}
