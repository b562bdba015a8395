//! The shipped model answers as transformers does.

use serde_json::{Value, json};

use crate::run::{answers, goldens, ids, jsonl, run};

const END: &str = "<|endoftext|>";

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn ids_and_texts_are_those_of_transformers_in_input_order() {
    let goldens = goldens();
    assert_eq!(goldens.len(), 12);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    // Twice: as ids and as text, which the tokenizer must turn into the same ids.
    let by_ids = goldens.iter().enumerate().map(
        |(at, golden)| json!({ "id": format!("ids {at}"), "prompt_ids": golden["prompt_ids"] }),
    );
    let by_text = goldens
        .iter()
        .enumerate()
        .map(|(at, golden)| json!({ "id": format!("text {at}"), "prompt": golden["prompt"] }));
    let requests: Vec<Value> = by_ids.chain(by_text).collect();
    std::fs::write(path("in.jsonl"), jsonl(&requests)).unwrap();
    let ran = run(&[
        "generate",
        "--input",
        &path("in.jsonl"),
        "--output",
        &path("out.jsonl"),
        "--max-tokens",
        "64",
        "--temperature",
        "0",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stdout, "");
    let lines = crate::run::json_lines(&std::fs::read_to_string(path("out.jsonl")).unwrap());
    assert_eq!(lines.len(), 24);
    for (at, line) in lines.iter().enumerate() {
        let golden = &goldens[at % 12];
        assert_eq!(line["id"], requests[at]["id"]);
        assert_eq!(line["token_ids"], golden["greedy_ids"], "{}", line["id"]);
        let text = golden["greedy_text"].as_str().unwrap();
        let ended = text.ends_with(END);
        assert_eq!(line["text"], text.strip_suffix(END).unwrap_or(text));
        assert_eq!(line["finish_reason"], if ended { "stop" } else { "length" });
        assert_eq!(keys(line), ["id", "token_ids", "text", "finish_reason", "meta_info"]);
        let meta = &line["meta_info"];
        assert_eq!(
            keys(meta)[..4],
            ["prompt_tokens", "completion_tokens", "cached_tokens", "retractions"]
        );
        // The shipped model drafts, unless it is told not to.
        assert!(keys(meta)[4..].iter().all(|key| key.starts_with("spec_")), "{meta}");
        assert!(meta["spec_verify_ct"].as_u64() > Some(0), "{meta}");
        assert_eq!(meta["prompt_tokens"], golden["prompt_ids"].as_array().unwrap().len());
        assert_eq!(meta["completion_tokens"], ids(line).len());
    }
}

#[test]
fn log_probabilities_are_those_of_transformers() {
    let goldens = goldens();
    let sampling = json!({
        "max_tokens": 2, "temperature": 0, "logprobs": true, "top_logprobs": 10,
        "prompt_logprobs": true,
    });
    let requests: Vec<Value> = goldens
        .iter()
        .map(|golden| json!({ "prompt_ids": golden["prompt_ids"], "sampling": sampling }))
        .collect();
    let number = |value: &Value| value.as_f64().unwrap();
    for (golden, line) in goldens.iter().zip(answers(&[], &requests)) {
        let order = [
            "id",
            "token_ids",
            "text",
            "finish_reason",
            "logprobs",
            "prompt_logprobs",
            "meta_info",
        ];
        assert_eq!(keys(&line), order);

        let tokens = line["logprobs"].as_array().unwrap();
        assert_eq!(tokens.len(), ids(&line).len());
        for (token, id) in tokens.iter().zip(ids(&line)) {
            assert_eq!(keys(token), ["id", "logprob", "top"]);
            assert_eq!(token["id"], id);
            // A greedy token is the most likely one.
            assert_eq!(token["top"][0], json!([id, token["logprob"]]));
            assert_eq!(token["top"].as_array().unwrap().len(), 10);
        }
        let expected = golden["first_token_top10"].as_array().unwrap();
        for (found, expected) in tokens[0]["top"].as_array().unwrap().iter().zip(expected) {
            assert_eq!(found[0], expected[0]);
            assert!((number(&found[1]) - number(&expected[1])).abs() < 1e-3);
        }

        let prompt = line["prompt_logprobs"].as_array().unwrap();
        let prompt_ids: Vec<&Value> = prompt.iter().map(|token| &token["id"]).collect();
        assert_eq!(prompt_ids, golden["prompt_ids"].as_array().unwrap().iter().collect::<Vec<_>>());
        assert_eq!(prompt[0]["logprob"], Value::Null);
        let sum: f64 = prompt[1..].iter().map(|token| number(&token["logprob"])).sum();
        assert!((sum - number(&golden["prompt_logprob_sum"])).abs() < 0.05);
    }
}
