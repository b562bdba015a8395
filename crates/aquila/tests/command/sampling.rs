//! Every setting of a request does what it says.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use crate::run::{answer, answers, generate, goldens, ids, request, run};

/// A prompt after which the model repeats itself.
fn prompt() -> Value {
    "fn main() {".into()
}

/// What is sampled at a high temperature with these settings besides.
fn sampled(seed: i64, more: Value) -> Vec<u64> {
    let mut sampling = json!({
        "max_tokens": 24, "temperature": 3.0, "seed": seed, "ignore_eos": true,
    });
    sampling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ids(&answer(&prompt(), sampling))
}

fn greedy(more: Value) -> Value {
    let mut sampling = json!({ "max_tokens": 24, "temperature": 0, "ignore_eos": true });
    sampling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    answer(&prompt(), sampling)
}

#[test]
fn max_tokens_ends_an_answer_by_length() {
    let line = greedy(json!({ "max_tokens": 3 }));
    assert_eq!(ids(&line).len(), 3);
    assert_eq!(line["finish_reason"], "length");
    let line = greedy(json!({ "max_tokens": 0 }));
    assert_eq!((ids(&line).len(), &line["text"]), (0, &json!("")));
}

#[test]
fn temperature_and_seed_change_answers_and_filters_undo_it() {
    let best = ids(&greedy(json!({})));
    let one = sampled(1, json!({}));
    assert_ne!(one, best);
    assert_ne!(one, sampled(2, json!({})));
    assert_ne!(one, sampled(-1, json!({})));
    assert_eq!(one, sampled(1, json!({ "top_k": -1, "top_p": 1.0, "min_p": 0.0 })));
    for filter in [json!({ "top_k": 1 }), json!({ "top_p": 1e-6 }), json!({ "min_p": 1.0 })] {
        assert_eq!(sampled(1, filter.clone()), best, "{filter}");
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let whole = greedy(json!({}));
    let text = whole["text"].as_str().unwrap();
    // Longer than any token, so that it is completed by more than one.
    let stop: String = text.chars().skip(15).take(12).collect();
    for stop in [json!(stop), json!(["never in the text", stop])] {
        let line = greedy(json!({ "stop": stop }));
        let stop = stop.as_str().or(stop[1].as_str()).unwrap();
        assert_eq!(line["text"], text[..text.find(stop).unwrap()]);
        assert_eq!(line["finish_reason"], "stop");
        assert!(ids(&whole).starts_with(&ids(&line)));
        assert!(ids(&line).len() < ids(&whole).len());
        assert_eq!(line["meta_info"]["completion_tokens"], ids(&line).len());
    }
}

#[test]
fn a_stop_token_ends_the_ids_but_not_the_text() {
    let whole = greedy(json!({}));
    let stop = ids(&whole)[5];
    let line = greedy(json!({ "stop_token_ids": [stop] }));
    let kept = ids(&whole).iter().position(|&id| id == stop).unwrap() + 1;
    assert_eq!(ids(&line), ids(&whole)[..kept]);
    assert_eq!(line["finish_reason"], "stop");
    let before = greedy(json!({ "max_tokens": kept - 1 }));
    assert_eq!(line["text"], before["text"]);
}

#[test]
fn ignore_eos_and_min_tokens_put_off_the_end() {
    let golden = &goldens()[0];
    let expected = ids(&json!({ "token_ids": golden["greedy_ids"] }));
    let (end, before) = expected.split_last().unwrap();
    let prompt = &golden["prompt_ids"];
    let on = answer(prompt, json!({ "max_tokens": 30, "temperature": 0, "ignore_eos": true }));
    assert_eq!(ids(&on).len(), 30);
    assert_eq!(ids(&on)[..expected.len()], expected);
    let put_off = answer(prompt, json!({ "max_tokens": 30, "temperature": 0, "min_tokens": 20 }));
    assert!(ids(&put_off).len() >= 20);
    assert_eq!(ids(&put_off)[..before.len()], *before);
    assert!(!ids(&put_off)[..20].contains(end));
}

#[test]
fn penalties_make_repetition_rarer() {
    let most = |ids: Vec<u64>| {
        let mut counts = HashMap::new();
        ids.iter().for_each(|id| *counts.entry(*id).or_insert(0) += 1);
        counts.into_values().max().unwrap()
    };
    let different = |ids: Vec<u64>| ids.iter().collect::<HashSet<_>>().len();
    let plain = ids(&greedy(json!({})));
    assert!(most(plain.clone()) > 2, "the prompt should be answered with repetitions");
    let penalized = |more| ids(&greedy(more));
    assert!(most(penalized(json!({ "frequency_penalty": 2.0 }))) < most(plain.clone()));
    assert!(different(penalized(json!({ "presence_penalty": 2.0 }))) > different(plain.clone()));
    assert_eq!(different(penalized(json!({ "repetition_penalty": 1e6 }))), plain.len());
}

#[test]
fn logit_bias_forces_and_forbids_tokens() {
    let plain = ids(&greedy(json!({})));
    assert_eq!(ids(&greedy(json!({ "logit_bias": { "77": 1000 } }))), vec![77; plain.len()]);
    let first = plain[0];
    let forbidden = ids(&greedy(json!({ "logit_bias": { (first.to_string()): -1000 } })));
    assert!(!forbidden.contains(&first));
}

#[test]
fn n_answers_come_as_choices_with_different_noise() {
    let line = answer(&prompt(), json!({ "max_tokens": 8, "temperature": 2, "seed": 3, "n": 3 }));
    let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "choices", "meta_info"]);
    let choices = line["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_eq!(choices.iter().map(ids).collect::<HashSet<_>>().len(), 3);
    let answered: usize = choices.iter().map(|choice| ids(choice).len()).sum();
    assert_eq!(line["meta_info"]["completion_tokens"], answered);
    // The first is what one answer alone would be.
    let alone = answer(&prompt(), json!({ "max_tokens": 8, "temperature": 2, "seed": 3 }));
    assert_eq!(ids(&choices[0]), ids(&alone));
}

#[test]
fn log_probabilities_come_where_asked() {
    let line = greedy(json!({ "max_tokens": 2 }));
    assert_eq!(line.get("logprobs"), None);
    let line = greedy(json!({ "max_tokens": 2, "logprobs": true }));
    assert_eq!(line["logprobs"][1]["top"], json!([]));
    let line = greedy(json!({ "max_tokens": 2, "top_logprobs": 2 }));
    assert_eq!(line["logprobs"][1]["top"].as_array().unwrap().len(), 2);
}

#[test]
fn flags_mean_what_the_keys_of_a_line_mean() {
    let flags = [
        ["--max-tokens", "12"],
        ["--min-tokens", "3"],
        ["--temperature", "1.5"],
        ["--top-p", "0.9"],
        ["--top-k", "40"],
        ["--min-p", "0.01"],
        ["--seed", "-7"],
        ["--stop", "never"],
        ["--stop-token-ids", "5,6"],
        ["--repetition-penalty", "1.2"],
        ["--presence-penalty", "0.5"],
        ["--frequency-penalty", "-0.5"],
        ["--logit-bias", r#"{"7": -3.5}"#],
        ["--n", "2"],
        ["--top-logprobs", "3"],
    ];
    let settings = json!({
        "max_tokens": 12, "min_tokens": 3, "temperature": 1.5, "top_p": 0.9, "top_k": 40,
        "min_p": 0.01, "seed": -7, "stop": "never", "stop_token_ids": [5, 6], "ignore_eos": true,
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": { "7": -3.5 }, "n": 2, "logprobs": true, "top_logprobs": 3,
        "prompt_logprobs": true,
    });
    let switches = ["--ignore-eos", "--logprobs", "--prompt-logprobs"];
    let args = [flags.concat(), switches.to_vec()].concat();
    // How much is drafted depends on what rounds cost.
    let plain = ["--speculative-algorithm", "NONE"];
    let args = [args, plain.to_vec()].concat();
    let by_flags = answers(&args, &[request(&prompt(), json!({}))]);
    assert_eq!(by_flags, answers(&plain, &[request(&prompt(), settings)]));
    // A line's own settings come first, and the rest stay.
    let own = json!({ "n": 1, "prompt_logprobs": false, "max_tokens": 5 });
    let line = answers(&args, &[request(&prompt(), own)]).remove(0);
    assert_eq!(ids(&line), ids(&by_flags[0]["choices"][0])[..5]);
    assert_eq!(line.get("prompt_logprobs"), None);
}

#[test]
fn one_prompt_gets_the_text_that_a_file_gets() {
    let expected = greedy(json!({}))["text"].as_str().unwrap().to_owned();
    let args = ["generate", "--prompt", "fn main() {", "--max-tokens", "24", "--temperature", "0"];
    let ran = run(&[&args[..], &["--ignore-eos"]].concat());
    assert_eq!((ran.code, ran.stdout), (Some(0), expected + "\n"));
    assert!(ran.stderr.contains("24 answered"), "{}", ran.stderr);
}

#[test]
fn a_model_without_a_tokenizer_serves_ids_alone() {
    let model = crate::run::without_tokenizer();
    let requests = [
        json!({ "id": "ids", "prompt_ids": [1, 2, 3], "sampling": { "max_tokens": 4 } }),
        json!({ "id": "text", "prompt": "a text" }),
        json!({ "id": "stop", "prompt_ids": [1, 2, 3], "sampling": { "stop": "a text" } }),
    ];
    let ran = generate(&["--ignore-eos", &model], &requests);
    assert_eq!(ran.code, Some(3));
    let lines = ran.lines();
    assert_eq!(ids(&lines[0]).len(), 4);
    assert_eq!(lines[0]["text"], Value::Null);
    for line in &lines[1..] {
        assert!(line["error"].as_str().unwrap().contains("no tokenizer"), "{line}");
    }
    let ran = run(&["generate", &model, "--prompt", "a text"]);
    assert_eq!(ran.code, Some(3));
    assert!(ran.stderr.contains("no tokenizer"), "{}", ran.stderr);
}

#[test]
fn dummy_weights_come_from_the_config_and_the_seed_alone() {
    let folder = tempfile::tempdir().unwrap();
    let config = crate::run::fixture("qwen3").join("config.json");
    std::fs::copy(config, folder.path().join("config.json")).unwrap();
    let model = folder.path().to_str().unwrap();
    let answer = |seed: &str| {
        let args = ["--model-path", model, "--load-format", "dummy", "--random-seed", seed];
        let sampling = json!({ "temperature": 0, "max_tokens": 16, "ignore_eos": true });
        answers(&args, &[request(&json!([1, 2, 3]), sampling)])
    };
    assert_eq!(answer("1"), answer("1"));
    assert_ne!(answer("1"), answer("2"));
}
