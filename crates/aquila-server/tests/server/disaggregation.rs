//! A prefill and a decode worker, asked as a router asks them: the same body to both.

use std::sync::Arc;
use std::time::Duration;

use aquila_disagg::{
    DecodeSettings, DecodeWorker, Identity, PrefillSettings, PrefillWorker, Secret, Tcp,
};
use aquila_server::{Role, Settings};
use serde_json::{Value, json};

use crate::support::{Reply, Running, generator, settings};

struct Workers {
    prefill: Running,
    decode: Running,
    port: u16,
}

impl Workers {
    fn new() -> Self {
        let (identity, secret) = (Identity::default().with("model", "tiny"), Secret::default());
        let prefills = generator();
        let of_prefill = PrefillSettings {
            address: "127.0.0.1:0".into(),
            identity: identity.clone(),
            secret: secret.clone(),
            patience: Duration::from_secs(60),
            most_unsent: 1 << 20,
        };
        let worker = PrefillWorker::start(&Tcp, of_prefill, prefills.engine().clone()).unwrap();
        let port = worker.port();
        let role = Some(Role::Prefill(Arc::new(worker)));
        let prefill = Running::start(prefills, Settings { role, ..settings() });
        let decodes = generator();
        let of_decode = DecodeSettings { identity, secret, hosts: Vec::new(), port };
        let worker = DecodeWorker::new(Box::new(Tcp), of_decode, decodes.engine().clone());
        let role = Some(Role::Decode(worker));
        let decode = Running::start(decodes, Settings { role, ..settings() });
        Self { prefill, decode, port }
    }

    /// Sends a body to both workers at once, with a room as a router gives it.
    fn ask(&self, path: &str, body: &Value, room: Value) -> (Reply, Reply) {
        let mut body = body.clone();
        let fields = body.as_object_mut().unwrap();
        fields.insert("bootstrap_host".into(), "127.0.0.1".into());
        fields.insert("bootstrap_port".into(), self.port.into());
        fields.insert("bootstrap_room".into(), room);
        let text = body.to_string();
        let mut first = self.prefill.connect().post(path, text.as_bytes());
        let mut second = self.decode.connect().post(path, text.as_bytes());
        (first.reply(), second.reply())
    }
}

/// What a client reads, without what differs from answer to answer.
fn texts(answer: &Value) -> Vec<Value> {
    let list = answer.as_array().cloned().unwrap_or_else(|| vec![answer.clone()]);
    let of = |answer: &Value| match answer.get("choices") {
        Some(choices) => choices.clone(),
        None => {
            let meta = &answer["meta_info"];
            let kept = ["finish_reason", "input_token_logprobs", "output_token_logprobs"];
            let meta: Vec<&Value> = kept.iter().map(|name| &meta[name]).collect();
            json!([answer["text"], answer["output_ids"], meta])
        }
    };
    list.iter().map(of).collect()
}

#[test]
fn answers_are_those_of_one_server() {
    let (workers, one) = (Workers::new(), Running::usual());
    let sampling = json!({ "max_new_tokens": 20, "temperature": 0.8, "sampling_seed": 4 });
    let several = json!({ "max_new_tokens": 6, "temperature": 0.8, "sampling_seed": 4, "n": 3 });
    let user = json!([{ "role": "user", "content": "What is a list?" }]);
    let cases = [
        (
            "/generate",
            json!({ "text": "fn main() {", "sampling_params": sampling, "return_logprob": true,
                    "logprob_start_len": 0, "top_logprobs_num": 2 }),
            json!(9_000_000_000_000_000_000_u64),
        ),
        ("/generate", json!({ "text": "a list", "sampling_params": several }), json!(70)),
        (
            "/generate",
            json!({ "input_ids": [[5, 6, 7], [8, 9]], "sampling_params": sampling }),
            json!([80, 81]),
        ),
        (
            "/v1/completions",
            json!({ "model": "tiny", "prompt": ["x =", "y ="], "max_tokens": 9, "seed": 2, "logprobs": 1 }),
            json!([90, 91]),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": user, "max_tokens": 12, "seed": 5, "n": 2, "logprobs": true }),
            json!([100, 101]),
        ),
    ];
    for (path, body, room) in cases {
        let wanted = one.post(path, &body.to_string()).ok();
        let (first, second) = workers.ask(path, &body, room);
        assert_eq!(first.ok()["object"], "prefill");
        assert_eq!(texts(&second.ok()), texts(&wanted), "{path} {body}");
    }
    let mut streamed = json!({ "text": "fn main() {", "sampling_params": sampling });
    let wanted = one.post("/generate", &streamed.to_string()).ok();
    streamed["stream"] = true.into();
    let (first, second) = workers.ask("/generate", &streamed, json!(200));
    // A router takes whatever a prefill worker answers, and throws it away.
    assert_eq!(first.ok()["object"], "prefill");
    assert_eq!(second.events().last().unwrap()["text"], wanted["text"]);
}

#[test]
fn roles_and_transfers_are_told() {
    let workers = Workers::new();
    let body = json!({ "text": "fn main() {", "sampling_params": { "max_new_tokens": 4 } });
    let (first, second) = workers.ask("/generate", &body, json!(1));
    first.ok();
    second.ok();
    for (server, role, peer, counted) in [
        (&workers.prefill, "prefill", "127.0.0.1".to_owned(), "handed_over"),
        (&workers.decode, "decode", format!("127.0.0.1:{}", workers.port), "received"),
    ] {
        assert_eq!(server.get("/server_info").ok()["disaggregation_mode"], role);
        let page = server.get("/metrics").body;
        for line in [
            format!("aquila:transfers_total{{model_name=\"tiny\",peer=\"{peer}\"}} 1"),
            format!("aquila:transfer_failures_total{{model_name=\"tiny\",peer=\"{peer}\"}} 0"),
            format!("aquila:{counted}_total{{model_name=\"tiny\"}} 1"),
        ] {
            assert!(page.contains(&line), "no {line} in\n{page}");
        }
        // A probe that asks for a token is answered by the worker alone.
        assert_eq!(server.get("/health_generate").status, 200);
    }
}

#[test]
fn bad_rooms_are_refused_by_name() {
    let (workers, one) = (Workers::new(), Running::usual());
    let body = json!({ "input_ids": [[1], [2], [3]], "sampling_params": { "max_new_tokens": 1 } });
    let refused = |reply: &Reply, param: &str, why: &str| {
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!(param)), "{}", reply.body);
        assert!(error["message"].as_str().unwrap().contains(why), "{}", reply.body);
    };
    let missing = workers.prefill.post("/generate", &body.to_string());
    refused(&missing, "bootstrap_room", "this is a prefill worker");
    let missing = workers.decode.post("/generate", &body.to_string());
    refused(&missing, "bootstrap_room", "this is a decode worker");
    for (room, why) in [
        (json!([1, 2]), "has 2 rooms for 3 answers"),
        (json!("x"), "string"),
        (json!(-4), "-4"),
        (json!([1, null, 3]), "is missing"),
    ] {
        let (first, second) = workers.ask("/generate", &body, room);
        refused(&first, "bootstrap_room", why);
        refused(&second, "bootstrap_room", why);
    }
    // A room is the name of one request: the second one is refused, and the first goes on.
    let mut twice = json!({ "text": "x", "sampling_params": { "max_new_tokens": 2 } });
    twice["bootstrap_room"] = 77.into();
    let text = twice.to_string();
    let mut first = workers.prefill.connect().post("/generate", text.as_bytes());
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while !workers
        .prefill
        .get("/metrics")
        .body
        .contains("aquila:transfer_rooms{model_name=\"tiny\"} 1")
    {
        assert!(std::time::Instant::now() < until, "the room was not opened");
    }
    let second = workers.prefill.post("/generate", &text);
    refused(&second, "bootstrap_room", "another request has opened it");
    workers.decode.post("/generate", &text).ok();
    assert_eq!(first.reply().ok()["object"], "prefill");
    let mut elsewhere = body.clone();
    elsewhere["bootstrap_room"] = 4.into();
    // A server without a role does all of a request.
    assert_eq!(one.post("/generate", &elsewhere.to_string()).ok().as_array().unwrap().len(), 3);
    elsewhere["bootstrap_host"] = "192.0.2.7".into();
    let reply = workers.decode.post("/generate", &elsewhere.to_string());
    refused(&reply, "bootstrap_host", "192.0.2.7 is not a prefill host");
}
