//! The access log: what was asked, by whom, how it was answered, and under which id.
//!
//! Every response names its request in `x-request-id`: by the id that the client sent, by the id of
//! its answer, or by a new one. A request whose client leaves before its answer has the status 499,
//! as in nginx's log; one that leaves in the middle of an answer is logged as cut.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;

use crate::connection::Peer;
use crate::http_metrics::{Active, Endpoint};
use crate::keys::Holder;
use crate::refusal::Refused;
use crate::state::{App, Shared};

/// Where ids come and go.
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Bytes of the longest id that is taken from a client.
const LONGEST_ID: usize = 128;
/// Bytes of a path that the log has.
const LONGEST_PATH: usize = 256;
/// The status of a request whose client has left.
const CLIENT_LEFT: u16 = 499;

/// Logs and counts a request.
pub(crate) async fn log(State(app): State<Shared>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let endpoint = Endpoint::of(request.method(), route.map(MatchedPath::as_str));
    let path = request.uri().path();
    let caller = Caller::default();
    let mut entry = Entry {
        active: app.metrics.http.begin(endpoint),
        begun: Instant::now(),
        method: request.method().to_string(),
        path: path[..path.floor_char_boundary(LONGEST_PATH)].to_owned(),
        peer: request.extensions().get::<Peer>().map(|peer| peer.0),
        id: sane(request.headers()).map(str::to_owned),
        answer_id: None,
        status: None,
        refused: None,
        complete: false,
        caller: caller.clone(),
        span: app.traces.get().and_then(|traces| traces.begin(request.headers())),
    };
    request.extensions_mut().insert(caller);
    let mut response = next.run(request).await;
    entry.answered(&app, &mut response);
    // Such bodies are not asked for what is in them.
    entry.complete = response.body().is_end_stream() || entry.method == "HEAD";
    response.map(|body| Body::new(Logged { body, entry }))
}

/// An id that a log can have as it is.
fn sane(headers: &HeaderMap) -> Option<&str> {
    let id = headers.get(X_REQUEST_ID)?.to_str().ok()?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&byte);
    (!id.is_empty() && id.len() <= LONGEST_ID && id.bytes().all(plain)).then_some(id)
}

/// Who asks, as far as a key tells; known once keys are checked.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    holder: OnceLock<Arc<Holder>>,
    /// Its place among the requests of its key, until it is answered.
    place: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Caller {
    /// Notes whose key was shown.
    pub fn set(&self, holder: Arc<Holder>) {
        // Keys are checked once.
        let _ = self.0.holder.set(holder);
    }

    /// Whose key was shown.
    pub fn holder(&self) -> Option<&Arc<Holder>> {
        self.0.holder.get()
    }

    /// Takes a place among the requests of its key until it is answered, or none.
    pub fn place(&self, place: Option<OwnedSemaphorePermit>) {
        *self.0.place.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }
}

/// A line of the log, written when it is dropped.
struct Entry {
    active: Active,
    begun: Instant,
    method: String,
    path: String,
    peer: Option<SocketAddr>,
    id: Option<String>,
    /// The id of the answer, where it is not that of the request.
    answer_id: Option<String>,
    status: Option<u16>,
    refused: Option<&'static str>,
    /// Whether the client has got the whole answer.
    complete: bool,
    caller: Caller,
    span: Option<crate::traces::Span>,
}

impl Entry {
    /// Notes how the request was answered, and gives the response its id.
    fn answered(&mut self, app: &App, response: &mut Response) {
        let status = response.status().as_u16();
        self.status = Some(status);
        self.active.answered(status);
        self.refused = response.extensions().get::<Refused>().map(|refused| refused.0);
        let answer_id = sane(response.headers()).map(str::to_owned);
        match &self.id {
            Some(_) => self.answer_id = answer_id,
            None => self.id = Some(answer_id.unwrap_or_else(|| app.identifiers.next("req-"))),
        }
        let id = self.id.as_deref().and_then(|id| HeaderValue::from_str(id).ok());
        if let Some(id) = id {
            response.headers_mut().insert(X_REQUEST_ID, id);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.status.is_none() {
            self.active.answered(CLIENT_LEFT);
        }
        let Self { method, path, .. } = self;
        let status = self.status.unwrap_or(CLIENT_LEFT);
        if let Some(span) = &self.span {
            let (id, error, route) = (self.id.as_deref(), self.refused, self.active.route());
            span.end(&crate::traces::Ended { method, route, path, status, id, error });
        }
        let ms = (self.begun.elapsed().as_secs_f64() * 1e4).round() / 10.0;
        let id = self.id.as_deref().map(tracing::field::display);
        let answer = self.answer_id.as_deref().map(tracing::field::display);
        let key = self.caller.holder().map(|holder| tracing::field::display(holder.name()));
        let peer = self.peer.map(tracing::field::display);
        let error = self.refused.map(tracing::field::display);
        let cut = (self.status.is_some() && !self.complete).then_some(true);
        // Those who look after servers ask often, and always the same.
        if path.starts_with("/health") || path == "/metrics" {
            tracing::debug!(%method, %path, status, ms, id, key, peer, error, cut, answer, "request");
        } else {
            tracing::info!(%method, %path, status, ms, id, key, peer, error, cut, answer, "request");
        }
    }
}

/// A response's body, at whose end the request is logged.
struct Logged {
    body: Body,
    entry: Entry,
}

impl http_body::Body for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(frame) = &frame {
            self.entry.complete = frame.is_none() || self.body.is_end_stream();
            if self.entry.complete {
                // Before the client has the last of it, and asks again.
                self.entry.caller.place(None);
            }
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
