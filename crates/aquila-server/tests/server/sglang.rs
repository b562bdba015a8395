//! SGLang's API, and what its router asks of a worker.

use serde_json::{Value, json};

use crate::support::{Running, engine_config, settings, wait_for};

fn generate(server: &Running, body: Value) -> Value {
    server.post("/generate", &body.to_string()).ok()
}

#[test]
fn generate_takes_texts_and_ids_alone_and_in_lists() {
    let server = Running::usual();
    let params = json!({ "max_new_tokens": 6, "temperature": 0 });
    let one = generate(&server, json!({ "text": "fn main", "sampling_params": params }));
    let meta = &one["meta_info"];
    assert_eq!(meta["finish_reason"], json!({ "type": "length", "length": 6 }));
    assert_eq!(meta["completion_tokens"], 6);
    assert_eq!(one["output_ids"].as_array().unwrap().len(), 6);
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0);
    let ids = server.post("/tokenize", r#"{"prompt": "fn main"}"#).ok();
    assert_eq!(meta["prompt_tokens"], ids["count"]);
    let by_ids =
        generate(&server, json!({ "input_ids": ids["tokens"], "sampling_params": params }));
    assert_eq!(by_ids["text"], one["text"]);
    let longer = json!({ "max_new_tokens": 8, "temperature": 0 });
    let many = json!({
        "text": ["fn main", "use std"], "sampling_params": [params, longer], "rid": ["a", "b"],
    });
    let many = generate(&server, many);
    assert_eq!(many[0]["text"], one["text"]);
    assert_eq!(many[1]["meta_info"]["completion_tokens"], 8);
    assert_eq!(many[1]["meta_info"]["id"], "b");
    let several = json!({ "max_new_tokens": 4, "n": 2, "temperature": 0 });
    let several = generate(&server, json!({ "text": "fn main", "sampling_params": several }));
    assert_eq!(several[0]["text"], several[1]["text"]);
    let back = json!({ "tokens": one["output_ids"] }).to_string();
    assert_eq!(server.post("/detokenize", &back).ok()["text"], one["text"]);
}

#[test]
fn a_streamed_generation_grows_to_the_whole_answer() {
    let server = Running::usual();
    let params = json!({ "max_new_tokens": 9, "temperature": 0 });
    let mut body = json!({ "text": "fn main", "sampling_params": params, "return_logprob": true });
    let whole = generate(&server, body.clone());
    body["stream"] = true.into();
    let events = server.post("/generate", &body.to_string()).events();
    let mut before = String::new();
    for event in &events {
        let text = event["text"].as_str().unwrap();
        assert!(text.starts_with(&before), "{text:?} does not continue {before:?}");
        before = text.to_owned();
    }
    let last = events.last().unwrap();
    for key in ["text", "output_ids"] {
        assert_eq!(last[key], whole[key]);
    }
    for key in ["finish_reason", "completion_tokens", "output_token_logprobs"] {
        assert_eq!(last["meta_info"][key], whole["meta_info"][key]);
    }
    assert!(events[0]["meta_info"]["finish_reason"].is_null());
}

#[test]
fn log_probabilities_come_in_triples_from_where_they_are_wanted() {
    let server = Running::usual();
    let ids = server.post("/tokenize", r#"{"prompt": "pub fn main() {"}"#).ok();
    let ask = |start: i64| {
        generate(
            &server,
            json!({
                "input_ids": ids["tokens"], "return_logprob": true, "logprob_start_len": start,
                "top_logprobs_num": 2, "return_text_in_logprobs": true,
                "sampling_params": { "max_new_tokens": 3, "temperature": 0 },
            }),
        )["meta_info"]
            .clone()
    };
    let (all, none, some) = (ask(0), ask(-1), ask(2));
    let count = ids["count"].as_u64().unwrap() as usize;
    let input = all["input_token_logprobs"].as_array().unwrap();
    assert_eq!(input.len(), count);
    assert!(input[0][0].is_null() && input[1][0].as_f64().unwrap() < 0.0);
    for (entry, id) in input.iter().zip(ids["tokens"].as_array().unwrap()) {
        assert_eq!(&entry[1], id);
    }
    assert!(all["input_top_logprobs"][0].is_null());
    assert_eq!(all["input_top_logprobs"][1].as_array().unwrap().len(), 2);
    assert_eq!(none["input_token_logprobs"], json!([]));
    assert_eq!(some["input_token_logprobs"].as_array().unwrap().len(), count - 2);
    assert_eq!(some["input_token_logprobs"][1], input[3]);
    let output = all["output_token_logprobs"].as_array().unwrap();
    assert_eq!(output.len(), 3);
    assert!(output[0][2].is_string());
    assert_eq!(all["output_top_logprobs"][0][0], output[0]);
    assert_eq!(none["output_token_logprobs"], all["output_token_logprobs"]);
}

#[test]
fn stops_are_named_and_kept_if_wished() {
    let server = Running::usual();
    let ask = |extra: Value| {
        let mut params = json!({ "max_new_tokens": 24, "temperature": 0 });
        params.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        generate(&server, json!({ "text": "fn main", "sampling_params": params }))
    };
    let free = ask(json!({}));
    let text = free["text"].as_str().unwrap();
    let stop = &text[4..7];
    let cut = ask(json!({ "stop": stop }));
    assert_eq!(cut["meta_info"]["finish_reason"], json!({ "type": "stop", "matched": stop }));
    let end = text.find(stop).unwrap();
    assert_eq!(cut["text"], text[..end]);
    assert_eq!(ask(json!({ "stop": [stop], "no_stop_trim": true }))["text"], text[..end + 3]);
    let id = free["output_ids"][2].clone();
    let cut = ask(json!({ "stop_token_ids": [id] }));
    assert_eq!(cut["meta_info"]["finish_reason"], json!({ "type": "stop", "matched": id }));
}

#[test]
fn requests_are_aborted_by_their_name() {
    let server = Running::held(engine_config(), settings());
    let long = json!({ "max_new_tokens": 450, "ignore_eos": true });
    let body = json!({ "text": "fn main", "rid": "mine", "sampling_params": long }).to_string();
    for abort in [json!({ "rid": "mine" }), json!({ "abort_all": true })] {
        server.hold();
        let mut whole = server.connect().post("/generate", body.as_bytes());
        server.wait_until("running", |s| s.running == 1);
        assert_eq!(server.post("/abort_request", &abort.to_string()).status, 200);
        server.run_freely();
        let answer = whole.reply().ok();
        assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
        assert!(answer["meta_info"]["completion_tokens"].as_u64().unwrap() < 450);
        server.wait_until_idle();
    }
    assert_eq!(server.post("/abort_request", r#"{"rid": "nobody"}"#).status, 200);
}

#[test]
fn a_router_learns_what_it_asks() {
    let server = Running::usual();
    for path in ["/server_info", "/get_server_info"] {
        let info = server.get(path).ok();
        assert_eq!(info["served_model_name"], "tiny");
        for number in
            ["tp_size", "dp_size", "max_total_tokens", "max_running_requests", "max_prefill_tokens"]
        {
            assert!(info[number].is_u64(), "{number}");
        }
        assert_eq!(info["device"], settings().device);
        assert_eq!(info["cuda_graph_bs"], json!(settings().captured_batches));
        assert_eq!(info["disable_cuda_graph"], false);
    }
    for path in ["/model_info", "/get_model_info"] {
        let info = server.get(path).ok();
        assert_eq!(info["model_type"], "llama");
        assert_eq!(info["architectures"], json!(["LlamaForCausalLM"]));
    }
    let load = server.get("/get_load").ok();
    assert_eq!(load[0]["num_reqs"], 0);
    assert!(load[0]["num_tokens"].is_u64());
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/health_generate").status, 200);
    assert_eq!(server.stats().completion_tokens, 1);
    assert_eq!(server.post("/flush_cache", "").status, 200);
}

#[test]
fn metrics_count_what_happened() {
    let server = Running::usual();
    let params = json!({ "max_new_tokens": 5, "temperature": 0, "ignore_eos": true });
    for _ in 0..2 {
        generate(&server, json!({ "text": "pub fn main() {", "sampling_params": params }));
    }
    server.wait_until_idle();
    let page = server.get("/metrics").body;
    let value = |name: &str| -> f64 {
        let start = format!("{name}{{model_name=\"tiny\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("no {name} in\n{page}")).parse().unwrap()
    };
    assert_eq!(value("sglang:generation_tokens_total"), 10.0);
    assert_eq!(value("sglang:num_requests_total"), 2.0);
    assert_eq!(value("sglang:time_to_first_token_seconds_count"), 2.0);
    assert_eq!(value("sglang:inter_token_latency_seconds_count"), 8.0);
    assert_eq!(value("sglang:time_per_output_token_seconds_count"), 2.0);
    assert_eq!(value("sglang:e2e_request_latency_seconds_count"), 2.0);
    assert!(value("sglang:cached_tokens_total") > 0.0);
    assert!(value("sglang:cache_hit_rate") > 0.0);
    assert_eq!(value("sglang:num_running_reqs"), 0.0);
    assert_eq!(value("sglang:num_queue_reqs"), 0.0);
    assert_eq!(value("sglang:num_used_tokens"), 0.0);
    assert!(value("process_resident_memory_bytes") > 1e6);
    let inf = "sglang:e2e_request_latency_seconds_bucket{model_name=\"tiny\",le=\"+Inf\"} 2";
    assert!(page.contains(inf));
    // Every sample belongs to a family that was announced.
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split('{').next().unwrap();
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let announced = |name: &str| page.contains(&format!("# TYPE {name} "));
        assert!(announced(name) || family.is_some_and(announced), "{line}");
    }
}

#[test]
fn every_answer_has_the_prompts_log_probabilities() {
    let server = Running::usual();
    let params = json!({ "max_new_tokens": 3, "n": 3, "temperature": 0 });
    let mut body = json!({
        "text": ["fn main", "use std::fmt"], "sampling_params": params, "return_logprob": true,
        "logprob_start_len": 0, "top_logprobs_num": 2,
    });
    let keys = ["input_token_logprobs", "input_top_logprobs"];
    let whole = generate(&server, body.clone());
    let whole = whole.as_array().unwrap();
    assert_eq!(whole.len(), 6);
    for (index, answer) in whole.iter().enumerate() {
        let tokens = answer["meta_info"]["input_token_logprobs"].as_array().unwrap();
        assert_eq!(tokens.len(), answer["meta_info"]["prompt_tokens"].as_u64().unwrap() as usize);
        for key in keys {
            assert_eq!(answer["meta_info"][key], whole[index / 3 * 3]["meta_info"][key]);
        }
    }
    body["stream"] = true.into();
    let events = server.post("/generate", &body.to_string()).events();
    for event in events.iter().filter(|event| !event["meta_info"]["finish_reason"].is_null()) {
        let index = event["index"].as_u64().unwrap() as usize;
        for key in keys {
            assert_eq!(event["meta_info"][key], whole[index]["meta_info"][key]);
        }
    }
}

#[test]
fn of_pieces_that_wait_together_the_last_is_written() {
    let server = Running::usual();
    let body = json!({
        "text": "fn main", "stream": true, "return_logprob": true, "top_logprobs_num": 100,
        "sampling_params": { "max_new_tokens": 500, "ignore_eos": true },
    });
    let mut connection = server.connect().post("/generate", body.to_string().as_bytes());
    assert_eq!(connection.head().0, 200);
    // Nothing is read, so that most pieces wait until the answer has ended.
    server.wait_until("it ended", |s| s.finished == 1);
    let (mut bytes, mut frames) = (Vec::new(), Vec::new());
    while let Some(chunk) = connection.chunk() {
        frames.push(chunk.len());
        bytes.extend(chunk);
    }
    let text = String::from_utf8(bytes).unwrap();
    let events: Vec<&str> =
        text.split("\n\n").filter(|event| event.starts_with("data: {")).collect();
    assert!(events.len() < 400, "{} events for 500 tokens", events.len());
    let largest = events.iter().map(|event| event.len()).max().unwrap();
    // What a frame has when it is full, and one event more.
    assert!(frames.iter().all(|&frame| frame < (256 << 10) + largest + 100), "{frames:?}");
    let counts = events.iter().map(|event| {
        let event: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        event["meta_info"]["completion_tokens"].as_u64().unwrap()
    });
    let counts: Vec<u64> = counts.collect();
    assert!(counts.is_sorted());
    assert_eq!(counts.last(), Some(&500));
}

#[test]
fn probes_that_wait_together_share_one_token() {
    let server = Running::held(engine_config(), settings());
    let probe = "GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut probes: Vec<_> = (0..20).map(|_| server.connect().send(probe)).collect();
    let active = || {
        let page = server.get("/metrics").body;
        let line = page.lines().find(|line| {
            line.starts_with("sglang:http_requests_active") && line.contains("\"/health_generate\"")
        });
        line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    };
    wait_for("all probes wait", || active() >= 20.0);
    server.run_freely();
    assert!(probes.iter_mut().all(|probe| probe.reply().status == 200));
    assert_eq!(server.stats().finished, 1);
}
