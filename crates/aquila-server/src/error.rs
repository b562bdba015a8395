//! Why a server did not start.

/// The result of starting a server.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address that was asked for.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The threads of the server cannot be started.
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
}
