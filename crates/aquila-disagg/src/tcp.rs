//! Messages over TCP.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::link::{Accept, Link, SMALL, Transport};
use crate::message::{CHECKSUM, Encoded, HEADER, Header, Message};

/// How long a peer may take nothing of what is sent.
pub(crate) const STUCK: Duration = Duration::from_secs(10);
/// How long one write waits: one that took a part of its bytes says so only when it ends.
const WRITE: Duration = Duration::from_secs(1);
/// Bytes of rows that are written at once, and checksummed while the cache has them.
const PIECE: usize = 256 << 10;
/// The shortest wait that a socket can be asked for here.
const LEAST: Duration = Duration::from_millis(1);
/// Where a header has the kind.
const KIND: usize = 3;
/// When a listener tries again that could not accept.
const AGAIN: Duration = Duration::from_millis(50);

/// The transport that is built in.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Transport for Tcp {
    fn listen(&self, address: &str) -> Result<Arc<dyn Accept>> {
        Ok(Arc::new(TcpAccept::listen(address)?))
    }

    fn connect(&self, address: &str, patience: Duration) -> Result<Box<dyn Link>> {
        Ok(Box::new(TcpLink::connect(address, patience)?))
    }
}

/// Takes TCP connections.
pub(crate) struct TcpAccept {
    listener: TcpListener,
    address: String,
    closed: AtomicBool,
}

impl TcpAccept {
    /// Listens at `host:port`.
    pub(crate) fn listen(address: &str) -> Result<Self> {
        let listener = TcpListener::bind(address).map_err(|e| Error::connection(address, e))?;
        Ok(Self { listener, address: address.to_owned(), closed: AtomicBool::new(false) })
    }

    /// Waits for the next connection; none once it is closed.
    pub(crate) fn next(&self) -> Option<TcpLink> {
        loop {
            let accepted = self.listener.accept();
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            match accepted {
                // The port of a peer is chosen anew for each connection and says nothing.
                Ok((stream, peer)) => match TcpLink::of(stream, peer.ip().to_string()) {
                    Ok(link) => return Some(link),
                    Err(e) => tracing::debug!("a connection of {peer} broke at once: {e}"),
                },
                // Too many open files, no memory, or a peer that left already: others may still
                // come.
                Err(e) => {
                    tracing::warn!("a connection to {} was not accepted: {e}", self.address);
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }
}

impl Accept for TcpAccept {
    fn accept(&self) -> Option<Box<dyn Link>> {
        self.next().map(|link| Box::new(link) as Box<dyn Link>)
    }

    fn port(&self) -> u16 {
        self.listener.local_addr().map_or(0, |address| address.port())
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let Ok(mut address) = self.listener.local_addr() else { return };
        if address.ip().is_unspecified() {
            let loopback: IpAddr = match address {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            };
            address.set_ip(loopback);
        }
        // One more connection wakes who waits for one.
        let _ = TcpStream::connect_timeout(&address, Duration::from_secs(1));
    }
}

/// One TCP connection.
pub(crate) struct TcpLink {
    stream: TcpStream,
    peer: String,
}

/// What came as one frame: a header, a payload and the checksum of both.
pub(crate) struct Frame {
    pub(crate) kind: u8,
    /// The payload before the bytes of rows.
    pub(crate) values: Vec<u8>,
    pub(crate) rows: Vec<u8>,
    /// Bytes of all of it.
    pub(crate) bytes: usize,
}

/// What has come on a connection, as far as is known without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    Bytes,
    End,
}

impl TcpLink {
    /// Connects to `host:port`.
    pub(crate) fn connect(address: &str, patience: Duration) -> Result<Self> {
        let failed = |e| Error::connection(address, e);
        let mut last = ErrorKind::NotFound.into();
        for socket in address.to_socket_addrs().map_err(failed)? {
            match TcpStream::connect_timeout(&socket, patience) {
                Ok(stream) => return Self::of(stream, address.to_owned()).map_err(failed),
                Err(e) => last = e,
            }
        }
        Err(failed(last))
    }

    fn of(stream: TcpStream, peer: String) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE))?;
        Ok(Self { stream, peer })
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::connection(&self.peer, error)
    }

    /// Writes all bytes, one part behind the other; that takes as long as the peer takes some of
    /// them.
    fn write(&mut self, parts: [&[u8]; 3]) -> Result<()> {
        let mut parts = parts.map(IoSlice::new);
        let mut parts = &mut parts[..];
        // Parts without bytes do not count.
        IoSlice::advance_slices(&mut parts, 0);
        let mut taken = Instant::now();
        while !parts.is_empty() {
            match self.stream.write_vectored(parts) {
                Ok(0) => return Err(self.failed(ErrorKind::WriteZero.into())),
                Ok(count) => {
                    IoSlice::advance_slices(&mut parts, count);
                    taken = Instant::now();
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => (),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if taken.elapsed() >= STUCK {
                        return Err(self.failed(ErrorKind::TimedOut.into()));
                    }
                }
                Err(e) => return Err(self.failed(e)),
            }
        }
        Ok(())
    }

    /// Reads until there are `length` bytes. A short run of them must be there by the deadline; a
    /// long one may take longer, as long as something comes.
    fn fill(&mut self, bytes: &mut Vec<u8>, length: usize, deadline: Instant) -> Result<()> {
        while bytes.len() < length {
            let left = deadline.saturating_duration_since(Instant::now()).max(LEAST);
            self.stream.set_read_timeout(Some(left)).map_err(|e| self.failed(e))?;
            let missing = length - bytes.len();
            let read = if length <= SMALL {
                let mut some = [0; 512];
                let read = self.stream.read(&mut some[..missing.min(512)]);
                read.inspect(|&read| bytes.extend(&some[..read]))
            } else {
                // Memory is taken as bytes come, so a length alone takes none.
                (&self.stream).take(missing as u64).read_to_end(bytes)
            };
            match read {
                Ok(_) if bytes.len() == length => (),
                Ok(read) if read > 0 && length <= SMALL => (),
                Ok(_) if bytes.is_empty() && length == HEADER => {
                    return Err(Error::HungUp { peer: self.peer.clone() });
                }
                Ok(_) => return Err(self.failed(ErrorKind::UnexpectedEof.into())),
                Err(e) if e.kind() == ErrorKind::Interrupted => (),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(Error::Silent { peer: self.peer.clone(), waited: left });
                }
                Err(e) => return Err(self.failed(e)),
            }
        }
        Ok(())
    }

    /// What has come, without waiting for anything.
    pub(crate) fn seen(&self) -> Seen {
        if self.stream.set_nonblocking(true).is_err() {
            return Seen::End;
        }
        let seen = match self.stream.peek(&mut [0]) {
            Ok(1..) => Seen::Bytes,
            Err(e) if e.kind() == ErrorKind::WouldBlock => Seen::Nothing,
            _ => Seen::End,
        };
        if self.stream.set_nonblocking(false).is_ok() { seen } else { Seen::End }
    }

    /// Sends a message that is encoded; answers its bytes.
    pub(crate) fn send_frame(&mut self, encoded: Encoded<'_>) -> Result<usize> {
        let Encoded { head, rows } = encoded;
        let mut checksum = checksum(head[KIND]);
        checksum.update(&head[HEADER..]);
        let (mut before, mut rest) = (&head[..], rows);
        loop {
            let (piece, after) = rest.split_at(rest.len().min(PIECE));
            checksum.update(piece);
            if after.is_empty() {
                self.write([before, piece, &checksum.finalize().to_le_bytes()])?;
                return Ok(head.len() + rows.len() + CHECKSUM);
            }
            self.write([before, piece, &[]])?;
            (before, rest) = (&[], after);
        }
    }

    /// Waits at most `patience` for a frame of at most `limit` bytes.
    pub(crate) fn receive_frame(&mut self, limit: usize, patience: Duration) -> Result<Frame> {
        let deadline = Instant::now() + patience;
        let mut first = Vec::new();
        self.fill(&mut first, HEADER, deadline)?;
        let header = first.first_chunk().expect("it is filled");
        let header = Header::read(header).map_err(|why| Error::protocol(&self.peer, why))?;
        if header.length > limit {
            return Err(Error::protocol(&self.peer, "a message is too long"));
        }
        let mut checksum = checksum(header.kind);
        let mut values = Vec::new();
        self.fill(&mut values, header.before_rows(), deadline)?;
        checksum.update(&values);
        let of_rows = header.length - values.len();
        let mut rows = Vec::with_capacity(of_rows + CHECKSUM);
        self.fill(&mut rows, of_rows + CHECKSUM, deadline)?;
        let last = rows.split_off(of_rows);
        checksum.update(&rows);
        if last != checksum.finalize().to_le_bytes() {
            return Err(Error::protocol(&self.peer, "a checksum is wrong"));
        }
        let bytes = HEADER + header.length + CHECKSUM;
        Ok(Frame { kind: header.kind, values, rows, bytes })
    }
}

/// The checksum of a message of this kind, before anything of its payload.
fn checksum(kind: u8) -> crc32fast::Hasher {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&[kind]);
    checksum
}

impl Link for TcpLink {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn send(&mut self, message: &Message) -> Result<usize> {
        self.send_frame(message.encode()?)
    }

    fn receive(&mut self, limit: usize, patience: Duration) -> Result<(Message, usize)> {
        let Frame { kind, values, rows, bytes } = self.receive_frame(limit, patience)?;
        let message = Message::read(kind, &values, rows);
        let form = || Error::protocol(&self.peer, "a message is not of its form");
        Ok((message.ok_or_else(form)?, bytes))
    }

    fn has_hung_up(&mut self) -> bool {
        // Bytes that came unasked are not of this protocol either.
        self.seen() != Seen::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_goes_on_after_any_error() {
        let accept = TcpAccept::listen("127.0.0.1:0").unwrap();
        let address = accept.listener.local_addr().unwrap();
        // Until something connects, accepting fails with an error that is not listed anywhere.
        accept.listener.set_nonblocking(true).unwrap();
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let accept = &accept;
            let last = scope.spawn(move || {
                tell.send(accept.next().is_some()).unwrap();
                accept.next().is_some()
            });
            // For some errors; without any, the test says less.
            std::thread::sleep(2 * AGAIN);
            let _peer = TcpStream::connect(address).unwrap();
            assert!(told.recv().unwrap());
            Accept::close(accept);
            assert!(!last.join().unwrap());
        });
    }
}
