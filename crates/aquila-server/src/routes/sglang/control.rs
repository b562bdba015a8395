//! Giving requests up, and cached prefixes.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use crate::body;
use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::state::Shared;

/// `{"rid": …}` or `{"abort_all": true}`; a request that has ended already needs no aborting.
pub(crate) async fn abort(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let mut fields = body.work(Fields::parse_or_none).await?;
    let name: Option<String> = fields.take("rid")?;
    let name = name.filter(|name| !name.is_empty());
    if !fields.flag("abort_all")? && name.is_none() {
        return Err(Refusal::param("rid", "name a request, or set `abort_all`"));
    }
    let engine = app.generator.engine();
    let aborted = app.active_requests.abort(engine, name.as_deref());
    tracing::debug!(aborted, "aborted by name");
    Ok(().into_response())
}

pub(crate) async fn flush(State(app): State<Shared>) -> Result<Response, Refusal> {
    let engine = app.generator.engine().clone();
    // The engine answers between two rounds.
    let flushed = tokio::task::spawn_blocking(move || engine.flush_cache()).await;
    let pages = flushed.map_err(|_| Refusal::failed("the cache was not flushed"))?;
    Ok(format!("Cache flushed: {pages} pages.\n").into_response())
}
