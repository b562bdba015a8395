//! What OpenAI's API has beside text, refused clearly.

use axum::extract::{Request, State};

use crate::refusal::Refusal;
use crate::routes::read_past;
use crate::state::Shared;

/// Paths of OpenAI's API, and of those that extend it, that need another kind of model.
pub(crate) const PATHS: &[(&str, &str)] = &[
    ("/v1/embeddings", "embeddings are not supported: this server generates text"),
    ("/v1/rerank", "reranking is not supported: this server generates text"),
    ("/v1/score", "scoring is not supported: this server generates text"),
    ("/v1/audio/speech", "audio is not supported: this server generates text"),
    ("/v1/audio/transcriptions", "audio is not supported: this server reads text"),
    ("/v1/audio/translations", "audio is not supported: this server reads text"),
    ("/v1/images/generations", "images are not supported: this server generates text"),
    ("/v1/images/edits", "images are not supported: this server generates text"),
    ("/v1/images/variations", "images are not supported: this server generates text"),
];

pub(crate) async fn refuse(State(app): State<Shared>, request: Request) -> Refusal {
    let path = request.uri().path();
    let why = PATHS.iter().find(|(known, _)| *known == path).map(|(_, why)| *why);
    let refusal = Refusal::unsupported_route(path, why.unwrap_or("not supported"));
    read_past(&app, request).await.err().unwrap_or(refusal)
}
