//! A round that panics fails its requests, and the server serves on; an engine that can serve no more
//! is told by whatever is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquila_compute::cpu::CpuBackend;
use aquila_engine::executor::{BatchOutput, Executor, ModelExecutor, Profile, ScheduledBatch};
use aquila_engine::{EngineFailure, Scheduler};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, generator_over, settings};

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

/// Runs rounds until it is told to break, and then up to the next one that admits a request: rounds of
/// requests that have ended may still be on their way.
struct Breaking {
    compute: ModelExecutor<CpuBackend>,
    told: Arc<AtomicBool>,
    /// The first round that breaks.
    first: Option<u64>,
    breaks: fn(BatchOutput) -> BatchOutput,
}

impl Executor for Breaking {
    fn profile(&self) -> Profile {
        self.compute.profile()
    }

    fn enqueue(&mut self, batch: ScheduledBatch) {
        if !batch.admitted.is_empty() && self.told.load(Ordering::Acquire) {
            self.first.get_or_insert(batch.number);
        }
        self.compute.enqueue(batch);
    }

    fn finish(&mut self) -> BatchOutput {
        let output = self.compute.finish();
        let breaks = self.first.is_some_and(|first| output.number >= first);
        if breaks { (self.breaks)(output) } else { output }
    }
}

/// Breaks a server's engine in the middle of its life; `why` is what the server then says.
fn breaks(overlapped: bool, breaks: fn(BatchOutput) -> BatchOutput, why: &str) {
    let told = Arc::new(AtomicBool::new(false));
    let breaking = told.clone();
    let generator = generator_over(
        engine_config(),
        |cpu| cpu,
        |runner, config| {
            let compute = ModelExecutor::new(runner, config.clone());
            let executor = Breaking { compute, told: breaking, first: None, breaks };
            let engine = Scheduler::over(executor, config).unwrap();
            if overlapped { engine.overlapped().unwrap() } else { engine }
        },
    );
    let mut server = Running::start(generator, settings());
    let short = json!({ "prompt": "fn main", "max_tokens": 8, "temperature": 0 }).to_string();
    server.post("/v1/completions", &short).ok();
    for health in ["/health", "/health_generate"] {
        assert_eq!(server.get(health).status, 200);
    }

    told.store(true, Ordering::Release);
    let failed = server.post("/v1/completions", &short);
    assert_eq!(failed.status, 500);
    assert!(failed.body.contains(why), "{}", failed.body);

    let message = json!({ "max_tokens": 8, "messages": [{ "role": "user", "content": "hi" }] });
    for reply in [
        server.get("/health"),
        server.get("/health_generate"),
        server.post("/v1/completions", &short),
        server.post("/generate", r#"{"text": "fn main"}"#),
        server.post("/v1/messages", &message.to_string()),
    ] {
        assert_eq!(reply.status, 503, "{}", reply.body);
        let said = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(said.contains("the engine has failed") && said.contains(why), "{said}");
    }
    assert_eq!(server.get("/health").json()["error"]["code"], "engine_failed");
    assert_eq!(server.get("/metrics").status, 200);
    server.join();
}

#[test]
fn a_lost_device_is_told_by_health_and_to_new_requests() {
    for overlapped in [false, true] {
        let lose = |output| {
            let lost = EngineFailure::DeviceLost("it left the bus".into());
            BatchOutput { outcome: Err(lost.into()), ..output }
        };
        breaks(overlapped, lose, "the device is lost: it left the bus");
    }
}

#[test]
fn an_engine_that_panicked_is_told_by_health() {
    // The engine's thread insists on the order of rounds.
    let misnumber = |output: BatchOutput| BatchOutput { number: output.number + 1, ..output };
    breaks(false, misnumber, "rounds come back in the order");
}
