//! Why an algorithm was not taken, or does not fit.

/// What is wrong, in words for whoever gave the flags.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option that the algorithm does not take, or a value that it cannot have.
    #[error("{0}")]
    Option(String),
    /// No algorithm of this name.
    #[error("--speculative-algorithm {name}: there is no such algorithm; there are {known}")]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// An algorithm that SGLang has.
    #[error("--speculative-algorithm {name}: SGLang has it, Aquila not yet; there are {known}")]
    NotYet {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// A mix of algorithms that there is not.
    #[error(
        "--speculative-algorithm {name}: {why}; what can be mixed is NAME+NGRAM, with NAME one of \
         {known}"
    )]
    NoMix {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: String,
        /// The algorithms that n-grams can be mixed into.
        known: String,
    },
    /// A name that another algorithm has, or that is kept for one.
    #[error("an algorithm cannot be called {0}: that name is taken")]
    NameTaken(String),
    /// A name that could not be given as a flag.
    #[error("an algorithm cannot be called {0:?}: names are of letters, digits, _ and -")]
    BadName(String),
    /// A tree that cannot be.
    #[error(transparent)]
    Shape(#[from] crate::ShapeError),
    /// A draft that does not fit its target, or settings that do not fit the algorithm.
    #[error("{0}")]
    Refused(String),
    /// An error of a model or of the backend below it.
    #[error(transparent)]
    Model(#[from] aquila_model::Error),
}

impl Error {
    /// Whether the flags themselves are wrong, whatever files they name.
    pub fn is_usage(&self) -> bool {
        use Error::{NoMix, NotYet, Option, Shape, Unknown};
        matches!(self, Unknown { .. } | NotYet { .. } | NoMix { .. } | Option(_) | Shape(_))
    }
}

/// The result of finding or opening an algorithm.
pub type Result<T> = std::result::Result<T, Error>;
