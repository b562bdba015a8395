//! Requests and responses, counted by route and status, under SGLang's names.
//!
//! The number of series is bounded: a route that there is not and a method that nobody has heard
//! of are counted under one name each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::Method;

use crate::metrics::Page;
use crate::refusal::Refusal;

/// The route of what has none.
const NO_ROUTE: &str = "Unknown";
const METHODS: [&str; 7] = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"];
const OTHER_METHOD: &str = "OTHER";

/// What is asked, and how.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Endpoint {
    route: String,
    method: &'static str,
}

impl Endpoint {
    /// The endpoint of a route as it was registered, if one matched.
    pub fn of(method: &Method, route: Option<&str>) -> Self {
        let known = METHODS.into_iter().find(|known| *known == method.as_str());
        let method = known.unwrap_or(OTHER_METHOD);
        Self { route: route.unwrap_or(NO_ROUTE).to_owned(), method }
    }

    fn labels(&self) -> String {
        format!(",endpoint=\"{}\",method=\"{}\"", self.route, self.method)
    }
}

#[derive(Debug, Default)]
struct Counts {
    requests: u64,
    active: u64,
    responses: BTreeMap<u16, u64>,
}

/// What is counted of HTTP.
#[derive(Debug, Default)]
pub(crate) struct HttpMetrics {
    endpoints: Mutex<BTreeMap<Endpoint, Counts>>,
    /// Streams that ended with an error, by its label.
    stream_errors: Mutex<BTreeMap<&'static str, u64>>,
    refused_connections: AtomicU64,
    failed_handshakes: AtomicU64,
}

impl HttpMetrics {
    fn endpoints(&self) -> MutexGuard<'_, BTreeMap<Endpoint, Counts>> {
        // Every change is a single step, so a panic leaves it whole.
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request from now on until the guard is dropped.
    pub fn begin(self: &Arc<Self>, endpoint: Endpoint) -> Active {
        let mut endpoints = self.endpoints();
        let counts = endpoints.entry(endpoint.clone()).or_default();
        counts.requests += 1;
        counts.active += 1;
        drop(endpoints);
        Active { metrics: self.clone(), endpoint }
    }

    /// Counts a request that could not be read as HTTP, and was answered so.
    pub fn connection_failed(&self, error: &hyper::Error) {
        if error.is_parse() {
            let status = if error.is_parse_too_large() { 431 } else { 400 };
            let endpoint = Endpoint { route: NO_ROUTE.into(), method: OTHER_METHOD };
            let mut endpoints = self.endpoints();
            let counts = endpoints.entry(endpoint).or_default();
            counts.requests += 1;
            *counts.responses.entry(status).or_default() += 1;
        }
    }

    /// Counts a stream that ended with an error, whose status was long sent.
    pub fn stream_failed(&self, refusal: &Refusal) {
        let mut errors = self.stream_errors.lock().unwrap_or_else(PoisonError::into_inner);
        *errors.entry(refusal.label()).or_default() += 1;
    }

    /// Counts a connection that was refused with 503, since all others are being answered.
    pub fn connection_refused(&self) {
        self.refused_connections.fetch_add(1, Relaxed);
    }

    /// Counts a TLS handshake that failed.
    pub fn handshake_failed(&self) {
        self.failed_handshakes.fetch_add(1, Relaxed);
    }

    /// Writes all of it.
    pub fn write(&self, page: &mut Page) {
        let endpoints = self.endpoints();
        let name = "sglang:http_requests_total";
        page.head(name, "counter", "Requests by route and method");
        for (endpoint, counts) in &*endpoints {
            page.line(name, &endpoint.labels(), counts.requests as f64);
        }
        let name = "sglang:http_requests_active";
        page.head(name, "gauge", "Requests that are being answered");
        for (endpoint, counts) in &*endpoints {
            page.line(name, &endpoint.labels(), counts.active as f64);
        }
        let name = "sglang:http_responses_total";
        page.head(name, "counter", "Responses by route, method and status; 499: the client left");
        for (endpoint, counts) in &*endpoints {
            for (status, count) in &counts.responses {
                let labels = format!("{},status_code=\"{status}\"", endpoint.labels());
                page.line(name, &labels, *count as f64);
            }
        }
        drop(endpoints);
        let name = "aquila:stream_errors_total";
        page.head(name, "counter", "Streams that ended with an error, by its code");
        for (label, count) in &*self.stream_errors.lock().unwrap_or_else(PoisonError::into_inner) {
            page.line(name, &format!(",code=\"{label}\""), *count as f64);
        }
        let read = |counter: &AtomicU64| counter.load(Relaxed) as f64;
        for (name, help, value) in [
            (
                "aquila:refused_connections_total",
                "Connections refused with 503, since all others were being answered",
                read(&self.refused_connections),
            ),
            (
                "aquila:failed_tls_handshakes_total",
                "TLS handshakes that failed",
                read(&self.failed_handshakes),
            ),
        ] {
            page.single(name, "counter", help, value);
        }
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(crate) struct Active {
    metrics: Arc<HttpMetrics>,
    endpoint: Endpoint,
}

impl Active {
    /// The route, as it was registered.
    pub fn route(&self) -> &str {
        &self.endpoint.route
    }

    /// Counts its response.
    pub fn answered(&self, status: u16) {
        if let Some(counts) = self.metrics.endpoints().get_mut(&self.endpoint) {
            *counts.responses.entry(status).or_default() += 1;
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        if let Some(counts) = self.metrics.endpoints().get_mut(&self.endpoint) {
            counts.active -= 1;
        }
    }
}
