//! `return_draft_trees`: how the tokens of a stream came, and the trees of its rounds.

use aquila_spec::Shape;
use serde_json::{Value, json};

use crate::speculation::server;
use crate::support::Running;

const PROMPT: &str = "use std::collections::HashMap;\n\npub fn count(words: &[String])";

/// The bodies of all three routes, and where their events have texts and rounds.
fn routes() -> [(&'static str, Value, &'static str, &'static str); 3] {
    let messages = json!([{ "role": "user", "content": PROMPT }]);
    let sampling = json!({ "max_new_tokens": 40, "temperature": 0, "ignore_eos": true });
    let openai = |name: &str, prompt: Value| json!({ name: prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": true });
    let generate = json!({ "text": PROMPT, "sampling_params": sampling });
    let choice = "/choices/0/draft_round";
    [
        ("/v1/chat/completions", openai("messages", messages), "/choices/0/delta/content", choice),
        ("/v1/completions", openai("prompt", PROMPT.into()), "/choices/0/text", choice),
        ("/generate", generate, "/text", "/meta_info/draft_round"),
    ]
}

fn with(mut body: Value, more: Value) -> String {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// Checks one round; answers how many of its drafts were accepted and rejected.
fn check(round: &Value, what: &str) -> (usize, usize) {
    let tokens = round["tokens"].as_array().unwrap();
    let Some(tree) = round["tree"].as_array() else {
        assert!(tokens.iter().all(|token| token["drafted"].is_null()), "{what}");
        return (0, 0);
    };
    assert!(tree[0]["parent"].is_null() && tree[0]["accepted"] == true, "{what}");
    let mut accepted = Vec::new();
    for node in &tree[1..] {
        let parent = &tree[node["parent"].as_u64().unwrap() as usize];
        assert_eq!(node["depth"].as_u64(), parent["depth"].as_u64().map(|d| d + 1), "{what}");
        assert!(node["score"].as_f64() <= parent["score"].as_f64(), "{what}");
        if node["accepted"] == true {
            assert!(parent["accepted"] == true, "{what}");
            accepted.push(node);
        }
    }
    for (at, token) in tokens.iter().enumerate() {
        let draft = accepted.get(at);
        assert_eq!(token["drafted"].as_u64(), draft.map(|_| at as u64 + 1), "{what}");
        assert!(draft.is_none_or(|draft| draft["token"] == token["id"]), "{what}");
    }
    (accepted.len(), tree.len() - 1 - accepted.len())
}

#[test]
fn streams_say_how_tokens_came_on_all_three_routes() {
    let server = server(Shape::new(4, 4, 12).unwrap());
    for (path, body, text_at, round_at) in routes() {
        let trees = json!({ "stream": true, "return_draft_trees": true });
        let asked = server.post(path, &with(body.clone(), trees)).events();
        let plain = server.post(path, &with(body, json!({ "stream": true }))).events();
        let whole = |events: &[Value]| match path {
            // Every event of this route has the whole text so far.
            "/generate" => events.last().unwrap()["text"].as_str().unwrap().to_owned(),
            _ => events.iter().filter_map(|event| event.pointer(text_at)?.as_str()).collect(),
        };
        assert_eq!(whole(&asked), whole(&plain), "{path}: the text is the same");
        assert!(plain.iter().all(|event| event.pointer(round_at).is_none()), "{path}");
        let rounds: Vec<&Value> = asked.iter().filter_map(|e| e.pointer(round_at)).collect();
        let (mut accepted, mut rejected) = (0, 0);
        for round in &rounds {
            let (right, wrong) = check(round, path);
            (accepted, rejected) = (accepted + right, rejected + wrong);
        }
        assert!(accepted > 5 && rejected > 5, "{path}: {accepted} and {rejected}");
        let tokens = rounds.iter().flat_map(|round| round["tokens"].as_array().unwrap());
        let tokens: Vec<&Value> = tokens.collect();
        assert_eq!(tokens.len(), 40, "{path}");
        let joined: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
        assert_eq!(joined, whole(&asked), "{path}: texts of tokens join to the text");
    }
}

#[test]
fn requests_that_do_not_speculate_have_trees_of_one_node() {
    let server = server(Shape::new(4, 4, 12).unwrap());
    let [(path, body, _, round_at), ..] = routes();
    let plain = json!({ "stream": true, "return_draft_trees": true, "speculative": false });
    let events = server.post(path, &with(body, plain)).events();
    let rounds: Vec<&Value> = events.iter().filter_map(|e| e.pointer(round_at)).collect();
    assert_eq!(rounds.len(), 40);
    for round in rounds {
        assert_eq!(round["tokens"].as_array().unwrap().len(), 1);
        assert!(round["tree"].as_array().is_none_or(|tree| tree.len() == 1));
    }
}

#[test]
fn draft_trees_are_refused_outside_of_streams() {
    let server = Running::usual();
    for (path, body, ..) in routes() {
        let reply = server.post(path, &with(body, json!({ "return_draft_trees": true })));
        assert_eq!(reply.status, 400, "{path}");
        let error = &reply.json()["error"];
        assert_eq!(error["param"], "return_draft_trees");
        assert!(error["message"].as_str().unwrap().contains("`stream` is true"), "{error}");
    }
}
