//! Keys: who may ask for what, and how much at a time.

use aquila_server::{ApiKey, Keys, Settings};
use serde_json::json;

use crate::support::{Connection, Reply, Running, engine_config, generator, settings};

fn keys(keys: &[(&str, &str)], most: Option<usize>) -> Keys {
    let keys = keys.iter().map(|(name, key)| ApiKey::new(name, key).unwrap());
    Keys::new(keys.collect(), most)
}

fn get(server: &Running, path: &str, headers: &str) -> Reply {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
    server.connect().send(&request).reply()
}

fn post(server: &Running, key: &str, body: &str) -> Connection {
    let length = body.len();
    server.connect().send(&format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: \
         {length}\r\n\r\n{body}"
    ))
}

#[test]
fn a_key_is_asked_of_everyone_but_health_and_metrics() {
    let keys = keys(&[("alice", "secret"), ("bob", "other")], None);
    let server = Running::start(generator(), Settings { keys, ..settings() });
    let with = |headers: &str| get(&server, "/v1/models", headers);
    for wrong in [
        "",
        "Authorization: Bearer wrong\r\n",
        "Authorization: Bearer secretother\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Basic secret\r\n",
        "Authorization: secret\r\n",
        "x-api-key: Bearer secret\r\n",
        "x-api-key: \r\n",
    ] {
        let reply = with(wrong);
        assert_eq!(reply.status, 401, "{wrong}");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        let error = &reply.json()["error"];
        assert_eq!(error["code"], "invalid_api_key");
        assert_eq!(error["type"], "invalid_request_error");
    }
    with("Authorization: Bearer secret\r\n").ok();
    with("authorization: bearer other\r\n").ok();
    with("X-API-Key: other\r\n").ok();
    // A router sends its own key beside the client's.
    with("Authorization: Bearer client\r\nAuthorization: Bearer secret\r\n").ok();
    for open in ["/health", "/health_generate", "/metrics"] {
        assert_eq!(server.get(open).status, 200, "{open}");
    }
    for closed in ["/healthy", "/metrics/", "/", "/server_info", "/flush_cache"] {
        assert_eq!(server.get(closed).status, 401, "{closed}");
    }
}

#[test]
fn admin_routes_take_the_admin_key_alone() {
    let admin = [
        ("GET", "/flush_cache"),
        ("POST", "/abort_request"),
        ("POST", "/add_external_corpus"),
        ("POST", "/remove_external_corpus"),
        ("GET", "/list_external_corpora"),
    ];
    let ask = |server: &Running, (method, path): (&str, &str), key: &str| {
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n\r\n");
        server.connect().send(&head).reply().status
    };
    let one = keys(&[("alice", "secret")], None);
    let with_both = one.clone().with_admin("root").unwrap();
    let server = Running::start(generator(), Settings { keys: with_both, ..settings() });
    for route in admin {
        assert_eq!(ask(&server, route, "secret"), 401, "{route:?}");
        assert_ne!(ask(&server, route, "root"), 401, "{route:?}");
    }
    // As in SGLang, the admin key is no key for the rest.
    assert_eq!(ask(&server, ("GET", "/v1/models"), "root"), 401);
    assert_eq!(ask(&server, ("GET", "/v1/models"), "secret"), 200);
    drop(server);

    let admin_alone = Keys::default().with_admin("root").unwrap();
    let server = Running::start(generator(), Settings { keys: admin_alone, ..settings() });
    assert_eq!(ask(&server, ("GET", "/v1/models"), "nobody"), 200);
    assert_eq!(ask(&server, admin[0], "nobody"), 401);
    assert_eq!(ask(&server, admin[0], "root"), 200);
    drop(server);

    let server = Running::start(generator(), Settings { keys: one, ..settings() });
    assert_eq!(ask(&server, admin[0], "secret"), 200);
}

#[test]
fn a_key_has_only_so_many_requests_at_a_time() {
    let keys = keys(&[("alice", "secret"), ("bob", "other")], Some(2));
    let server = Running::held(engine_config(), Settings { keys, ..settings() });
    let body = json!({ "prompt": "fn main", "max_tokens": 4, "ignore_eos": true, "stream": true });
    let body = body.to_string();
    let mut streams = [(); 2].map(|()| post(&server, "secret", &body));
    assert_eq!(streams.each_mut().map(|stream| stream.head().0), [200, 200]);
    let refused = post(&server, "secret", &body).reply();
    assert_eq!(refused.status, 429);
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["code"], &error["type"]),
        (&json!("rate_limit_exceeded"), &json!("requests"))
    );
    // Others, and what costs nothing, are served meanwhile.
    let mut other = post(&server, "other", &body);
    assert_eq!(other.head().0, 200);
    get(&server, "/v1/models", "x-api-key: secret\r\n").ok();
    // A client that leaves gives its place back.
    let [left, mut stays] = streams;
    drop(left);
    server.wait_until("two are left", |s| s.running + s.waiting == 2);
    let mut next = post(&server, "secret", &body);
    assert_eq!(next.head().0, 200);
    server.run_freely();
    for stream in [&mut stays, &mut next, &mut other] {
        while stream.chunk().is_some() {}
    }
    // So does one whose answer has ended, before its client knows.
    for _ in 0..20 {
        let mut pair = [(); 2].map(|()| post(&server, "secret", &body));
        pair.iter_mut().for_each(|stream| drop(stream.reply().events()));
    }
}
