//! What can go wrong between a name and a forward pass.

use std::path::{Path, PathBuf};

/// An error of a checkpoint or of a forward pass; its text says where the fault is.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name under which no model was found.
    #[error("no model {name:?}; tried:{}", tried.iter().map(|t| format!("\n  - {t}")).collect::<String>())]
    NotFound {
        /// The name as given.
        name: String,
        /// Every place that was looked at, and what was wrong with it.
        tried: Vec<String>,
    },
    /// A revision of something that has none.
    #[error("revision {revision}: {name} is {what}, and only models of the hub have revisions")]
    Revision {
        /// The name as given.
        name: String,
        /// The revision as given.
        revision: String,
        /// What the name means.
        what: &'static str,
    },
    /// A file that cannot be read, written or understood.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A setting of a configuration with an impossible value.
    #[error("{origin}: {field} {problem}")]
    Field {
        /// The file the setting is in.
        origin: String,
        /// The name of the setting.
        field: String,
        /// What is wrong with it, with the value found.
        problem: String,
    },
    /// A model that is sound but that Aquila does not run.
    #[error("{origin}: {reason}")]
    Unsupported {
        /// The file that says so.
        origin: String,
        /// What is not supported.
        reason: String,
    },
    /// A checkpoint that is sound, but that another setting is for.
    #[error("{origin}: {reason}")]
    Setting {
        /// The file that says so.
        origin: String,
        /// What does not suit it, and what would.
        reason: String,
        /// The setting to change.
        setting: Setting,
    },
    /// A tensor that is missing, misshapen or of the wrong type.
    #[error("{origin}: tensor {tensor}: {problem}")]
    Tensor {
        /// The file or folder the tensor is, or should be, in.
        origin: String,
        /// The name of the tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A plan that the model or the scratch cannot run.
    #[error("plan refused: {0}")]
    Plan(String),
    /// An error of the backend.
    #[error(transparent)]
    Compute(#[from] aquila_compute::Error),
}

/// What a user may set otherwise, so that a checkpoint can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// What drafts, by this algorithm where it is known.
    Draft(Option<&'static str>),
    /// The algorithm that drafts.
    Algorithm(&'static str),
    /// How the layers are numbered whose hidden states a head reads.
    AuxLayerConvention,
    /// Weights that are kept as 8-bit integers.
    Int8,
    /// Draft steps, at most so many.
    Steps(usize),
}

/// The result of an operation on models.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        Error::File { path: path.to_owned(), problem: problem.to_string() }
    }

    /// The setting to change, where one is at fault.
    pub fn setting(&self) -> Option<Setting> {
        match self {
            Error::Setting { setting, .. } => Some(*setting),
            _ => None,
        }
    }

    pub(crate) fn tensor(origin: &str, tensor: &str, problem: impl ToString) -> Self {
        Error::Tensor { origin: origin.into(), tensor: tensor.into(), problem: problem.to_string() }
    }
}
