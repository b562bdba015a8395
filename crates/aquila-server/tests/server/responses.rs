//! OpenAI's responses: items, events, and that a stream says what a whole response does.

use aquila_text::{Generator, SamplingParams};
use serde_json::{Value, json};

use crate::support::{Running, generator, settings};
use crate::tools::add;

const RESPONSES: &str = "/v1/responses";

fn body(extra: Value) -> String {
    let mut body = json!({ "input": "What is 3 + 4?", "temperature": 0, "max_output_tokens": 12 });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

/// What two responses must share: ids and times differ.
fn comparable(mut value: Value) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for key in ["id", "call_id", "created_at", "completed_at", "item_id", "usage"] {
                    fields.shift_remove(key);
                }
                fields.values_mut().for_each(strip);
            }
            Value::Array(values) => values.iter_mut().for_each(strip),
            _ => {}
        }
    }
    strip(&mut value);
    value
}

#[test]
fn a_response_has_the_text_of_a_chat() {
    let server = Running::usual();
    let messages = json!([
        { "role": "system", "content": "Be brief." }, { "role": "user", "content": "What is 3 + 4?" },
    ]);
    let chat = json!({ "messages": messages, "temperature": 0, "max_tokens": 12 });
    let chat = server.post("/v1/chat/completions", &chat.to_string()).ok();
    let asked = json!({
        "instructions": "Be brief.",
        "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        "input": [{ "type": "message", "role": "user",
            "content": [{ "type": "input_text", "text": "What is 3 + 4?" }] }],
        "metadata": { "a": "b" },
    });
    let response = server.post(RESPONSES, &body(asked)).ok();
    assert_eq!(response["object"], "response");
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(response["metadata"]["a"], "b");
    let content = &response["output"][0]["content"][0];
    assert_eq!(content["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(content["logprobs"].as_array().unwrap().len(), 12);
    let usage = &response["usage"];
    assert_eq!(usage["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(usage["output_tokens"], 12);
    assert_eq!(usage["total_tokens"], chat["usage"]["total_tokens"]);
}

#[test]
fn events_tell_of_the_response_that_they_end_with() {
    let server = Running::usual();
    let tools = json!([{ "type": "function", "name": "add", "parameters": add() }]);
    let named = json!({ "type": "function", "name": "add" });
    for extra in [
        json!({}),
        json!({ "tools": tools, "tool_choice": named, "max_output_tokens": 100 }),
        json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false,
            "max_output_tokens": 100 }),
        json!({ "text": { "format": { "type": "json_schema", "name": "x", "schema": add() } },
            "max_output_tokens": 100 }),
    ] {
        let whole = server.post(RESPONSES, &body(extra.clone())).ok();
        let mut asked = extra;
        asked["stream"] = true.into();
        let (events, done) = server.post(RESPONSES, &body(asked)).named_events();
        assert!(done);
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[..2], ["response.created", "response.in_progress"]);
        for (number, (_, event)) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
        let last = &events.last().unwrap().1["response"];
        assert_eq!(comparable(last.clone()), comparable(whole.clone()));
        assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        // Deltas join to the items.
        let joined = |kind: &str| -> String {
            let deltas = events.iter().filter(|(name, _)| name == kind);
            deltas.map(|(_, event)| event["delta"].as_str().unwrap()).collect()
        };
        let item = &last["output"][0];
        if item["type"] == "message" {
            assert_eq!(item["content"][0]["text"], joined("response.output_text.delta"));
            assert!(names.contains(&"response.content_part.done"));
        } else {
            let arguments = joined("response.function_call_arguments.delta");
            assert_eq!(item["arguments"], arguments.as_str());
            assert_eq!(item["name"], "add");
            assert!(serde_json::from_str::<Value>(&arguments).unwrap()["a"].is_u64());
            assert_eq!(last["status"], "completed");
        }
    }
}

#[test]
fn conversations_with_calls_and_results_go_on() {
    let server = Running::usual();
    let input = json!([
        { "role": "user", "content": "What is 3 + 4?" },
        { "type": "reasoning", "id": "rs_1", "summary": [] },
        { "type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{\"a\": 3}" },
        { "type": "function_call_output", "call_id": "call_1", "output": "7" },
    ]);
    let response = server.post(RESPONSES, &body(json!({ "input": input, "store": false }))).ok();
    assert_eq!(response["output"][0]["type"], "message");
    let reply = server.get(&format!("{RESPONSES}/{}", response["id"].as_str().unwrap()));
    assert_eq!(reply.status, 404);
    assert!(reply.body.contains("not stored"), "{}", reply.body);
}

#[test]
fn responses_and_messages_are_one_answer_whatever_the_default() {
    let usual = generator();
    let defaults = SamplingParams { n: Some(2), ..SamplingParams::default() };
    let (engine, tokenizer) = (usual.engine().clone(), usual.tokenizer().cloned());
    let server =
        Running::start(Generator::new(engine, tokenizer, Vec::new(), defaults), settings());
    let message = json!([{ "role": "user", "content": "hi" }]);
    for (path, mut body) in [
        ("/v1/responses", json!({ "input": "hi", "max_output_tokens": 5, "temperature": 0 })),
        ("/v1/messages", json!({ "messages": message, "max_tokens": 5, "temperature": 0 })),
    ] {
        let whole = server.post(path, &body.to_string()).ok();
        assert_eq!(whole["usage"]["output_tokens"], 5, "{path}");
        body["stream"] = true.into();
        let (events, _) = server.post(path, &body.to_string()).named_events();
        let texts = events.iter().filter_map(|(name, event)| match name.as_str() {
            "response.output_text.delta" => event["delta"].as_str(),
            "content_block_delta" => event["delta"]["text"].as_str(),
            _ => None,
        });
        let text: String = texts.collect();
        let path_of_text = match path {
            "/v1/responses" => "/output/0/content/0/text",
            _ => "/content/0/text",
        };
        assert_eq!(whole.pointer(path_of_text).unwrap(), text.as_str(), "{path}");
    }
    assert_eq!(server.stats().finished, 4);
}
