//! The end of a server: no new requests, and the old ones finish.

use serde_json::{Value, json};

use crate::support::{Running, engine_config, settings, wait_for};

#[test]
fn a_draining_server_finishes_its_streams_and_refuses_the_rest() {
    let mut server = Running::held(engine_config(), settings());
    let body =
        json!({ "prompt": "fn main", "max_tokens": 400, "ignore_eos": true, "stream": true });
    let mut stream = server.connect().post("/v1/completions", body.to_string().as_bytes());
    let (status, _) = stream.head();
    assert_eq!(status, 200);
    server.wait_until("some tokens are there", |s| s.completion_tokens > 20);
    let mut text = stream.chunk().expect("a first chunk");
    let mut idle = server.connect();
    server.stop();
    // On a connection that is open already, and on a new one.
    let health = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut refused = loop {
        idle = idle.send(health);
        let reply = idle.reply();
        if reply.status != 200 {
            break reply;
        }
    };
    for _ in 0..2 {
        assert_eq!(refused.status, 503);
        assert_eq!(refused.json()["error"]["code"], "shutting_down");
        assert!(refused.header("retry-after").is_some());
        refused = server.post("/v1/completions", r#"{"prompt": "hi"}"#);
    }
    server.run_freely();
    while let Some(chunk) = stream.chunk() {
        text.extend(chunk);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"));
    let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: {"));
    let last = events.last().unwrap();
    let last: Value = serde_json::from_str(&format!("{{{last}")).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    server.join();
    assert!(std::net::TcpStream::connect(server.address).is_err());
}

#[test]
fn an_idle_server_ends_at_once_though_connections_are_open() {
    let mut server = Running::usual();
    let mut connection = server.connect().send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(connection.reply().status, 200);
    server.join();
    assert!(connection.is_closed());
}

#[test]
fn a_request_that_is_still_being_read_is_answered() {
    let mut server = Running::usual();
    let body = r#"{"prompt": "fn main", "max_tokens": 2}"#;
    let (half, rest) = body.split_at(9);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{half}",
        body.len()
    );
    let slow = server.connect().send(&head);
    let is_active = || {
        let page = server.get("/metrics").body;
        let active = |line: &str| {
            line.starts_with("sglang:http_requests_active")
                && line.contains("/v1/completions")
                && line.ends_with(" 1")
        };
        page.lines().any(active)
    };
    wait_for("the request has begun", is_active);
    server.stop();
    wait_for("the server drains", || server.get("/health").status != 200);
    slow.send(rest).reply().ok();
    server.join();
}
