//! A round that panics fails its requests, and the server serves on.

use serde_json::{Value, json};

use crate::support::{Running, engine_config, settings};

#[test]
fn a_panic_fails_its_requests_and_the_server_serves_on() {
    let server = Running::held(engine_config(), settings());
    server.run_freely();
    let short = json!({ "prompt": "fn main", "max_tokens": 8, "temperature": 0 }).to_string();
    let before = server.post("/v1/completions", &short).ok();

    let long = |stream: bool| {
        let body = json!({
            "prompt": "use std", "max_tokens": 480, "ignore_eos": true, "stream": stream,
        });
        body.to_string().into_bytes()
    };
    server.hold();
    let mut whole = server.connect().post("/v1/completions", &long(false));
    let mut stream = server.connect().post("/v1/completions", &long(true));
    server.wait_until("both run", |s| s.running == 2 && s.completion_tokens > 20);
    server.inject_fault();
    server.run_freely();

    let reply = whole.reply();
    assert_eq!(reply.status, 500);
    let error = &reply.json()["error"];
    assert_eq!(error["type"], "server_error");
    assert!(error["message"].as_str().unwrap().contains("a fault was injected"));
    let reply = stream.reply();
    let last = reply.body.trim_end().rsplit("\n\n").next().unwrap();
    let last: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(last["error"]["type"], "server_error");
    assert!(!reply.body.contains("[DONE]"));

    server.wait_until_idle();
    assert_eq!(server.stats().failed_rounds, 1);
    assert_eq!(server.get("/health_generate").status, 200);
    let after = server.post("/v1/completions", &short).ok();
    assert_eq!(after["choices"], before["choices"]);
}
