//! Traces by OpenTelemetry's protocol, OTLP over HTTP in JSON: a span for each request.
//!
//! Spans wait in a queue that has an end, and a task of the server sends them in batches: a
//! collector that is slow or away costs spans, and keeps no request waiting.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, timeout, timeout_at};

use crate::identifier::Identifiers;

/// Spans that may wait to be sent.
const QUEUE: usize = 4096;
/// Spans that are sent together.
const BATCH: usize = 512;
/// How long a span waits for others.
const DELAY: Duration = Duration::from_secs(1);
/// How long the collector may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Where a collector takes spans, unless its address has a path.
const PATH: &str = "/v1/traces";

/// Where spans are sent, and as whose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceEndpoint {
    /// Its host, with its port.
    authority: String,
    path: String,
    service: String,
}

impl TraceEndpoint {
    /// The collector at `url`, where the name of the service that `OTEL_SERVICE_NAME` has is used; an
    /// address without a path stands for that of all signals.
    pub fn of_service(url: &str) -> Result<Self, &'static str> {
        let service = std::env::var("OTEL_SERVICE_NAME").ok().filter(|name| !name.is_empty());
        Self::parse(url, service.as_deref().unwrap_or("aquila"))
    }

    /// The collector at `url`, for spans of `service`.
    pub fn parse(url: &str, service: &str) -> Result<Self, &'static str> {
        let rest = url.strip_prefix("http://").ok_or(
            "spans are sent over plain HTTP: give http://HOST:PORT of a collector on this machine \
             or in its network",
        )?;
        let (host, base) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let sane = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_empty() || !sane(rest) {
            return Err("this is no address: give http://HOST:PORT");
        }
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { host.to_owned() } else { format!("{host}:80") };
        let path = if base.trim_end_matches('/').is_empty() { PATH } else { base }.to_owned();
        Ok(Self { authority, path, service: service.to_owned() })
    }
}

/// What is known of a request when it has ended.
pub(crate) struct Ended<'a> {
    pub method: &'a str,
    pub route: &'a str,
    pub path: &'a str,
    pub status: u16,
    pub id: Option<&'a str>,
    pub error: Option<&'a str>,
}

/// A span that has begun.
#[derive(Debug)]
pub(crate) struct Span {
    traces: Arc<Traces>,
    trace_id: String,
    span_id: String,
    parent_id: Option<String>,
    begun: SystemTime,
}

impl Span {
    /// Ends it, and has it sent.
    pub fn end(&self, request: &Ended<'_>) {
        let text =
            |key: &str, value: &str| json!({ "key": key, "value": { "stringValue": value } });
        let mut attributes = vec![
            text("http.request.method", request.method),
            text("http.route", request.route),
            text("url.path", request.path),
            // Numbers of 64 bits are strings in the JSON of protocol buffers.
            json!({
                "key": "http.response.status_code",
                "value": { "intValue": request.status.to_string() },
            }),
        ];
        attributes.extend(request.id.map(|id| text("http.request.id", id)));
        attributes.extend(request.error.map(|error| text("error.type", error)));
        let nanoseconds = |time: SystemTime| {
            time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos()).to_string()
        };
        self.traces.send(json!({
            "traceId": self.trace_id,
            "spanId": self.span_id,
            "parentSpanId": self.parent_id.as_deref().unwrap_or_default(),
            "name": format!("{} {}", request.method, request.route),
            // A server's.
            "kind": 2,
            "startTimeUnixNano": nanoseconds(self.begun),
            "endTimeUnixNano": nanoseconds(SystemTime::now()),
            "attributes": attributes,
            "status": if request.status >= 500 { json!({ "code": 2 }) } else { json!({}) },
        }));
    }
}

/// Takes spans, until it is closed.
#[derive(Debug)]
pub(crate) struct Traces {
    queue: Mutex<Option<Sender<Value>>>,
    identifiers: Identifiers,
}

impl Traces {
    /// What takes spans, and what sends them once it is run.
    pub fn new(endpoint: TraceEndpoint) -> (Arc<Self>, Export) {
        let (queue, spans) = channel(QUEUE);
        let queue = Mutex::new(Some(queue));
        let traces = Arc::new(Self { queue, identifiers: Identifiers::default() });
        (traces, Export { endpoint, spans })
    }

    /// Begins the span of a request with these headers; none if its caller does not want one.
    pub fn begin(self: &Arc<Self>, headers: &HeaderMap) -> Option<Span> {
        let parent = headers.get("traceparent").and_then(|value| parent(value.to_str().ok()?));
        let (trace_id, parent_id) = match parent {
            Some(Parent { sampled: false, .. }) => return None,
            Some(Parent { trace_id, span_id, .. }) => (trace_id, Some(span_id)),
            None => (self.identifiers.next(""), None),
        };
        let mut span_id = self.identifiers.next("");
        span_id.truncate(16);
        let (traces, begun) = (self.clone(), SystemTime::now());
        Some(Span { traces, trace_id, span_id, parent_id, begun })
    }

    /// Takes no more spans, so that what sends them ends when it has.
    pub fn close(&self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn send(&self, span: Value) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.as_ref().is_some_and(|queue| queue.try_send(span).is_err()) {
            tracing::warn!("a span was lost: the collector is too slow");
        }
    }
}

/// The span that a caller has begun.
struct Parent {
    trace_id: String,
    span_id: String,
    sampled: bool,
}

/// Reads `traceparent`, as W3C defines it.
fn parent(header: &str) -> Option<Parent> {
    let parts: Vec<&str> = header.split('-').collect();
    let [version, trace_id, span_id, flags, ..] = parts[..] else { return None };
    let is_hex = |text: &str, length: usize| {
        text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |text: &str, length| is_hex(text, length) && text.bytes().any(|byte| byte != b'0');
    let known = is_hex(version, 2) && version != "ff" && (version != "00" || parts.len() == 4);
    if !known || !is_id(trace_id, 32) || !is_id(span_id, 16) || !is_hex(flags, 2) {
        return None;
    }
    let sampled = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1);
    Some(Parent { trace_id: trace_id.into(), span_id: span_id.into(), sampled })
}

/// Sends spans to a collector.
pub(crate) struct Export {
    endpoint: TraceEndpoint,
    spans: Receiver<Value>,
}

impl Export {
    /// Sends until no more are taken and all are sent.
    pub async fn run(mut self) {
        while let Some(first) = self.spans.recv().await {
            let mut batch = vec![first];
            let until = Instant::now() + DELAY;
            while batch.len() < BATCH
                && let Ok(Some(span)) = timeout_at(until, self.spans.recv()).await
            {
                batch.push(span);
            }
            let count = batch.len();
            let sent = timeout(PATIENCE, self.send(batch)).await;
            if let Err(error) = sent.unwrap_or_else(|late| Err(late.into())) {
                tracing::warn!(%error, count, "spans were lost: the collector did not take them");
            }
        }
    }

    async fn send(&self, spans: Vec<Value>) -> std::io::Result<()> {
        let TraceEndpoint { authority, path, service } = &self.endpoint;
        let name = json!({ "key": "service.name", "value": { "stringValue": service } });
        let scope = json!({ "name": "aquila-server", "version": env!("CARGO_PKG_VERSION") });
        let body = json!({ "resourceSpans": [{
            "resource": { "attributes": [name] },
            "scopeSpans": [{ "scope": scope, "spans": spans }],
        }] });
        let body = body.to_string();
        let mut socket = TcpStream::connect(authority).await?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        socket.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
        // `HTTP/1.1 200`, and more that is of no use.
        let mut status = [0; 12];
        socket.read_exact(&mut status).await?;
        if status[9] == b'2' {
            return Ok(());
        }
        Err(std::io::Error::other(String::from_utf8_lossy(&status).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_plain_http() {
        let parse = |url| {
            let endpoint = TraceEndpoint::parse(url, "a");
            endpoint.map(|endpoint| (endpoint.authority, endpoint.path))
        };
        let is = |authority: &str, path: &str| Ok((authority.to_owned(), path.to_owned()));
        assert_eq!(parse("http://collector:4318"), is("collector:4318", "/v1/traces"));
        assert_eq!(parse("http://[::1]:4318/"), is("[::1]:4318", "/v1/traces"));
        assert_eq!(parse("http://a/otlp"), is("a:80", "/otlp"));
        for wrong in ["https://a:4318", "a:4318", "http://", "http:///x", "http://a b"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn parents_are_those_of_w3c() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let sampled = |header: String| parent(&header).map(|parent| parent.sampled);
        assert_eq!(sampled(format!("00-{trace}-{span}-01")), Some(true));
        assert_eq!(sampled(format!("00-{trace}-{span}-00")), Some(false));
        assert_eq!(sampled(format!("01-{trace}-{span}-03-more")), Some(true));
        for wrong in [
            String::new(),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-more"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{}-{span}-01", trace.to_uppercase()),
        ] {
            assert_eq!(sampled(wrong.clone()), None, "{wrong}");
        }
    }
}
