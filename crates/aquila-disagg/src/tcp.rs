//! Messages over TCP.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::link::{Accept, Link, SMALL, Transport};
use crate::message::{HEADER, Header, Message};

/// How long a peer may take nothing of what is sent.
const STUCK: Duration = Duration::from_secs(20);
/// When a listener tries again that could not accept.
const AGAIN: Duration = Duration::from_millis(50);

/// The transport that is built in.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Transport for Tcp {
    fn listen(&self, address: &str) -> Result<Arc<dyn Accept>> {
        let listener = TcpListener::bind(address).map_err(|e| Error::connection(address, e))?;
        let closed = AtomicBool::new(false);
        Ok(Arc::new(TcpAccept { listener, address: address.to_owned(), closed }))
    }

    fn connect(&self, address: &str, patience: Duration) -> Result<Box<dyn Link>> {
        let failed = |e| Error::connection(address, e);
        let mut last = ErrorKind::NotFound.into();
        for socket in address.to_socket_addrs().map_err(failed)? {
            match TcpStream::connect_timeout(&socket, patience) {
                Ok(stream) => return TcpLink::of(stream, address.to_owned()).map_err(failed),
                Err(e) => last = e,
            }
        }
        Err(failed(last))
    }
}

struct TcpAccept {
    listener: TcpListener,
    address: String,
    closed: AtomicBool,
}

impl Accept for TcpAccept {
    fn accept(&self) -> Result<Option<Box<dyn Link>>> {
        loop {
            let accepted = self.listener.accept();
            if self.closed.load(Ordering::Acquire) {
                return Ok(None);
            }
            match accepted {
                // The port of a peer is chosen anew for each connection and says nothing.
                Ok((stream, peer)) => match TcpLink::of(stream, peer.ip().to_string()) {
                    Ok(link) => return Ok(Some(link)),
                    Err(e) => tracing::debug!("a connection of {peer} broke at once: {e}"),
                },
                // Too many open files, or a peer that left already: others may still come.
                Err(e) if matches!(e.raw_os_error(), Some(23 | 24)) || transient(&e) => {
                    tracing::warn!("a connection to {} was not accepted: {e}", self.address);
                    std::thread::sleep(AGAIN);
                }
                Err(e) => return Err(Error::connection(&self.address, e)),
            }
        }
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

fn transient(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted
    )
}

struct TcpLink {
    stream: TcpStream,
    peer: String,
}

impl TcpLink {
    fn of(stream: TcpStream, peer: String) -> std::io::Result<Box<dyn Link>> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(STUCK))?;
        Ok(Box::new(Self { stream, peer }))
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::connection(&self.peer, error)
    }

    /// Reads some bytes, in at most `patience`; 0 where the peer hung up.
    fn some(&mut self, into: &mut [u8], patience: Duration) -> Result<usize> {
        self.stream
            .set_read_timeout(Some(patience.max(Duration::from_millis(1))))
            .map_err(|e| Error::connection(&self.peer, e))?;
        loop {
            match self.stream.read(into) {
                Err(e) if e.kind() == ErrorKind::Interrupted => (),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(Error::Silent { peer: self.peer.clone(), waited: patience });
                }
                read => return read.map_err(|e| self.failed(e)),
            }
        }
    }
}

impl Link for TcpLink {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn send(&mut self, message: &Message) -> Result<usize> {
        let pieces = message.pieces();
        for piece in &pieces {
            self.stream.write_all(piece).map_err(|e| self.failed(e))?;
        }
        Ok(pieces.iter().map(|piece| piece.len()).sum())
    }

    fn receive(&mut self, limit: usize, patience: Duration) -> Result<(Message, usize)> {
        let deadline = Instant::now() + patience;
        let left = || deadline.saturating_duration_since(Instant::now());
        let mut header = [0; HEADER];
        let mut filled = 0;
        while filled < HEADER {
            match self.some(&mut header[filled..], left())? {
                0 if filled == 0 => return Err(Error::HungUp { peer: self.peer.clone() }),
                0 => return Err(self.failed(ErrorKind::UnexpectedEof.into())),
                read => filled += read,
            }
        }
        let protocol = |why| Error::protocol(&self.peer, why);
        let header = Header::read(&header).map_err(protocol)?;
        if header.length > limit {
            return Err(protocol("a message is too long"));
        }
        // Memory is taken as bytes come, so a length alone takes none.
        let mut payload = Vec::new();
        while payload.len() < header.length {
            let filled = payload.len();
            payload.resize(header.length.min(filled.max(SMALL) * 2), 0);
            let mut at = filled;
            while at < payload.len() {
                // A short message comes in time as a whole, a long one without a pause.
                let patience = if header.length <= SMALL { left() } else { patience };
                match self.some(&mut payload[at..], patience)? {
                    0 => return Err(self.failed(ErrorKind::UnexpectedEof.into())),
                    read => at += read,
                }
            }
        }
        let bytes = HEADER + payload.len();
        let message = header.message(payload).map_err(|why| Error::protocol(&self.peer, why))?;
        Ok((message, bytes))
    }

    fn has_hung_up(&mut self) -> bool {
        if self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let seen = self.stream.peek(&mut [0]);
        let waiting = matches!(&seen, Err(e) if e.kind() == ErrorKind::WouldBlock);
        let back = self.stream.set_nonblocking(false);
        // Bytes that came unasked are not of this protocol either.
        !(waiting && back.is_ok())
    }
}
