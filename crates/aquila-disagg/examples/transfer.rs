//! How fast rows go from process to process, against a plain copy between the same two sockets.
//!
//!     cargo run --release -p aquila-disagg --example transfer [MIB] [PASSES] [NIXL]
//!
//! With NIXL, the path of its library, rows go through that instead of a socket.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aquila_disagg::{Message, Nixl, Tcp, Transport};
use aquila_engine::KvRows;

/// Bytes of one message: one layer of a chunk of 1,024 tokens, 4 KiB each.
const PIECE: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn rows(bytes: Vec<u8>) -> Message {
    Message::Rows(KvRows { group: 0, store: 0, layers: 0..1, rows: 0..1, bytes })
}

/// What carries rows: NIXL, if its library is given.
fn transport(nixl: &str) -> Box<dyn Transport> {
    match nixl {
        "" => Box::new(Tcp),
        library => Box::new(Nixl::start(Some(Path::new(library))).unwrap()),
    }
}

/// The other process: it connects, sends all, and waits until all was taken.
fn send(address: &str, plainly: bool, pieces: usize, nixl: &str) {
    let bytes: Vec<u8> = (0..PIECE).map(|at| (at * 31 % 251) as u8).collect();
    if plainly {
        let mut socket = TcpStream::connect(address).unwrap();
        for _ in 0..pieces {
            socket.write_all(&bytes).unwrap();
        }
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        socket.read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let mut link = transport(nixl).connect(address, PATIENCE).unwrap();
    let message = rows(bytes);
    for _ in 0..pieces {
        link.send(&message).unwrap();
    }
    link.receive(1 << 10, PATIENCE).unwrap();
}

/// Seconds to take all, from the first byte on.
fn take(plainly: bool, pieces: usize, nixl: &str) -> f64 {
    let spawn = |address: &str| {
        let program = std::env::current_exe().unwrap();
        let kind = if plainly { "plain" } else { "rows" };
        let arguments = ["send", address, kind, &pieces.to_string(), nixl];
        Command::new(program).args(arguments).stdout(Stdio::inherit()).spawn().unwrap()
    };
    if plainly {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut child = spawn(&listener.local_addr().unwrap().to_string());
        let mut socket = listener.accept().unwrap().0;
        let mut buffer = vec![0; PIECE];
        let mut taken = socket.read(&mut buffer).unwrap();
        let began = Instant::now();
        while taken < pieces * PIECE {
            taken += socket.read(&mut buffer).unwrap();
        }
        let seconds = began.elapsed().as_secs_f64();
        drop(socket);
        child.wait().unwrap();
        return seconds;
    }
    let accept = transport(nixl).listen("127.0.0.1:0").unwrap();
    let mut child = spawn(&format!("127.0.0.1:{}", accept.port()));
    let mut link = accept.accept().unwrap();
    link.receive(1 << 30, PATIENCE).unwrap();
    let began = Instant::now();
    for _ in 1..pieces {
        let (message, _) = link.receive(1 << 30, PATIENCE).unwrap();
        assert!(matches!(message, Message::Rows(_)));
    }
    let seconds = began.elapsed().as_secs_f64();
    link.send(&Message::Wait).unwrap();
    child.wait().unwrap();
    seconds
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [verb, address, kind, pieces, nixl] = &arguments[..]
        && verb == "send"
    {
        return send(address, kind == "plain", pieces.parse().unwrap(), nixl);
    }
    let number = |at: usize, usual: usize| {
        arguments.get(at).map_or(usual, |text| text.parse().expect("a number"))
    };
    let (pieces, passes) = ((number(0, 1024) << 20) / PIECE, number(1, 5));
    let nixl = arguments.get(2).map_or("", String::as_str);
    let mut ratios = Vec::new();
    for pass in 0..=passes {
        let (plain, ours) = (take(true, pieces, nixl), take(false, pieces, nixl));
        let speed = |seconds: f64| (pieces * PIECE) as f64 / seconds / 1e9;
        if pass > 0 {
            println!("plain copy {:.2} GB/s, rows {:.2} GB/s", speed(plain), speed(ours));
            ratios.push(plain / ours);
        }
    }
    ratios.sort_by(f64::total_cmp);
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    println!("rows over plain: {:.3} ({least:.3} to {most:.3})", ratios[ratios.len() / 2]);
}
