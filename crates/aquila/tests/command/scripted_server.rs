//! A server that answers as a test says: what servers do when they are in trouble.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Writes the answer to the request of this number; the connection is closed after it.
type Script = dyn Fn(usize, &mut TcpStream) + Send + Sync;

/// Starts it; POST requests are counted and answered by the script, others with 404. It ends with
/// the process.
pub fn start(script: impl Fn(usize, &mut TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (script, count): (Arc<Script>, _) = (Arc::new(script), Arc::new(AtomicUsize::new(0)));
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (script, count) = (script.clone(), count.clone());
            std::thread::spawn(move || answer(socket.unwrap(), &*script, &count));
        }
    });
    address
}

fn answer(mut socket: TcpStream, script: &Script, count: &AtomicUsize) {
    let mut reader = BufReader::new(socket.try_clone().unwrap());
    let (mut first, mut length) = (String::new(), 0);
    if reader.read_line(&mut first).unwrap_or(0) == 0 {
        return;
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    if first.starts_with("POST") {
        script(count.fetch_add(1, Ordering::SeqCst), &mut socket);
    } else {
        whole(&mut socket, "404 Not Found", "text/plain", "nothing here");
    }
}

/// A whole response. A client that has left reads nothing.
pub fn whole(socket: &mut TcpStream, status: &str, kind: &str, body: &str) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n");
    let _ = write!(socket, "{head}Content-Length: {length}\r\n\r\n{body}");
}

/// The beginning of a stream, and these bytes of it; whether more comes is left open.
pub fn begin(socket: &mut TcpStream, bytes: &str) {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n";
    let size = bytes.len();
    let _ = write!(socket, "{head}Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n{bytes}\r\n");
    let _ = socket.flush();
}

/// A stream of these bytes that ends as it should.
pub fn stream(socket: &mut TcpStream, bytes: &str) {
    begin(socket, bytes);
    let _ = write!(socket, "0\r\n\r\n");
}

/// A complete answer of three tokens.
pub const ANSWER: &str = "\
    : keep-alive\n\n\
    data: {\"choices\": [{\"text\": \"a\"}]}\n\n\
    data: {\"choices\": [{\"text\": \"b c\", \"finish_reason\": \"stop\"}]}\n\n\
    data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 5, \"completion_tokens\": 3}}\n\n\
    data: [DONE]\n\n";
