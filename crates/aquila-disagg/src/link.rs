//! What carries messages.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::message::Message;

/// Bytes that a message has at most before both sides know each other, and after that.
pub(crate) const SMALL: usize = 16 << 10;
pub(crate) const LARGE: usize = 256 << 20;

/// A connection to one peer.
pub trait Link: Send {
    /// Who is at the other end, for logs and metrics.
    fn peer(&self) -> &str;

    /// Sends a message; answers its bytes. It waits while the peer takes nothing, but not for ever.
    ///
    /// # Errors
    /// If the connection broke.
    fn send(&mut self, message: &Message) -> Result<usize>;

    /// Waits at most `patience` for a message of at most `limit` bytes; answers its bytes too.
    ///
    /// # Errors
    /// If nothing came in time, the peer hung up, or what came is no message.
    fn receive(&mut self, limit: usize, patience: Duration) -> Result<(Message, usize)>;

    /// Whether the peer has hung up, as far as is known without waiting.
    fn has_hung_up(&mut self) -> bool;
}

/// How links are made.
pub trait Transport: Send + Sync {
    /// Listens at `host:port`.
    ///
    /// # Errors
    /// If that is not possible.
    fn listen(&self, address: &str) -> Result<Arc<dyn Accept>>;

    /// Connects to `host:port`.
    ///
    /// # Errors
    /// If nobody answers there in time.
    fn connect(&self, address: &str, patience: Duration) -> Result<Box<dyn Link>>;
}

/// Takes what connects.
pub trait Accept: Send + Sync {
    /// Waits for the next one, whatever else fails meanwhile; none once it is closed.
    fn accept(&self) -> Option<Box<dyn Link>>;

    /// The port on which it listens.
    fn port(&self) -> u16;

    /// Ends [`accept`](Self::accept).
    fn close(&self);
}

/// Sends why and answers the error of that.
pub(crate) fn refuse<T>(link: &mut dyn Link, why: impl Into<String>) -> Result<T> {
    let why = why.into();
    // It is told if it still listens.
    let _ = link.send(&Message::Refused(why.clone()));
    Err(Error::refused(link.peer(), why))
}
