//! What comes in wrong: a clear refusal, and the server goes on.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::support::{Running, settings};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// What a refusal must say.
struct Case {
    path: &'static str,
    body: Vec<u8>,
    status: u16,
    param: Value,
    /// Part of the message.
    says: &'static str,
}

fn case(path: &'static str, body: impl ToString, param: &str, says: &'static str) -> Case {
    let param = if param.is_empty() { Value::Null } else { param.into() };
    Case { path, body: body.to_string().into_bytes(), status: 400, param, says }
}

fn chat(extra: Value, param: &str, says: &'static str) -> Case {
    let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    case(CHAT, body, param, says)
}

fn completion(extra: Value, param: &str, says: &'static str) -> Case {
    let mut body = json!({ "prompt": "hi" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    case(COMPLETIONS, body, param, says)
}

fn generation(extra: Value, param: &str, says: &'static str) -> Case {
    let mut body = json!({ "text": "hi" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    case("/generate", body, param, says)
}

fn messages(messages: Value, param: &str, says: &'static str) -> Case {
    case(CHAT, json!({ "messages": messages }), param, says)
}

fn many_biases() -> Value {
    (0..4097).map(|id: u32| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into()
}

fn response(extra: Value, param: &str, says: &'static str) -> Case {
    let mut body = json!({ "input": "hi" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    case("/v1/responses", body, param, says)
}

fn cases() -> Vec<Case> {
    let long = "word ".repeat(2000);
    vec![
        // Not JSON at all, or not an object.
        case(CHAT, "", "", "the body is empty"),
        case(CHAT, "{\"messages\": [", "", "line 1 column 14"),
        case(CHAT, "{\"messages\":\n}", "", "line 2 column 1"),
        case(CHAT, "[1, 2]", "", "must be a JSON object"),
        case(CHAT, "model=tiny&prompt=hi", "", "not JSON"),
        case(COMPLETIONS, "null", "", "must be a JSON object"),
        case("/generate", "{", "", "not JSON"),
        case("/tokenize", "nonsense", "", "not JSON"),
        Case {
            path: CHAT,
            body: b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}".to_vec(),
            status: 400,
            param: Value::Null,
            says: "invalid unicode code point at line 1 column",
        },
        // Wrong types, and values out of range.
        chat(json!({ "temperature": "hot" }), "temperature", "expected a number"),
        chat(json!({ "temperature": -0.5 }), "temperature", "from 0 up"),
        chat(json!({ "top_p": 1.5 }), "top_p", "at most 1"),
        chat(json!({ "top_p": 0 }), "top_p", "above 0"),
        chat(json!({ "n": 0 }), "n", "from 1"),
        chat(json!({ "n": 1.5 }), "n", "expected"),
        chat(json!({ "max_tokens": -1 }), "max_tokens", "expected a whole number"),
        chat(json!({ "max_tokens": 0 }), "max_completion_tokens", "at least 1"),
        chat(json!({ "max_completion_tokens": "9" }), "max_completion_tokens", "whole number"),
        chat(json!({ "stop": 5 }), "stop", "expected a string"),
        chat(json!({ "stop": [""] }), "stop", "empty"),
        chat(json!({ "stop": vec!["x"; 257] }), "stop", "at most 256 strings"),
        chat(json!({ "stop": "x".repeat(16385) }), "stop", "16384 bytes"),
        chat(json!({ "stop_token_ids": vec![1; 4097] }), "stop_token_ids", "at most 4096"),
        chat(json!({ "logit_bias": many_biases() }), "logit_bias", "at most 4096"),
        chat(json!({ "rid": "x".repeat(257) }), "rid", "at most 256"),
        completion(json!({ "rid": "x".repeat(257) }), "rid", "at most 256"),
        generation(json!({ "rid": "x".repeat(257) }), "rid", "at most 256"),
        generation(json!({ "rid": ["x".repeat(257)] }), "rid", "at most 256"),
        generation(
            json!({ "return_logprob": true, "top_logprobs_num": 101 }),
            "top_logprobs_num",
            "at most 100",
        ),
        chat(json!({ "stream": "yes" }), "stream", "boolean"),
        chat(json!({ "seed": "x" }), "seed", "whole number"),
        chat(json!({ "presence_penalty": 3 }), "presence_penalty", "from -2 to 2"),
        chat(json!({ "logit_bias": { "a": 1 } }), "logit_bias", "token ids"),
        chat(json!({ "logit_bias": { "99999999": 1 } }), "logit_bias", "99999999"),
        chat(json!({ "stop_token_ids": [99_999_999] }), "stop_token_ids", "99999999"),
        chat(json!({ "top_logprobs": 2 }), "top_logprobs", "logprobs"),
        chat(json!({ "logprobs": true, "top_logprobs": 999 }), "top_logprobs", "at most"),
        chat(json!({ "stream_options": {} }), "stream_options", "stream"),
        chat(json!({ "model": 7 }), "model", "string"),
        chat(json!({ "response_format": { "type": "xml" } }), "response_format", "json_schema"),
        chat(
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": 5 } } }),
            "response_format",
            "JSON schema",
        ),
        // What only the compiler finds is told by the field that it came in.
        chat(
            json!({ "response_format": {
                "type": "json_schema", "json_schema": { "schema": { "type": "strnig" } } } }),
            "response_format",
            "strnig",
        ),
        chat(json!({ "guided_regex": "(" }), "guided_regex", "unclosed"),
        chat(
            json!({ "response_format": { "type": "json_object" }, "regex": "a" }),
            "response_format",
            "`regex`",
        ),
        chat(json!({ "regex": "(" }), "regex", ""),
        chat(json!({ "ebnf": "root ::= other" }), "ebnf", ""),
        chat(json!({ "json_schema": "{" }), "json_schema", "not JSON"),
        chat(json!({ "guided_choice": [] }), "guided_choice", "at least one"),
        chat(
            json!({ "structured_outputs": { "regex": "a", "choice": ["b"] } }),
            "structured_outputs",
            "two constraints",
        ),
        chat(
            json!({ "structured_outputs": { "chioce": ["b"] } }),
            "structured_outputs.chioce",
            "`choice`",
        ),
        chat(json!({ "structural_tag": {} }), "structural_tag", "`structures`"),
        chat(json!({ "tool_choice": "required" }), "tool_choice", "`tools` has none"),
        chat(json!({ "tool_choice": "always" }), "tool_choice", "`required`"),
        chat(json!({ "tools": [{ "type": "retrieval" }] }), "tools[0].type", "`function`"),
        chat(
            json!({ "tools": [{ "type": "function", "function": {} }] }),
            "tools[0].function.name",
            "required",
        ),
        chat(
            json!({
                "tools": [{ "type": "function", "function": { "name": "f" } }],
                "tool_choice": { "type": "function", "function": { "name": "g" } },
            }),
            "tool_choice",
            "`g` is not among",
        ),
        chat(
            json!({ "tools": [{ "type": "function", "function": { "name": "f" } }], "regex": "a" }),
            "regex",
            "`tools`",
        ),
        messages(
            json!([{ "role": "assistant", "tool_calls": [{ "function": {} }] }]),
            "messages[0].tool_calls[0].function",
            "`name`",
        ),
        completion(json!({ "logprobs": true }), "logprobs", "invalid type"),
        completion(json!({ "prompt": 5 }), "prompt", "expected a string"),
        completion(json!({ "prompt": [] }), "prompt", "at least one"),
        completion(json!({ "prompt": "" }), "prompt", "empty"),
        completion(json!({ "prompt": [1, 99_999_999] }), "prompt", "index 1"),
        completion(json!({ "prompt": [-1] }), "prompt", "expected"),
        completion(json!({ "suffix": "x" }), "suffix", "not supported"),
        completion(json!({ "best_of": 3 }), "best_of", "equal"),
        completion(json!({ "prompt": long }), "prompt", "context length"),
        completion(json!({ "n": 100, "prompt": ["a", "b", "c"] }), "prompt", "at once"),
        // Conversations that are none.
        case(CHAT, json!({}), "messages", "required"),
        messages(json!([]), "messages", "at least one"),
        messages(json!("hi"), "messages", "invalid type"),
        messages(json!(["hi"]), "messages[0]", "object"),
        messages(json!([{ "content": "hi" }]), "messages[0].role", "string"),
        messages(json!([{ "role": "user" }]), "messages[0].content", "string"),
        messages(json!([{ "role": "user", "content": 5 }]), "messages[0].content", "string"),
        messages(
            json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }]),
            "messages[0].content[0]",
            "`image_url` is not supported",
        ),
        messages(json!([{ "role": "user", "content": long }]), "messages", "context length"),
        // SGLang's.
        case("/generate", "{}", "text", "input_ids"),
        case("/generate", json!({ "text": "a", "input_ids": [1] }), "input_ids", "not both"),
        case("/generate", json!({ "text": [] }), "text", "at least one"),
        case("/generate", json!({ "input_ids": [[1], "x"] }), "input_ids", "expected"),
        case(
            "/generate",
            json!({ "text": "a", "sampling_params": { "max_tokens": 5 } }),
            "sampling_params.max_tokens",
            "no such setting",
        ),
        case(
            "/generate",
            json!({ "text": "a", "sampling_params": { "max_new_tokens": "5" } }),
            "max_new_tokens",
            "whole number",
        ),
        case(
            "/generate",
            json!({ "text": ["a", "b"], "sampling_params": [{}] }),
            "sampling_params",
            "1 entries for 2 prompts",
        ),
        case("/generate", json!({ "text": "a", "sampling_params": { "regex": "(" } }), "regex", ""),
        // Fields that would change the answer and are not served.
        chat(json!({ "continue_final_message": true }), "continue_final_message", "not supported"),
        chat(json!({ "best_of": 2 }), "best_of", "not supported"),
        chat(json!({ "stop_regex": "a+" }), "stop_regex", "not supported"),
        chat(json!({ "return_hidden_states": true }), "return_hidden_states", "not supported"),
        chat(json!({ "modalities": ["text", "audio"] }), "modalities", "not supported"),
        completion(json!({ "lora_path": "x" }), "lora_path", "not supported"),
        completion(json!({ "echo": true, "use_beam_search": true }), "use_beam_search", "not"),
        generation(json!({ "return_indexer_topk": true }), "return_indexer_topk", "not supported"),
        generation(json!({ "custom_logit_processor": "x" }), "custom_logit_processor", "not"),
        generation(json!({ "image_data": ["x"] }), "image_data", "not supported"),
        generation(json!({ "sampling_params": { "stop_regex": "a" } }), "stop_regex", "not"),
        // Names that are none.
        chat(json!({ "max_token": 5 }), "max_token", "`max_tokens`"),
        chat(json!({ "temperatur": 0 }), "temperatur", "`temperature`"),
        chat(json!({ "nonsense": [1] }), "nonsense", "no such setting"),
        chat(
            json!({ "stream": true, "stream_options": { "include_usag": true } }),
            "stream_options.include_usag",
            "`include_usage`",
        ),
        completion(json!({ "stop_token_id": [1] }), "stop_token_id", "`stop_token_ids`"),
        completion(json!({ "max_new_tokens": 5 }), "max_new_tokens", "no such setting"),
        generation(json!({ "return_logprobs": true }), "return_logprobs", "`return_logprob`"),
        generation(
            json!({ "sampling_params": { "max_new_token": 5 } }),
            "sampling_params.max_new_token",
            "`max_new_tokens`",
        ),
        // OpenAI's responses.
        response(json!({ "metadata": { "a": "x".repeat(513) } }), "metadata", "values of 512"),
        response(json!({ "metadata": { "x".repeat(65): "a" } }), "metadata", "keys of 64"),
        response(
            json!({ "metadata": (0..17).map(|i| (i.to_string(), json!("a"))).collect::<serde_json::Map<_, _>>() }),
            "metadata",
            "16 pairs",
        ),
        response(json!({ "user": "x".repeat(513) }), "user", "at most 512"),
        response(
            json!({ "text": { "format": { "type": "json_schema", "name": "a", "schema": {}, "description": "x".repeat(1 << 20) } } }),
            "",
            "are repeated",
        ),
        case("/v1/responses", "{}", "input", "required"),
        case("/v1/responses", json!({ "input": 5 }), "input", "string"),
        case(
            "/v1/responses",
            json!({ "input": "a", "previous_response_id": "resp_1" }),
            "previous_response_id",
            "not stored",
        ),
        case(
            "/v1/responses",
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }),
            "input[0].content[0]",
            "`input_image` is not supported",
        ),
        case(
            "/v1/responses",
            json!({ "input": "a", "tools": [{ "type": "web_search" }] }),
            "tools[0].type",
            "`web_search` is not supported",
        ),
        case("/v1/responses", json!({ "input": "a", "background": true }), "background", "not"),
        Case { status: 404, ..case("/v1/embeddings", "{}", "", "embeddings are not supported") },
        Case { status: 404, ..case("/v1/audio/speech", "{}", "", "audio is not supported") },
        case("/abort_request", "{}", "rid", "abort_all"),
        case("/detokenize", json!({ "tokens": "x" }), "tokens", "expected"),
        case("/detokenize", json!({ "tokens": vec![1; 513] }), "tokens", "at most 512"),
        case("/detokenize", json!({ "tokens": vec![vec![1; 500]; 600] }), "tokens", "262144"),
        Case {
            status: 404,
            ..chat(json!({ "model": "gpt-4" }), "model", "`gpt-4` does not exist")
        },
        Case { status: 404, ..case("/v1/nothing", "{}", "", "unknown route: POST /v1/nothing") },
        Case { status: 405, ..case("/health", "{}", "", "does not take POST") },
    ]
}

#[test]
fn every_wrong_request_gets_a_refusal_that_names_the_parameter() {
    let server = Running::usual();
    // One connection for all: a refusal does not cost it.
    let mut connection = server.connect();
    for case in cases() {
        let shown = String::from_utf8_lossy(&case.body[..case.body.len().min(120)]).into_owned();
        connection = connection.post(case.path, &case.body);
        let reply = connection.reply();
        assert_eq!(reply.status, case.status, "{} {shown}: {}", case.path, reply.body);
        assert_eq!(reply.header("content-type"), Some("application/json"));
        let error = &reply.json()["error"];
        assert_eq!(error["param"], case.param, "{} {shown}: {error}", case.path);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(case.says), "{} {shown}: {message}", case.path);
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error.get("code").is_some());
    }
    assert_eq!(server.post(COMPLETIONS, r#"{"prompt": "hi"}"#).status, 200);
    server.wait_until_idle();
}

#[test]
fn what_openai_accepts_is_accepted() {
    let server = Running::usual();
    for extra in [
        json!({ "user": "someone", "metadata": { "a": 1 }, "store": false, "audio": null }),
        json!({ "temperature": null, "stop": null, "n": null, "seed": -5, "model": "tiny" }),
        json!({ "model": "models/tiny", "response_format": { "type": "text" } }),
        json!({ "model": "default", "tools": [], "tool_choice": "auto" }),
        json!({ "messages": [{ "role": "user", "content": [
            { "type": "text", "text": "one" }, { "type": "text", "text": "two" }] }] }),
        json!({ "bootstrap_room": 9_223_372_036_854_775_807_u64, "bootstrap_port": null }),
    ] {
        let case = chat(extra, "", "");
        let body = String::from_utf8(case.body).unwrap();
        let limited = body.replacen('{', "{\"max_tokens\": 2, ", 1);
        server.post(CHAT, &limited).ok();
    }
}

#[test]
fn fields_that_ask_for_what_is_done_anyway_are_accepted() {
    let server = Running::usual();
    let common = json!({
        "regex": null, "lora_path": null, "custom_logit_processor": null, "session_params": null,
        "return_indexer_topk": false, "background": false, "log_metrics": true, "user": "me",
        "unknown": null, "data_parallel_rank": 0, "max_tokens": 2,
    });
    let openai = json!({
        "return_hidden_states": false, "return_routed_experts": false, "no_stop_trim": false,
        "include_stop_str_in_output": false, "length_penalty": 1.0, "separate_reasoning": true,
        "stream_reasoning": true, "bad_words": [], "service_tier": "auto",
    });
    let chats = json!({
        "continue_final_message": false, "add_generation_prompt": true, "best_of": 1,
        "modalities": ["text"], "parallel_tool_calls": true, "verbosity": "medium",
        "function_call": "none", "reasoning_effort": null, "chat_template_kwargs": null,
        "stream": true, "stream_options": { "include_usage": true, "include_obfuscation": false },
    });
    let completions =
        json!({ "suffix": null, "best_of": 1, "response_format": { "type": "text" } });
    let generations = json!({
        "max_tokens": null, "image_data": null, "lora_path": [null], "return_hidden_states": false,
        "return_routed_experts": [false], "routed_experts_start_len": 0, "stream_options": {},
        "sampling_params": { "max_new_tokens": 2, "json_schema": null, "custom_params": {} },
    });
    for (case, parts) in [
        (chat(json!({}), "", ""), [&common, &openai, &chats]),
        (completion(json!({}), "", ""), [&common, &openai, &completions]),
        (generation(json!({}), "", ""), [&common, &generations, &generations]),
    ] {
        let mut body: Value = serde_json::from_slice(&case.body).unwrap();
        for part in parts {
            body.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
        }
        let reply = server.post(case.path, &body.to_string());
        assert_eq!(reply.status, 200, "{}: {}", case.path, reply.body);
    }
}

#[test]
fn oversized_bodies_are_refused_without_breaking_the_connection() {
    let server = Running::usual();
    let body = json!({ "prompt": "a".repeat(10_000_000) }).to_string();
    let reply = server.post(COMPLETIONS, &body);
    assert_eq!(reply.status, 413);
    assert_eq!(reply.json()["error"]["code"], "request_too_large");
    // A length that nobody would wait for is refused unseen.
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n";
    assert_eq!(server.connect().send(head).reply().status, 413);
    // The same in chunks, whose sum nobody announced.
    let chunk = format!("100000\r\n{}\r\n", "b".repeat(1 << 20));
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = format!("{head}{}0\r\n\r\n", chunk.repeat(10));
    assert_eq!(server.connect().send(&chunks).reply().status, 413);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn sockets_that_speak_no_http_are_closed() {
    let server = Running::usual();
    for garbage in [
        "\0\x01\x02\x03\r\n\r\n",
        "HELLO\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    ] {
        let mut connection = server.connect().send(garbage);
        let (status, _) = connection.head();
        assert!((400..500).contains(&status), "{garbage:?}: {status}");
        assert!(connection.is_closed(), "{garbage:?}");
    }
    // A probe for another protocol is told so by the end of the connection.
    assert!(server.connect().send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").is_closed());
    // Garbage behind a good request spoils only what follows.
    let mut connection =
        server.connect().send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n\x7f\x00 garbage\r\n\r\n");
    assert_eq!(connection.reply().status, 200);
    assert_eq!(connection.reply().status, 400);
    assert!(connection.is_closed());
    // Good requests in one breath are all answered.
    let mut connection =
        server.connect().send(&"GET /health HTTP/1.1\r\nHost: x\r\n\r\n".repeat(3));
    for _ in 0..3 {
        assert_eq!(connection.reply().status, 200);
    }
}

#[test]
fn half_closed_sockets_hold_no_slot() {
    let server = Running::usual();
    // Closed within the body.
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{\"prompt\"";
    let mut connection = server.connect().send(head).half_close();
    assert!(connection.is_closed() || connection.head().0 == 400);
    // Closed within the headers.
    assert!(server.connect().send("POST /v1/comp").half_close().is_closed());
    // Closed behind a request: who sends no more counts as gone.
    let body = json!({ "prompt": "fn main", "max_tokens": 400, "ignore_eos": true }).to_string();
    let connection = server.connect().post(COMPLETIONS, body.as_bytes()).half_close();
    server.wait_until_idle();
    drop(connection);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn clients_that_leave_bytes_behind_hold_no_slot() {
    let server = Running::held(crate::support::engine_config(), settings());
    let body = json!({ "prompt": "fn main", "max_tokens": 400, "ignore_eos": true }).to_string();
    let connection = server.connect().post(COMPLETIONS, body.as_bytes());
    server.wait_until("it runs", |s| s.running == 1);
    // The rest of a request that nobody reads yet, and the end.
    drop(connection.send("GET /health HTTP/1.1\r\n"));
    server.wait_until_idle();
    let finished = server.stats().completion_tokens;
    assert!(finished < 400, "{finished} tokens were made for nobody");
}

#[test]
fn slow_senders_are_cut_in_time() {
    let short = Duration::from_millis(300);
    // Of headers and bodies apart: a busy machine may take longer than that for a whole request.
    let mut impatient = settings();
    impatient.limits.header_time = short;
    let server = Running::start(crate::support::generator(), impatient);
    let begun = Instant::now();
    // Headers that never end, byte by byte.
    let mut slow = server.connect().send("POST /v1/completions HTTP/1.1\r\nHost: x\r\n");
    let mut writer = slow.socket.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        while writer.write_all(b"X-Drip: drop\r\n").is_ok() {
            if begun.elapsed() > crate::support::PATIENCE {
                panic!("the server never closed");
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
    });
    while !slow.is_closed() {}
    dripping.join().unwrap();
    // A body that never comes.
    let mut impatient = settings();
    impatient.limits.body_time = short;
    let server = Running::start(crate::support::generator(), impatient);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{\"prompt\"";
    let mut slow = server.connect().send(head);
    let reply = slow.reply();
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (408, &json!("request_timeout")));
    assert!(slow.is_closed());
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn refusals_repeat_no_more_than_a_line_of_what_was_sent() {
    let server = Running::usual();
    let long = "x".repeat(1 << 20);
    for body in [
        json!({ "prompt": "a", "model": long }),
        json!({ "prompt": "a", &long: 1 }),
        json!({ "prompt": "a", "temperature": long }),
    ] {
        let reply = server.post(COMPLETIONS, &body.to_string());
        assert!(reply.status >= 400 && reply.body.len() < 4096, "{}", reply.body.len());
    }
}
