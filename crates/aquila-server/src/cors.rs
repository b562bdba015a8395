//! Pages of other origins: whose may ask, from within a browser.
//!
//! None unless asked for. Browsers alone do not keep them away: they send simple requests of any
//! page, and only its answer is withheld. So what a browser says of the page that asks is compared
//! with the server's own name, and that name, where nothing else protects the server, must be one
//! that no stranger can give to this machine. What has no such header comes from no browser, and
//! what shows a key from no page of a stranger.

use std::net::{IpAddr, Ipv6Addr};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::keys::Level;
use crate::refusal::Refusal;
use crate::routes::level;
use crate::state::{App, Shared};

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

    /// Whether a server of this name has pages that may ask.
    fn has_host(&self, host: &str) -> bool {
        match self {
            Self::None => false,
            Self::Any => true,
            Self::Of(origins) => origins.iter().any(|origin| is_of_host(origin, host)),
        }
    }
}

/// Why a request is not answered, for what a browser says of the page that asks.
fn refusal(app: &App, request: &Request) -> Option<Refusal> {
    let allowed = &app.settings.allowed_origins;
    let headers = request.headers();
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    // No page can write this header, and none is sent by plain HTTP from other machines.
    let site = text("sec-fetch-site");
    if *allowed == AllowedOrigins::Any || site == Some("same-origin") {
        return None;
    }
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let host = text("host").or(authority).unwrap_or_default();
    let is_open = !app.settings.keys.are_asked_for() && app.settings.tls.is_none();
    if app.is_local && is_open && !is_own_name(host) && !allowed.has_host(host) {
        return Some(Refusal::foreign_host());
    }
    let may_ask = match headers.get(header::ORIGIN) {
        Some(_) if allowed.answer(headers).is_some() => true,
        Some(origin) => {
            // A page would have to ask first for leave to write the forwarded ones.
            let forwarded = text("x-forwarded-host").unwrap_or_default().split(',').map(str::trim);
            let is_of = |host| origin.to_str().is_ok_and(|origin| is_of_host(origin, host));
            is_of(host) || forwarded.into_iter().any(is_of)
        }
        None => match site {
            None | Some("none") => true,
            Some(_) => {
                // A link leads here, and its page learns nothing; but it may change nothing.
                let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
                request.method() == Method::GET
                    && text("sec-fetch-mode") == Some("navigate")
                    && text("sec-fetch-dest") == Some("document")
                    && level(route) != Level::Admin
            }
        },
    };
    (!may_ask && !app.settings.keys.any_is_shown(headers)).then(Refusal::foreign_origin)
}

/// Whether an origin is that of a host as requests name it.
fn is_of_host(origin: &str, host: &str) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return false };
    let port = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => return false,
    };
    let without = |name: &str| name.strip_suffix(port).unwrap_or(name).to_ascii_lowercase();
    !host.is_empty() && without(authority) == without(host)
}

/// Whether a Host header has an address, or a name that only this machine or its network gives:
/// whoever owns another name may have it lead here, and his page then is of the same origin.
fn is_own_name(host: &str) -> bool {
    if let Some((address, _)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let inner = [".localhost", ".local", ".internal"];
    name.parse::<IpAddr>().is_ok()
        || !name.contains('.')
        || inner.iter().any(|ending| name.ends_with(ending))
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

/// Refuses pages that may not ask, answers browsers that ask whether a page may, and tells them of
/// every response, errors too, that its page may read it.
pub(crate) async fn share(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let refusal = refusal(&app, &request);
    let allowed = &app.settings.allowed_origins;
    if *allowed == AllowedOrigins::None {
        return match refusal {
            Some(refusal) => refusal.into_response(),
            None => next.run(request).await,
        };
    }
    let origin = allowed.answer(request.headers());
    let asks_first = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ORIGIN)
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match refusal {
        Some(refusal) => refusal.into_response(),
        None if asks_first && origin.is_some() => preflight(request.headers()),
        None => next.run(request).await,
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

    #[test]
    fn names_that_a_stranger_may_own_are_not_ours() {
        for own in [
            "",
            "localhost",
            "LocalHost:30000",
            "127.0.0.1:1",
            "10.1.2.3",
            "[::1]:30000",
            "[::1]",
            "box",
            "box:80",
            "a.localhost",
            "box.local:8080",
            "host.docker.internal",
            "localhost.",
        ] {
            assert!(is_own_name(own), "{own}");
        }
        for foreign in ["evil.example", "evil.example:30000", "localhost.evil.example", "[evil]"] {
            assert!(!is_own_name(foreign), "{foreign}");
        }
    }

    #[test]
    fn an_origin_is_its_hosts_with_the_usual_port_or_without() {
        for (origin, host, same) in [
            ("http://localhost:30000", "localhost:30000", true),
            ("http://localhost:3000", "localhost:30000", false),
            ("https://a.example", "a.example:443", true),
            ("http://a.example", "A.example", true),
            ("http://a.example", "a.example:443", false),
            ("null", "null", false),
            ("http://", "", false),
        ] {
            assert_eq!(is_of_host(origin, host), same, "{origin} {host}");
        }
    }
}
