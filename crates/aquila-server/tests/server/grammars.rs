//! Grammars of strangers: what is too much to compile, requests with several, and several with one.

use aquila_server::Limits;
use aquila_text::GrammarSpec;
use serde_json::{Map, Value, json};

use crate::support::{Running, engine_config, generator, settings, wait_for};
use crate::tools::add;

const CHAT: &str = "/v1/chat/completions";

fn chat(extra: Value) -> String {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "What is 3 + 4?" }],
        "temperature": 0, "max_tokens": 4,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

/// Definitions of which each refers to the next one.
fn chain(count: usize) -> Value {
    let link = |index| json!({ "$ref": format!("#/$defs/{index}") });
    let mut defs: Map<String, Value> =
        (0..count).map(|index| (index.to_string(), link(index + 1))).collect();
    defs.insert(count.to_string(), json!({ "type": "object" }));
    json!({ "$ref": "#/$defs/0", "$defs": defs })
}

fn tool(name: &str, parameters: Value) -> Value {
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

fn assert_refused(server: &Running, path: &str, body: &str, param: &str, says: &str) {
    let reply = server.post(path, body);
    assert_eq!(reply.status, 400, "{param}: {}", reply.json());
    let error = &reply.json()["error"];
    assert_eq!(error["param"], param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(says), "{error}");
}

#[test]
fn grammars_past_their_bounds_are_refused() {
    let server = Running::usual();
    let next = |index| format!("r{index}::=r{} ", index + 1);
    let rules: String = (0..12_000).map(next).collect();
    let rules = format!("root::=r0 {rules} r12000::=\"x\"");
    let refused = |extra: Value, param: &str, says: &str| {
        assert_refused(&server, CHAT, &chat(extra), param, says);
    };
    refused(json!({ "ebnf": rules }), "ebnf", "rules and groups");
    refused(json!({ "guided_grammar": rules }), "guided_grammar", "rules and groups");
    let outputs = json!({ "structured_outputs": { "grammar": rules } });
    refused(outputs, "structured_outputs", "rules and groups");
    refused(json!({ "regex": "a".repeat(300_000) }), "regex", "262144");
    refused(json!({ "json_schema": chain(4_100) }), "json_schema", "nested too deeply");
    // Texts of schemas have values that are not counted with the body's.
    let text = format!("[{}1]", "1,".repeat(600_000));
    refused(json!({ "json_schema": text }), "json_schema", "at most 1048576");
    refused(json!({ "structural_tag": text }), "structural_tag", "at most 1048576");
    refused(json!({ "guided_json": { "const": text } }), "guided_json", "262144");
    let names: Map<String, Value> = (0..1_200).map(|i| (format!("^a{i}$"), json!({}))).collect();
    let patterns = json!({ "type": "object", "patternProperties": names });
    refused(json!({ "json_schema": patterns }), "json_schema", "`patternProperties`");
    // Copies of all tools are counted together.
    let names: Map<String, Value> = (0..600).map(|i| (format!("p{i}"), json!({}))).collect();
    let part = json!({ "properties": names, "type": "object" });
    let copied = json!({ "type": "object", "additionalProperties": { "const": vec![1; 100] } });
    let tools = |count| -> Vec<Value> {
        (0..count).map(|_| tool("f", json!({ "allOf": [part, copied] }))).collect()
    };
    let held = |tools: Vec<Value>| json!({ "tools": tools, "tool_choice": "required" });
    refused(held(tools(20)), "tools", "parts are joined");
    let schema = json!({ "name": "x", "schema": chain(4_100) });
    let format = json!({ "type": "json_schema", "json_schema": schema });
    refused(json!({ "response_format": format }), "response_format", "nested too deeply");
    let forced = json!({ "tools": [tool("f", chain(4_100))], "tool_choice": "required" });
    refused(forced, "tools", "nested too deeply");
    let large = json!({ "type": "object", "description": "a".repeat(200_000) });
    let tools: Vec<Value> = (0..6).map(|_| tool("f", large.clone())).collect();
    refused(json!({ "tools": tools, "tool_choice": "required" }), "tools", "together");
    let structure = json!({ "begin": "<f>", "schema": chain(4_100), "end": "</f>" });
    let tag = json!({ "structures": [structure], "triggers": ["<f"] });
    refused(json!({ "structural_tag": tag }), "structural_tag", "nested too deeply");
    let body = json!({ "text": "a", "sampling_params": { "ebnf": rules } }).to_string();
    assert_refused(&server, "/generate", &body, "ebnf", "rules and groups");
    server.post(CHAT, &chat(json!({ "ebnf": "root ::= \"yes\"" }))).ok();
}

#[test]
fn schemas_that_hold_nothing_are_not_checked() {
    let server = Running::usual();
    let plain = server.post(CHAT, &chat(json!({}))).ok();
    // No grammar is made of them: their schemas may be of any kind.
    let tools = [tool("f", chain(4_100)), tool("g", json!({ "type": "strnig" }))];
    let answer = server.post(CHAT, &chat(json!({ "tools": tools }))).ok();
    assert_eq!(answer["choices"], plain["choices"]);
    // A tool that must be called is checked alone.
    let choice = json!({ "type": "function", "function": { "name": "h" } });
    let tools = [tool("f", chain(4_100)), tool("h", add())];
    server.post(CHAT, &chat(json!({ "tools": tools, "tool_choice": choice }))).ok();
}

#[test]
fn tools_are_counted() {
    let server = Running::usual();
    let tools = |count: usize| {
        let tools: Vec<Value> = (0..count).map(|index| tool(&format!("f{index}"), add())).collect();
        chat(json!({ "tools": tools }))
    };
    server.post(CHAT, &tools(1024)).ok();
    assert_refused(&server, CHAT, &tools(1025), "tools", "at most 1024");
}

#[test]
fn each_prompt_of_a_batch_has_its_own_grammar() {
    let server = Running::usual();
    let params = |regex| json!({ "regex": regex, "max_new_tokens": 8 });
    let params = vec![[params("[0-9]{3}"), params("yes|no")]; 6].concat();
    let body = json!({ "text": vec!["Say: "; 12], "sampling_params": params }).to_string();
    let answers = server.post("/generate", &body).ok();
    for (index, answer) in answers.as_array().unwrap().iter().enumerate() {
        let text = answer["text"].as_str().unwrap();
        let digits = text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
        assert!(if index % 2 == 0 { digits } else { ["yes", "no"].contains(&text) }, "{text}");
    }
}

/// Bytes that a regular expression takes when it is compiled.
fn compiled_bytes(regex: &str) -> usize {
    generator().compile(&GrammarSpec::Regex(regex.into())).unwrap().bytes()
}

fn with_room(bytes: usize) -> aquila_server::Settings {
    let limits = Limits { grammar_bytes: bytes, ..Limits::default() };
    aquila_server::Settings { limits, ..settings() }
}

fn metric(server: &Running, name: &str) -> f64 {
    let page = server.get("/metrics").body;
    let line = page.lines().find(|line| line.starts_with(&format!("{name}{{")));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap()
}

#[test]
fn equal_grammars_of_different_requests_are_compiled_once() {
    let server = Running::usual();
    let schema = json!({ "type": "object", "properties": { "a": { "enum": [1, 2] } } });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let bodies = [
        (CHAT, chat(json!({ "response_format": format }))),
        (CHAT, chat(json!({ "guided_json": schema }))),
        ("/v1/completions", json!({ "prompt": "a", "json_schema": schema }).to_string()),
        (
            "/generate",
            json!({
                "text": ["a", "b"],
                "sampling_params": { "json_schema": schema.to_string(), "max_new_tokens": 4 },
            })
            .to_string(),
        ),
    ];
    std::thread::scope(|scope| {
        for (path, body) in bodies.iter().chain(&bodies) {
            scope.spawn(|| server.post(path, body).ok());
        }
    });
    assert_eq!(metric(&server, "sglang:num_grammar_total"), 8.0);
    assert_eq!(metric(&server, "sglang:num_grammar_cache_hit_total"), 7.0);
    server.wait_until_idle();
    wait_for("nothing held", || metric(&server, "aquila:grammar_bytes") == 0.0);
}

#[test]
fn grammars_without_room_are_refused_until_others_leave() {
    let (long, other) = ("[a-z]{400}", "[0-9]{3}");
    let most = compiled_bytes(long).max(compiled_bytes(other));
    let server = Running::held(engine_config(), with_room(most));
    let body = |regex| json!({ "prompt": "Say: ", "regex": regex, "max_tokens": 400 }).to_string();
    let mut holder = server.connect().post("/v1/completions", body(long).as_bytes());
    server.wait_until("it runs", |stats| stats.running == 1);
    assert_eq!(metric(&server, "aquila:grammar_bytes"), compiled_bytes(long) as f64);
    let refused = server.post("/v1/completions", &body(other));
    assert_eq!(refused.status, 503, "{}", refused.body);
    let why = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(why.contains("--max-grammar-bytes"), "{why}");
    // One with the same grammar needs no room of its own.
    let mut equal = server.connect().post("/v1/completions", body(long).as_bytes());
    server.run_freely();
    for running in [&mut holder, &mut equal] {
        running.reply().ok();
    }
    wait_for("room", || server.post("/v1/completions", &body(other)).status == 200);
}

#[test]
fn a_grammar_larger_than_all_room_is_refused() {
    let regex = "[0-9]{3}";
    let server = Running::start(generator(), with_room(compiled_bytes(regex) - 1));
    assert_refused(&server, CHAT, &chat(json!({ "regex": regex })), "regex", "--max-grammar-bytes");
    server.post(CHAT, &chat(json!({}))).ok();
}
