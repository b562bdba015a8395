//! Why a server did not start, or ended.

/// The result of running a server.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a server did not start, or ended by itself.
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
    /// The engine failed while the server ran, and all requests were answered.
    #[error("the engine has failed: {0}")]
    Engine(aquila_engine::EngineFailure),
    /// The threads of the server cannot be started.
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
}
