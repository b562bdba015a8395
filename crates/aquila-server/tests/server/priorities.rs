//! Priorities over HTTP, and what the server says about its schedule.

use aquila_engine::{EngineConfig, Priorities};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, generator_of, settings};

/// A server that runs one request at a time; the test may hold it.
fn narrow(priorities: Priorities) -> Running {
    let config = EngineConfig { max_running_requests: 1, ..engine_config() };
    let server = Running::held_with(config, settings(), |mut engine| {
        engine.prioritize(priorities);
        engine
    });
    server.run_freely();
    server
}

/// The same short request in the words of each route.
fn short(priority: Value) -> [(&'static str, Value); 3] {
    let params = json!({ "max_new_tokens": 3, "temperature": 0, "ignore_eos": true });
    let messages = json!([{ "role": "user", "content": "use std" }]);
    [
        (
            "/generate",
            json!({ "text": "use std", "sampling_params": params, "priority": priority }),
        ),
        ("/v1/completions", json!({ "prompt": "use std", "max_tokens": 3, "priority": priority })),
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 3, "priority": priority }),
        ),
    ]
}

#[test]
fn urgent_requests_preempt_on_every_route_and_change_no_text() {
    let ranked = Priorities::Ranked { low_values_first: false, preemption_threshold: 10 };
    let server = narrow(ranked);
    let params = json!({ "max_new_tokens": 450, "temperature": 0, "ignore_eos": true });
    let long = json!({ "text": "fn main", "sampling_params": params, "priority": 0 }).to_string();
    let undisturbed = server.post("/generate", &long).ok();
    for (times, (route, urgent)) in short(json!(10)).into_iter().enumerate() {
        assert_eq!(server.post("/flush_cache", "").status, 200);
        server.hold();
        let mut under_way = server.connect().post("/generate", long.as_bytes());
        server.wait_until("running", |s| s.running == 1);
        let mut urgent = server.connect().post(route, urgent.to_string().as_bytes());
        server.wait_until(route, |s| s.preemptions == times as u64 + 1);
        server.run_freely();
        urgent.reply().ok();
        assert_eq!(under_way.reply().ok()["text"], undisturbed["text"], "{route}");
    }
    let info = server.get("/server_info").ok();
    assert_eq!(info["enable_priority_scheduling"], true);
    assert_eq!(info["schedule_low_priority_values_first"], false);
    assert_eq!(info["priority_scheduling_preemption_threshold"], 10);
}

#[test]
fn a_priority_is_whole_and_ignored_or_refused_when_disabled() {
    let ignoring = Running::usual();
    let refusing = narrow(Priorities::Refused);
    for (route, body) in short(json!(-7)) {
        ignoring.post(route, &body.to_string()).ok();
        let refused = refusing.post(route, &body.to_string());
        assert_eq!(refused.status, 400, "{route}");
        let error = &refused.json()["error"];
        assert_eq!(error["param"], "priority", "{route}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("priority scheduling"), "{message}");
    }
    for (route, body) in short(Value::Null) {
        refusing.post(route, &body.to_string()).ok();
    }
    for wrong in [json!("high"), json!(1.5), json!([1]), json!(1_u64 << 63)] {
        for (route, body) in short(wrong.clone()) {
            let refused = ignoring.post(route, &body.to_string());
            assert_eq!(refused.status, 400, "{route}: {wrong}");
            assert_eq!(refused.json()["error"]["param"], "priority", "{route}: {wrong}");
        }
    }
}

#[test]
fn the_server_says_whether_rounds_overlap_and_why() {
    for apart in [false, true] {
        let generator = generator_of(
            engine_config(),
            |cpu| cpu,
            |engine| if apart { engine.overlapped().unwrap() } else { engine },
        );
        let server = Running::start(generator, settings());
        let info = server.get("/server_info").ok();
        assert_eq!(info["disable_overlap_schedule"], !apart);
        assert_eq!(info["overlap_schedule_reason"], settings().overlap_reason);
        assert_eq!(info["enable_priority_scheduling"], false);
    }
}
