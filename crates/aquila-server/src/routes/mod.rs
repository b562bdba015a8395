//! What can be asked, and who answers.

mod anthropic;
mod openai;
mod openapi;
mod page;
mod sglang;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};

use crate::access::{self, Caller};
use crate::body;
use crate::cors;
use crate::keys::Level;
use crate::refusal::Refusal;
use crate::state::Shared;

pub(crate) use self::sglang::health::Probe;

/// Where the web page is.
const PAGE: &str = "/";

/// A router that knows its paths, so that they can be compared with the document of them.
struct Routes {
    router: Router<Shared>,
    paths: Vec<&'static str>,
}

impl Routes {
    fn new() -> Self {
        Self { router: Router::new(), paths: Vec::new() }
    }

    fn route(mut self, path: &'static str, handler: MethodRouter<Shared>) -> Self {
        self.paths.push(path);
        Self { router: self.router.route(path, handler), ..self }
    }
}

/// Routes that make the engine work, which keys have a share of.
fn working_routes() -> Routes {
    Routes::new()
        .route("/v1/chat/completions", post(openai::chat::chat))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/responses", post(openai::responses::responses))
        .route("/v1/messages", post(anthropic::messages::messages))
        .route("/generate", post(sglang::generate::generate).put(sglang::generate::generate))
        .route("/add_external_corpus", post(sglang::corpus::add))
}

/// Routes that keys have no share of: descriptions, control, tokenizing, health, metrics.
fn other_routes(web_page: bool) -> Routes {
    let routes = Routes::new()
        .route("/openapi.json", get(openapi::document))
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
        .route(
            "/v1/responses/{id}",
            get(openai::responses::stored)
                .post(openai::responses::stored)
                .delete(openai::responses::stored),
        )
        .route("/v1/messages/count_tokens", post(anthropic::messages::count_tokens));
    let refuse = |routes: Routes, path| routes.route(path, post(openai::refused::refuse));
    let routes = openai::refused::PATHS.iter().map(|(path, _)| *path).fold(routes, refuse);
    if web_page { routes.route(PAGE, get(page::page)) } else { routes }
}

/// All routes.
pub(crate) fn router(app: Shared) -> Router {
    let working = working_routes().router;
    let working = working
        .route_layer(from_fn_with_state(app.clone(), limit_key))
        .route_layer(from_fn_with_state(app.clone(), refuse_unless_serving));
    working
        .merge(other_routes(app.settings.web_page).router)
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), check_key))
        .layer(from_fn_with_state(app.clone(), cors::share))
        .layer(from_fn(anthropic::errors::translate))
        .layer(from_fn_with_state(app.clone(), access::log))
        .with_state(app)
}

/// The keys that a route asks for, as in SGLang.
pub(crate) fn level(route: Option<&str>) -> Level {
    match route {
        Some("/health" | "/health_generate" | "/metrics") => Level::Open,
        Some(
            "/flush_cache"
            | "/abort_request"
            | "/add_external_corpus"
            | "/remove_external_corpus"
            | "/list_external_corpora",
        ) => Level::Admin,
        _ => Level::Normal,
    }
}

/// Lets pass who shows a key that the route asks for.
async fn check_key(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let level = match route.map(MatchedPath::as_str) {
        Some(PAGE) if page::is_for_browser(request.headers()) => Level::Open,
        route => level(route),
    };
    match app.settings.keys.check(level, request.headers()) {
        Ok(Some(holder)) => {
            if let Some(caller) = request.extensions().get::<Caller>() {
                caller.set(holder);
            }
        }
        Ok(None) => (),
        Err(refusal) => return refusal.into_response(),
    }
    next.run(request).await
}

/// Refuses a request whose key has as many under way as it may.
async fn limit_key(State(app): State<Shared>, request: Request, next: Next) -> Response {
    if let Some(caller) = request.extensions().get::<Caller>()
        && let Some(holder) = caller.holder()
    {
        match app.settings.keys.begin(holder) {
            Ok(place) => caller.place(Some(place)),
            Err(refusal) => return refusal.into_response(),
        }
    }
    next.run(request).await
}

async fn refuse_unless_serving(
    State(app): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    // Counted before the question, so that the server waits for whatever it does not refuse.
    let _accepted = app.active_requests.accept();
    if let Err(refusal) = app.check_serving() {
        return refusal.into_response();
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

/// Reads a body that is not needed, so that the connection can be used again.
pub(crate) async fn read_past(app: &Shared, request: Request) -> Result<(), Refusal> {
    body::read(request, app).await.map(drop)
}

/// A JSON response with the request's name in its headers, where clients look for it.
pub(crate) fn json(value: &impl serde::Serialize, name: Option<&str>) -> Response {
    let body = serde_json::to_vec(value).expect("answers are always JSON");
    let mut response = ([(header::CONTENT_TYPE, "application/json")], body).into_response();
    if let Some(name) = name.and_then(|name| name.parse().ok()) {
        response.headers_mut().insert("x-request-id", name);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_document_has_the_paths_of_the_router() {
        let served = [working_routes().paths, other_routes(true).paths].concat();
        let served: BTreeSet<String> = served.iter().map(|path| path.replace("{*", "{")).collect();
        let document: serde_json::Value = serde_json::from_slice(&openapi::text()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let documented: BTreeSet<String> = paths.keys().cloned().collect();
        assert_eq!(documented, served);
    }
}
