//! Priorities on the command line and in input lines: said at start, and in no text.

use serde_json::json;

use crate::run::{answers, generate, run, without_tokenizer};

const RANKED: &str = "--enable-priority-scheduling";

#[test]
fn priorities_change_no_answer_and_are_refused_on_request() {
    let requests: Vec<_> = [Some(3), None, Some(-20), Some(40)]
        .into_iter()
        .enumerate()
        .map(|(at, priority)| json!({ "prompt_ids": [at + 1, 5, 9], "priority": priority }))
        .collect();
    let model = without_tokenizer();
    let usual = [&model, "--max-tokens", "20", "--max-running-requests", "1"];
    let wanted = answers(&usual, &requests);
    for flags in [
        &[RANKED][..],
        &[RANKED, "--schedule-low-priority-values-first"],
        &[RANKED, "--priority-scheduling-preemption-threshold", "0", "--schedule-policy", "lpm"],
        &[RANKED, "--abort-on-priority-when-disabled"],
    ] {
        let found = answers(&[&usual[..], flags].concat(), &requests);
        let texts = |lines: &[serde_json::Value]| -> Vec<_> {
            lines.iter().map(|line| (line["id"].clone(), line["token_ids"].clone())).collect()
        };
        assert_eq!(texts(&found), texts(&wanted), "{flags:?}");
    }
    let refusing = [&usual[..], &["--abort-on-priority-when-disabled"]].concat();
    let ran = generate(&refusing, &requests);
    let lines = ran.lines();
    for (line, request) in lines.iter().zip(&requests) {
        let error = line["error"].as_str().unwrap_or_default();
        assert_eq!(error.contains(RANKED), !request["priority"].is_null(), "{line}");
    }
}

#[test]
fn a_priority_is_whole_and_its_flags_belong_together() {
    let model = without_tokenizer();
    for wrong in [json!("high"), json!(0.5)] {
        let ran = generate(&[&model], &[json!({ "prompt_ids": [1], "priority": wrong })]);
        let error = ran.lines()[0]["error"].to_string();
        assert!(error.contains("priority: expected a whole number"), "{error}");
    }
    for flags in [
        &["--schedule-low-priority-values-first"][..],
        &["--priority-scheduling-preemption-threshold", "5"],
        &[RANKED, "--priority-scheduling-preemption-threshold", "-1"],
    ] {
        let ran = run(&[&["generate", "--prompt", "x"], flags].concat());
        assert_eq!(ran.code, Some(2), "{flags:?}: {}", ran.stderr);
        assert!(ran.stderr.contains("priority"), "{}", ran.stderr);
    }
}

#[test]
fn the_start_says_what_becomes_of_priorities() {
    let cases = [
        (&[][..], "first come first, overlap"),
        (&["--abort-on-priority-when-disabled"], "first come first, priorities refused, overlap"),
        (&[RANKED], "highest priority before that (a difference of 10 preempts), overlap"),
        (
            &[
                RANKED,
                "--schedule-low-priority-values-first",
                "--priority-scheduling-preemption-threshold",
                "3",
            ],
            "lowest priority before that (a difference of 3 preempts), overlap",
        ),
    ];
    for (flags, said) in cases {
        let prompt = ["generate", "--prompt", "fn", "--max-tokens", "1"];
        let ran = run(&[&prompt[..], flags].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert!(ran.stderr.contains(said), "{said} is not in\n{}", ran.stderr);
    }
}
