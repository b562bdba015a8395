//! Clients that want the server to fail: it stays within its memory, serves others, and ends.
//!
//! The long form of these, with ten thousand connections, is `tests/clients/hostile.py`.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use aquila_server::{Address, Limits, RequestMemory, Settings};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::{Connection, Reply, Running, engine_config, generator, settings};

/// Tells the test that is run as a server from one that is run as a test.
const AS_SERVER: &str = "AQUILA_TEST_SERVER";
const MIB: usize = 1 << 20;

fn limited(limits: Limits) -> Running {
    Running::start(generator(), Settings { limits, ..settings() })
}

/// A normal request.
fn ask(address: SocketAddr) -> Reply {
    let body = json!({ "prompt": "fn main", "max_tokens": 2, "temperature": 0 }).to_string();
    Connection::open(address).post("/v1/completions", body.as_bytes()).reply()
}

#[test]
fn texts_that_cannot_fit_are_refused_by_their_bytes() {
    let server = Running::usual();
    let tokenizer = server.generator.tokenizer().unwrap();
    let longest = server.generator.engine().config().longest_sequence();
    let text = " ".repeat(tokenizer.most_bytes(longest).unwrap() + 1);
    let bodies = [
        ("/v1/completions", json!({ "prompt": text })),
        ("/v1/completions", json!({ "prompt": ["a", text] })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": text }] })),
        ("/generate", json!({ "text": text })),
        ("/generate", json!({ "text": ["a", text] })),
        ("/tokenize", json!({ "prompt": text })),
        ("/tokenize", json!({ "prompt": ["a", text] })),
    ];
    for (path, body) in bodies {
        let reply = server.post(path, &body.to_string());
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["code"]), (400, &json!("context_length_exceeded")));
        assert!(error["message"].as_str().unwrap().contains("bytes"), "{path}: {error}");
    }
    // As many bytes as the bound, in tokens that are as long as tokens are.
    let ids: Vec<u32> = (0..tokenizer.vocab_size() as u32).collect();
    let longest_token = ids.iter().map(|&id| tokenizer.token_text(id).unwrap().unwrap());
    let longest_token = longest_token.max_by_key(String::len).unwrap();
    let prompt = longest_token.repeat(longest - 1);
    assert_eq!(prompt.len(), tokenizer.most_bytes(longest - 1).unwrap());
    let body = json!({ "prompt": prompt, "max_tokens": 1 }).to_string();
    let usage = &server.post("/v1/completions", &body).ok()["usage"];
    assert_eq!(usage["prompt_tokens"], longest - 1);
}

#[test]
fn bodies_past_their_room_are_refused_while_others_are_served() {
    let limits = Limits { body_bytes: MIB, bodies_bytes: MIB, ..Limits::default() };
    let server = limited(limits);
    let body = json!({ "prompt": "a".repeat(MIB - 100) }).to_string();
    let (half, rest) = body.as_bytes().split_at(body.len() / 2);
    let length = body.len();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
    let slow = server.connect().send(&head).send_bytes(half);
    let second = || server.post("/v1/completions", &body);
    // Until the server has read the first one's headers, the second may have its room.
    let refused = std::iter::repeat_with(second).find(|reply| reply.status == 503).unwrap();
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    assert!(refused.header("retry-after").is_some());
    assert_eq!(ask(server.address).status, 200);
    let middle = json!({ "prompt": "a".repeat(100 << 10) }).to_string();
    assert_eq!(server.post("/v1/completions", &middle).status, 400);
    let reply = slow.send_bytes(rest).reply();
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
    // A body that is given up leaves its room, too.
    drop(server.connect().send(&head).send_bytes(half));
    assert!(std::iter::repeat_with(second).any(|reply| reply.status == 400));
}

#[test]
fn bodies_without_a_length_have_the_same_bounds() {
    let limits = Limits { body_bytes: MIB, bodies_bytes: MIB, ..Limits::default() };
    let server = limited(limits);
    let chunked = |bytes: usize| {
        let body = json!({ "prompt": "a".repeat(bytes), "max_tokens": 1 }).to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
        let mut connection = server.connect().send(head);
        for chunk in body.as_bytes().chunks(5000) {
            let size = format!("{:x}\r\n", chunk.len());
            connection = connection.send(&size).send_bytes(chunk).send("\r\n");
        }
        connection.send("0\r\n\r\n").reply()
    };
    assert_eq!(chunked(100).status, 200);
    assert_eq!(chunked(MIB / 2).json()["error"]["code"], "context_length_exceeded");
    assert_eq!(chunked(2 * MIB).json()["error"]["code"], "request_too_large");
}

#[test]
fn idle_connections_make_place_for_new_ones() {
    let server = limited(Limits { connections: 16, ..Limits::default() });
    let body =
        json!({ "prompt": "fn main", "max_tokens": 400, "ignore_eos": true, "stream": true });
    let mut stream = server.connect().post("/v1/completions", body.to_string().as_bytes());
    assert_eq!(stream.head().0, 200);
    let mut idle: Vec<Connection> = (0..300).map(|_| server.connect()).collect();
    let partial = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{";
    let mut slow: Vec<Connection> = (0..300).map(|_| server.connect().send(partial)).collect();
    assert_eq!(ask(server.address).status, 200);
    assert!(idle[0].is_closed() && slow[0].is_closed());
    // Who is being answered is never closed for others.
    while stream.chunk().is_some() {}
}

#[test]
fn past_busy_connections_there_is_a_reason() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let server = Running::held(engine_config(), Settings { limits, ..settings() });
    let body = json!({ "prompt": "fn main", "max_tokens": 2, "stream": true }).to_string();
    let mut busy = [(); 2].map(|()| server.connect().post("/v1/completions", body.as_bytes()));
    // The engine makes no token meanwhile, so that both stay busy.
    assert_eq!(busy.each_mut().map(|connection| connection.head().0), [200, 200]);
    let mut third = server.connect();
    let reply = third.reply();
    assert_eq!(reply.status, 503);
    assert!(reply.body.contains("all 2 connections"), "{}", reply.body);
    server.run_freely();
    busy.iter_mut().for_each(|connection| while connection.chunk().is_some() {});
    server.wait_until_idle();
}

#[test]
fn settings_are_not_multiplied_by_prompts_without_bound() {
    let server = Running::usual();
    let bias: serde_json::Map<_, _> = (0..2000).map(|id| (id.to_string(), json!(1))).collect();
    let prompts = vec!["a"; 200];
    let body = json!({ "prompt": prompts, "logit_bias": bias, "max_tokens": 1 }).to_string();
    server.post("/v1/completions", &body).ok();
    let prompts = vec!["a"; 250];
    let stops = vec![1; 4000];
    let completion = json!({ "prompt": prompts, "logit_bias": bias, "stop_token_ids": stops });
    let params = json!({ "logit_bias": bias, "stop_token_ids": stops });
    let generate = json!({ "text": prompts, "sampling_params": params });
    for (path, body) in [("/v1/completions", completion), ("/generate", generate)] {
        let reply = server.post(path, &body.to_string());
        assert_eq!(reply.status, 400);
        assert!(reply.body.contains("fewer prompts"), "{}", reply.body);
    }
}

#[test]
fn more_prompts_than_may_wait_are_refused_before_anything_is_made_of_them() {
    let server = Process::start();
    let prompts = vec!["a"; 100_000];
    let before = server.peak();
    let long = "x".repeat(4 * MIB);
    let stops: Vec<String> = (0..100).map(|i| format!("{i}{}", "y".repeat(30_000))).collect();
    let settings = json!({ "stop": &long[MIB..], "json_schema": &long[MIB..] });
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": prompts, "rid": long })),
        ("/v1/completions", json!({ "prompt": prompts, "stop": stops })),
        ("/generate", json!({ "text": prompts, "rid": long })),
        ("/generate", json!({ "text": prompts, "sampling_params": settings })),
        ("/generate", json!({ "text": &prompts[..200], "sampling_params": settings })),
        ("/generate", json!({ "text": &prompts[..200], "rid": long })),
        ("/v1/completions", json!({ "prompt": &prompts[..200], "rid": long })),
        ("/v1/completions", json!({ "prompt": "a", "stop": stops })),
    ] {
        let reply = server.post(path, body.to_string().as_bytes());
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
    }
    // A few bodies' worth, where a copy for each prompt would be gigabytes.
    let grown = server.peak() - before;
    assert!(grown < 400 * MIB as u64, "{grown} bytes more");
}

/// A server in a process of its own.
struct Process {
    child: Child,
    address: SocketAddr,
    /// Bytes that requests may take.
    requests: u64,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Process {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "hostile::as_server"])
            .env(AS_SERVER, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        let (address, requests) = line.trim().split_once(' ').expect("an address and bytes");
        let (address, requests) = (address.parse().unwrap(), requests.parse().unwrap());
        Self { child, address, requests, stderr }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The most memory that it ever had, in bytes.
    fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    fn post(&self, path: &str, body: &[u8]) -> Reply {
        Connection::open(self.address).post(path, body).reply()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test unless a test starts it: a server that ends by signals.
#[test]
fn as_server() {
    if std::env::var_os(AS_SERVER).is_none() {
        return;
    }
    let (generator, mut settings) = (generator(), settings());
    // What no attack here asks for would hide what it takes.
    settings.limits.returned_bytes = MIB;
    settings.limits.grammar_bytes = MIB;
    let requests = RequestMemory::of(&generator, &settings).total();
    let told = |address| eprintln!("{address} {requests}");
    let address = Address::take("127.0.0.1", 0).unwrap();
    let say = |line: std::fmt::Arguments<'_>| eprintln!("{line}");
    aquila_server::run(address, generator, settings, told, say).unwrap();
}

#[test]
fn hostile_clients_stay_within_the_memory_of_requests() {
    let server = Process::start();
    assert_eq!(ask(server.address).status, 200);
    let before = server.peak();
    let size = 8 * MIB - 100;
    let words = json!({ "prompt": "word ".repeat(size / 5) }).to_string();
    let ids = format!("{{\"prompt\": [{}1]}}", "1,".repeat(size / 2 - 20));
    let values = format!("{{\"a\": [{}1]}}", "{},".repeat(size / 3 - 20));
    let deep = "[".repeat(size);
    let mut invalid = words.clone().into_bytes();
    invalid[size / 2] = 0xff;
    let bodies = [
        ("/v1/completions", words.as_bytes()),
        ("/v1/chat/completions", values.as_bytes()),
        ("/generate", ids.as_bytes()),
        ("/tokenize", words.as_bytes()),
        ("/detokenize", deep.as_bytes()),
        ("/v1/completions", &invalid),
        ("/add_external_corpus", deep.as_bytes()),
        ("/v1/completions", ids.as_bytes()),
    ];
    let partial = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n{";
    let idle: Vec<Connection> = (0..200).map(|_| Connection::open(server.address)).collect();
    let half_open = Connection::open(server.address).send("GET / HT").half_close();
    std::thread::scope(|scope| {
        for (path, body) in bodies.iter().chain(&bodies) {
            let server = &server;
            scope.spawn(move || {
                let reply = server.post(path, body);
                assert!(matches!(reply.status, 400 | 503), "{path}: {}", reply.body);
            });
            // Uploads that end early.
            scope.spawn(move || drop(Connection::open(server.address).send(partial)));
        }
        for _ in 0..8 {
            assert_eq!(ask(server.address).status, 200);
        }
    });
    assert_eq!(ask(server.address).status, 200);
    let grown = server.peak() - before;
    let most = server.requests + server.requests / 5;
    assert!(grown <= most, "{grown} bytes more, but requests may take {most}");
    drop((idle, half_open));
}

#[test]
fn one_signal_drains_and_two_end_at_once() {
    for signals in [[Signal::TERM, Signal::TERM], [Signal::INT, Signal::TERM]] {
        let mut server = Process::start();
        // More than the test could ever wait for.
        let body = json!({
            "prompt": vec!["fn main"; 250], "max_tokens": 500, "ignore_eos": true, "stream": true,
        });
        let post = Connection::open(server.address);
        let mut stream = post.post("/v1/completions", body.to_string().as_bytes());
        assert_eq!(stream.head().0, 200);
        server.signal(signals[0]);
        let mut line = String::new();
        server.stderr.read_line(&mut line).unwrap();
        assert!(line.contains("finishing what is under way"), "{line}");
        server.signal(signals[1]);
        assert_eq!(server.child.wait().unwrap().code(), Some(1));
        line.clear();
        server.stderr.read_to_string(&mut line).unwrap();
        assert!(line.contains("ended with requests under way"), "{line}");
    }
    let mut server = Process::start();
    let idle = Connection::open(server.address);
    server.signal(Signal::TERM);
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    drop(idle);
}
