//! The address of a server, taken before there is anything to serve.
//!
//! A socket that is bound and does not listen refuses connections, so nobody waits for a model that
//! is still being loaded, and a port that another process has is noticed at once.

use std::net::{SocketAddr, ToSocketAddrs};

use tokio::net::{TcpListener, TcpSocket};

use crate::error::{Error, Result};

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// An address that is this process's, and not listened on yet.
pub struct Address {
    socket: TcpSocket,
    asked: String,
}

impl Address {
    /// Takes the port of a host: a name, an address, or one in brackets as URLs have them.
    pub fn take(host: &str, port: u16) -> Result<Self> {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let asked =
            if bare.contains(':') { format!("[{bare}]:{port}") } else { format!("{bare}:{port}") };
        match bind(bare, port) {
            Ok(socket) => Ok(Self { socket, asked }),
            Err(source) => Err(Error::Listen { address: asked, source }),
        }
    }

    /// Whether only clients of this machine can reach it.
    pub fn is_loopback(&self) -> bool {
        self.socket.local_addr().is_ok_and(|address| address.ip().is_loopback())
    }

    /// Listens.
    pub(crate) fn listen(self) -> Result<(TcpListener, SocketAddr)> {
        let failed = |source| Error::Listen { address: self.asked, source };
        let listening = self.socket.listen(BACKLOG);
        let listening = listening.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = listening.map_err(failed)?;
        Ok((listener, address))
    }
}

fn bind(host: &str, port: u16) -> std::io::Result<TcpSocket> {
    let mut failure = None;
    for address in (host, port).to_socket_addrs()? {
        let bound = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let bound = bound.and_then(|socket| {
            // Connections of a server that has just ended do not keep its port.
            #[cfg(unix)]
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            Ok(socket)
        });
        match bound {
            Ok(socket) => return Ok(socket),
            Err(error) => failure = Some(error),
        }
    }
    let nowhere = || std::io::Error::other("the name stands for no address");
    Err(failure.unwrap_or_else(nowhere))
}
