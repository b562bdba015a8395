//! Anthropic's messages: blocks, events and errors.

use aquila_server::{ApiKey, Keys};
use serde_json::{Value, json};

use crate::support::{Running, generator, settings};
use crate::tools::add;

const MESSAGES: &str = "/v1/messages";

fn body(extra: Value) -> String {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "What is 3 + 4?" }],
        "temperature": 0, "max_tokens": 12,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

#[test]
fn a_message_has_the_text_of_a_chat() {
    let server = Running::usual();
    let messages = json!([
        { "role": "system", "content": "Be brief." }, { "role": "user", "content": "What is 3 + 4?" },
    ]);
    let chat = json!({ "messages": messages, "temperature": 0, "max_tokens": 12 });
    let chat = server.post("/v1/chat/completions", &chat.to_string()).ok();
    let asked = json!({ "system": [{ "type": "text", "text": "Be brief." }], "model": "tiny" });
    let message = server.post(MESSAGES, &body(asked.clone())).ok();
    assert_eq!(message["type"], "message");
    assert_eq!(message["role"], "assistant");
    assert_eq!(message["stop_reason"], "max_tokens");
    let text = message["content"][0]["text"].as_str().unwrap();
    assert_eq!(message["content"], json!([{ "type": "text", "text": text, "citations": null }]));
    assert_eq!(chat["choices"][0]["message"]["content"], text);
    assert_eq!(message["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(message["usage"]["output_tokens"], 12);
    let count = server.post("/v1/messages/count_tokens", &body(asked)).ok();
    assert_eq!(count, json!({ "input_tokens": chat["usage"]["prompt_tokens"] }));

    let stop = &text[4..7];
    let stopped = server.post(
        MESSAGES,
        &body(json!({
            "system": "Be brief.", "stop_sequences": [stop], "max_tokens": 30,
        })),
    );
    let stopped = stopped.ok();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], stop);
}

#[test]
fn events_tell_of_the_blocks_of_the_message() {
    let server = Running::usual();
    let tools = json!([{ "name": "add", "description": "Adds.", "input_schema": add() }]);
    for extra in [
        json!({}),
        json!({ "tools": tools, "tool_choice": { "type": "tool", "name": "add" },
            "max_tokens": 100 }),
        json!({ "tools": tools, "max_tokens": 100,
            "tool_choice": { "type": "any", "disable_parallel_tool_use": true } }),
    ] {
        let whole = server.post(MESSAGES, &body(extra.clone())).ok();
        let mut asked = extra;
        asked["stream"] = true.into();
        let (events, done) = server.post(MESSAGES, &body(asked)).named_events();
        assert!(!done, "Anthropic's streams end with their last event");
        assert_eq!(events[0].0, "message_start");
        assert_eq!(events[0].1["message"]["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
        assert_eq!(events.last().unwrap().0, "message_stop");
        let (_, last) = &events[events.len() - 2];
        assert_eq!(last["delta"]["stop_reason"], whole["stop_reason"]);
        assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        let deltas = events.iter().filter(|(name, _)| name == "content_block_delta");
        let pieces: String = deltas
            .map(|(_, event)| {
                let delta = &event["delta"];
                delta.get("text").or(delta.get("partial_json")).unwrap().as_str().unwrap()
            })
            .collect();
        let block = &whole["content"][0];
        if block["type"] == "text" {
            assert_eq!(block["text"], pieces.as_str());
        } else {
            assert_eq!(whole["stop_reason"], "tool_use");
            assert_eq!(block["name"], "add");
            assert!(block["id"].as_str().unwrap().starts_with("toolu_"));
            assert_eq!(serde_json::from_str::<Value>(&pieces).unwrap(), block["input"]);
        }
    }
}

#[test]
fn conversations_with_calls_and_results_go_on() {
    let server = Running::usual();
    let messages = json!([
        { "role": "user", "content": "What is 3 + 4?" },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Easy.", "signature": "" },
            { "type": "text", "text": "Let me see." },
            { "type": "tool_use", "id": "toolu_1", "name": "add", "input": { "a": 3, "b": 4 } }] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "toolu_1", "content": [
                { "type": "text", "text": "7" }] },
            { "type": "text", "text": "Well?" }] },
    ]);
    let message = server.post(MESSAGES, &body(json!({ "messages": messages }))).ok();
    assert_eq!(message["content"][0]["type"], "text");
}

#[test]
fn errors_are_in_the_form_of_anthropic() {
    let mut settings = settings();
    settings.keys = Keys::new(vec![ApiKey::new("me", "sk-1").unwrap()], None);
    let server = Running::start(generator(), settings);
    let post = |key: &str, path: &str, body: &str| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        server.connect().send(&head).send(body).reply()
    };
    let image = json!({ "messages": [{ "role": "user", "content": [{ "type": "image" }] }] });
    for (key, path, body, status, kind, says) in [
        ("sk-1", MESSAGES, "{", 400, "invalid_request_error", "not JSON"),
        ("sk-1", MESSAGES, "{\"messages\": []}", 400, "invalid_request_error", "messages"),
        (
            "sk-1",
            MESSAGES,
            &body(json!({ "max_tokens": null })),
            400,
            "invalid_request_error",
            "max_tokens",
        ),
        ("sk-1", MESSAGES, &body(image), 400, "invalid_request_error", "`image`"),
        ("sk-1", MESSAGES, &body(json!({ "model": "claude" })), 404, "not_found_error", "claude"),
        ("sk-2", MESSAGES, "{}", 401, "authentication_error", "key"),
        ("sk-1", "/v1/messages/nothing", "{}", 404, "not_found_error", "unknown route"),
    ] {
        let reply = post(key, path, body);
        assert_eq!(reply.status, status, "{}", reply.body);
        let error = reply.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], kind);
        assert!(error["error"]["message"].as_str().unwrap().contains(says), "{error}");
    }
    assert_eq!(post("sk-1", MESSAGES, &body(json!({}))).status, 200);
}

#[test]
fn pages_of_strangers_are_refused_in_anthropics_form() {
    let server = Running::usual();
    let head = format!(
        "POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n\
         Content-Length: 0\r\n\r\n"
    );
    let reply = server.connect().send(&head).reply();
    assert_eq!(reply.status, 403);
    let error = reply.json();
    assert_eq!(error["type"], "error");
    assert_eq!(error["error"]["type"], "permission_error");
}
