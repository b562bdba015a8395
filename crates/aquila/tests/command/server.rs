//! The real server, started by a line of flags, asked over a socket, and ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr};

use crate::run::{Ran, aquila};

/// A server that has said that it is ready.
pub struct Served {
    child: Child,
    /// Kept open: the server writes to it until it ends.
    stderr: BufReader<ChildStderr>,
    /// Where it listens.
    pub address: SocketAddr,
    /// What it said until it was ready, that included.
    pub said: String,
}

impl Served {
    /// Starts `aquila serve` with these flags on a free port; what it left, if it ended instead.
    pub fn start(line: &str) -> Result<Self, Ran> {
        Self::start_with(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// As [`Served::start`].
    pub fn start_with(flags: &[&str]) -> Result<Self, Ran> {
        Self::start_in(&[], flags)
    }

    /// The same, with these variables in its environment.
    pub fn start_in(variables: &[(&str, &str)], flags: &[&str]) -> Result<Self, Ran> {
        let mut command = aquila(&[&["serve", "--port", "0"], flags].concat());
        let mut child = command.envs(variables.iter().copied()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let begun = said.len();
            if stderr.read_line(&mut said).unwrap() == 0 {
                let code = child.wait().unwrap().code();
                return Err(Ran { code, stdout: String::new(), stderr: said });
            }
            if let Some((_, url)) = said[begun..].split_once("ready: http") {
                let after = url.split_once("://").unwrap().1;
                break after.split('/').next().unwrap().parse().unwrap();
            }
        };
        Ok(Self { child, stderr, address, said })
    }

    /// The next line that it writes to its log which has `what` in it.
    pub fn logged(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "it ended without {what}");
            if line.contains(what) {
                return line;
            }
        }
    }

    /// The status and the body of an answer.
    pub fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    }

    /// The same, to a body of JSON.
    pub fn post(&self, path: &str, body: &str) -> (u16, String) {
        let length = body.len();
        self.ask(&format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: \
             application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        ))
    }

    /// The same, to a request written by hand, which must ask for the connection to be closed.
    pub fn ask(&self, request: &str) -> (u16, String) {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        (status, body.to_owned())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It is of no use any more, whatever it is doing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
