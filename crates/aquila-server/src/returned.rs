//! Room for the rows that answers return: hidden states and routed experts, which are far larger
//! than tokens.
//!
//! The invariant: a request has room for all rows that it may get before it is submitted, and keeps
//! it until its client has taken the answer or has left. So what all of them take is bounded.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use aquila_engine::EngineHandle;
use axum::body::Body;
use axum::response::Response;
use bytes::{Buf, Bytes};
use http_body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::refusal::Refusal;
use crate::submit::Submission;

/// Bytes of a value of a hidden state: as it is kept, and as a number of up to 15 characters with a
/// comma, both in lists that may have grown to twice their size.
const PER_STATE: usize = 2 * (4 + 16);
/// Bytes of the id of an expert: as it is kept, as an int32, and in base64.
const PER_EXPERT: usize = 2 * 4 + 4 + 2 * 6;
/// Bytes that a permit stands for.
const UNIT: usize = 1 << 10;
/// Bytes of an answer that are handed to its connection at a time.
const PIECE: usize = 64 << 10;

/// Room for the rows of all answers.
#[derive(Debug)]
pub(crate) struct ReturnedRoom {
    bytes: usize,
    units: Arc<Semaphore>,
}

/// Room for the rows of one request's answers.
#[derive(Debug)]
pub(crate) struct HeldRoom(#[expect(dead_code)] OwnedSemaphorePermit);

impl ReturnedRoom {
    /// Room for so many bytes.
    pub fn new(bytes: usize) -> Self {
        let units = (bytes / UNIT).min(u32::MAX as usize);
        Self { bytes, units: Arc::new(Semaphore::new(units)) }
    }

    /// Room for the rows of `submissions`, if they ask for any.
    pub fn hold(
        &self,
        engine: &EngineHandle,
        submissions: &[Submission],
    ) -> Result<Option<HeldRoom>, Refusal> {
        let wanted = submissions
            .iter()
            .map(|submission| bytes_of(engine, submission))
            .fold(0, usize::saturating_add);
        if wanted == 0 {
            return Ok(None);
        }
        if wanted / UNIT >= self.bytes / UNIT {
            return Err(Refusal::invalid(format!(
                "hidden states and routed experts of the answers may take {wanted} bytes, and this \
                 server has room for {} of all answers together: ask for fewer tokens at a time",
                self.bytes
            )));
        }
        let units = (wanted / UNIT + 1) as u32;
        let held = self.units.clone().try_acquire_many_owned(units).map_err(|_| {
            Refusal::busy(format!(
                "no room for {wanted} bytes of hidden states and routed experts: other answers \
                 have most of the {} bytes that they may take together",
                self.bytes
            ))
        });
        Ok(Some(HeldRoom(held?)))
    }
}

/// Bytes that the rows of the answers to one prompt may take.
fn bytes_of(engine: &EngineHandle, submission: &Submission) -> usize {
    let (asked, kept) = (submission.params.returned, engine.config().returned);
    let widths = engine.row_widths();
    let states = asked.hidden_states && kept.hidden_states;
    let states = if states { widths.hidden_states * PER_STATE } else { 0 };
    let experts = asked.routed_experts && kept.routed_experts;
    let experts = if experts { widths.routed_experts * PER_EXPERT } else { 0 };
    let tokens = submission.prompt.len().saturating_add(submission.params.limits.max_tokens);
    let tokens = tokens.min(engine.config().longest_sequence());
    let rows = tokens.saturating_sub(submission.params.returned_from);
    (states + experts).saturating_mul(rows).saturating_mul(submission.params.n as usize)
}

/// A response whose body keeps room until its last byte is handed over.
pub(crate) fn keep_room(response: Response, room: Option<HeldRoom>) -> Response {
    match room {
        Some(room) => {
            response.map(|body| Body::new(HeldBody { body, left: Bytes::new(), _room: room }))
        }
        None => response,
    }
}

/// A body that is handed over in pieces, as its connection takes them, with the room of its rows.
struct HeldBody {
    body: Body,
    /// The rest of a frame.
    left: Bytes,
    _room: HeldRoom,
}

impl http_body::Body for HeldBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        if this.left.is_empty() {
            let frame = match ready!(Pin::new(&mut this.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            };
            match frame.into_data() {
                Ok(data) => this.left = data,
                Err(frame) => return Poll::Ready(Some(Ok(frame))),
            }
        }
        // A copy, so that a piece that waits does not keep the whole frame.
        let piece = Bytes::copy_from_slice(&this.left[..this.left.len().min(PIECE)]);
        this.left.advance(piece.len());
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let left = self.left.len() as u64;
        let hint = self.body.size_hint();
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower() + left);
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + left);
        }
        whole
    }
}
