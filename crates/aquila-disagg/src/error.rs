//! What can go wrong between two workers.

use std::time::Duration;

use crate::link::LARGE;

/// The result of talking to another worker.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a transfer did not happen. The texts are for operators and, in answers, for clients.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection broke or could not be made.
    #[error("the connection to {peer} failed: {source}")]
    Connection {
        /// Whose.
        peer: String,
        /// Why.
        source: std::io::Error,
    },
    /// Nothing came in time.
    #[error("nothing came from {peer} for {:.1} s", .waited.as_secs_f64())]
    Silent {
        /// From whom.
        peer: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The peer hung up between two messages.
    #[error("{peer} hung up")]
    HungUp {
        /// Who.
        peer: String,
    },
    /// What a request leaves does not fit into a message.
    #[error(
        "what its prompt leaves beside rows takes {bytes} bytes, and a message has at most \
         {LARGE}: ask for less of the prompt's tokens"
    )]
    TooLong {
        /// Bytes of it.
        bytes: usize,
    },
    /// What came is not of our protocol.
    #[error("{peer} does not keep to the transfer protocol: {why}")]
    Protocol {
        /// Who.
        peer: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The peer does not want to talk to us, or we not to it.
    #[error("{peer} and this worker do not fit together: {why}")]
    Refused {
        /// Who.
        peer: String,
        /// Why.
        why: String,
    },
    /// A room cannot be opened or claimed.
    #[error("room {room}: {why}")]
    Room {
        /// Which.
        room: u64,
        /// Why.
        why: String,
    },
    /// A request names a prefill worker that this worker must not connect to.
    #[error(
        "{host} is not a prefill host of this worker: bootstrap_host must be named at its start, \
         or both must have a shared secret"
    )]
    Host {
        /// The host.
        host: String,
    },
}

impl Error {
    /// A broken connection.
    pub(crate) fn connection(peer: &str, source: std::io::Error) -> Self {
        Self::Connection { peer: peer.to_owned(), source }
    }

    /// Something that is not of our protocol.
    pub(crate) fn protocol(peer: &str, why: &'static str) -> Self {
        Self::Protocol { peer: peer.to_owned(), why }
    }

    /// A peer that does not fit.
    pub(crate) fn refused(peer: &str, why: impl Into<String>) -> Self {
        Self::Refused { peer: peer.to_owned(), why: why.into() }
    }
}
