//! Why a policy's file or settings were not taken.

/// What is wrong, in words for the author of the file.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// Not JSON.
    #[error("it is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Not an object.
    #[error("it must be a JSON object, not {got}")]
    NotAnObject {
        /// What it is.
        got: String,
    },
    /// Candidates that are none.
    #[error(
        "batch size {key}: candidate_steps must be a non-empty list of whole numbers of at least 0, not {got}"
    )]
    CandidateSteps {
        /// The slot's key.
        key: String,
        /// What was there.
        got: String,
    },
    /// The older format, or a file of defaults alone.
    #[error(
        "it has no batch size among its keys ({keys}); each slot's key is its least batch size. In that form the file is:\n{today}"
    )]
    NoBatchSize {
        /// The keys there are.
        keys: String,
        /// The same thing as it is written today.
        today: String,
    },
    /// A setting of the wrong kind or out of its range.
    #[error("{place}: {key} must be {must}, not {got}")]
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
    #[error("batch size {key}: {source}")]
    Shape {
        /// The slot's key.
        key: usize,
        /// Why.
        source: crate::ShapeError,
    },
    /// The launch steps are no slot's candidate.
    #[error(
        "{steps} steps are not among the candidate_steps of any batch size ({union}); give one of \
         them, or add it to the table"
    )]
    LaunchSteps {
        /// The steps asked for.
        steps: usize,
        /// The candidates of all slots.
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
