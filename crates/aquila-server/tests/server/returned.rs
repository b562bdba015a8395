//! Hidden states and routed experts of `/generate`, in SGLang's form.

use std::path::PathBuf;
use std::sync::Arc;

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_engine::{EngineConfig, EngineHandle, Returned, Runner, Scheduler};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location, Safetensors, TensorSource};
use aquila_server::{Limits, Settings};
use aquila_spec::ngram::{Corpora, Ngram, NgramScope, NgramSettings};
use aquila_spec::{Algorithm, Shape};
use aquila_text::{Generator, SamplingParams};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::support::{Running, engine_config, generator_of, settings};

const BOTH: Returned = Returned { hidden_states: true, routed_experts: true };
/// Layers of the fixture, and experts of each row in each.
const EXPERTS: usize = 3 * 2;

fn fixture() -> PathBuf {
    let fixtures = "../aquila-model/tests/fixtures/qwen3-moe-dense";
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(fixtures)
}

/// A server over a mixture of experts without a tokenizer, which drafts from n-grams if `drafts`.
fn server(drafts: bool, settings: Settings) -> Running {
    let shape = if drafts { Shape::new(5, 4, 16).unwrap() } else { Shape::PLAIN };
    let config =
        EngineConfig { shape, returned: BOTH, chunked_prefill_size: 16, ..engine_config() };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 2).unwrap());
    let checkpoint = Checkpoint::open(&Location::Folder(fixture()), LoadFormat::Auto).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let decoder = Decoder::load(&*backend, &checkpoint, format, positions, &mut |_| ()).unwrap();
    let algorithm = drafts.then(|| {
        let corpora = Corpora::new(1 << 16, decoder.spec().vocab_size);
        let settings = NgramSettings { scope: NgramScope::Request, ..NgramSettings::default() };
        Algorithm::on_host("NGRAM", Ngram::new(settings, corpora).unwrap())
    });
    let runner = Runner::new(backend, decoder, algorithm, &config).unwrap();
    let handle = EngineHandle::start(Scheduler::new(runner, config).unwrap()).unwrap();
    let generator = Generator::new(handle, None, Vec::new(), SamplingParams::default());
    Running::start(generator, settings)
}

/// Asks for both kinds of rows, with more fields.
fn body(prompt: &[u32], tokens: usize, more: Value) -> Value {
    let mut body = json!({
        "input_ids": prompt, "return_hidden_states": true, "return_routed_experts": true,
        "sampling_params": { "max_new_tokens": tokens, "temperature": 0 },
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ask(server: &Running, body: &Value) -> Value {
    server.post("/generate", &body.to_string()).ok()
}

fn experts(answer: &Value) -> Vec<u32> {
    let text = answer["meta_info"]["routed_experts"].as_str().unwrap();
    let bytes = STANDARD.decode(text).unwrap();
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()) as u32).collect()
}

/// The prompt's rows, then those of the answer.
fn states(answer: &Value) -> (Vec<Value>, Vec<Value>) {
    let list = answer["meta_info"]["hidden_states"].as_array().unwrap();
    (list[0].as_array().unwrap().clone(), list[1..].to_vec())
}

/// The prompt of transformers' outputs for the fixture, its hidden states and its experts.
fn golden() -> (Vec<u32>, Vec<f32>, Vec<u32>) {
    let file = Safetensors::open_file(&fixture().join("golden.safetensors")).unwrap();
    let ids = |tensor: &str| -> Vec<u32> {
        let id = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap()) as u32;
        file.get(tensor).unwrap().bytes().chunks_exact(8).map(id).collect()
    };
    let hidden = file.get("last_hidden").unwrap().to_f32().unwrap();
    (ids("input_ids"), hidden, ids("routed_experts"))
}

#[test]
fn answers_have_the_rows_of_transformers() {
    let (prompt, hidden, routed) = golden();
    for drafts in [false, true] {
        let server = server(drafts, settings());
        for tokens in [0, 1, 9] {
            let answer = ask(&server, &body(&prompt, tokens, json!({})));
            assert_eq!(answer["meta_info"]["completion_tokens"], tokens);
            let (before, after) = states(&answer);
            assert_eq!((before.len(), after.len()), (prompt.len(), tokens.saturating_sub(1)));
            let ours = before.iter().flat_map(|row| row.as_array().unwrap());
            let ours: Vec<f64> = ours.map(|value| value.as_f64().unwrap()).collect();
            assert_eq!(ours.len(), hidden.len());
            let off = ours.iter().zip(&hidden).map(|(a, b)| (a - f64::from(*b)).abs());
            assert!(off.fold(0.0, f64::max) < 1e-3);
            assert!(after.iter().all(|row| row.as_array().unwrap().len() == hidden.len() / 40));
            let ids = experts(&answer);
            assert_eq!(ids.len(), (prompt.len() + tokens - 1) * EXPERTS);
            let both = ids.len().min(routed.len());
            assert_eq!(ids[..both], routed[..both]);
        }
    }
}

#[test]
fn drafts_change_no_row_of_any_answer() {
    let prompt: Vec<u32> = [7, 21, 99, 4, 250, 13].repeat(4);
    let (plain, drafted) = (server(false, settings()), server(true, settings()));
    let several = json!({ "sampling_params": { "max_new_tokens": 40, "n": 2, "temperature": 0 } });
    for more in [json!({}), several, json!({ "input_ids": [prompt, [5, 6], [5, 6, 7]] })] {
        let body = body(&prompt, 40, more);
        let (wanted, got) = (ask(&plain, &body), ask(&drafted, &body));
        let list = |answer: &Value| answer.as_array().cloned().unwrap_or(vec![answer.clone()]);
        for (wanted, got) in list(&wanted).iter().zip(list(&got)) {
            assert_eq!(got["output_ids"], wanted["output_ids"]);
            for key in ["hidden_states", "routed_experts"] {
                assert_eq!(got["meta_info"][key], wanted["meta_info"][key], "{key}");
            }
        }
        assert_eq!(list(&got).len(), list(&wanted).len());
    }
    let answer = ask(&drafted, &body(&prompt, 40, json!({})));
    assert!(answer["meta_info"]["spec_num_correct_drafts"].as_u64().unwrap() > 0);
}

#[test]
fn streams_have_rows_in_their_last_event_alone() {
    let server = server(true, settings());
    let mut body = body(&[7, 21, 99, 4].repeat(3), 12, json!({}));
    let whole = ask(&server, &body);
    body["stream"] = true.into();
    // Each piece has an event of its own with this.
    body["return_draft_trees"] = true.into();
    let events = server.post("/generate", &body.to_string()).events();
    let (last, before) = events.split_last().unwrap();
    assert!(!before.is_empty());
    for key in ["hidden_states", "routed_experts"] {
        assert!(before.iter().all(|event| event["meta_info"].get(key).is_none()), "{key}");
        assert_eq!(last["meta_info"][key], whole["meta_info"][key], "{key}");
    }
}

#[test]
fn experts_are_returned_from_where_they_are_wanted() {
    let server = server(false, settings());
    let prompt: Vec<u32> = (20..40).collect();
    let whole = experts(&ask(&server, &body(&prompt, 6, json!({}))));
    for states in [false, true] {
        for from in [0, 7, 20] {
            let more = json!({ "routed_experts_start_len": from, "return_hidden_states": states });
            let answer = ask(&server, &body(&prompt, 6, more));
            assert_eq!(experts(&answer), whole[from * EXPERTS..]);
            assert_eq!(answer["meta_info"].get("hidden_states").is_some(), states);
        }
    }
    let beyond = body(&prompt, 6, json!({ "routed_experts_start_len": 21 }));
    let reply = server.post("/generate", &beyond.to_string());
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("routed_experts_start_len"))
    );
}

#[test]
fn rows_follow_a_text_that_a_stop_string_cuts() {
    let config = EngineConfig {
        returned: Returned { hidden_states: true, routed_experts: false },
        ..engine_config()
    };
    let server = Running::start(generator_of(config, |cpu| cpu, |engine| engine), settings());
    let ask = |stop: Option<&str>| {
        let params = json!({ "max_new_tokens": 24, "temperature": 0, "stop": stop });
        let body =
            json!({ "text": "fn main", "sampling_params": params, "return_hidden_states": true });
        server.post("/generate", &body.to_string()).ok()
    };
    let whole = ask(None);
    let text = whole["text"].as_str().unwrap();
    let cut = ask(Some(&text[4..7]));
    let (tokens, (_, after)) = (cut["output_ids"].as_array().unwrap().len(), states(&cut));
    assert!(tokens < 24);
    assert_eq!(after.len(), tokens - 1);
    assert_eq!(after, states(&whole).1[..tokens - 1]);
}

#[test]
fn rows_that_the_server_does_not_keep_are_refused() {
    let server = Running::usual();
    for (field, setting) in [
        ("return_hidden_states", "enable-return-hidden-states"),
        ("return_routed_experts", "enable-return-routed-experts"),
    ] {
        let reply = server.post("/generate", &json!({ "text": "a", field: true }).to_string());
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], field);
        assert!(error["message"].as_str().unwrap().contains(setting), "{error}");
        server.post("/generate", &json!({ "text": "a", field: false }).to_string()).ok();
        let reply = server.post("/generate", &json!({ "text": "a", field: "yes" }).to_string());
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert!(reply.body.contains("expected a boolean"), "{}", reply.body);
    }
}

#[test]
fn rows_past_the_room_for_them_are_refused() {
    let limits = Limits { returned_bytes: 256 << 10, ..Limits::default() };
    let server = server(false, Settings { limits, ..settings() });
    let prompt: Vec<u32> = (20..40).collect();
    ask(&server, &body(&prompt, 4, json!({})));
    let long = server.post("/generate", &body(&prompt, 400, json!({})).to_string());
    assert_eq!(long.status, 400, "{}", long.body);
    assert!(long.body.contains("262144"), "{}", long.body);
    // All of them in turn: none leaves anything behind.
    for _ in 0..8 {
        ask(&server, &body(&prompt, 60, json!({})));
    }
}
