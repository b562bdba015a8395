//! Rows through NIXL, the transfer library of dynamo, vLLM and SGLang: with RDMA a network card reads
//! them from the other machine's memory.
//!
//! Everything but the bytes of rows goes over a TCP connection, as with [`Tcp`](crate::Tcp). Bytes of
//! rows are copied into slots of registered memory; the prefill worker says where they are, the
//! decode worker reads them there, and says so. The one invariant: a slot that was told is not
//! written again before the other side has read it, or the connection has ended.

mod agent;
mod slots;

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquila_spec::bytes::{Reader, Writer};

use crate::error::{Error, Result};
use crate::link::{Accept, Link, SMALL, Transport};
use crate::message::{self, Encoded, Message};
use crate::secret::nonce;
use crate::tcp::{Frame, STUCK, Seen, TcpAccept, TcpLink};
use slots::{SLOT, Slot, Slots};

/// Kinds of frames beside those of messages: what the sender's agent is; rows, of which each piece
/// follows as the place of it; that a piece was read.
const AGENT: u8 = 32;
const ROWS: u8 = 33;
const PIECE: u8 = 34;
const READ: u8 = 35;
/// Slots of one connection that wait to be read.
const UNREAD: usize = 2;
/// How long the sender sleeps between two looks at what the other side has read.
const NAP: Duration = Duration::from_micros(50);

/// The transport.
#[derive(Clone)]
pub struct Nixl(Arc<Shared>);

/// What all connections share.
struct Shared {
    slots: Arc<Slots>,
    /// How many connections read from each agent.
    remotes: Mutex<HashMap<CString, usize>>,
}

impl Nixl {
    /// Loads NIXL's library, from this path if one is given, and starts an agent.
    ///
    /// # Errors
    /// Why that is not possible.
    pub fn start(library: Option<&Path>) -> std::result::Result<Self, String> {
        // A worker that is started again at the same address is another agent.
        let nonce = nonce().map_err(|e| e.to_string())?;
        let name = format!("aquila-{:032x}", u128::from_le_bytes(nonce));
        let slots = Slots::start(library, &name)?;
        Ok(Self(Arc::new(Shared { slots, remotes: Mutex::default() })))
    }

    fn link(&self, control: TcpLink) -> Box<dyn Link> {
        let shared = self.0.clone();
        let unread = VecDeque::new();
        Box::new(NixlLink { control, shared, is_described: false, unread, remote: None })
    }
}

impl Transport for Nixl {
    fn listen(&self, address: &str) -> Result<Arc<dyn Accept>> {
        Ok(Arc::new(NixlAccept { control: TcpAccept::listen(address)?, transport: self.clone() }))
    }

    fn connect(&self, address: &str, patience: Duration) -> Result<Box<dyn Link>> {
        Ok(self.link(TcpLink::connect(address, patience)?))
    }
}

struct NixlAccept {
    control: TcpAccept,
    transport: Nixl,
}

impl Accept for NixlAccept {
    fn accept(&self) -> Option<Box<dyn Link>> {
        self.control.next().map(|control| self.transport.link(control))
    }

    fn port(&self) -> u16 {
        self.control.port()
    }

    fn close(&self) {
        self.control.close();
    }
}

impl Shared {
    fn remotes(&self) -> MutexGuard<'_, HashMap<CString, usize>> {
        self.remotes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns of another agent; answers its name.
    fn learn(&self, description: &[u8]) -> std::result::Result<CString, String> {
        let mut remotes = self.remotes();
        let name = self.slots.agent.load_remote(description)?;
        *remotes.entry(name.clone()).or_default() += 1;
        Ok(name)
    }

    /// Forgets another agent once no connection reads from it.
    fn forget(&self, name: &CStr) {
        let mut remotes = self.remotes();
        let Some(readers) = remotes.get_mut(name) else { return };
        *readers -= 1;
        if *readers == 0 {
            remotes.remove(name);
            self.slots.agent.forget_remote(name);
        }
    }
}

struct NixlLink {
    control: TcpLink,
    shared: Arc<Shared>,
    /// Whether the other side knows this side's agent.
    is_described: bool,
    /// Slots that the other side has not read yet, in the order in which it was told of them.
    unread: VecDeque<Slot>,
    /// The other side's agent, once it was told.
    remote: Option<CString>,
}

impl NixlLink {
    fn failed(&self, why: String) -> Error {
        Error::connection(self.control.peer(), std::io::Error::other(why))
    }

    fn protocol(&self, why: &'static str) -> Error {
        Error::protocol(self.control.peer(), why)
    }

    /// Waits until the other side has read the oldest slot that it was told of.
    fn wait_for_reader(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match self.control.seen() {
                Seen::Bytes => break,
                Seen::End => return Err(Error::HungUp { peer: self.control.peer().to_owned() }),
                Seen::Nothing if begun.elapsed() > STUCK => {
                    let peer = self.control.peer().to_owned();
                    return Err(Error::Silent { peer, waited: STUCK });
                }
                Seen::Nothing => {
                    self.shared.slots.agent.progress().map_err(|why| self.failed(why))?;
                    std::thread::sleep(NAP);
                }
            }
        }
        let frame = self.control.receive_frame(SMALL, STUCK)?;
        if frame.kind != READ {
            return Err(self.protocol("it should have said that it has read rows"));
        }
        self.unread.pop_front();
        Ok(())
    }

    /// Waits until the other side has read all slots that it was told of.
    fn settle(&mut self) -> Result<()> {
        while !self.unread.is_empty() {
            self.wait_for_reader()?;
        }
        Ok(())
    }

    /// A slot for the next piece.
    fn slot(&mut self) -> Result<Slot> {
        while self.unread.len() >= UNREAD {
            self.wait_for_reader()?;
        }
        loop {
            // A link that has slots itself waits for one of those, so that links do not wait for
            // each other.
            let patience = if self.unread.is_empty() { STUCK } else { Duration::ZERO };
            match self.shared.slots.take(patience) {
                Some(slot) => return Ok(slot),
                None if self.unread.is_empty() => {
                    return Err(self.failed("no memory of NIXL's has become free".into()));
                }
                None => self.wait_for_reader()?,
            }
        }
    }

    fn send_rows(&mut self, encoded: &Encoded<'_>) -> Result<usize> {
        let mut bytes = 0;
        if !self.is_described {
            let described = message::frame(AGENT, &self.shared.slots.metadata)?;
            bytes += self.control.send_frame(described)?;
            self.is_described = true;
        }
        let mut values = Writer(encoded.values().to_vec());
        values.size(encoded.rows.len());
        values.u32(crc32fast::hash(encoded.rows));
        bytes += self.control.send_frame(message::frame(ROWS, &values.0)?)?;
        for piece in encoded.rows.chunks(SLOT) {
            let mut slot = self.slot()?;
            let mut place = Writer(Vec::new());
            place.u64(slot.fill(piece));
            place.size(piece.len());
            bytes += self.control.send_frame(message::frame(PIECE, &place.0)?)?;
            self.unread.push_back(slot);
        }
        Ok(bytes + encoded.rows.len())
    }

    /// Reads rows of which a frame has told.
    fn receive_rows(&mut self, frame: &Frame, limit: usize) -> Result<(Message, usize)> {
        let form = "a message is not of its form";
        let (values, mut rest) = message::split_rows(&frame.values).ok_or(self.protocol(form))?;
        let (Some(length), Some(checksum)) = (rest.size(), rest.u32()) else {
            return Err(self.protocol(form));
        };
        if length > limit {
            return Err(self.protocol("a message is too long"));
        }
        let (mut rows, mut bytes) = (Vec::new(), frame.bytes + length);
        while rows.len() < length {
            let piece = self.control.receive_frame(SMALL, STUCK)?;
            bytes += piece.bytes;
            let mut place = Reader(&piece.values);
            let (Some(address), Some(of_piece)) = (place.u64(), place.size()) else {
                return Err(self.protocol(form));
            };
            let is_piece = piece.kind == PIECE && (1..=SLOT).contains(&of_piece);
            if !is_piece || of_piece > length - rows.len() {
                return Err(self.protocol("it should have said where rows are"));
            }
            let Some(remote) = &self.remote else {
                return Err(self.protocol("it should have said what its agent is"));
            };
            let slot = self.shared.slots.take(STUCK);
            let slot = slot.ok_or_else(|| "no memory of NIXL's has become free".to_owned());
            let read = slot.and_then(|slot| slot.read(remote, address, of_piece, STUCK, &mut rows));
            read.map_err(|why| self.failed(why))?;
            self.control.send_frame(message::frame(READ, &[])?)?;
        }
        if checksum != crc32fast::hash(&rows) {
            return Err(self.protocol("a checksum is wrong"));
        }
        let message = Message::read(message::ROWS, values, rows).ok_or(self.protocol(form))?;
        Ok((message, bytes))
    }
}

impl Link for NixlLink {
    fn peer(&self) -> &str {
        self.control.peer()
    }

    fn send(&mut self, message: &Message) -> Result<usize> {
        let encoded = message.encode()?;
        if !encoded.rows.is_empty() {
            return self.send_rows(&encoded);
        }
        self.settle()?;
        self.control.send_frame(encoded)
    }

    fn receive(&mut self, limit: usize, patience: Duration) -> Result<(Message, usize)> {
        self.settle()?;
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let frame = self.control.receive_frame(limit, left)?;
            match frame.kind {
                // NIXL parses the description of an agent without checks, so it gets only those of
                // peers that have passed the handshake.
                AGENT | ROWS if limit <= SMALL => {
                    return Err(self.protocol("rows were not expected"));
                }
                AGENT if self.remote.is_none() => {
                    let learnt = self.shared.learn(&frame.values);
                    self.remote = Some(learnt.map_err(|why| self.failed(why))?);
                }
                ROWS => return self.receive_rows(&frame, limit),
                kind => {
                    let message = Message::read(kind, &frame.values, frame.rows);
                    let form = self.protocol("a message is not of its form");
                    return Ok((message.ok_or(form)?, frame.bytes));
                }
            }
        }
    }

    fn has_hung_up(&mut self) -> bool {
        self.settle().is_err() || self.control.has_hung_up()
    }
}

impl Drop for NixlLink {
    fn drop(&mut self) {
        if let Some(remote) = &self.remote {
            self.shared.forget(remote);
        }
    }
}
