//! Pipes: answers come while prompts still do, and a reader may leave.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::run::{Ran, aquila, jsonl, without_tokenizer};

fn requests(count: usize) -> Vec<Value> {
    let sampling = json!({ "max_tokens": 50, "ignore_eos": true });
    (0..count)
        .map(|at| json!({ "id": at, "prompt_ids": [1 + at % 300], "sampling": sampling }))
        .collect()
}

#[test]
fn an_answer_comes_before_the_next_prompt_is_written() {
    let args = ["generate", "-q", &without_tokenizer(), "--input", "-", "--output", "-"];
    let mut child = aquila(&args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    for request in requests(3) {
        writeln!(stdin, "{request}").unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["id"], request["id"]);
    }
    drop(stdin);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_reader_that_leaves_ends_the_command_quietly() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    std::fs::write(&input, jsonl(&requests(200))).unwrap();
    let model = without_tokenizer();
    let batch = ["generate", "-q", &model, "--input", input.to_str().unwrap()];
    let one = ["generate", "-q", "--prompt", "The", "--max-tokens", "200", "--ignore-eos"];
    for args in [&batch[..], &one, &["inspect", "tiny"], &["inspect", "--json", "tiny"]] {
        let mut child = aquila(args).spawn().unwrap();
        drop(child.stdout.take());
        let ran = Ran::of(child.wait_with_output().unwrap());
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(141), ""), "{args:?}");
    }
}

#[test]
fn a_closed_standard_error_is_no_reason_to_fail() {
    let mut child = aquila(&["generate", "--prompt", "The", "--max-tokens", "3"]).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
