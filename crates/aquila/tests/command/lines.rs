//! The lines of an input: what they may be, and that a bad one fails alone.

use serde_json::{Value, json};

use crate::run::{answers, generate, generate_bytes, ids, run, without_tokenizer};

#[test]
fn an_id_is_any_json_or_else_the_line_number() {
    let given = [
        json!("a"),
        json!(7),
        json!(-1.5),
        json!(null),
        json!(true),
        json!([1, "x"]),
        json!({ "z": 1, "a": 2 }),
    ];
    let mut requests: Vec<Value> =
        given.iter().map(|id| json!({ "id": id, "prompt_ids": [1] })).collect();
    requests.push(json!({ "prompt_ids": [1] }));
    let model = without_tokenizer();
    let lines = answers(&[&model, "--max-tokens", "1"], &requests);
    let found: Vec<&Value> = lines.iter().map(|line| &line["id"]).collect();
    assert_eq!(found[..7], given.iter().collect::<Vec<_>>());
    assert_eq!(found[7], 8);
}

#[test]
fn blank_lines_are_skipped_and_empty_input_answers_nothing() {
    let model = without_tokenizer();
    let input = b"\xef\xbb\xbf\r\n  \n{\"prompt_ids\":[1]}\r\n\n{\"prompt_ids\":[2]}";
    let ran = generate_bytes(&[&model, "--max-tokens", "1"], input);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let ids: Vec<Value> = ran.lines().iter().map(|line| line["id"].clone()).collect();
    assert_eq!(ids, [json!(3), json!(5)]);
    let ran = generate_bytes(&[&model], b"");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""));
}

/// A bad line, the id that its answer has, and words of the error.
type Case = (&'static str, Value, &'static [&'static str]);

fn bad_lines() -> Vec<Case> {
    vec![
        ("nonsense", json!(1), &["line 1", "not JSON", "column"]),
        (r#"{"id": 5, "prompt"#, json!(2), &["line 2", "not JSON"]),
        (r#"[1, 2]"#, json!(3), &["line 3", "not a JSON object"]),
        (r#""text""#, json!(4), &["not a JSON object"]),
        (r#"{"id": "x"}"#, json!("x"), &["line 5", "prompt or prompt_ids is missing"]),
        (r#"{"id": 1, "prompt": "a", "prompt_ids": [1]}"#, json!(1), &["exclude each other"]),
        (r#"{"prompt": 3}"#, json!(7), &["prompt: expected a string"]),
        (r#"{"prompt_ids": "1"}"#, json!(8), &["prompt_ids: expected a list of token ids"]),
        (r#"{"prompt_ids": [-1]}"#, json!(9), &["prompt_ids"]),
        (r#"{"prompt_ids": [1.5]}"#, json!(10), &["prompt_ids"]),
        (r#"{"prompt_ids": []}"#, json!(11), &["line 11", "prompt is empty"]),
        (r#"{"prompt_ids": [1, 320]}"#, json!(12), &["index 1", "320", "vocabulary"]),
        (r#"{"prompt_ids": [1], "max_tokens": 3}"#, json!(13), &["max_tokens", "sampling"]),
        (r#"{"prompt_ids": [1], "sampling": 3}"#, json!(14), &["sampling: expected an object"]),
        (
            r#"{"prompt_ids": [1], "sampling": {"temprature": 1}}"#,
            json!(15),
            &["sampling.temprature: no such setting", "temperature"],
        ),
        (
            r#"{"prompt_ids": [1], "sampling": {"temperature": "hot"}}"#,
            json!(16),
            &["sampling.temperature: expected a number", "hot"],
        ),
        (
            r#"{"prompt_ids": [1], "sampling": {"temperature": -0.5}}"#,
            json!(17),
            &["line 17", "temperature: must be", "-0.5"],
        ),
        (r#"{"prompt_ids": [1], "sampling": {"top_p": 0}}"#, json!(18), &["top_p: must be"]),
        (r#"{"prompt_ids": [1], "sampling": {"n": 0}}"#, json!(19), &["n: must be from 1"]),
        (
            r#"{"prompt_ids": [1], "sampling": {"max_tokens": -1}}"#,
            json!(20),
            &["max_tokens: expected a whole number", "-1"],
        ),
        (
            r#"{"prompt_ids": [1], "sampling": {"min_tokens": 9}}"#,
            json!(21),
            &["min_tokens: must be at most max_tokens (2)"],
        ),
        (
            r#"{"prompt_ids": [1], "sampling": {"stop_token_ids": [999]}}"#,
            json!(22),
            &["stop tokens", "999"],
        ),
        (
            r#"{"prompt_ids": [1], "sampling": {"logit_bias": {"999": 1}}}"#,
            json!(23),
            &["logit bias", "999"],
        ),
        (
            r#"{"prompt_ids": [1], "sampling": {"logit_bias": {"1": 1e40}}}"#,
            json!(24),
            &["logit_bias: must be finite"],
        ),
        (r#"{"prompt_ids": [1], "sampling": {"stop": ""}}"#, json!(25), &["stop", "empty"]),
        (
            r#"{"prompt_ids": [1], "sampling": {"top_logprobs": 101}}"#,
            json!(26),
            &["top_logprobs: must be at most 100"],
        ),
    ]
}

#[test]
fn a_bad_line_gets_an_error_and_others_go_on() {
    let cases = bad_lines();
    let mut input = Vec::new();
    for (line, ..) in &cases {
        input.extend(line.as_bytes());
        input.push(b'\n');
    }
    // Bytes that are no text, and a prompt beyond the context of 512.
    input.extend(b"{\"prompt\": \"\xff\xfe\"}\n");
    let long = json!({ "id": "long", "prompt_ids": vec![1; 512] });
    let good = json!({ "id": "good", "prompt_ids": [1, 2] });
    input.extend(format!("{long}\n{good}\n").as_bytes());
    let model = without_tokenizer();
    let ran = generate_bytes(&[&model, "--max-tokens", "2", "--ignore-eos"], &input);
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    let lines = ran.lines();
    assert_eq!(lines.len(), cases.len() + 3);
    for ((line, id, words), found) in cases.iter().zip(&lines) {
        let keys: Vec<&String> = found.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["id", "error"], "{line}");
        assert_eq!(found["id"], *id, "{line}");
        let error = found["error"].as_str().unwrap();
        for word in *words {
            assert!(error.contains(word), "{line}: {error:?} does not say {word:?}");
        }
    }
    let [bytes, long, good] = &lines[cases.len()..] else { panic!("three more lines") };
    assert!(bytes["error"].as_str().unwrap().contains("not JSON"), "{bytes}");
    let error = long["error"].as_str().unwrap();
    assert!(error.contains("512 tokens") && error.contains("511"), "{error}");
    assert_eq!(ids(good).len(), 2);
    assert!(ran.stderr.contains(&format!("{} of {}", cases.len() + 2, lines.len())));
    assert!(ran.stderr.contains("line 1: not JSON"), "{}", ran.stderr);
}

#[test]
fn a_prompt_too_long_or_empty_fails_alone() {
    let requests = [
        json!({ "id": "long", "prompt": "word ".repeat(5000) }),
        json!({ "id": "empty", "prompt": "" }),
        json!({ "id": "good", "prompt": "word" }),
    ];
    let ran = generate(&["--max-tokens", "1"], &requests);
    assert_eq!(ran.code, Some(3));
    let lines = ran.lines();
    assert!(lines[0]["error"].as_str().unwrap().contains("--context-length"), "{}", lines[0]);
    assert!(lines[1]["error"].as_str().unwrap().contains("empty"), "{}", lines[1]);
    assert_eq!(ids(&lines[2]).len(), 1);
    let ran = run(&["generate", "--prompt", ""]);
    assert_eq!(ran.code, Some(3));
    assert!(ran.stderr.contains("the prompt is empty"), "{}", ran.stderr);
}

#[test]
fn no_line_is_refused_because_others_wait() {
    let model = without_tokenizer();
    let requests: Vec<Value> = (0..60)
        .map(|at| {
            let n = if at % 20 == 7 { 9 } else { 1 };
            let sampling = json!({ "max_tokens": at % 3, "n": n, "temperature": 1 });
            json!({ "id": at, "prompt_ids": [1 + at], "sampling": sampling })
        })
        .collect();
    for queued in ["1", "4"] {
        let lines = answers(&[&model, "--max-queued-requests", queued], &requests);
        assert!(lines.iter().enumerate().all(|(at, line)| line["id"] == at));
        assert_eq!(lines[7]["choices"].as_array().unwrap().len(), 9);
    }
}

#[test]
fn of_two_lines_with_one_id_the_second_fails() {
    let model = without_tokenizer();
    let requests = [
        json!({ "id": "a", "prompt_ids": [1] }),
        json!({ "prompt_ids": [2] }),
        json!({ "id": "a", "prompt_ids": [3] }),
        json!({ "id": 2, "prompt_ids": [4] }),
        json!({ "id": "2", "prompt_ids": [5] }),
        json!({ "id": 7 }),
        json!({ "prompt_ids": [6] }),
    ];
    let ran = generate(&[&model, "--max-tokens", "1"], &requests);
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    let lines = ran.lines();
    for (at, error) in
        [(2, "line 3: its id \"a\" is that of line 1"), (3, "line 4: its id 2 is that of line 2")]
    {
        let found = lines[at]["error"].as_str().unwrap();
        assert!(found.contains(error) && found.contains("must differ"), "{found}");
        assert_eq!(lines[at]["id"], requests[at]["id"]);
    }
    // An id of another type is another, and a line that has failed has no answer to share one with.
    assert_eq!(ids(&lines[4]).len(), 1);
    assert_eq!(lines[5]["id"], lines[6]["id"]);
    assert!(lines[5]["error"].is_string() && lines[6]["error"].is_null(), "{}", lines[6]);
}
