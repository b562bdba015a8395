//! The web page at `/`: one static document, for browsers alone.
//!
//! It holds no secret, so it needs no key; what it asks for does. Its policy forbids everything
//! that is not in the document itself or on this server.

use std::sync::LazyLock;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};

use super::unknown_route;
use crate::state::Shared;

const DOCUMENT: &str = include_str!("../../page/index.html");
const STYLE: &str = include_str!("../../page/style.css");
/// In the order in which they need each other.
const SCRIPT: &str = concat!(
    "\"use strict\";\n",
    include_str!("../../page/stream.js"),
    include_str!("../../page/rounds.js"),
    include_str!("../../page/tree.js"),
    include_str!("../../page/panel.js"),
    include_str!("../../page/chat.js"),
);

static PAGE: LazyLock<Page> = LazyLock::new(Page::new);

struct Page {
    document: String,
    policy: HeaderValue,
}

impl Page {
    fn new() -> Self {
        let document = DOCUMENT.replace("/* style */", STYLE).replace("/* script */", SCRIPT);
        let policy = format!(
            "default-src 'none'; script-src '{}'; style-src '{}'; img-src data:; \
             connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            hash(SCRIPT),
            hash(STYLE)
        );
        let policy = policy.parse().expect("hashes in base64 are visible ASCII");
        Self { document, policy }
    }
}

/// How a policy names an element of the document by its text.
fn hash(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(digest(&SHA256, text.as_bytes())))
}

/// Whether a browser asks: other clients hear that there is nothing here.
pub(super) fn is_for_browser(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepts.flat_map(|value| value.split(',')).any(|kind| {
        let kind = kind.split(';').next().unwrap_or_default().trim();
        kind.eq_ignore_ascii_case("text/html")
    })
}

pub(super) async fn page(State(app): State<Shared>, request: Request) -> Response {
    if !is_for_browser(request.headers()) {
        return unknown_route(State(app), request).await.into_response();
    }
    let page = &*PAGE;
    let mut response = page.document.as_str().into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, page.policy.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::VARY, HeaderValue::from_static("accept")),
    ] {
        headers.insert(name, value);
    }
    response
}
