//! Same seed, same text: whatever else is in the batch, and however it is computed.

use aquila_compute::cpu::Isa;
use serde_json::{Value, json};

use crate::run::{answers, goldens};

fn requests() -> Vec<Value> {
    let goldens = goldens();
    (0..10)
        .map(|at| {
            let golden = &goldens[at % 9];
            let prompt = golden["prompt_ids"].as_array().unwrap();
            json!({
                "id": at,
                "prompt_ids": prompt[..20 + 6 * at],
                "sampling": {
                    "seed": 40 + at, "temperature": 0.4 + 0.2 * at as f64, "top_p": 0.95,
                    "max_tokens": 8 + 2 * at, "frequency_penalty": 0.1 * at as f64,
                    "n": 1 + at % 3, "logprobs": true, "top_logprobs": 2,
                },
            })
        })
        .collect()
}

/// An answer without what may depend on its neighbours: how much was cached, how often it waited.
fn essence(mut line: Value) -> Value {
    line.as_object_mut().unwrap().remove("meta_info");
    line
}

fn essences(args: &[&str], requests: &[Value]) -> Vec<Value> {
    answers(args, requests).into_iter().map(essence).collect()
}

#[test]
fn settings_of_the_engine_change_no_text() {
    let requests = requests();
    let expected = essences(&[], &requests);
    for flags in [
        "--page-size 16",
        "--page-size 7 --chunked-prefill-size 5",
        "--chunked-prefill-size 1 --max-running-requests 3",
        "--chunked-prefill-size -1",
        "--max-running-requests 1",
        "--threads 1",
        "--threads 3 --disable-radix-cache",
        "--max-queued-requests 1",
        "--max-queued-requests 2 --max-running-requests 2",
        "--context-length 200",
    ] {
        let args: Vec<&str> = flags.split(' ').collect();
        assert_eq!(essences(&args, &requests), expected, "{flags}");
    }
}

#[test]
fn the_instruction_set_changes_no_text() {
    // Few and short, since the portable path is slow.
    let mut requests = requests();
    requests.truncate(2);
    for request in &mut requests {
        request["sampling"]["max_tokens"] = json!(5);
    }
    let expected = essences(&[], &requests);
    for isa in Isa::available() {
        assert_eq!(essences(&["--cpu-isa", &isa.to_string()], &requests), expected, "{isa}");
    }
}

#[test]
fn neighbours_and_order_change_no_text() {
    let requests = requests();
    let expected = essences(&[], &requests);
    for at in [0, 4, 9] {
        assert_eq!(essences(&[], &requests[at..=at]), expected[at..=at]);
    }
    let mut backwards: Vec<Value> = requests.clone();
    backwards.reverse();
    let mut answers = essences(&["--max-running-requests", "4"], &backwards);
    answers.reverse();
    assert_eq!(answers, expected);
}

#[test]
fn a_pool_too_small_for_all_changes_no_text() {
    // Longer than what admission leaves free for those that run.
    let mut requests = requests();
    for request in &mut requests {
        request["sampling"]["max_tokens"] = json!(60);
        request["sampling"]["ignore_eos"] = json!(true);
    }
    let lines = answers(&["--max-total-tokens", "200"], &requests);
    let preemptions = |line: &Value| line["meta_info"]["retractions"].as_u64().unwrap();
    assert!(lines.iter().map(preemptions).sum::<u64>() > 0);
    assert_eq!(lines.into_iter().map(essence).collect::<Vec<_>>(), essences(&[], &requests));
}

#[test]
fn unseeded_requests_differ_and_repeat_from_run_to_run() {
    let request = json!({ "prompt": "The", "sampling": { "temperature": 2, "max_tokens": 8 } });
    let requests = vec![request; 3];
    let ids = |args: &[&str]| -> Vec<Value> {
        answers(args, &requests).iter().map(|line| line["token_ids"].clone()).collect()
    };
    let first = ids(&[]);
    assert_ne!(first[0], first[1]);
    assert_eq!(first, ids(&["--page-size", "4"]));
    assert_ne!(first, ids(&["--random-seed", "1"]));
}
