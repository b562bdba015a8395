//! The flags of policies: who decides how large trees are.

use std::path::Path;

use serde_json::{Value, json};

use crate::run::{answers, ids, run};

fn requests() -> Vec<Value> {
    let sampling = json!({ "max_tokens": 60, "temperature": 0, "ignore_eos": true });
    let prompts = ["pub fn add(a: u32, b: u32) -> u32 {", "It was a dark night, and the old man"];
    let request =
        |(id, prompt): (usize, &&str)| json!({ "id": id, "prompt": prompt, "sampling": sampling });
    prompts.iter().enumerate().map(request).collect()
}

fn file(name: &str, text: &str) -> String {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn every_policy_gives_the_text_of_plain_decoding() {
    let plain = answers(&["--speculative-algorithm", "NONE"], &requests());
    let table =
        r#"{"1": {"candidate_steps": [0, 2, 4]}, "update_interval": 2, "warmup_batches": 1}"#;
    let table = file("switching.json", table);
    let policies: [&[&str]; 6] = [
        &[],
        &["--speculative-policy", "auto", "--speculative-num-steps", "4"],
        &["--speculative-adaptive"],
        &["--speculative-policy", "adaptive", "--speculative-adaptive-config", &table],
        &["--speculative-policy", "fixed"],
        &["--speculative-algorithm", "STANDALONE+NGRAM", "--speculative-policy", "auto"],
    ];
    for policy in policies {
        let got = answers(policy, &requests());
        for (got, plain) in got.iter().zip(&plain) {
            assert_eq!(ids(got), ids(plain), "{policy:?}");
            assert!(got["meta_info"]["spec_verify_ct"].as_u64().unwrap() > 0, "{policy:?}: {got}");
        }
    }
}

#[test]
fn wrong_flags_of_policies_are_refused_by_name() {
    let older = file("older.json", r#"{"candidate_steps": [1, 3, 7], "ema_alpha": 0.2}"#);
    let steps = file("steps.json", r#"{"1": {"candidate_steps": [1, -3]}}"#);
    let costs = file("costs.json", "{}");
    let cases: [(&[&str], &str); 10] = [
        (&["--speculative-adaptive", "--speculative-num-steps", "4"], "4"),
        (&["--speculative-adaptive", "--speculative-policy", "auto"], "give one of them"),
        (&["--speculative-adaptive", "--speculative-eagle-topk", "4"], "--speculative-eagle-topk"),
        (&["--speculative-adaptive", "--speculative-adaptive-config", &older], "\"1\""),
        (&["--speculative-adaptive", "--speculative-adaptive-config", &steps], "-3"),
        (&["--speculative-adaptive", "--speculative-adaptive-config", "/none.json"], "/none.json"),
        (&["--speculative-adaptive-config", &steps], "for --speculative-policy adaptive"),
        (&["--speculative-adaptive", "--speculative-cost-table", &costs], "policy auto"),
        (&["--speculative-cost-table", &costs], "costs.json"),
        (
            &["--speculative-algorithm", "NONE", "--speculative-policy", "auto"],
            "needs --speculative-algorithm",
        ),
    ];
    for (flags, why) in cases {
        let ran = run(&[&["generate", "-q", "--prompt", "a"], flags].concat());
        assert_eq!(ran.code, Some(2), "{flags:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(why), "{flags:?}: {}", ran.stderr);
        assert_eq!(ran.stderr.lines().count(), ran.stderr.trim_end().lines().count());
    }
}

#[test]
fn what_rounds_cost_is_measured_once_and_shown() {
    let table = Path::new(env!("CARGO_TARGET_TMPDIR")).join("measured.json");
    let _ = std::fs::remove_file(&table);
    let table = table.to_str().unwrap();
    let small = ["--max-running-requests", "2", "--speculative-cost-table", table];
    let flags = [&["inspect", "tiny", "--costs"], &small[..]].concat();
    let first = run(&flags);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert!(first.stderr.contains("costs     measured in"), "{}", first.stderr);
    assert!(first.stdout.contains("verify, µs") && first.stdout.contains("2 requests"));
    let again = run(&flags);
    assert_eq!((again.code, &again.stdout), (Some(0), &first.stdout), "{}", again.stderr);
    assert!(again.stderr.contains(table) && !again.stderr.contains("measured in"));
    let json = run(&[&flags[..], &["--json"]].concat());
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["batches"], json!([1, 2]));
    assert_eq!(json["rows"][0], 1);
    let [rows, verify, steps] =
        ["rows", "verify", "steps"].map(|key| json[key].as_array().unwrap());
    assert_eq!(verify.len(), rows.len());
    assert!(verify.iter().all(|seconds| seconds.as_f64().unwrap() > 0.0));
    let draft = json["draft"].as_array().unwrap();
    assert_eq!(draft.len(), 2);
    assert!(draft.iter().all(|batch| batch.as_array().unwrap().len() == steps.len()));
    assert!(json["request"].is_number() && json["draft_row"].is_number());
    // Other flags are another table.
    let other = run(&[&flags[..], &["--page-size", "16"]].concat());
    assert!(other.stderr.contains("costs     measured in"), "{}", other.stderr);

    let none = run(&["inspect", "tiny", "--costs", "--speculative-num-steps", "3"]);
    assert_eq!(none.code, Some(2), "{}", none.stderr);
    assert!(none.stderr.contains("--speculative-policy auto"), "{}", none.stderr);
}
