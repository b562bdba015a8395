//! Reading bodies, within limits of size and time.

use axum::body::Body;
use axum::http::header;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::refusal::Refusal;
use crate::settings::Limits;

/// How much of a body that is too large is read and dropped, so that its sender, who reads only
/// when all is sent, sees the refusal and not a broken connection.
const DROPPED: usize = 64 << 20;

/// The body of a request.
pub(crate) async fn read(
    request: axum::http::Request<Body>,
    limits: &Limits,
) -> Result<Bytes, Refusal> {
    let announced = request.headers().get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > limits.body_bytes.saturating_add(DROPPED)) {
        return Err(Refusal::too_large(limits.body_bytes));
    }
    let reading = read_all(request.into_body(), limits.body_bytes);
    tokio::time::timeout(limits.body_time, reading).await.unwrap_or(Err(Refusal::slow_body()))
}

async fn read_all(mut body: Body, limit: usize) -> Result<Bytes, Refusal> {
    let mut first = Bytes::new();
    let mut joined = BytesMut::new();
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Refusal::invalid("the body ended before its length"))?;
        let Ok(data) = frame.into_data() else { continue };
        size += data.len();
        if size > limit {
            first = Bytes::new();
            joined = BytesMut::new();
            if size > limit.saturating_add(DROPPED) {
                break;
            }
        } else if first.is_empty() && joined.is_empty() {
            first = data;
        } else {
            if joined.is_empty() {
                joined.extend_from_slice(&std::mem::take(&mut first));
            }
            joined.extend_from_slice(&data);
        }
    }
    if size > limit {
        return Err(Refusal::too_large(limit));
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}
