//! Refusals in Anthropic's form.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use serde_json::{Value, json};

use crate::refusal::Refusal;

/// Where Anthropic's API begins.
const PREFIX: &str = "/v1/messages";

/// A refusal as Anthropic's clients read it.
pub(super) fn error(refusal: &Refusal) -> Value {
    let kind = match refusal.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({ "type": "error", "error": { "type": kind, "message": refusal.message() } })
}

/// Writes refusals of Anthropic's routes in its form, whoever refused.
pub(crate) async fn translate(request: Request, next: Next) -> Response {
    let is_anthropic = request.uri().path().starts_with(PREFIX);
    let response = next.run(request).await;
    let refusal = response.extensions().get::<Refusal>().filter(|_| is_anthropic);
    let Some(refusal) = refusal else { return response };
    let body = error(refusal).to_string();
    let length = HeaderValue::from(body.len());
    let mut response = response.map(|_| Body::from(body));
    response.headers_mut().insert(header::CONTENT_LENGTH, length);
    response
}
