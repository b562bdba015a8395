//! A round that panics fails its requests, and the server serves on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquila_compute::cpu::{Operation, Watch, Watched};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, generator_on, settings};

/// Panics in the middle of a forward pass when it is told to.
struct Fault(Arc<AtomicBool>);

impl Watch for Fault {
    fn around<T>(&self, operation: Operation, run: impl FnOnce() -> T) -> T {
        if operation == Operation::Attend && self.0.swap(false, Ordering::AcqRel) {
            panic!("a fault was injected");
        }
        run()
    }
}

#[test]
fn a_panic_in_a_round_fails_its_requests_and_the_server_serves_on() {
    let fault = Arc::new(AtomicBool::new(false));
    let injected = fault.clone();
    let generator = generator_on(engine_config(), |cpu| Watched::new(cpu, Fault(injected)));
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
    fault.store(true, Ordering::Release);

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
