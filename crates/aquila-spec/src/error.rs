//! Why an algorithm was not taken, or does not fit.

/// What is wrong, in words for the user who chose it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option that the algorithm does not take, or a value that it cannot have.
    #[error("{option}: {why}")]
    Option {
        /// The option as it was given.
        option: String,
        /// What is wrong with it.
        why: String,
    },
    /// No algorithm of this name.
    #[error("{name}: there is no such algorithm; there are {known}")]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// An algorithm that SGLang has.
    #[error("{name}: SGLang has it, Aquila not yet; there are {known}")]
    NotYet {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// A mix of algorithms that there is not.
    #[error("{name}: {why}; what can be mixed is NAME+NGRAM, with NAME one of {known}")]
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
    /// A name that could not be asked for.
    #[error("an algorithm cannot be called {0:?}: names are of letters, digits, _ and -")]
    BadName(String),
    /// An algorithm that needs something to draft with.
    #[error("nothing that drafts was given")]
    NoDraft,
    /// A layer for each step was asked for.
    #[error("{0} has one MTP layer, which recurs")]
    OneLayer(String),
    /// N-grams that cannot be drafted from as asked for.
    #[error(transparent)]
    Ngram(#[from] crate::ngram::NgramError),
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
    /// Whether what was asked for is wrong in itself, whatever files it names.
    pub fn is_usage(&self) -> bool {
        use Error::{NoMix, NotYet, Option, Shape, Unknown};
        matches!(self, Unknown { .. } | NotYet { .. } | NoMix { .. } | Option { .. } | Shape(_))
    }
}

/// The result of finding or opening an algorithm.
pub type Result<T> = std::result::Result<T, Error>;
