//! Prefill and decode on different machines: how KV rows and the state of a request get from one
//! worker to another.
//!
//! - [`Message`] is what two workers say to each other, and [`bytes`](Message) are read without
//!   trust.
//! - [`Transport`] and [`Link`] carry messages; [`Tcp`] needs nothing but sockets, [`Nixl`] NIXL's
//!   library.
//! - [`Identity`] and [`Secret`] decide who may talk to whom.
//! - [`PrefillWorker`] listens: it has a room for each request that is to be decoded elsewhere.
//! - [`DecodeWorker`] connects: it claims the room of a request once it has slots for it.
//!
//! The engine is known by [`EngineHandle`](aquila_engine::EngineHandle) and by the traits of its
//! `transfer` module alone.

mod decode;
mod error;
mod handshake;
mod identity;
mod link;
mod message;
mod nixl;
mod peers;
mod prefill;
mod room;
mod secret;
mod tcp;

pub use decode::{DecodeSettings, DecodeWorker, PrefillAddress};
pub use error::{Error, Result};
pub use identity::Identity;
pub use link::{Accept, Link, Transport};
pub use message::Message;
pub use nixl::Nixl;
pub use peers::{PeerCounts, Peers};
pub use prefill::{PrefillSettings, PrefillWorker};
pub use room::Room;
pub use secret::Secret;
pub use tcp::Tcp;
