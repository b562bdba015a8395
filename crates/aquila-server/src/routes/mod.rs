//! What can be asked, and who answers.

mod openai;
mod sglang;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::body;
use crate::refusal::Refusal;
use crate::state::Shared;

/// All routes.
pub(crate) fn router(app: Shared) -> Router {
    let taking = Router::new()
        .route("/v1/chat/completions", post(openai::chat::chat))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/generate", post(sglang::generate::generate).put(sglang::generate::generate))
        .route("/add_external_corpus", post(sglang::corpus::add))
        .route_layer(from_fn_with_state(app.clone(), refuse_while_draining));
    Router::new()
        .merge(taking)
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*name}", get(openai::models::one))
        .route("/server_info", get(sglang::info::server))
        .route("/get_server_info", get(sglang::info::server))
        .route("/model_info", get(sglang::info::model))
        .route("/get_model_info", get(sglang::info::model))
        .route("/get_load", get(sglang::info::load))
        .route("/abort_request", post(sglang::control::abort))
        .route("/flush_cache", get(sglang::control::flush).post(sglang::control::flush))
        .route("/remove_external_corpus", post(sglang::corpus::remove))
        .route("/list_external_corpora", get(sglang::corpus::list))
        .route("/tokenize", post(sglang::tokens::tokenize))
        .route("/detokenize", post(sglang::tokens::detokenize))
        .route("/v1/tokenize", post(sglang::tokens::tokenize))
        .route("/v1/detokenize", post(sglang::tokens::detokenize))
        .route("/health", get(sglang::health::health))
        .route("/health_generate", get(sglang::health::health_generate))
        .route("/metrics", get(sglang::info::metrics))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), check_key))
        .with_state(app)
}

/// Lets pass who shows the key. Health and metrics are open, as in SGLang: those who ask for them
/// have no key.
async fn check_key(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let Some(key) = &app.settings.api_key else { return next.run(request).await };
    let path = request.uri().path();
    let open = path.starts_with("/health") || path == "/metrics";
    // A router may add its own key to the client's; one that fits is enough.
    let shown = request.headers().get_all(header::AUTHORIZATION).iter().any(|value| {
        let value = value.as_bytes();
        let bearer = value.get(..7).is_some_and(|word| word.eq_ignore_ascii_case(b"bearer "));
        bearer && same(value[7..].trim_ascii(), key.as_bytes())
    });
    if open || shown { next.run(request).await } else { Refusal::unauthorized().into_response() }
}

/// Compares in a time that says nothing about where two keys differ.
fn same(shown: &[u8], key: &[u8]) -> bool {
    let differences = shown.iter().zip(key).fold(0, |all, (a, b)| all | (a ^ b));
    shown.len() == key.len() && std::hint::black_box(differences) == 0
}

async fn refuse_while_draining(
    State(app): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    if app.is_draining() {
        return Refusal::shutting_down().into_response();
    }
    next.run(request).await
}

async fn unknown_route(State(app): State<Shared>, request: Request) -> Refusal {
    let refusal = Refusal::unknown_route(request.method().as_str(), request.uri().path());
    read_past(&app, request).await.err().unwrap_or(refusal)
}

async fn wrong_method(State(app): State<Shared>, request: Request) -> Refusal {
    let refusal = Refusal::wrong_method(request.method().as_str(), request.uri().path());
    read_past(&app, request).await.err().unwrap_or(refusal)
}

/// Reads a body that nobody wants, so that the connection can be used again.
async fn read_past(app: &Shared, request: Request) -> Result<(), Refusal> {
    body::read(request, app).await.map(drop)
}

/// A JSON response with the request's name in its headers, where clients look for it.
fn json(value: &impl serde::Serialize, name: Option<&str>) -> Response {
    let body = serde_json::to_vec(value).expect("answers are always JSON");
    let mut response = ([(header::CONTENT_TYPE, "application/json")], body).into_response();
    if let Some(name) = name.and_then(|name| name.parse().ok()) {
        response.headers_mut().insert("x-request-id", name);
    }
    response
}
