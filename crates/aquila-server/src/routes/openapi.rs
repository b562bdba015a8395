//! `/openapi.json`: all routes and what their bodies may have, as an OpenAPI document.

use axum::http::header;
use axum::response::{IntoResponse, Response};

const DOCUMENT: &str = include_str!("openapi.json");

/// The document, with the version of this build.
pub(super) fn text() -> Vec<u8> {
    DOCUMENT.replacen("0.0.0", env!("CARGO_PKG_VERSION"), 1).into_bytes()
}

pub(crate) async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text()).into_response()
}
