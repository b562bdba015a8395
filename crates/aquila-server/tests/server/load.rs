//! Many clients at once, some of which leave, are too slow or too many.

use std::sync::Arc;
use std::time::Duration;

use aquila_engine::EngineConfig;
use aquila_text::SamplingParams;
use serde_json::{Value, json};

use crate::support::{Running, engine_config, offline, settings};

const CLIENTS: u64 = 64;
const TURNS: u64 = 3;

/// A stream of numbers for test cases.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// What a client asks for.
struct Wish {
    prompt: String,
    max_tokens: usize,
    seed: u64,
}

impl Wish {
    fn of(client: u64) -> Self {
        let mut numbers = Numbers(client);
        Self {
            prompt: format!(
                "fn number_{client}{} {{",
                "(a: u32)".repeat(numbers.below(6) as usize)
            ),
            max_tokens: 1 + numbers.below(90) as usize,
            seed: client,
        }
    }

    fn params(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: Some(self.max_tokens),
            temperature: Some(0.8),
            seed: Some(self.seed),
            ..SamplingParams::default()
        }
    }

    fn body(&self, stream: bool, rid: &str) -> Vec<u8> {
        let Self { prompt, max_tokens, seed } = self;
        let body = json!({
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": seed,
            "stream": stream, "rid": rid,
        });
        body.to_string().into_bytes()
    }
}

fn text(events: &[Value]) -> String {
    events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect()
}

/// One client's requests: each is read to its end, left in the middle, or aborted by name.
fn talk(server: &Running, client: u64, expected: &str) {
    let wish = Wish::of(client);
    let mut numbers = Numbers(client + 1000);
    for turn in 0..TURNS {
        let rid = format!("{client}-{turn}");
        let way = numbers.below(5);
        let mut connection = server.connect().post("/v1/completions", &wish.body(way != 1, &rid));
        match way {
            1 => assert_eq!(connection.reply().ok()["choices"][0]["text"], expected),
            2 => {
                connection.head();
                for _ in 0..numbers.below(8) {
                    if connection.chunk().is_none() {
                        break;
                    }
                }
            }
            3 => {
                connection.head();
                connection.chunk();
                let abort = json!({ "rid": rid }).to_string();
                assert_eq!(server.post("/abort_request", &abort).status, 200);
            }
            _ => assert_eq!(text(&connection.reply().events()), expected),
        }
    }
}

#[test]
fn sixty_four_clients_get_the_offline_text() {
    // So few slots that requests are retracted and resumed.
    let config = EngineConfig { max_total_tokens: 320, ..engine_config() };
    let server = Arc::new(Running::held(config, settings()));
    server.run_freely();
    let expected: Vec<String> = (0..CLIENTS)
        .map(Wish::of)
        .map(|wish| offline(&server.generator, &wish.prompt, wish.params()))
        .collect();
    server.hold();
    std::thread::scope(|scope| {
        for (client, expected) in expected.iter().enumerate() {
            let server = server.clone();
            scope.spawn(move || talk(&server, client as u64, expected));
        }
        server.wait_until("half of them are there", |s| s.running + s.waiting >= 32);
        server.run_freely();
    });
    server.wait_until_idle();
    assert_eq!(server.stats().failed_rounds, 0);
    assert_eq!(server.stats().finished, CLIENTS + CLIENTS * TURNS);
    assert!(server.stats().preemptions > 0, "the pool was large enough for all");
}

#[test]
fn a_client_that_leaves_frees_its_slots() {
    let config = EngineConfig { max_running_requests: 2, ..engine_config() };
    let server = Running::held(config, settings());
    let body = |stream| {
        let body = json!({
            "prompt": "fn main", "max_tokens": 480, "ignore_eos": true, "stream": stream,
        });
        body.to_string().into_bytes()
    };
    let clients: Vec<_> = [true, false, true, false]
        .map(|stream| server.connect().post("/v1/completions", &body(stream)))
        .into();
    server.wait_until("two run, two wait", |s| s.running == 2 && s.waiting == 2);
    drop(clients);
    server.wait_until_idle();
    assert!(server.stats().completion_tokens < 4 * 480);
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let mut settings = settings();
    settings.limits.unread_pieces = 4;
    settings.limits.stall_time = Duration::from_millis(500);
    let server = Running::start(crate::support::generator(), settings);
    // Every event repeats all before it, so that the kernel's buffers fill soon.
    let body = json!({
        "text": "fn main", "stream": true, "return_logprob": true, "top_logprobs_num": 100,
        "sampling_params": { "max_new_tokens": 500, "ignore_eos": true },
    });
    let connection = server.connect().post("/generate", body.to_string().as_bytes());
    server.wait_until("it ended", |s| s.finished == 1);
    server.wait_until_idle();
    assert!(server.stats().completion_tokens < 500, "it was read to its end");
    drop(connection);
    assert_eq!(server.get("/health_generate").status, 200);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let config =
        EngineConfig { max_running_requests: 1, max_queued_requests: 2, ..engine_config() };
    let server = Running::held(config, settings());
    let body = json!({ "prompt": "fn main", "max_tokens": 480, "ignore_eos": true }).to_string();
    let first = server.connect().post("/v1/completions", body.as_bytes());
    server.wait_until("one runs", |s| s.running == 1);
    let waiting = [(); 2].map(|()| server.connect().post("/v1/completions", body.as_bytes()));
    server.wait_until("two wait", |s| s.waiting == 2);
    let reply = server.post("/v1/completions", &body);
    assert_eq!(reply.status, 503);
    assert!(reply.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    assert_eq!(reply.json()["error"]["code"], "queue_full");
    drop((first, waiting));
    server.wait_until_idle();
    server.run_freely();
    let short = json!({ "prompt": "fn main", "max_tokens": 1 }).to_string();
    server.post("/v1/completions", &short).ok();
}

#[test]
fn requests_beyond_their_time_are_ended() {
    let mut settings = settings();
    settings.limits.request_time = Some(Duration::from_millis(100));
    // Passes are at least a millisecond apart, so that 480 take longer than that on any machine.
    let server = Running::held(engine_config(), settings);
    let mut body = json!({ "prompt": "fn main", "n": 64, "max_tokens": 480, "ignore_eos": true });
    let mut whole = server.connect().post("/v1/completions", body.to_string().as_bytes());
    server.wait_until("its answers ended", |s| s.finished == 64);
    let reply = whole.reply();
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (504, &json!("timeout")));
    body["stream"] = true.into();
    let mut stream = server.connect().post("/v1/completions", body.to_string().as_bytes());
    server.wait_until("its answers ended", |s| s.finished == 128);
    let reply = stream.reply();
    let last = reply.body.trim_end().rsplit("\n\n").next().unwrap();
    let error: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "timeout");
    server.wait_until_idle();
}

#[test]
fn prompts_may_be_limited_below_the_context() {
    let mut settings = settings();
    settings.limits.prompt_tokens = Some(4);
    let server = Running::start(crate::support::generator(), settings);
    let reply = server.post("/v1/completions", r#"{"prompt": [1, 2, 3, 4, 5]}"#);
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
    server.post("/v1/completions", r#"{"prompt": [1, 2, 3, 4]}"#).ok();
}

#[test]
fn any_number_of_unread_pieces_may_be_allowed() {
    let mut settings = settings();
    settings.limits.unread_pieces = usize::MAX;
    let server = Running::start(crate::support::generator(), settings);
    let body = json!({ "prompt": "fn main", "max_tokens": 3, "stream": true, "n": 2 }).to_string();
    server.post("/v1/completions", &body).events();
}
