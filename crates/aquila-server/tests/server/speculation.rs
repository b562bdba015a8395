//! What answers, metrics and the server's description say about speculation, and what a request
//! may say about it.

use std::sync::Arc;

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_engine::{EngineConfig, EngineHandle, Runner, Scheduler};
use aquila_model::{Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, LoadFormat, resolve};
use aquila_spec::{Algorithm, Eagle3, RecurrentDraft, Shape};
use aquila_text::{Generator, SamplingParams, Tokenizer};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, settings};

const PROMPT: &str = "use std::collections::HashMap;\n\npub fn count(words: &[String])";

/// A server whose model has an EAGLE-3 head.
pub fn server(shape: Shape) -> Running {
    let config = EngineConfig { shape, ..engine_config() };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 2).unwrap());
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let target = Decoder::load(&*backend, &checkpoint, format, positions, &mut |_| ()).unwrap();
    let location = resolve("tiny-eagle3").unwrap();
    let head = HeadCheckpoint::open(&location, LoadFormat::Auto, target.spec()).unwrap();
    let embedding = target.embedding();
    let head = Eagle3Head::load(&*backend, &head, format, positions, embedding, &mut |_| ());
    let eagle3 = Eagle3::new(&*backend, head.unwrap(), config.draft_bounds()).unwrap();
    let (slots, dtype) = (config.slots(), config.kv_dtype);
    let draft = RecurrentDraft::new(&*backend, Box::new(eagle3), slots, dtype).unwrap();
    let runner = Runner::new(backend, target, Some(Algorithm::on_device(draft)), &config).unwrap();
    let handle = EngineHandle::start(Scheduler::new(runner, config).unwrap()).unwrap();
    let tokenizer = Tokenizer::load(checkpoint.folder().unwrap()).unwrap();
    let eos = checkpoint.eos_token_ids().to_vec();
    let generator = Generator::new(handle, tokenizer, eos, SamplingParams::default());
    Running::start(generator, settings())
}

fn params(tokens: usize) -> Value {
    json!({ "max_new_tokens": tokens, "temperature": 0, "ignore_eos": true })
}

/// Asks with more fields than the usual ones.
fn generate(server: &Running, more: Value) -> Value {
    let mut body = json!({ "text": PROMPT, "sampling_params": params(48) });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post("/generate", &body.to_string()).ok()
}

fn number(fields: &Value, name: &str) -> f64 {
    fields[name].as_f64().unwrap_or_else(|| panic!("no number {name} in {fields}"))
}

/// The histogram, after checking that all fields agree with it.
fn consistent(fields: &Value, most_nodes: usize) -> Vec<u64> {
    let histogram = fields["spec_correct_drafts_histogram"].as_array().unwrap();
    let histogram: Vec<u64> = histogram.iter().map(|count| count.as_u64().unwrap()).collect();
    let rounds: u64 = histogram.iter().sum();
    let correct: u64 = (0..).zip(&histogram).map(|(i, count)| i * count).sum();
    let proposed = fields["spec_num_proposed_drafts"].as_u64().unwrap();
    assert_eq!(fields["spec_verify_ct"], rounds);
    assert_eq!(fields["spec_num_correct_drafts"], correct);
    assert!(correct <= proposed && proposed <= rounds * (most_nodes as u64 - 1), "{fields}");
    let close = |name: &str, value: f64| assert!((number(fields, name) - value).abs() < 1e-6);
    close("spec_accept_rate", correct as f64 / proposed as f64);
    close("spec_accept_length", (correct + rounds) as f64 / rounds as f64);
    histogram
}

#[test]
fn answers_say_what_speculation_did_in_sglangs_words() {
    let shape = Shape::new(4, 3, 9).unwrap();
    let server = server(shape);
    let native = generate(&server, json!({}));
    let meta = &native["meta_info"];
    let histogram = consistent(meta, shape.nodes());
    assert!(histogram.len() <= 5 && histogram[1..].iter().sum::<u64>() > 0, "{histogram:?}");
    // The first token is the prefill's; every other one was chosen in a round.
    let rounds: u64 = histogram.iter().sum();
    assert_eq!(number(meta, "spec_num_correct_drafts") as u64 + rounds + 1, 48);

    let body = json!({
        "model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": true,
    });
    let completion = server.post("/v1/completions", &body.to_string()).ok();
    assert_eq!(completion["choices"][0]["text"], native["text"]);
    let usage = &completion["usage"]["speculative"];
    assert_eq!(consistent(usage, shape.nodes()), histogram);
    for (name, value) in usage.as_object().unwrap() {
        assert_eq!(value, &meta[name], "{name}");
    }

    let body = json!({ "text": PROMPT, "stream": true, "sampling_params": params(48) });
    let events = server.post("/generate", &body.to_string()).events();
    let meta = &events.last().unwrap()["meta_info"];
    assert_eq!(consistent(meta, shape.nodes()), histogram);
}

#[test]
fn statistics_are_where_clients_of_sglang_and_vllm_look() {
    let server = server(Shape::new(4, 3, 9).unwrap());
    let chat = json!({ "messages": [{ "role": "user", "content": PROMPT }] });
    for (path, asked) in
        [("/v1/chat/completions", chat), ("/v1/completions", json!({ "prompt": PROMPT }))]
    {
        for stream in [false, true] {
            let mut body = asked.clone();
            let more = json!({ "max_tokens": 40, "temperature": 0, "stream": stream,
                "ignore_eos": true, "return_spec_tokens_details": true });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            if stream {
                body["stream_options"] = json!({ "include_usage": true });
            }
            let reply = server.post(path, &body.to_string());
            let answer = if stream { reply.events().pop().unwrap() } else { reply.ok() };
            let details = &answer["sglext"]["spec_tokens_details"];
            let mut histogram = consistent(details, 9);
            let metrics = &answer["metrics"]["speculative_decoding"];
            assert_eq!(metrics["num_spec_steps"], details["spec_verify_ct"]);
            assert_eq!(metrics["num_draft_tokens"], details["spec_num_proposed_drafts"]);
            assert_eq!(metrics["num_accepted_draft_tokens"], details["spec_num_correct_drafts"]);
            assert_eq!(metrics["mean_acceptance_length"], details["spec_accept_length"]);
            assert_eq!(metrics["num_spec_tokens"], 4);
            histogram.resize(5, 0);
            assert_eq!(metrics["acceptance_histogram"], json!(histogram));
            // Several answers share no statistics, and nobody gets details who does not ask.
            body["n"] = 2.into();
            body["return_spec_tokens_details"] = false.into();
            let reply = server.post(path, &body.to_string());
            let answer = if stream { reply.events().pop().unwrap() } else { reply.ok() };
            assert!(answer.get("metrics").is_none() && answer.get("sglext").is_none());
        }
    }
}

#[test]
fn a_request_may_opt_out_or_cap_its_steps() {
    let server = server(Shape::chain(5));
    let free = generate(&server, json!({}));
    assert!(consistent(&free["meta_info"], 6).len() > 2);
    for none in [json!(false), json!({ "num_steps": 0 })] {
        let plain = generate(&server, json!({ "speculative": none }));
        assert_eq!(plain["text"], free["text"]);
        let fields = plain["meta_info"].as_object().unwrap();
        assert!(!fields.keys().any(|name| name.starts_with("spec_")), "{fields:?}");
    }
    let one = generate(&server, json!({ "speculative": { "num_steps": 1 } }));
    assert_eq!(one["text"], free["text"]);
    assert_eq!(consistent(&one["meta_info"], 2).len(), 2);
    let more = generate(&server, json!({ "speculative": { "num_steps": 9 } }));
    let histogram = |answer: &Value| answer["meta_info"]["spec_correct_drafts_histogram"].clone();
    assert_eq!(histogram(&more), histogram(&free), "a cap above the server's changes nothing");
    assert_eq!(histogram(&generate(&server, json!({ "speculative": true }))), histogram(&free));

    let body = json!({
        "model": "tiny", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": true,
        "speculative": false,
    });
    let completion = server.post("/v1/completions", &body.to_string()).ok();
    assert_eq!(completion["choices"][0]["text"], free["text"]);
    assert!(completion["usage"]["speculative"].is_null());
}

#[test]
fn a_wrong_wish_about_speculation_is_refused_by_name() {
    let server = server(Shape::chain(2));
    for wrong in [
        json!("no"),
        json!(3),
        json!([]),
        json!({}),
        json!({ "num_steps": -1 }),
        json!({ "num_steps": 1.5 }),
        json!({ "num_steps": "2" }),
        json!({ "num_steps": 2, "topk": 4 }),
        json!({ "steps": 2 }),
    ] {
        let native = json!({ "text": PROMPT, "speculative": wrong });
        let openai = json!({ "model": "tiny", "prompt": PROMPT, "speculative": wrong });
        for (path, body) in [("/generate", native), ("/v1/completions", openai)] {
            let reply = server.post(path, &body.to_string());
            assert_eq!(reply.status, 400, "{path}, {wrong}: {}", reply.body);
            assert!(reply.body.contains("speculative"), "{path}, {wrong}: {}", reply.body);
        }
    }
    server.wait_until_idle();
    assert_eq!(server.stats().finished, 0, "nothing of it reached the engine");
}

#[test]
fn stop_strings_inside_an_accepted_run_end_the_text() {
    let server = server(Shape::chain(5));
    let ask = |mut more: Value, stop: Option<&str>| {
        more["sampling_params"] = params(40);
        more["sampling_params"]["stop"] = json!(stop);
        generate(&server, more)
    };
    let whole = ask(json!({}), None);
    let text = whole["text"].as_str().unwrap();
    let boundaries: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    for window in boundaries.windows(4).step_by(3) {
        let stop = &text[window[0]..window[3]];
        let (with, without) =
            (ask(json!({}), Some(stop)), ask(json!({ "speculative": false }), Some(stop)));
        assert_eq!(with["text"], text[..text.find(stop).unwrap()], "{stop:?}");
        for key in ["text", "output_ids"] {
            assert_eq!(with[key], without[key], "{stop:?}");
        }
        for key in ["finish_reason", "completion_tokens"] {
            assert_eq!(with["meta_info"][key], without["meta_info"][key], "{stop:?}");
        }
    }
}

#[test]
fn metrics_and_the_description_follow_what_was_drafted() {
    let server = server(Shape::chain(4));
    let value = |page: &str, name: &str| -> f64 {
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in\n{page}")).parse().unwrap()
    };
    let info = server.get("/server_info").ok();
    assert_eq!(info["speculative_algorithm"], "EAGLE3");
    assert_eq!(info["speculative_num_steps"], 4);
    assert_eq!(info["speculative_num_draft_tokens"], 5);
    assert_eq!(info["internal_states"][0]["avg_spec_accept_length"], 0.0);

    let mut sums = [0; 5];
    let (mut proposed, mut rounds) = (0.0, 0.0);
    for step in 0..2 {
        let prompt = json!({ "text": format!("{PROMPT} step {step}") });
        let answer = generate(&server, prompt);
        let meta = &answer["meta_info"];
        for (sum, count) in sums.iter_mut().zip(consistent(meta, 5)) {
            *sum += count;
        }
        proposed += number(meta, "spec_num_proposed_drafts");
        rounds += number(meta, "spec_verify_ct");
        server.wait_until_idle();
        let page = server.get("/metrics").body;
        let single = |name: &str| value(&page, &format!("{name}{{model_name=\"tiny\"}}"));
        assert_eq!(single("sglang:spec_verify_calls_total"), rounds);
        assert_eq!(single("aquila:spec_proposed_drafts_total"), proposed);
        let mut correct = 0.0;
        for place in 1..=sums.iter().rposition(|&count| count > 0).unwrap() {
            let right: u64 = sums[place..].iter().sum();
            let name = "aquila:spec_correct_drafts_total";
            let line = format!("{name}{{model_name=\"tiny\",position=\"{place}\"}}");
            assert_eq!(value(&page, &line), right as f64, "position {place}");
            correct += right as f64;
        }
        assert!((single("sglang:spec_accept_rate") - correct / proposed).abs() < 1e-6);
        let mean = (correct + rounds) / rounds;
        assert!((single("sglang:spec_accept_length") - mean).abs() < 1e-6);
        let info = server.get("/server_info").ok();
        let state = &info["internal_states"][0];
        assert_eq!(state["speculative_policy"]["name"], "fixed");
        assert_eq!(number(state, "speculative_num_steps"), single("sglang:spec_num_steps"));
        let nodes = single("sglang:spec_num_draft_tokens");
        assert_eq!(number(state, "speculative_num_draft_tokens"), nodes);
        let told = number(&info["internal_states"][0], "avg_spec_accept_length");
        assert!((told - mean).abs() < 1e-6, "{told} against {mean}");
    }
}
