//! Settings as users write them: every key, its type, its range and its default.

use aquila_text::{ParamError, SamplingParams};
use proptest::prelude::*;
use serde_json::{Value, json};

fn parse(value: Value) -> Result<SamplingParams, ParamError> {
    SamplingParams::from_json(value.as_object().unwrap())
}

fn params(value: Value) -> SamplingParams {
    parse(value).unwrap()
}

fn all_keys() -> Value {
    json!({
        "max_tokens": 5, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7,
        "min_p": 0.125, "seed": 9, "stop": ["a", "b"], "stop_token_ids": [3, 4],
        "ignore_eos": true, "repetition_penalty": 1.5, "presence_penalty": -1,
        "frequency_penalty": 2, "logit_bias": { "30": -1, "4": 2.5 }, "n": 3, "logprobs": true,
        "top_logprobs": 6, "prompt_logprobs": true,
    })
}

#[test]
fn every_key_is_read() {
    let expected = SamplingParams {
        max_tokens: Some(5),
        min_tokens: Some(2),
        temperature: Some(0.5),
        top_p: Some(0.25),
        top_k: Some(7),
        min_p: Some(0.125),
        seed: Some(9),
        stop: Some(vec!["a".into(), "b".into()]),
        stop_token_ids: Some(vec![3, 4]),
        ignore_eos: Some(true),
        repetition_penalty: Some(1.5),
        presence_penalty: Some(-1.0),
        frequency_penalty: Some(2.0),
        logit_bias: Some(vec![(4, 2.5), (30, -1.0)]),
        n: Some(3),
        logprobs: Some(true),
        top_logprobs: Some(6),
        prompt_logprobs: Some(true),
        grammar: None,
    };
    assert_eq!(params(all_keys()), expected);
}

#[test]
fn every_key_reaches_the_engine() {
    let checked = params(all_keys()).check(&[99]).unwrap();
    let sampling = &checked.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (0.5, 0.25, 0.125));
    assert_eq!((sampling.top_k, sampling.seed, checked.seeded), (7, 9, true));
    assert_eq!(sampling.repetition_penalty, 1.5);
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (-1.0, 2.0));
    assert_eq!(sampling.logit_bias, [(4, 2.5), (30, -1.0)]);
    assert_eq!((checked.limits.max_tokens, checked.limits.min_tokens), (5, 2));
    // End-of-text is ignored, the request's own ids are not.
    assert_eq!(checked.limits.stop_ids, [3, 4]);
    assert_eq!(checked.stop.strings(), ["a", "b"]);
    assert_eq!((checked.n, checked.logprobs, checked.prompt_logprobs), (3, Some(6), Some(6)));
}

#[test]
fn what_is_left_out_or_null_takes_the_defaults() {
    let nulls = all_keys().as_object().unwrap().keys().map(|k| (k.clone(), Value::Null)).collect();
    assert_eq!(params(Value::Object(nulls)), SamplingParams::default());
    let checked = SamplingParams::default().check(&[2, 0]).unwrap();
    assert_eq!(checked.sampling.temperature, 1.0);
    assert_eq!((checked.sampling.top_p, checked.sampling.top_k), (1.0, 0));
    assert_eq!((checked.limits.max_tokens, checked.limits.min_tokens), (128, 0));
    assert_eq!(checked.limits.stop_ids, [0, 2]);
    assert_eq!((checked.n, checked.seeded), (1, false));
    assert_eq!((checked.logprobs, checked.prompt_logprobs), (None, None));
    assert!(checked.stop.is_empty());
}

#[test]
fn a_value_of_the_wrong_type_is_refused_by_name() {
    let whole = ["max_tokens", "min_tokens", "top_k", "seed", "n", "top_logprobs"];
    let numbers = [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ];
    let truths = ["ignore_eos", "logprobs", "prompt_logprobs"];
    let mut cases: Vec<(&str, Value)> = Vec::new();
    for key in whole {
        cases.extend([json!("5"), json!(1.5), json!([1]), json!(true)].map(|wrong| (key, wrong)));
    }
    for key in ["max_tokens", "min_tokens", "n", "top_logprobs"] {
        cases.push((key, json!(-1)));
    }
    for key in numbers {
        cases.extend([json!("hot"), json!(false), json!({})].map(|wrong| (key, wrong)));
    }
    for key in truths {
        cases.extend([json!(1), json!("yes")].map(|wrong| (key, wrong)));
    }
    cases.extend([
        ("stop", json!(5)),
        ("stop", json!(["a", 5])),
        ("stop_token_ids", json!(5)),
        ("stop_token_ids", json!([-1])),
        ("stop_token_ids", json!([1u64 << 32])),
        ("logit_bias", json!([1, 2])),
        ("logit_bias", json!({ "the": 1 })),
        ("logit_bias", json!({ "-1": 1 })),
        ("logit_bias", json!({ "1": "much" })),
    ]);
    for (key, value) in cases {
        let error = parse(json!({ key: value })).unwrap_err();
        assert_eq!(error.name, key);
        let (text, value) = (error.to_string(), value.to_string());
        assert!(text.contains("expected") && text.contains(&value), "{key}: {text}");
    }
}

#[test]
fn an_unknown_key_is_refused_with_those_that_exist() {
    let error = parse(json!({ "max_new_tokens": 5 })).unwrap_err();
    assert_eq!(error.name, "max_new_tokens");
    for key in all_keys().as_object().unwrap().keys() {
        assert!(error.why.contains(key.as_str()), "{} lacks {key}", error.why);
    }
}

#[test]
fn a_value_out_of_range_is_refused_by_its_key() {
    let cases = [
        ("temperature", json!(-0.1)),
        ("temperature", json!(1e40)),
        ("top_p", json!(0)),
        ("top_p", json!(1.1)),
        ("top_k", json!(-2)),
        ("top_k", json!(1i64 << 40)),
        ("min_p", json!(-0.1)),
        ("min_p", json!(1.1)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(1e40)),
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!(-2.1)),
        ("logit_bias", json!({ "1": 1e40 })),
        ("n", json!(0)),
        ("n", json!(129)),
        ("top_logprobs", json!(101)),
        ("stop", json!("")),
        ("stop", json!(["a", ""])),
        ("min_tokens", json!(129)),
    ];
    for (key, value) in cases {
        let error = params(json!({ key: value })).check(&[]).unwrap_err();
        assert_eq!(error.name, key, "{value}");
        assert!(error.why.contains("must"), "{key}: {}", error.why);
    }
}

#[test]
fn edges_of_the_ranges_are_taken() {
    for value in [
        json!({ "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "n": 1 }),
        json!({ "top_k": 0, "min_p": 1, "n": 128, "top_logprobs": 100, "max_tokens": 0 }),
        json!({ "presence_penalty": -2, "frequency_penalty": 2, "min_tokens": 128 }),
    ] {
        params(value.clone()).check(&[]).unwrap_or_else(|e| panic!("{value}: {e}"));
    }
    assert_eq!(params(json!({ "top_k": -1 })).check(&[]).unwrap().sampling.top_k, 0);
}

#[test]
fn log_probabilities_are_wanted_where_any_key_says_so() {
    let wanted = |value| params(value).check(&[]).map(|c| (c.logprobs, c.prompt_logprobs)).unwrap();
    assert_eq!(wanted(json!({ "logprobs": true })), (Some(0), None));
    assert_eq!(wanted(json!({ "top_logprobs": 3 })), (Some(3), None));
    assert_eq!(wanted(json!({ "logprobs": false, "top_logprobs": 0 })), (None, None));
    assert_eq!(wanted(json!({ "prompt_logprobs": true })), (None, Some(0)));
}

#[test]
fn a_generation_config_gives_defaults_and_no_sampling_is_greedy() {
    let read = |value: Value| SamplingParams::from_generation_config(&value).unwrap();
    let config = json!({
        "do_sample": true, "temperature": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25,
        "repetition_penalty": 1.25, "eos_token_id": 3, "max_length": 7,
    });
    let expected = json!({
        "temperature": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.25,
    });
    assert_eq!(read(config), params(expected));
    assert_eq!(read(json!({})), SamplingParams::default());
    assert_eq!(read(json!({ "temperature": null })), SamplingParams::default());
    let greedy = read(json!({ "do_sample": false, "temperature": 0.75 }));
    assert_eq!(greedy.temperature, Some(0.0));
    for (key, value) in [("temperature", json!("hot")), ("do_sample", json!(1))] {
        let error = SamplingParams::from_generation_config(&json!({ key: value })).unwrap_err();
        assert_eq!(error.name, key);
    }
}

proptest! {
    #[test]
    fn each_setting_comes_from_the_first_that_has_it(own in any::<u32>(), others in any::<u32>()) {
        let pick = |mask: u32, value: &Value| -> SamplingParams {
            let keys = value.as_object().unwrap().iter().enumerate();
            let kept = keys.filter(|(at, _)| mask >> at & 1 == 1);
            params(Value::Object(kept.map(|(_, (k, v))| (k.clone(), v.clone())).collect()))
        };
        let first = all_keys();
        let second = json!({
            "max_tokens": 50, "min_tokens": 20, "temperature": 1.5, "top_p": 0.75, "top_k": 70,
            "min_p": 0.5, "seed": 90, "stop": ["c"], "stop_token_ids": [30],
            "ignore_eos": false, "repetition_penalty": 2.5, "presence_penalty": 1,
            "frequency_penalty": 1, "logit_bias": { "5": 1 }, "n": 30, "logprobs": false,
            "top_logprobs": 60, "prompt_logprobs": false,
        });
        let mut merged = pick(others & !own, &second);
        for (at, (key, value)) in first.as_object().unwrap().iter().enumerate() {
            if own >> at & 1 == 1 {
                prop_assert!(merged.set(key, value).unwrap());
            }
        }
        prop_assert_eq!(pick(own, &first).or(&pick(others, &second)), merged);
    }

    #[test]
    fn any_whole_number_of_64_bits_is_a_seed(positive in any::<u64>(), signed in any::<i64>()) {
        prop_assert_eq!(params(json!({ "seed": positive })).seed, Some(positive));
        prop_assert_eq!(params(json!({ "seed": signed })).seed, Some(signed as u64));
    }

    #[test]
    fn finite_settings_in_range_pass_and_arrive_as_they_are(
        temperature in 0.0f32..100.0,
        top_p in 0.001f32..=1.0,
        min_p in 0.0f32..=1.0,
        top_k in -1i64..100_000,
        penalty in -2.0f32..=2.0,
    ) {
        let value = json!({
            "temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k,
            "presence_penalty": penalty, "frequency_penalty": -penalty,
        });
        let sampling = params(value).check(&[]).unwrap().sampling;
        prop_assert_eq!(sampling.temperature, temperature);
        prop_assert_eq!((sampling.top_p, sampling.min_p), (top_p, min_p));
        prop_assert_eq!(i64::from(sampling.top_k), top_k.max(0));
        let penalties = (sampling.presence_penalty, sampling.frequency_penalty);
        prop_assert_eq!(penalties, (penalty, -penalty));
    }

    #[test]
    fn stop_ids_are_each_once_and_ascending(
        own in prop::collection::vec(0u32..50, 0..10),
        eos in prop::collection::vec(0u32..50, 0..4),
        ignore in any::<bool>(),
    ) {
        let value = json!({ "stop_token_ids": own, "ignore_eos": ignore });
        let found = params(value).check(&eos).unwrap().limits.stop_ids;
        let mut expected: Vec<u32> = own;
        if !ignore {
            expected.extend(&eos);
        }
        expected.sort_unstable();
        expected.dedup();
        prop_assert_eq!(found, expected);
    }
}
