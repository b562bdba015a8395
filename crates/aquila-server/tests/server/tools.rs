//! Tools, reasoning and constraints in chats: what comes of them, whole and streamed.

use aquila_text::ReasoningFormat;
use serde_json::{Value, json};

use crate::support::{Running, generator, settings};

const CHAT: &str = "/v1/chat/completions";

/// A tool whose arguments are small numbers.
pub fn add() -> Value {
    let number = json!({ "type": "integer", "minimum": 0, "maximum": 99 });
    json!({
        "type": "object", "properties": { "a": number, "b": number }, "required": ["a", "b"],
        "additionalProperties": false,
    })
}

fn tools() -> Value {
    json!([
        { "type": "function", "function": { "name": "add", "parameters": add() } },
        { "type": "function", "function": {
            "name": "say",
            "parameters": { "type": "object", "properties": { "word": { "enum": ["a", "b"] } },
                "required": ["word"], "additionalProperties": false },
        } },
    ])
}

fn chat(extra: Value) -> String {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "What is 3 + 4?" }],
        "temperature": 0, "max_tokens": 120,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

/// The calls of a stream, put together as clients do, without their ids.
fn streamed_calls(events: &[Value]) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in events.iter().filter_map(|event| event["choices"][0]["delta"].get("tool_calls")) {
        let call = &delta[0];
        let index = call["index"].as_u64().unwrap() as usize;
        if let Some(name) = call["function"].get("name") {
            assert_eq!(index, calls.len());
            assert!(call["id"].as_str().unwrap().starts_with("call_"));
            assert_eq!(call["type"], "function");
            calls.push((name.as_str().unwrap().into(), String::new()));
        }
        calls[index].1.push_str(call["function"]["arguments"].as_str().unwrap());
    }
    calls
}

fn whole_calls(answer: &Value) -> Vec<(String, String)> {
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let call =
        |call: &Value| (text(&call["function"]["name"]), text(&call["function"]["arguments"]));
    calls.iter().map(call).collect()
}

#[test]
fn a_forced_tool_is_called_with_arguments_of_its_schema() {
    let server = Running::usual();
    let named = json!({ "type": "function", "function": { "name": "add" } });
    for (choice, parallel) in [(named, true), (json!("required"), false)] {
        let asked = json!({
            "tools": tools(), "tool_choice": choice, "parallel_tool_calls": parallel,
            "logprobs": true,
        });
        let answer = server.post(CHAT, &chat(asked.clone())).ok();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let calls = whole_calls(&answer);
        assert_eq!(calls.len(), 1);
        let arguments: Value = serde_json::from_str(&calls[0].1).unwrap();
        assert!(arguments["a"].is_u64() || arguments["word"].is_string(), "{arguments}");
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], tokens.len());

        let mut asked = asked;
        asked["stream"] = true.into();
        asked["stream_options"] = json!({ "include_usage": true });
        let events = server.post(CHAT, &chat(asked)).events();
        assert_eq!(streamed_calls(&events), calls);
        let streamed: Vec<Value> = events
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
            .flatten()
            .cloned()
            .collect();
        assert_eq!(&streamed, tokens);
        let (usage, chunks) = events.split_last().unwrap();
        assert_eq!(usage["usage"]["completion_tokens"], tokens.len());
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn a_call_that_is_cut_stays_text() {
    let server = Running::usual();
    let asked = json!({ "tools": tools(), "tool_choice": "required", "max_tokens": 21 });
    let answer = server.post(CHAT, &chat(asked)).ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert!(choice["message"].get("tool_calls").is_none(), "{answer}");
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(text.starts_with("<tool_call>\n{\"name\": \""), "{text}");
}

#[test]
fn tools_that_need_not_be_called_leave_the_text_as_it_is() {
    let server = Running::usual();
    let plain = server.post(CHAT, &chat(json!({}))).ok();
    let mut strict = tools();
    strict[0]["function"]["strict"] = true.into();
    for extra in [
        json!({ "tools": tools() }),
        json!({ "tools": tools(), "tool_choice": "none" }),
        json!({ "tools": strict }),
    ] {
        let answer = server.post(CHAT, &chat(extra)).ok();
        assert_eq!(answer["choices"][0]["message"], plain["choices"][0]["message"]);
        assert_eq!(answer["choices"][0]["finish_reason"], plain["choices"][0]["finish_reason"]);
    }
}

#[test]
fn conversations_with_calls_and_results_go_on() {
    let server = Running::usual();
    let call = json!({ "id": "call_1", "type": "function",
        "function": { "name": "add", "arguments": "{\"a\": 3, \"b\": 4}" } });
    let messages = json!([
        { "role": "developer", "content": "Be brief." },
        { "role": "user", "content": "What is 3 + 4?" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "call_1", "content": "7" },
    ]);
    let answer = server.post(CHAT, &chat(json!({ "messages": messages, "tools": tools() }))).ok();
    assert!(answer["choices"][0]["message"]["content"].is_string());
}

#[test]
fn constraints_hold_by_the_fields_of_every_server() {
    let server = Running::usual();
    let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } },
        "required": ["ok"], "additionalProperties": false });
    let format = json!({ "type": "json_schema",
        "json_schema": { "name": "x", "strict": true, "schema": schema } });
    let structured = |inner: Value| json!({ "structured_outputs": inner });
    let is_schema = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap();
        value["ok"].is_boolean() && value.as_object().unwrap().len() == 1
    };
    let is_choice = |text: &str| ["yes", "no"].contains(&text);
    let is_regex = |text: &str| text.len() == 3 && text.bytes().all(|b| b.is_ascii_digit());
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let ebnf = "root ::= \"yes\" | \"no\"";
    let cases: Vec<(Value, Check<'_>)> = vec![
        (json!({ "response_format": format }), &is_schema),
        (json!({ "json_schema": schema.to_string() }), &is_schema),
        (json!({ "guided_json": schema }), &is_schema),
        (structured(json!({ "json": schema })), &is_schema),
        (json!({ "regex": "[0-9]{3}" }), &is_regex),
        (json!({ "guided_regex": "[0-9]{3}" }), &is_regex),
        (structured(json!({ "regex": "[0-9]{3}" })), &is_regex),
        (json!({ "guided_choice": ["yes", "no"] }), &is_choice),
        (structured(json!({ "choice": ["yes", "no"] })), &is_choice),
        (json!({ "ebnf": ebnf }), &is_choice),
        (json!({ "guided_grammar": ebnf }), &is_choice),
        (structured(json!({ "grammar": ebnf })), &is_choice),
    ];
    for (extra, holds) in cases {
        let answer = server.post(CHAT, &chat(extra.clone())).ok();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(holds(text), "{extra}: {text}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let mut body = extra;
        body["prompt"] = "Say: ".into();
        body["max_tokens"] = 60.into();
        let answer = server.post("/v1/completions", &body.to_string()).ok();
        assert!(holds(answer["choices"][0]["text"].as_str().unwrap()), "{body}: {answer}");
    }
    let params = json!({ "regex": "[0-9]{3}", "max_new_tokens": 20 });
    let body = json!({ "text": "Say: ", "sampling_params": params });
    let answer = server.post("/generate", &body.to_string()).ok();
    assert!(is_regex(answer["text"].as_str().unwrap()));
}

#[test]
fn with_tools_a_schema_is_for_the_text_alone() {
    let server = Running::usual();
    let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } },
        "required": ["ok"], "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let asked =
        json!({ "tools": tools(), "response_format": format, "parallel_tool_calls": false });
    let answer = server.post(CHAT, &chat(asked)).ok();
    let choice = &answer["choices"][0];
    match choice["finish_reason"].as_str().unwrap() {
        "tool_calls" => assert_eq!(whole_calls(&answer).len(), 1),
        _ => {
            let text = choice["message"]["content"].as_str().unwrap();
            let value: Value = serde_json::from_str(text).unwrap();
            assert!(value["ok"].is_boolean());
        }
    }
}

#[test]
fn a_grammar_holds_what_stands_behind_the_reasoning() {
    let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": {
        "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"]
    } } });
    let asked = |separate: bool| {
        let (format, most) = (format.clone(), 24);
        chat(
            json!({ "max_tokens": most, "response_format": format, "separate_reasoning": separate }),
        )
    };
    // Every answer begins with reasoning, which the grammar leaves as it is.
    let mut settings = settings();
    settings.reasoning = Some(ReasoningFormat::DeepseekR1);
    let server = Running::start(generator(), settings);
    let free = server.post(CHAT, &chat(json!({ "max_tokens": 24 }))).ok();
    let held = server.post(CHAT, &asked(true)).ok();
    assert_eq!(held["choices"][0]["message"], free["choices"][0]["message"]);
    assert_eq!(held["choices"][0]["finish_reason"], "length");
    // Who wants no reasoning told apart has JSON from the first token on.
    let whole = server.post(CHAT, &asked(false)).ok();
    assert_eq!(
        whole["choices"][0]["message"]["content"].as_str().unwrap().chars().next(),
        Some('{')
    );
    // An answer may begin with reasoning: this model prefers `<think>` to a brace.
    let mut settings = crate::support::settings();
    settings.reasoning = Some(ReasoningFormat::Qwen3);
    let server = Running::start(generator(), settings);
    let answer = server.post(CHAT, &asked(true)).ok();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "", "{answer}");
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{answer}");
}

#[test]
fn reasoning_is_told_from_the_answer() {
    let mut settings = settings();
    settings.reasoning = Some(ReasoningFormat::DeepseekR1);
    let server = Running::start(generator(), settings);
    let joined = chat(json!({ "separate_reasoning": false, "max_tokens": 12 }));
    let text = server.post(CHAT, &joined).ok();
    let text = text["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let answer = server.post(CHAT, &chat(json!({ "max_tokens": 12 }))).ok();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], text.trim());
    assert_eq!(message["reasoning"], text.trim());
    assert_eq!(message["content"], "");
    let details = &answer["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], answer["usage"]["completion_tokens"]);
    for at_once in [false, true] {
        let stream = json!({ "max_tokens": 12, "stream": true, "stream_reasoning": !at_once });
        let events = server.post(CHAT, &chat(stream)).events();
        let pieces: Vec<&str> = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["reasoning_content"].as_str())
            .collect();
        assert_eq!(pieces.concat(), text.trim());
        assert_eq!(pieces.len() == 1, at_once);
    }
}
