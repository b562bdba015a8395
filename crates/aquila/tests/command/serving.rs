//! How a server starts: where it listens, and what it says that it serves.

use std::io::Read;
use std::net::{Ipv6Addr, TcpListener};
use std::path::Path;

use serde_json::Value;

use crate::run::{run, without_tokenizer};
use crate::server::Served;

fn started(flags: &[&str]) -> Served {
    Served::start_with(flags).unwrap_or_else(|ran| panic!("{flags:?}: {}", ran.stderr))
}

#[test]
fn a_model_without_a_tokenizer_says_what_is_served() {
    let served = started(&[&without_tokenizer()]);
    assert!(!served.said.contains("any OpenAI client"), "{}", served.said);
    assert!(served.said.contains("chat and texts are refused"), "{}", served.said);
    let chat = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    assert_eq!(served.post("/v1/chat/completions", chat).0, 400);
    // What it proposes to try works.
    assert!(served.said.contains("/v1/completions and /generate are served with ids"));
    let (status, answer) = served.post("/v1/completions", r#"{"prompt": [1, 2, 3]}"#);
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = served.post("/generate", r#"{"input_ids": [1, 2, 3]}"#);
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_taken_port_is_noticed_before_anything_is_loaded() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let ran = run(&["serve", "--port", &port]);
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{}", ran.stderr);
    assert!(!ran.stderr.contains("model     tiny"), "{}", ran.stderr);
}

#[test]
fn an_address_of_ipv6_may_be_in_brackets() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        // A machine without IPv6: what is refused is the address, not how it is written.
        let ran = run(&["serve", "--port", "0", "--host", "[::1]"]);
        assert!(ran.stderr.contains("cannot listen on [::1]:0"), "{}", ran.stderr);
        return;
    }
    for host in ["[::1]", "::1"] {
        let served = started(&["--host", host, "--speculative-algorithm", "NONE"]);
        assert_eq!(served.get("/health").0, 200);
    }
}

#[test]
fn a_server_returns_the_rows_that_its_flags_name() {
    let served = started(&["--enable-return-hidden-states", "--speculative-algorithm", "EAGLE"]);
    assert!(served.said.contains("--max-returned-bytes"), "{}", served.said);
    let body = r#"{"text": "fn main", "sampling_params": {"max_new_tokens": 4, "temperature": 0},
                   "return_hidden_states": true}"#;
    let (status, answer) = served.post("/generate", body);
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let states = answer["meta_info"]["hidden_states"].as_array().unwrap();
    assert_eq!(states[0].as_array().unwrap().len(), answer["meta_info"]["prompt_tokens"]);
    assert_eq!(states.len(), 4);
    let (status, info) = served.get("/server_info");
    assert_eq!(status, 200);
    assert!(info.contains(r#""enable_return_hidden_states":true"#), "{info}");
}

#[test]
fn spans_go_to_a_collector_over_plain_http_alone() {
    for wrong in ["https://collector:4318", "collector:4317"] {
        let ran = run(&["serve", "--port", "0", "--otlp-traces-endpoint", wrong]);
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(
            ran.stderr.contains(&format!("--otlp-traces-endpoint {wrong}: ")),
            "{}",
            ran.stderr
        );
    }
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", collector.local_addr().unwrap());
    let flags = ["--otlp-traces-endpoint", &url, "--speculative-algorithm", "NONE"];
    let served = started(&flags);
    assert_eq!(served.get("/v1/models").0, 200);
    let mut head = [0; 15];
    collector.accept().unwrap().0.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"POST /v1/traces");
}

#[test]
fn experts_of_a_model_without_any_are_refused() {
    let ran = run(&["serve", "--port", "0", "--enable-return-routed-experts"]);
    assert_ne!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("--enable-return-routed-experts: "), "{}", ran.stderr);
    assert!(ran.stderr.contains("no layer with experts"), "{}", ran.stderr);
}

#[test]
fn a_name_that_is_empty_is_refused() {
    for name in ["", " "] {
        let ran = run(&["serve", "--port", "0", "--served-model-name", name]);
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains("--served-model-name"), "{}", ran.stderr);
    }
}

#[test]
fn routers_find_the_tokenizer_of_a_shipped_model() {
    let served = started(&["tiny", "--speculative-algorithm", "NONE"]);
    for route in ["/get_model_info", "/model_info", "/server_info"] {
        let (status, body) = served.get(route);
        assert_eq!(status, 200);
        let info: Value = serde_json::from_str(&body).unwrap();
        for key in ["model_path", "tokenizer_path"] {
            let folder = Path::new(info[key].as_str().unwrap());
            assert!(folder.is_absolute() && folder.join("tokenizer.json").is_file(), "{info}");
        }
        assert_eq!(info["served_model_name"], "tiny");
    }
    let asked = r#"{"model": "tiny", "prompt": "x", "max_tokens": 1}"#;
    assert_eq!(served.post("/v1/completions", asked).0, 200);
}
