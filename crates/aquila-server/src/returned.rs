//! Room for what answers return beside their tokens, and is far larger: hidden states, routed
//! experts and log-probabilities.
//!
//! The invariant: a request has room for all rows that it may get before it is submitted, and for
//! log-probabilities before they are kept; it keeps the room until its client has taken the answer
//! or has left. So what all of them take is bounded. An answer that finds no more room is given up.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use aquila_engine::{EngineHandle, Token};
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
/// Bytes of a log-probability with its token: as it is kept, as an API's object, and as JSON, in
/// lists that may have grown to twice their size.
const PER_LOGPROB: usize = 512;
/// Bytes that a permit stands for.
const UNIT: usize = 1 << 10;
/// Bytes from which on answers take long to write.
const LONG: usize = 1 << 20;
/// Bytes of an answer that are handed to its connection at a time.
const PIECE: usize = 64 << 10;

/// Room for what all answers return.
#[derive(Debug)]
pub(crate) struct ReturnedRoom {
    bytes: usize,
    units: Arc<Semaphore>,
}

/// Room for what one request's answers return.
#[derive(Debug)]
pub(crate) struct HeldRoom {
    /// Bytes of all answers together.
    most: usize,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    bytes: usize,
    units: OwnedSemaphorePermit,
    /// Why the request is given up, once it has found no room.
    refusal: Option<Refusal>,
}

impl HeldRoom {
    fn held(&self) -> MutexGuard<'_, Held> {
        // A panic between two changes could only leave too much room held.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room for the log-probabilities of `tokens`, of which an answer has `copies`; false
    /// from where there is none.
    pub fn take(&self, tokens: &[Token], copies: usize) -> bool {
        let of_token = |token: &Token| token.logprob.map_or(0, |_| 1 + token.top.len());
        let count: usize = tokens.iter().map(of_token).sum();
        let mut held = self.held();
        if count == 0 || held.refusal.is_some() {
            return held.refusal.is_none();
        }
        let more = count.saturating_mul(copies).saturating_mul(PER_LOGPROB);
        let bytes = held.bytes.saturating_add(more);
        let missing = (bytes / UNIT + 1).saturating_sub(held.units.num_permits());
        let units = held.units.semaphore().clone();
        let taken = u32::try_from(missing).ok().and_then(|n| units.try_acquire_many_owned(n).ok());
        match taken {
            Some(units) => {
                held.units.merge(units);
                held.bytes = bytes;
            }
            None => held.refusal = Some(self.refuse(bytes)),
        }
        held.refusal.is_none()
    }

    fn refuse(&self, bytes: usize) -> Refusal {
        if bytes >= self.most {
            too_many_logprobs(bytes, self.most)
        } else {
            busy(bytes, self.most)
        }
    }

    /// Whether what it is for takes long to write.
    pub fn is_long(&self) -> bool {
        self.held().bytes >= LONG
    }

    /// Why the request is given up, if it is.
    pub fn refusal(&self) -> Option<Refusal> {
        self.held().refusal.clone()
    }
}

fn too_many_logprobs(bytes: usize, most: usize) -> Refusal {
    Refusal::invalid(format!(
        "the log-probabilities of the answers take {bytes} bytes or more, and this server has room \
         for {most} of all answers together (--max-returned-bytes): ask for fewer answers, tokens \
         or likely tokens at a time"
    ))
}

fn busy(bytes: usize, most: usize) -> Refusal {
    Refusal::busy(format!(
        "no room for {bytes} bytes of log-probabilities, hidden states and routed experts: other \
         answers have most of the {most} bytes that they may take together"
    ))
}

impl ReturnedRoom {
    /// Room for so many bytes.
    pub fn new(bytes: usize) -> Self {
        let units = (bytes / UNIT).min(u32::MAX as usize);
        Self { bytes, units: Arc::new(Semaphore::new(units)) }
    }

    /// Room for what `submissions` are to be returned beside tokens, if they ask for any.
    pub fn hold(
        &self,
        engine: &EngineHandle,
        submissions: &[Submission],
    ) -> Result<Option<Arc<HeldRoom>>, Refusal> {
        let wanted = submissions
            .iter()
            .map(|submission| bytes_of(engine, submission))
            .fold(0, usize::saturating_add);
        let prompts = submissions.iter().map(prompt_logprobs).fold(0, usize::saturating_add);
        if wanted == 0 && submissions.iter().all(|submission| submission.params.logprobs.is_none())
        {
            return Ok(None);
        }
        if prompts >= self.bytes {
            return Err(too_many_logprobs(prompts, self.bytes));
        }
        if wanted / UNIT >= self.bytes / UNIT {
            return Err(Refusal::invalid(format!(
                "hidden states and routed experts of the answers may take {wanted} bytes, and this \
                 server has room for {} of all answers together: ask for fewer tokens at a time",
                self.bytes
            )));
        }
        let units = if wanted > 0 { (wanted / UNIT + 1) as u32 } else { 0 };
        let units = self.units.clone().try_acquire_many_owned(units);
        let units = units.map_err(|_| busy(wanted, self.bytes))?;
        let held = Mutex::new(Held { bytes: wanted, units, refusal: None });
        Ok(Some(Arc::new(HeldRoom { most: self.bytes, held })))
    }
}

/// Bytes that the log-probabilities of a prompt certainly take.
fn prompt_logprobs(submission: &Submission) -> usize {
    let params = &submission.params;
    let Some(top) = params.prompt_logprobs else { return 0 };
    let tokens = submission.prompt.len().saturating_mul(1 + top);
    tokens.saturating_mul(params.n as usize).saturating_mul(PER_LOGPROB)
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
pub(crate) fn keep_room(response: Response, room: Option<Arc<HeldRoom>>) -> Response {
    match room {
        Some(room) => {
            response.map(|body| Body::new(HeldBody { body, left: Bytes::new(), _room: room }))
        }
        None => response,
    }
}

/// A body that is handed over in pieces, as its connection takes them, with the room that it takes.
struct HeldBody {
    body: Body,
    /// The rest of a frame.
    left: Bytes,
    _room: Arc<HeldRoom>,
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
