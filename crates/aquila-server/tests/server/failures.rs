//! A round that panics fails its requests, and the server serves on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquila_compute::cpu::{Operation, Watch};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, generator_on, settings};

/// Panics in the middle of a forward pass when it is told to.
#[derive(Default)]
struct Fault(AtomicBool);

impl Watch for Fault {
    fn begin(&self, operation: Operation) {
        if operation == Operation::Attend && self.0.swap(false, Ordering::AcqRel) {
            panic!("a fault was injected");
        }
    }
}

#[test]
fn a_panic_in_a_round_fails_its_requests_and_the_server_serves_on() {
    let fault = Arc::new(Fault::default());
    let generator = generator_on(engine_config(), |cpu| cpu.watched(fault.clone()));
    let server = Running::start(generator, settings());
    let short = json!({ "prompt": "fn main", "max_tokens": 8, "temperature": 0 }).to_string();
    let before = server.post("/v1/completions", &short).ok();

    let long = |stream: bool| {
        let body = json!({
            "prompt": "use std", "max_tokens": 480, "ignore_eos": true, "stream": stream,
        });
        body.to_string().into_bytes()
    };
    let mut whole = server.connect().post("/v1/completions", &long(false));
    let mut stream = server.connect().post("/v1/completions", &long(true));
    server.wait_until("both run", |s| s.running == 2 && s.completion_tokens > 20);
    fault.0.store(true, Ordering::Release);

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
