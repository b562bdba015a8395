//! The APIs that are spoken: what a request says, and what the events of its answer say.

use clap::ValueEnum;
use serde_json::{Map, Value, json};

use super::acceptance::SpecCounts;

/// An API, under the names that the clients of SGLang and vLLM give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// OpenAI's /v1/completions
    #[value(name = "openai", alias = "vllm", alias = "sglang-oai", alias = "openai-completions")]
    Completions,
    /// OpenAI's /v1/chat/completions
    #[value(name = "openai-chat", alias = "vllm-chat", alias = "sglang-oai-chat")]
    Chat,
    /// SGLang's /generate
    #[value(name = "sglang", alias = "sglang-native")]
    Generate,
}

/// What requests have in common.
#[derive(Debug, Clone)]
pub struct RequestSettings {
    /// The model to ask.
    pub model: String,
    /// 0 is greedy.
    pub temperature: f64,
    /// Whether end-of-text does not end an answer.
    pub ignore_eos: bool,
    /// What else bodies say; a key of these takes the place of ours.
    pub extra: Map<String, Value>,
}

/// What one event said.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// Whether text came.
    pub has_text: bool,
    /// Whether it is of the answer, and no report about it.
    pub of_answer: bool,
    /// Whether the answer ends with it.
    pub ends: bool,
    /// Tokens of the prompt and of the answer so far, where the server counts them.
    pub tokens: Option<(u64, u64)>,
    /// What speculation did, where the server says so.
    pub spec: Option<SpecCounts>,
}

impl Backend {
    /// Where requests go.
    pub fn path(self) -> &'static str {
        match self {
            Backend::Completions => "/v1/completions",
            Backend::Chat => "/v1/chat/completions",
            Backend::Generate => "/generate",
        }
    }

    /// The body of a request.
    pub fn body(self, prompt: &str, max_tokens: usize, settings: &RequestSettings) -> Vec<u8> {
        let RequestSettings { model, temperature, ignore_eos, extra } = settings;
        let mut body = match self {
            Backend::Completions => json!({
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stream": true,
                "stream_options": { "include_usage": true },
            }),
            Backend::Chat => json!({
                "model": model,
                "messages": [{ "role": "user", "content": prompt }],
                "max_completion_tokens": max_tokens,
                "temperature": temperature,
                "stream": true,
                "stream_options": { "include_usage": true },
            }),
            Backend::Generate => json!({
                "text": prompt,
                "sampling_params": { "max_new_tokens": max_tokens, "temperature": temperature },
                "stream": true,
            }),
        };
        if *ignore_eos {
            // Not in OpenAI's API: a server that does not know it is not told false.
            match self {
                Backend::Generate => body["sampling_params"]["ignore_eos"] = true.into(),
                Backend::Chat | Backend::Completions => body["ignore_eos"] = true.into(),
            }
        }
        for (key, value) in extra {
            body[key] = value.clone();
        }
        body.to_string().into_bytes()
    }

    /// What an event says, or why the answer failed; `before` is how many tokens it had.
    pub fn piece(self, event: &[u8], before: u64) -> Result<Piece, String> {
        let event: Value = serde_json::from_slice(event).map_err(|error| {
            let text: String = String::from_utf8_lossy(event).chars().take(80).collect();
            format!("an event is not JSON ({error}): {text}")
        })?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(message(error));
        }
        match self {
            Backend::Generate => generated(&event, before),
            Backend::Chat | Backend::Completions => completed(&event),
        }
    }
}

/// An event of OpenAI's streams.
fn completed(event: &Value) -> Result<Piece, String> {
    let Some(choices) = event.get("choices").and_then(Value::as_array) else {
        return Err("an event has no \"choices\"".into());
    };
    let mut piece = Piece { of_answer: !choices.is_empty(), ..Piece::default() };
    for choice in choices {
        let (delta, text) = (&choice["delta"], &choice["text"]);
        let texts = [text, &delta["content"], &delta["reasoning_content"], &delta["reasoning"]];
        piece.has_text |= texts.iter().any(|text| text.as_str().is_some_and(|t| !t.is_empty()));
        piece.has_text |= delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        match choice["finish_reason"].as_str() {
            Some("abort" | "error") => return Err("the server gave the answer up".into()),
            Some(_) => piece.ends = true,
            None => (),
        }
    }
    let count = |key: &str| event["usage"][key].as_u64();
    piece.tokens = count("prompt_tokens").zip(count("completion_tokens"));
    piece.spec = SpecCounts::in_event(event);
    Ok(piece)
}

/// An event of SGLang's own streams, whose texts are cumulative unless the server says otherwise:
/// that text came is seen by its tokens.
fn generated(event: &Value, before: u64) -> Result<Piece, String> {
    let meta = &event["meta_info"];
    let count = |key: &str| meta[key].as_u64();
    let tokens = count("prompt_tokens").zip(count("completion_tokens"));
    let Some((_, so_far)) = tokens else {
        return Err("an event has no \"meta_info\" with counts of tokens".into());
    };
    let reason = &meta["finish_reason"];
    if reason["type"] == "abort" {
        return Err(message(reason));
    }
    Ok(Piece {
        has_text: so_far > before,
        of_answer: true,
        ends: !reason.is_null(),
        tokens,
        spec: SpecCounts::in_event(event),
    })
}

/// What an error says, in the forms that servers have.
pub fn message(error: &Value) -> String {
    let nested = &error["error"];
    let places = [&error["message"], &nested["message"], nested, &error["detail"], error];
    match places.iter().find_map(|place| place.as_str()) {
        Some(text) => text.to_owned(),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(backend: Backend, event: Value) -> Result<Piece, String> {
        backend.piece(event.to_string().as_bytes(), 0)
    }

    #[test]
    fn events_without_text_are_not_first_tokens() {
        let role = json!({ "choices": [{ "delta": { "role": "assistant", "content": "" } }] });
        let role = piece(Backend::Chat, role).unwrap();
        assert!(role.of_answer && !role.has_text && !role.ends);
        for delta in [
            json!({ "content": "a" }),
            json!({ "reasoning_content": "a" }),
            json!({ "tool_calls": [{ "index": 0 }] }),
        ] {
            let said = piece(Backend::Chat, json!({ "choices": [{ "delta": delta }] })).unwrap();
            assert!(said.has_text, "{said:?}");
        }
        let usage =
            json!({ "choices": [], "usage": { "prompt_tokens": 3, "completion_tokens": 9 } });
        let usage = piece(Backend::Completions, usage).unwrap();
        assert_eq!((usage.of_answer, usage.tokens), (false, Some((3, 9))));
        let end = json!({ "choices": [{ "text": "b", "finish_reason": "length" }] });
        let end = piece(Backend::Completions, end).unwrap();
        assert!(end.has_text && end.ends);
    }

    #[test]
    fn tokens_say_whether_text_came_from_sglang() {
        let event = |tokens: u64| {
            json!({ "text": "abc", "meta_info": { "prompt_tokens": 2, "completion_tokens": tokens,
                "finish_reason": null } })
            .to_string()
        };
        let said = |tokens, before| Backend::Generate.piece(event(tokens).as_bytes(), before);
        assert!(said(4, 3).unwrap().has_text);
        assert!(!said(4, 4).unwrap().has_text);
        let abort = json!({ "meta_info": { "prompt_tokens": 2, "completion_tokens": 1,
            "finish_reason": { "type": "abort", "message": "too long" } } });
        assert_eq!(piece(Backend::Generate, abort), Err("too long".into()));
    }

    #[test]
    fn what_is_wrong_with_an_event_is_said() {
        let error = json!({ "error": { "message": "the round failed" } });
        assert_eq!(piece(Backend::Chat, error), Err("the round failed".into()));
        let broken = Backend::Chat.piece(b"{\"choices\": [", 0).unwrap_err();
        assert!(broken.contains("not JSON") && broken.ends_with("{\"choices\": ["), "{broken}");
        assert!(piece(Backend::Chat, json!({ "object": "x" })).unwrap_err().contains("choices"));
        assert_eq!(message(&json!({ "detail": "Not Found" })), "Not Found");
        assert_eq!(message(&json!({ "error": "no model" })), "no model");
    }

    #[test]
    fn what_the_body_says_may_be_replaced() {
        let extra = json!({ "temperature": 0.5, "return_spec_tokens_details": true });
        let Value::Object(extra) = extra else { unreachable!() };
        let settings =
            RequestSettings { model: "m".into(), temperature: 0.0, ignore_eos: true, extra };
        let body = Backend::Chat.body("hi", 7, &settings);
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["temperature"], 0.5);
        assert_eq!(body["return_spec_tokens_details"], true);
        assert_eq!(
            (&body["max_completion_tokens"], &body["ignore_eos"]),
            (&json!(7), &json!(true))
        );
        let body = Backend::Generate.body("hi", 7, &settings);
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["sampling_params"]["ignore_eos"], true);
        assert_eq!(body["sampling_params"]["max_new_tokens"], 7);
    }
}
