//! `aquila chat` with lines from a pipe: answers, their status, and commands.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::run::{Ran, aquila};
use crate::server::Served;

/// What the command leaves after these lines.
fn chat(flags: &[&str], lines: &[&str]) -> Ran {
    let state = tempfile::tempdir().unwrap();
    let args = [&["chat", "--temperature", "0", "--max-tokens", "16"], flags].concat();
    let mut command = aquila(&args);
    command.env("XDG_STATE_HOME", state.path()).stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut text = lines.join("\n");
    text.push('\n');
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran
}

const FIXED: [&str; 4] = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"];
const QUESTION: &str = "Tom has 3 apples and buys 4 more. How many?";

#[test]
fn the_status_line_has_speed_and_acceptance() {
    let messages = json!([{ "role": "user", "content": QUESTION }]);
    let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 16 });
    let served = Served::start_with(&FIXED).unwrap();
    let (status, answer) = served.post("/v1/chat/completions", &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let usage = &answer["usage"];
    let spec = |key: &str| usage["speculative"][key].as_f64().unwrap();

    let ran = chat(&FIXED, &[QUESTION]);
    assert!(ran.stdout.contains(answer["choices"][0]["message"]["content"].as_str().unwrap()));
    let status = ran.stderr.lines().find(|line| line.contains("tokens/s")).unwrap();
    let accepted = format!(
        "{:.2} tokens per verify, {:.0} % of drafts",
        spec("spec_accept_length"),
        spec("spec_accept_rate") * 100.0
    );
    let tokens = format!("{} tokens · ", usage["completion_tokens"]);
    let context = format!("context {} of ", usage["total_tokens"]);
    for part in [&tokens, &accepted, &context] {
        assert!(status.contains(part), "{part}: {status}");
    }
    // Plain decoding accepts nothing.
    let ran = chat(&["--speculative-algorithm", "NONE"], &[QUESTION]);
    assert!(
        ran.stderr.contains("tokens/s") && !ran.stderr.contains("per verify"),
        "{}",
        ran.stderr
    );
}

#[test]
fn settings_are_changed_or_refused_by_name() {
    let ran = chat(
        &["--speculative-algorithm", "NONE"],
        &[
            "/set heat 1",
            "/set temperature warm",
            "/set top_p 2",
            "/set n 2",
            "/set max_tokens",
            "/sett top_p 1",
            "/set max_tokens 5",
            "/set ignore_eos true",
            "/set",
            "Count to ten",
            "/set max_tokens default",
            "Count to ten",
            "/help",
        ],
    );
    for said in [
        "not set: heat: no such setting; there are max_tokens, temperature, ",
        "not set: temperature: expected a number, found \"warm\"",
        "not set: top_p: must be above 0 and at most 1, found 2",
        "not set: n has no place in a chat",
        "/set max_tokens needs a value",
        "/sett is no command; /help lists them",
        "max_tokens is 5 from now on",
        "max_tokens = 5\nignore_eos = true",
        "5 tokens · ",
        "16 tokens · ",
        "/save FILE",
    ] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
}

#[test]
fn a_conversation_is_saved_and_never_overwrites() {
    let folder = tempfile::tempdir().unwrap();
    let (path, lost) = (folder.path().join("chat.json"), folder.path().join("no/such/folder"));
    let save = format!("/save {}", path.display());
    let nowhere = format!("/save {}", lost.display());
    let ran = chat(
        &["--system", "Be kind."],
        &["One?", "/undo", "/system Be brief.", "Two?", &save, "Three?", &save, &nowhere],
    );
    assert!(ran.stderr.contains("1 question and its answer are in "), "{}", ran.stderr);
    assert!(ran.stderr.contains("there is such a file already"), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("not saved: {}", lost.display())), "{}", ran.stderr);
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&saved["model"], &saved["settings"]), (&json!("tiny"), &json!({})));
    let messages = saved["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 3, "{saved}");
    assert_eq!(messages[0], json!({ "role": "system", "content": "Be brief." }));
    assert_eq!(messages[1], json!({ "role": "user", "content": "Two?" }));
    assert_eq!(messages[2]["role"], "assistant");

    // What is reset or taken away is not there any more.
    let second = folder.path().join("second.json");
    let save = format!("/save {}", second.display());
    chat(&[], &["/system Be brief.", "One?", "/reset", "/system", &save]);
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(&second).unwrap()).unwrap();
    assert_eq!(saved["messages"], json!([]));
}
