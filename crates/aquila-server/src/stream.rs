//! Answers as server-sent events.
//!
//! A stream is `data: JSON` events and, in most APIs, `data: [DONE]`; one that fails ends with an event that
//! holds the error, since its status is long sent.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use http_body::Frame;
use serde::Serialize;

use crate::answer::{Event, StreamEvent};
use crate::refusal::Refusal;
use crate::returned::keep_room;
use crate::submit::{AnswerStream, RequestGuards};

/// Events that are put together when several wait.
const AT_ONCE: usize = 64;
/// Bytes from which on a frame takes no further event, which waits for the next one.
const FRAME: usize = 256 << 10;

/// Writes events.
#[derive(Debug, Default)]
pub(crate) struct EventWriter(Vec<u8>);

impl EventWriter {
    /// Whether further events should wait until these are sent.
    pub fn is_full(&self) -> bool {
        self.0.len() >= FRAME
    }

    /// Writes one event.
    pub fn event(&mut self, value: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.0, value).expect("answers are always JSON");
        self.0.extend_from_slice(b"\n\n");
    }

    /// Writes one event with a name, for APIs whose events have names.
    pub fn named(&mut self, name: &str, value: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.event(value);
    }

    /// Writes data as it is.
    pub fn raw(&mut self, data: &[u8]) {
        self.0.extend_from_slice(b"data: ");
        self.0.extend_from_slice(data);
        self.0.extend_from_slice(b"\n\n");
    }
}

/// How one API writes what became of answers.
pub(crate) trait ResponseFormat: Send + Unpin + 'static {
    /// Writes what became of the answer `index`; most pieces are one event, some are none, and some
    /// are put off until it is known whether more follows at once.
    fn write(
        &mut self,
        index: usize,
        event: StreamEvent,
        guards: &RequestGuards,
        out: &mut EventWriter,
    );

    /// Writes what was put off, as far as `out` has room.
    fn flush(&mut self, _: &mut EventWriter) {}

    /// Writes what comes after all answers have ended.
    fn close(&mut self, out: &mut EventWriter);

    /// Writes that the answers failed, of which nothing more will come.
    fn fail(&mut self, refusal: &Refusal, out: &mut EventWriter) {
        out.raw(&refusal.json());
    }

    /// Writes the end of a stream that did not fail.
    fn done(&mut self, out: &mut EventWriter) {
        out.raw(b"[DONE]");
    }
}

/// A response that streams `pieces` in this format, with the request's name in its headers.
pub(crate) fn respond(pieces: AnswerStream, format: impl ResponseFormat, name: &str) -> Response {
    let left = pieces.guards.answers();
    let room = pieces.guards.room();
    let body = EventBody { pieces: Some(pieces), format, left, waiting: Vec::new() };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(name) = name.parse() {
        headers.insert("x-request-id", name);
    }
    keep_room(response, room)
}

struct EventBody<W> {
    /// None once the stream is complete.
    pieces: Option<AnswerStream>,
    format: W,
    /// Answers that have not ended.
    left: usize,
    /// Events that are not written yet, the last one first.
    waiting: Vec<Event>,
}

impl<W: ResponseFormat> EventBody<W> {
    /// Writes what has come, as far as a frame takes it; false if the stream ends with it.
    fn write(&mut self, out: &mut EventWriter) -> bool {
        let Some(pieces) = &mut self.pieces else { return false };
        while let Some(Event { index, event }) = self.waiting.pop_if(|_| !out.is_full()) {
            if let StreamEvent::End(end) = &event {
                if let Some(refusal) = pieces.guards.failure(index, &end.reason) {
                    pieces.metrics.stream_failed(&refusal);
                    self.format.fail(&refusal, out);
                    return false;
                }
                self.left -= 1;
            }
            self.format.write(index, event, &pieces.guards, out);
        }
        if self.left > 0 {
            self.format.flush(out);
            return true;
        }
        pieces.guards.complete();
        self.format.close(out);
        self.format.done(out);
        false
    }
}

impl<W: ResponseFormat> http_body::Body for EventBody<W> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        loop {
            let Some(pieces) = &mut this.pieces else { return Poll::Ready(None) };
            let mut out = EventWriter::default();
            this.format.flush(&mut out);
            let mut count = this.waiting.len();
            if count == 0 && out.0.is_empty() {
                let received = pieces.events.poll_recv_many(context, &mut this.waiting, AT_ONCE);
                let Poll::Ready(received) = received else { return Poll::Pending };
                this.waiting.reverse();
                count = received;
            }
            let goes_on = if count == 0 && out.0.is_empty() {
                // The answers were given up before their end came through.
                let refusal = Refusal::too_slow();
                pieces.metrics.stream_failed(&refusal);
                this.format.fail(&refusal, &mut out);
                false
            } else {
                this.write(&mut out)
            };
            if !goes_on {
                this.waiting.clear();
                this.pieces = None;
            }
            if !out.0.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.0.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_none()
    }
}
