//! The log: what it says of requests, and what its lines look like.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use crate::run::{Ran, aquila};
use crate::server::Served;

const PLAIN: [&str; 2] = ["--speculative-algorithm", "NONE"];
const ASK: &str = r#"{"prompt": "x", "max_tokens": 1}"#;

fn post(served: &Served, headers: &str, body: &str) -> (u16, String) {
    let length = body.len();
    served.ask(&format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: \
         {length}\r\n\r\n{body}"
    ))
}

#[test]
fn every_request_is_a_line_with_its_id() {
    let mut served = Served::start_with(&PLAIN).unwrap();
    let (status, answer) = post(&served, "X-Request-Id: mine-1\r\n", ASK);
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let line = served.logged("request ");
    let id = answer["id"].as_str().unwrap();
    for part in [
        "method=POST",
        "path=/v1/completions",
        "status=200",
        "ms=",
        "id=mine-1",
        "peer=127.0.0.1:",
        id,
    ] {
        assert!(line.contains(part), "{line} lacks {part}");
    }
    post(&served, "", "{");
    let line = served.logged("request ");
    assert!(line.contains("status=400") && line.contains("error=invalid_request_error"), "{line}");
    assert!(line.contains("id=req-"), "{line}");
    // Probes are not logged; a query, which may hold secrets, neither.
    served.get("/health");
    served.get("/v1/models?key=secret");
    let line = served.logged("request ");
    assert!(line.contains("path=/v1/models ") && !line.contains("secret"), "{line}");
    // Nothing here is a terminal.
    assert!(!line.contains('\x1b') && !served.said.contains('\x1b'));
}

#[test]
fn lines_are_json_where_asked_for() {
    let mut served = Served::start_with(&[&PLAIN[..], &["--log-format", "json"]].concat()).unwrap();
    for line in served.said.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(line["message"].is_string() && line["level"].is_string(), "{line}");
    }
    post(&served, "X-Request-Id: mine-2\r\n", ASK);
    let line: Value = serde_json::from_str(&served.logged("\"request\"")).unwrap();
    assert_eq!((&line["id"], &line["status"]), (&"mine-2".into(), &200.into()));
    assert!(line["ms"].as_f64().unwrap() > 0.0 && line.get("cut").is_none(), "{line}");
}

#[test]
fn a_log_that_nobody_can_mean_is_refused() {
    for (value, why) in [("verbose", "`verbose` is no level"), ("aquila=loud", "aquila=loud")] {
        for args in [&["serve", "--port", "0", "--log-level", "info"][..], &["inspect", "tiny"]] {
            let ran = Ran::of(aquila(args).env("AQUILA_LOG", value).output().unwrap());
            assert_eq!(ran.code, Some(2), "{}", ran.stderr);
            let says = ran.stderr.contains(why) && ran.stderr.contains("error, warn, info, debug");
            assert!(says, "{}", ran.stderr);
        }
    }
    let ran = Ran::of(aquila(&["inspect", "tiny"]).env("AQUILA_LOG", "").output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
}

#[test]
fn a_log_that_nobody_reads_keeps_nobody_waiting() {
    let served = Served::start_with(&PLAIN).unwrap();
    // More lines than a pipe holds, and than may wait.
    let requests = 8000;
    let mut socket = TcpStream::connect(served.address).unwrap();
    let mut answers = BufReader::new(socket.try_clone().unwrap());
    let ask = "GET /no/such/route HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100);
    for _ in 0..requests / 100 {
        socket.write_all(ask.as_bytes()).unwrap();
        for _ in 0..100 {
            let mut length = 0;
            let mut line = String::new();
            while line != "\r\n" {
                line.clear();
                assert!(answers.read_line(&mut line).unwrap() > 0, "the connection was closed");
                if let Some(value) = line.strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
            }
            answers.read_exact(&mut vec![0; length]).unwrap();
        }
    }
    assert_eq!(served.get("/health").0, 200);
}
