//! The web page: who gets it, and what it may do.

use aquila_server::{ApiKey, Keys, Settings};

use crate::support::{Reply, Running, generator, settings};

/// What Chromium sends when somebody opens a page.
const BROWSER: &str = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";

fn open(server: &Running, method: &str, accept: &str) -> Reply {
    let head = format!("{method} / HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n");
    server.connect().send(&head).reply()
}

#[test]
fn browsers_get_a_page_that_may_load_nothing_else() {
    let server = Running::usual();
    for accept in [BROWSER, "TEXT/HTML", "application/json, text/html;q=0.1"] {
        let reply = open(&server, "GET", accept);
        assert_eq!(reply.status, 200, "{accept}");
        assert_eq!(reply.header("content-type"), Some("text/html; charset=utf-8"));
        assert!(reply.body.starts_with("<!doctype html>") && reply.body.ends_with("</html>\n"));
        for placeholder in ["/* style */", "/* script */"] {
            assert!(!reply.body.contains(placeholder), "{placeholder}");
        }
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none';"), "{policy}");
        assert!(policy.contains("connect-src 'self'") && !policy.contains("unsafe"), "{policy}");
        for outside in ["http://", "https://", "//cdn", "@import"] {
            // The namespaces of SVG are names, never loaded.
            let body = reply.body.replace("http://www.w3.org/2000/svg", "");
            assert!(!body.contains(outside), "{outside}");
        }
    }
}

#[test]
fn other_clients_hear_that_there_is_nothing_at_the_root() {
    let server = Running::usual();
    for accept in ["*/*", "application/json", "text/htmlx", "text/*"] {
        let reply = open(&server, "GET", accept);
        assert_eq!(reply.status, 404, "{accept}");
        assert_eq!(reply.json()["error"]["code"], "unknown_url");
    }
    assert_eq!(server.get("/").status, 404);
    assert_eq!(open(&server, "POST", BROWSER).status, 405);
    let hidden = Running::start(generator(), Settings { web_page: false, ..settings() });
    assert_eq!(open(&hidden, "GET", BROWSER).status, 404);
}

#[test]
fn the_page_needs_no_key_but_what_it_asks_for_does() {
    let keys = Keys::new(vec![ApiKey::new("alice", "secret").unwrap()], None);
    let server = Running::start(generator(), Settings { keys: keys.clone(), ..settings() });
    assert_eq!(open(&server, "GET", BROWSER).status, 200);
    assert_eq!(open(&server, "GET", "*/*").status, 401);
    assert_eq!(server.get("/server_info").status, 401);
    assert_eq!(server.post("/v1/chat/completions", "{}").status, 401);
    let hidden = Running::start(generator(), Settings { keys, web_page: false, ..settings() });
    assert_eq!(open(&hidden, "GET", BROWSER).status, 401);
}
