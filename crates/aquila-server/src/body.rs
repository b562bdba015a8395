//! Reading bodies, within limits of size, time and room.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::connections::Place;
use crate::intake::{Intake, Received, Room, SHORT};
use crate::refusal::Refusal;
use crate::state::App;

/// How much of a body that is too large is read and dropped, so that its sender, who reads only
/// when all is sent, sees the refusal and not a broken connection.
const DROPPED: usize = 64 << 20;

/// The body of a request.
pub(crate) async fn read(
    request: axum::http::Request<Body>,
    app: &App,
) -> Result<Arc<Received>, Refusal> {
    let limits = &app.settings.limits;
    let announced = request.headers().get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > limits.body_bytes.saturating_add(DROPPED)) {
        return Err(Refusal::too_large(limits.body_bytes));
    }
    let place = request.extensions().get::<Arc<Place>>().cloned();
    let reading = Reading {
        intake: &app.intake,
        limit: limits.body_bytes,
        announced,
        size: 0,
        bytes: BytesMut::new(),
        room: None,
        refusal: None,
    };
    let read = tokio::time::timeout(limits.body_time, reading.all(request.into_body())).await;
    // From here on the client waits for us, and not we for the client.
    if let Some(place) = place {
        place.set_busy();
    }
    read.unwrap_or(Err(Refusal::slow_body()))
}

/// A body as far as it has come.
struct Reading<'a> {
    intake: &'a Intake,
    limit: usize,
    announced: Option<usize>,
    size: usize,
    bytes: BytesMut,
    room: Option<Room>,
    /// Why the rest is read and dropped, if it is.
    refusal: Option<Refusal>,
}

impl Reading<'_> {
    async fn all(mut self, mut body: Body) -> Result<Arc<Received>, Refusal> {
        if let Some(bytes) = self.announced {
            self.make_room(bytes);
        }
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Refusal::invalid("the body ended before its length"))?;
            let Ok(data) = frame.into_data() else { continue };
            self.add(data);
            if self.size > self.limit.saturating_add(DROPPED) {
                break;
            }
        }
        match self.refusal {
            Some(refusal) => Err(refusal),
            None => Ok(Received::new(self.bytes.freeze(), self.room)),
        }
    }

    fn add(&mut self, data: Bytes) {
        self.size += data.len();
        if self.announced.is_none() && self.size > SHORT && self.room.is_none() {
            // Nobody knows how long it will be.
            self.make_room(self.limit);
        }
        if self.size > self.limit {
            self.refuse(Refusal::too_large(self.limit));
        }
        if self.refusal.is_none() {
            self.bytes.extend_from_slice(&data);
        }
    }

    fn make_room(&mut self, bytes: usize) {
        if bytes > self.limit {
            return self.refuse(Refusal::too_large(self.limit));
        }
        match self.intake.room(bytes) {
            Ok(room) => {
                self.room = room;
                self.bytes.reserve(bytes - self.bytes.len());
            }
            Err(refusal) => self.refuse(refusal),
        }
    }

    /// Keeps nothing from now on.
    fn refuse(&mut self, refusal: Refusal) {
        self.bytes = BytesMut::new();
        self.room = None;
        self.refusal.get_or_insert(refusal);
    }
}
