//! OpenAI's API: the shape of answers, whole and streamed, and that both say the same.

use aquila_server::{Limits, Settings};
use aquila_text::SamplingParams;
use serde_json::{Value, json};

use crate::support::{Running, generator, offline, settings};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ..SamplingParams::default()
    }
}

fn merged(mut body: Value, extra: Value) -> String {
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

fn chat(extra: Value) -> String {
    let messages = json!([{ "role": "user", "content": "Tom has 3 apples. How many?" }]);
    merged(json!({ "messages": messages, "temperature": 0, "max_tokens": 12 }), extra)
}

fn completion(extra: Value) -> String {
    merged(json!({ "prompt": "fn main", "temperature": 0, "max_tokens": 12 }), extra)
}

/// The joined texts of a stream's chunks, by choice.
fn joined(events: &[Value], text: impl Fn(&Value) -> Option<&str>) -> Vec<String> {
    let mut texts: Vec<String> = Vec::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap() as usize;
        texts.resize(texts.len().max(index + 1), String::new());
        texts[index].push_str(text(choice).unwrap_or_default());
    }
    texts
}

fn chat_text(choice: &Value) -> Option<&str> {
    choice["delta"].get("content").and_then(Value::as_str)
}

#[test]
fn a_chat_is_answered_as_its_rendered_template_is() {
    let server = Running::usual();
    let prompt = "<|im_start|>user\nTom has 3 apples. How many?<|im_end|>\n<|im_start|>assistant\n";
    let expected = offline(&server.generator, prompt, greedy(12));
    let reply = server.post(CHAT, &chat(json!({ "model": "tiny" })));
    let answer = reply.ok();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    assert_eq!(answer["choices"][0]["message"]["content"], expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"], sum);
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());
    assert_eq!(reply.header("x-request-id"), answer["id"].as_str());
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
}

#[test]
fn a_streamed_chat_has_role_texts_end_and_usage() {
    let server = Running::usual();
    let whole = server.post(CHAT, &chat(json!({}))).ok();
    let stream = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let events = server.post(CHAT, &chat(stream)).events();
    let first = &events[0]["choices"][0];
    assert_eq!(first["delta"], json!({ "role": "assistant", "content": "" }));
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 12);
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(last["choices"][0]["delta"], json!({}));
    for chunk in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], events[0]["id"]);
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    assert!(before.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
    assert_eq!(joined(chunks, chat_text)[0], whole["choices"][0]["message"]["content"]);
    // Unless asked for, there is no usage.
    let events = server.post(CHAT, &chat(json!({ "stream": true }))).events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn several_choices_differ_by_seed_and_stream_the_same() {
    let server = Running::usual();
    let several = json!({ "n": 3, "seed": 11, "temperature": 1.0, "max_tokens": 16 });
    let whole = server.post(CHAT, &chat(several.clone())).ok();
    let texts: Vec<&str> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    let again = server.post(CHAT, &chat(several.clone())).ok();
    assert_eq!(again["choices"], whole["choices"]);
    let events = server.post(CHAT, &merge(&several, json!({ "stream": true }))).events();
    assert_eq!(joined(&events, chat_text), texts);
}

fn merge(several: &Value, extra: Value) -> String {
    chat(serde_json::from_str(&merged(several.clone(), extra)).unwrap())
}

#[test]
fn stop_strings_end_a_text_and_are_named() {
    let server = Running::usual();
    let free = server.post(COMPLETIONS, &completion(json!({}))).ok();
    let text = free["choices"][0]["text"].as_str().unwrap();
    let stop = &text[3..6];
    for stops in [json!(stop), json!(["\u{1}never", stop])] {
        for stream in [false, true] {
            let body = completion(json!({ "stop": stops, "stream": stream }));
            let reply = server.post(COMPLETIONS, &body);
            let (cut, choice) = if stream {
                let events = reply.events();
                let text = joined(&events, |c| c["text"].as_str()).remove(0);
                (text, events.last().unwrap()["choices"][0].clone())
            } else {
                let choice = reply.ok()["choices"][0].clone();
                (choice["text"].as_str().unwrap().to_owned(), choice)
            };
            assert_eq!(cut, text[..text.find(stop).unwrap()]);
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(choice["matched_stop"], stop);
        }
    }
}

#[test]
fn completions_take_texts_and_ids_alone_and_in_lists() {
    let server = Running::usual();
    let ids = server.post("/tokenize", r#"{"prompt": "fn main"}"#).ok()["tokens"].clone();
    let text = server.post(COMPLETIONS, &completion(json!({}))).ok();
    let by_ids = server.post(COMPLETIONS, &completion(json!({ "prompt": ids }))).ok();
    assert_eq!(by_ids["choices"], text["choices"]);
    let other = server.post(COMPLETIONS, &completion(json!({ "prompt": "use std" }))).ok();
    for prompts in [json!(["fn main", "use std"]), json!([ids, [ids[0]]])] {
        let many = server.post(COMPLETIONS, &completion(json!({ "prompt": prompts, "n": 2 }))).ok();
        let choices = many["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 4);
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!(choice["index"], index);
        }
        assert_eq!(choices[0]["text"], text["choices"][0]["text"]);
        assert_eq!(choices[1]["text"], text["choices"][0]["text"]);
        if prompts[1].is_string() {
            assert_eq!(choices[2]["text"], other["choices"][0]["text"]);
        }
    }
    // OpenAI's own default length.
    let usual = server.post(COMPLETIONS, r#"{"prompt": "fn main", "ignore_eos": true}"#).ok();
    assert_eq!(usual["usage"]["completion_tokens"], 16);
}

#[test]
fn log_probabilities_of_a_chat_spell_its_text() {
    let server = Running::usual();
    let asked = json!({ "logprobs": true, "top_logprobs": 3 });
    let answer = server.post(CHAT, &chat(asked.clone())).ok();
    let choice = &answer["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    let spelled: String = content.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(spelled, choice["message"]["content"].as_str().unwrap());
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy: what was chosen is what is most likely.
        assert_eq!(top[0]["token"], token["token"]);
        assert_eq!(top[0]["logprob"], token["logprob"]);
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), token["token"].as_str().unwrap());
    }
    let streamed = json!({ "logprobs": true, "top_logprobs": 3, "stream": true });
    let events = server.post(CHAT, &chat(streamed)).events();
    let tokens = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array());
    let tokens: Vec<&Value> = tokens.flatten().collect();
    assert_eq!(tokens, content.iter().collect::<Vec<_>>());
}

#[test]
fn an_echo_comes_with_the_log_probabilities_of_the_prompt() {
    let server = Running::usual();
    let asked = json!({ "echo": true, "logprobs": 2, "n": 2 });
    let answer = server.post(COMPLETIONS, &completion(asked)).ok();
    for choice in answer["choices"].as_array().unwrap() {
        let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
        assert!(choice["text"].as_str().unwrap().starts_with("fn main"));
        let columns = &choice["logprobs"];
        let tokens = columns["tokens"].as_array().unwrap();
        let spelled: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
        assert_eq!(spelled, choice["text"].as_str().unwrap());
        for (index, token) in tokens.iter().enumerate() {
            let offset = columns["text_offset"][index].as_u64().unwrap() as usize;
            let token = token.as_str().unwrap();
            let there: String = text[offset..].iter().take(token.chars().count()).collect();
            assert_eq!(there, token);
            let logprob = &columns["token_logprobs"][index];
            assert_eq!(logprob.is_null(), index == 0);
            let top = &columns["top_logprobs"][index];
            assert_eq!(top.is_null(), index == 0);
            if index > 0 {
                assert_eq!(&top[token], logprob);
                assert!((2..=3).contains(&top.as_object().unwrap().len()));
            }
        }
    }
    let streamed = json!({ "echo": true, "logprobs": 2, "n": 2, "stream": true });
    let events = server.post(COMPLETIONS, &completion(streamed)).events();
    let texts = joined(&events, |choice| choice["text"].as_str());
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(text, answer["choices"][index]["text"].as_str().unwrap());
        let of_choice = |e: &&Value| e["choices"][0]["index"] == index;
        let offsets = events.iter().filter(of_choice);
        let offsets = offsets.filter_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array());
        let offsets: Vec<&Value> = offsets.flatten().collect();
        let whole = answer["choices"][index]["logprobs"]["text_offset"].as_array().unwrap();
        assert_eq!(offsets, whole.iter().collect::<Vec<_>>());
    }
    // Reading a prompt without an answer to it.
    let asked = json!({ "echo": true, "logprobs": 0, "max_tokens": 0 });
    let answer = server.post(COMPLETIONS, &completion(asked)).ok();
    assert_eq!(answer["choices"][0]["text"], "fn main");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    assert!(answer["choices"][0]["logprobs"]["top_logprobs"].is_null());
}

#[test]
fn the_model_is_listed_and_found_by_its_name() {
    let server = Running::usual();
    let list = server.get("/v1/models").ok();
    assert_eq!(list["data"][0]["id"], "tiny");
    assert_eq!(server.get("/v1/models/tiny").ok(), list["data"][0]);
    assert_eq!(server.get("/v1/models/models/tiny").ok(), list["data"][0]);
    assert_eq!(server.get("/v1/models/other").status, 404);
}

#[test]
fn log_probabilities_past_the_room_for_them_are_refused() {
    let limits = Limits { returned_bytes: 1 << 20, ..Limits::default() };
    let server = Running::start(generator(), Settings { limits, ..settings() });
    let chat = json!([{ "role": "user", "content": "hi" }]);
    let long = "word ".repeat(200);
    let answers = json!({ "n": 8, "max_tokens": 100, "ignore_eos": true });
    let params = json!({ "max_new_tokens": 400, "ignore_eos": true });
    let mut cases = [
        ("/v1/completions", json!({ "prompt": "fn main", "logprobs": 20 }), answers.clone()),
        (
            "/v1/completions",
            json!({ "prompt": long, "logprobs": 20, "echo": true }),
            json!({ "n": 8 }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": chat, "logprobs": true, "top_logprobs": 20 }),
            answers,
        ),
        (
            "/v1/responses",
            json!({ "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20 }),
            json!({ "max_output_tokens": 400, "ignore_eos": true }),
        ),
        (
            "/generate",
            json!({ "text": "fn main", "return_logprob": true, "top_logprobs_num": 20 }),
            json!({ "sampling_params": params }),
        ),
    ];
    for (path, body, more) in &mut cases {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = server.post(path, &body.to_string());
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
        assert!(reply.body.contains("1048576"), "{}", reply.body);
    }
    // A stream that keeps what it has written is given up, one that does not goes on.
    let (path, body, _) = &mut cases[4];
    body["stream"] = true.into();
    let reply = server.post(path, &body.to_string());
    let last = reply.body.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.contains("error") && last.contains("1048576"), "{last}");
    let body = json!({
        "prompt": "fn main", "logprobs": 20, "max_tokens": 200, "ignore_eos": true, "stream": true,
    });
    let events = server.post("/v1/completions", &body.to_string()).events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    // All of them in turn: none leaves anything behind.
    let body = json!({ "prompt": "fn main", "logprobs": 20, "max_tokens": 60, "ignore_eos": true });
    for _ in 0..8 {
        server.post("/v1/completions", &body.to_string()).ok();
    }
}

#[test]
fn offsets_count_special_tokens_where_the_text_has_them() {
    let server = Running::usual();
    let text = |id: usize, skip: bool| {
        let body = json!({ "tokens": [id], "skip_special_tokens": skip }).to_string();
        server.post("/detokenize", &body).ok()["text"].as_str().unwrap().to_owned()
    };
    let special = (0..2000).find(|&id| text(id, true).is_empty() && !text(id, false).is_empty());
    let special = special.expect("a special token");
    let mut body = json!({
        "prompt": "fn main", "logprobs": 0, "max_tokens": 3, "ignore_eos": true, "temperature": 0,
        "logit_bias": { special.to_string(): 100 }, "skip_special_tokens": false,
    });
    let choice = &server.post("/v1/completions", &body.to_string()).ok()["choices"][0];
    let word = text(special, false);
    assert_eq!(choice["text"], word.repeat(3));
    let length = word.chars().count();
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, length, 2 * length]));
    body["skip_special_tokens"] = true.into();
    let choice = &server.post("/v1/completions", &body.to_string()).ok()["choices"][0];
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 0, 0]));
}
