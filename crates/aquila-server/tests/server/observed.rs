//! What operators and browsers see of requests: ids, counts, and headers for pages of others.

use std::time::Duration;

use aquila_server::{AllowedOrigins, Settings};
use serde_json::json;

use crate::support::{Reply, Running, engine_config, generator, settings};

fn ask(server: &Running, head: &str) -> Reply {
    server.connect().send(&format!("{head}\r\nHost: x\r\n\r\n")).reply()
}

/// The value of a series, by its name and some of its labels.
fn metric(server: &Running, name: &str, labels: &[&str]) -> f64 {
    let page = server.get("/metrics").body;
    let fits = |line: &&str| line.starts_with(name) && labels.iter().all(|l| line.contains(l));
    let line = page.lines().find(fits);
    line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[test]
fn every_response_names_its_request() {
    let server = Running::usual();
    let id = |head: &str| ask(&server, head).header("x-request-id").unwrap().to_owned();
    assert_eq!(id("GET /v1/models HTTP/1.1\r\nX-Request-Id: a-1:b/c"), "a-1:b/c");
    assert_eq!(id("GET /nowhere HTTP/1.1\r\nX-Request-Id: mine"), "mine");
    assert_ne!(id("GET /health HTTP/1.1"), id("GET /health HTTP/1.1"));
    // What could break a log, or fill it, is replaced.
    for bad in ["a b", "\"", "a\\n", "", &"a".repeat(129), "\u{e4}"] {
        let given = id(&format!("GET /v1/models HTTP/1.1\r\nX-Request-Id: {bad}"));
        assert!(given.starts_with("req-"), "{bad}: {given}");
    }
    // An answer's id is its request's, unless the client has one.
    let body = r#"{"prompt": "x", "max_tokens": 1}"#;
    let reply = server.post("/v1/completions", body);
    assert_eq!(reply.header("x-request-id"), reply.json()["id"].as_str());
    let head = format!("Host: x\r\nX-Request-Id: mine\r\nContent-Length: {}", body.len());
    let request = format!("POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}");
    let reply = server.connect().send(&request).reply();
    assert_eq!(reply.header("x-request-id"), Some("mine"));
}

#[test]
fn responses_are_counted_by_route_and_status() {
    let mut settings = settings();
    settings.limits.request_time = Some(Duration::from_millis(100));
    let server = Running::held(engine_config(), settings);
    for _ in 0..3 {
        ask(&server, "GET /v1/models HTTP/1.1");
    }
    ask(&server, "DELETE /v1/models HTTP/1.1");
    ask(&server, "GET /no/such/1 HTTP/1.1");
    ask(&server, "BREW /no/such/2 HTTP/1.1");
    server.post("/v1/completions", "{");
    ask(&server, "GET / HTTP/9.9");
    let responses = "sglang:http_responses_total";
    let count = |labels: &[&str]| metric(&server, responses, labels);
    let models = "endpoint=\"/v1/models\"";
    assert_eq!(count(&[models, "method=\"GET\"", "status_code=\"200\""]), 3.0);
    assert_eq!(count(&[models, "status_code=\"405\""]), 1.0);
    assert_eq!(count(&["endpoint=\"/v1/completions\"", "status_code=\"400\""]), 1.0);
    let unknown = "endpoint=\"Unknown\"";
    assert_eq!(count(&[unknown, "method=\"GET\"", "status_code=\"404\""]), 1.0);
    assert_eq!(count(&[unknown, "method=\"OTHER\"", "status_code=\"404\""]), 1.0);
    assert_eq!(count(&[unknown, "method=\"OTHER\"", "status_code=\"400\""]), 1.0);
    assert_eq!(metric(&server, "sglang:http_requests_total", &[models, "\"GET\""]), 3.0);
    // The one that asks.
    assert_eq!(metric(&server, "sglang:http_requests_active", &["\"/metrics\""]), 1.0);

    // Passes are at least a millisecond apart, so that 480 take longer than that on any machine.
    let mut body = json!({ "prompt": "fn main", "n": 8, "max_tokens": 480, "ignore_eos": true });
    let mut whole = server.connect().post("/v1/completions", body.to_string().as_bytes());
    server.wait_until("its answers ended", |s| s.finished == 8);
    assert_eq!(whole.reply().status, 504);
    assert_eq!(count(&["endpoint=\"/v1/completions\"", "status_code=\"504\""]), 1.0);
    body["stream"] = true.into();
    let mut stream = server.connect().post("/v1/completions", body.to_string().as_bytes());
    server.wait_until("its answers ended", |s| s.finished == 16);
    stream.reply();
    assert_eq!(metric(&server, "aquila:stream_errors_total", &["code=\"timeout\""]), 1.0);
    let left = server.connect().post("/v1/completions", br#"{"prompt": "x"}"#);
    server.wait_until("it is there", |s| s.running + s.waiting == 1);
    drop(left);
    server.wait_until_idle();
    let left = || count(&["endpoint=\"/v1/completions\"", "status_code=\"499\""]);
    assert!(std::iter::repeat_with(left).any(|count| count == 1.0));
}

#[test]
fn a_server_that_drains_counts_what_it_refuses() {
    let mut server = Running::held(engine_config(), settings());
    let body = r#"{"prompt": "x", "max_tokens": 1, "stream": true}"#;
    let mut stream = server.connect().post("/v1/completions", body.as_bytes());
    assert_eq!(stream.head().0, 200);
    server.stop();
    let refused = || server.post("/v1/completions", body).status == 503;
    assert!(std::iter::repeat_with(refused).any(|refused| refused));
    let labels = ["endpoint=\"/v1/completions\"", "status_code=\"503\""];
    assert!(metric(&server, "sglang:http_responses_total", &labels) >= 1.0);
}

#[test]
fn pages_of_other_origins_ask_only_where_allowed() {
    let preflight = "OPTIONS /v1/chat/completions HTTP/1.1\r\nAccess-Control-Request-Method: \
                     POST\r\nAccess-Control-Request-Headers: authorization\r\nOrigin:";
    let allows = |reply: &Reply| reply.header("access-control-allow-origin").map(str::to_owned);
    let with = |origins: &[&str]| {
        let origins: Vec<String> = origins.iter().map(|&origin| origin.into()).collect();
        let allowed_origins = AllowedOrigins::parse(&origins).unwrap();
        let keys = vec![aquila_server::ApiKey::new("alice", "secret").unwrap()];
        let keys = aquila_server::Keys::new(keys, None);
        Running::start(generator(), Settings { allowed_origins, keys, ..settings() })
    };
    let server = with(&[]);
    let reply = ask(&server, &format!("{preflight} https://a.example"));
    assert_eq!((reply.status, allows(&reply)), (403, None));
    let reply = ask(&server, "GET /health HTTP/1.1\r\nOrigin: https://a.example");
    assert_eq!((reply.status, allows(&reply)), (403, None));
    drop(server);

    let server = with(&["https://a.example", "http://localhost:3000"]);
    let reply = ask(&server, &format!("{preflight} http://localhost:3000"));
    assert_eq!(reply.status, 204);
    assert_eq!(allows(&reply).as_deref(), Some("http://localhost:3000"));
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization"));
    assert!(reply.header("access-control-allow-methods").unwrap().contains("POST"));
    assert_eq!(reply.header("vary"), Some("origin"));
    // Errors must be readable, too.
    let reply = ask(&server, "GET /v1/models HTTP/1.1\r\nOrigin: https://a.example");
    assert_eq!((reply.status, allows(&reply).as_deref()), (401, Some("https://a.example")));
    assert!(reply.header("access-control-expose-headers").unwrap().contains("x-request-id"));
    for foreign in ["https://b.example", "https://a.example.b.example", "null"] {
        let reply = ask(&server, &format!("{preflight} {foreign}"));
        assert_eq!((reply.status, allows(&reply)), (403, None), "{foreign}");
        let reply = ask(&server, &format!("GET /health HTTP/1.1\r\nOrigin: {foreign}"));
        assert_eq!((reply.status, allows(&reply)), (403, None), "{foreign}");
    }
    drop(server);

    let server = with(&["*"]);
    let reply = ask(&server, &format!("{preflight} https://b.example"));
    assert_eq!((reply.status, allows(&reply).as_deref()), (204, Some("*")));
}

#[test]
fn pages_of_strangers_change_nothing() {
    let server = Running::usual();
    let port = server.address.port();
    let own = format!("Host: localhost:{port}\r\n");
    let status = |request: &str, headers: &str| {
        let (route, body) = request
            .split_once(" {")
            .map_or((request, ""), |(route, _)| (route, r#"{"abort_all": true}"#));
        let length = body.len();
        let head = format!("{route} HTTP/1.1\r\nContent-Length: {length}\r\n{headers}\r\n{body}");
        server.connect().send(&head).reply().status
    };
    let image =
        "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: image\r\n";
    let link = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: \
                document\r\nAccept: text/html\r\n";
    let abort = "POST /abort_request {}";
    for (request, headers, expected) in [
        // What no browser sends.
        (abort, own.clone(), 200),
        ("GET /flush_cache", own.clone(), 200),
        // A page that sends what needs no leave, an image, a link, and a page without an origin.
        (abort, format!("{own}Origin: https://evil.example\r\n"), 403),
        (abort, format!("{own}Origin: null\r\n"), 403),
        (abort, format!("{own}Origin: http://localhost:1\r\n"), 403),
        ("GET /flush_cache", format!("{own}{image}"), 403),
        ("GET /flush_cache", format!("{own}{link}"), 403),
        ("GET /", format!("{own}{link}"), 200),
        // The server's own page, also behind proxies that write another Host.
        (abort, format!("{own}Origin: http://localhost:{port}\r\n"), 200),
        (abort, format!("{own}Origin: https://a.example\r\nSec-Fetch-Site: same-origin\r\n"), 200),
        (abort, format!("{own}Origin: http://a.example\r\nX-Forwarded-Host: a.example\r\n"), 200),
        (
            abort,
            format!("{own}Origin: http://a.example\r\nX-Forwarded-Host: b, a.example\r\n"),
            200,
        ),
        // A name that a stranger has made lead here.
        (abort, "Host: evil.example\r\nOrigin: http://evil.example\r\n".into(), 403),
        ("GET /v1/models", "Host: evil.example:30000\r\n".into(), 403),
        ("GET /v1/models", "Host: 127.0.0.1\r\n".into(), 200),
        ("GET /v1/models", format!("Host: [::1]:{port}\r\n"), 200),
    ] {
        assert_eq!(status(request, &headers), expected, "{request}\n{headers}");
    }
    drop(server);

    // Behind a proxy that keeps the name, its origin is named.
    let allowed_origins = AllowedOrigins::parse(&["https://chat.example".to_owned()]).unwrap();
    let server = Running::start(generator(), Settings { allowed_origins, ..settings() });
    let get = |host: &str| {
        server.connect().send(&format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")).reply()
    };
    assert_eq!(get("chat.example").status, 200);
    let refused = get("evil.example");
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (403, &json!("host_not_allowed"))
    );
    drop(server);

    // With keys, a page of a stranger has none; an extension of a browser, say, has one.
    let keys = vec![aquila_server::ApiKey::new("alice", "secret").unwrap()];
    let keys = aquila_server::Keys::new(keys, None);
    let server = Running::start(generator(), Settings { keys, ..settings() });
    for (headers, expected) in [
        ("x-api-key: secret\r\n", 200),
        ("Origin: chrome-extension://abc\r\nx-api-key: secret\r\n", 200),
        ("Origin: chrome-extension://abc\r\nx-api-key: wrong\r\n", 403),
        ("Origin: https://evil.example\r\n", 403),
    ] {
        let head = format!("GET /v1/models HTTP/1.1\r\nHost: chat.example\r\n{headers}\r\n");
        assert_eq!(server.connect().send(&head).reply().status, expected, "{headers}");
    }
}
