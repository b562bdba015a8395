//! Why a policy's file or flags were not taken.

/// What is wrong, in words for whoever wrote the file.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// Not JSON.
    #[error("{what} is not valid JSON: {source}")]
    Json {
        /// The file's role.
        what: &'static str,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// Not an object.
    #[error("--speculative-adaptive-config must be a JSON object, not {got}")]
    NotAnObject {
        /// What it is.
        got: String,
    },
    /// Candidates that are none.
    #[error(
        "--speculative-adaptive-config, batch size {key}: candidate_steps must be a non-empty list \
         of whole numbers of at least 0, not {got}"
    )]
    CandidateSteps {
        /// The slot's key.
        key: String,
        /// What was there.
        got: String,
    },
    /// The older format, or a file of defaults alone.
    #[error(
        "--speculative-adaptive-config has no batch size among its keys ({keys}); each slot's key \
         is its least batch size. In that form the file is:\n{today}"
    )]
    NoBatchSize {
        /// The keys there are.
        keys: String,
        /// The same thing as it is written today.
        today: String,
    },
    /// A setting of the wrong kind or out of its range.
    #[error("--speculative-adaptive-config, {place}: {key} must be {must}, not {got}")]
    Setting {
        /// Which slot, or that it is a default.
        place: String,
        /// The setting.
        key: String,
        /// What it must be.
        must: &'static str,
        /// What was there.
        got: String,
    },
    /// A slot's tree cannot be.
    #[error("--speculative-adaptive-config, batch size {key}: {source}")]
    Shape {
        /// The slot's key.
        key: usize,
        /// Why.
        source: crate::ShapeError,
    },
    /// The launch steps are no slot's candidate.
    #[error(
        "--speculative-num-steps {steps} is not among the candidate_steps of any batch size \
         ({union}); give one of them, or add it to --speculative-adaptive-config"
    )]
    LaunchSteps {
        /// The steps asked for.
        steps: usize,
        /// All candidates.
        union: String,
    },
    /// A cost table that is none.
    #[error("the cost table {key:?} cannot be used: {why}; delete it to measure again")]
    Costs {
        /// The table's key.
        key: String,
        /// Why.
        why: String,
    },
}
