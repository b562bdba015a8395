//! Pages of other origins: whose may ask, from within a browser.
//!
//! Off unless asked for: then no response has a header of this protocol, and browsers keep pages of
//! other origins away.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::refusal::Refusal;
use crate::state::Shared;

/// What routes here are asked with.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, PUT");
/// What a page may read of a response, beside what every page may.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, retry-after");
/// Seconds for which a browser need not ask again.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
const ANY: HeaderValue = HeaderValue::from_static("*");

/// The origins whose pages may ask.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Pages of this server alone.
    #[default]
    None,
    /// Pages of any origin.
    Any,
    /// Pages of these origins.
    Of(Vec<String>),
}

impl AllowedOrigins {
    /// Reads origins such as `https://chat.example.com`; `*` alone is all of them.
    pub fn parse(origins: &[String]) -> Result<Self, String> {
        match origins {
            [] => Ok(Self::None),
            [one] if one == "*" => Ok(Self::Any),
            origins => {
                let read = origins.iter().map(|origin| parse(origin));
                read.collect::<Result<Vec<_>, _>>().map(Self::Of)
            }
        }
    }

    /// What a page of the origin in these headers is told; none if it may not ask.
    fn answer(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        match self {
            Self::None => None,
            Self::Any => Some(ANY),
            Self::Of(origins) => {
                let known =
                    |known: &String| origin.as_bytes().eq_ignore_ascii_case(known.as_bytes());
                origins.iter().any(known).then(|| origin.clone())
            }
        }
    }
}

fn parse(origin: &str) -> Result<String, String> {
    let host = origin.split_once("://").map(|(_, host)| host);
    let plain = |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', '*', '@']);
    if host.is_some_and(plain) && origin.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(origin.to_owned());
    }
    Err(format!(
        "`{origin}` is no origin: give a scheme, a host and a port where it has one, such as \
         https://chat.example.com, and nothing behind it; or * alone for all"
    ))
}

/// Answers browsers that ask whether a page may ask, and tells them of every response, errors too,
/// that its page may read it.
pub(crate) async fn share(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let allowed = &app.settings.allowed_origins;
    if *allowed == AllowedOrigins::None {
        return next.run(request).await;
    }
    let origin = allowed.answer(request.headers());
    let asks_first = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ORIGIN)
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if !asks_first {
        next.run(request).await
    } else if origin.is_some() {
        preflight(request.headers())
    } else {
        Refusal::foreign_origin().into_response()
    };
    let headers = response.headers_mut();
    if let AllowedOrigins::Of(_) = allowed {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    // A wildcard would not include the header that keys come in.
    if let Some(wanted) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_origin_is_refused() {
        let parse = |origins: &[&str]| {
            AllowedOrigins::parse(&origins.iter().map(|&o| o.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(parse(&[]), Ok(AllowedOrigins::None));
        assert_eq!(parse(&["*"]), Ok(AllowedOrigins::Any));
        assert!(parse(&["https://a.example", "http://localhost:3000"]).is_ok());
        for wrong in
            ["", "a.example", "https://", "https://a.example/", "https://*.a", "https://a b"]
        {
            assert!(parse(&[wrong]).unwrap_err().contains("is no origin"), "{wrong}");
        }
        assert!(parse(&["*", "https://a.example"]).is_err());
    }
}
