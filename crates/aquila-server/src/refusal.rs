//! Refusals, in OpenAI's form: what went wrong, and which parameter is at fault.

use aquila_engine::{EngineFailure, ReturnedKind, SubmitError};
use aquila_text::{GenerateError, ParamError};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Seconds after which a client may try again when all places are taken.
const RETRY_AFTER: &str = "1";

/// Bytes of a message, and of the name of a parameter, that repeat what a client sent.
const LONGEST: (usize, usize) = (2048, 256);

/// A request that gets an error for an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    closes: bool,
}

/// Marks a response as a refusal, and says which.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused(pub &'static str);

#[derive(Serialize)]
struct Wire<'a> {
    error: Detail<'a>,
}

#[derive(Serialize)]
struct Detail<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl Refusal {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = shortened(message.into(), LONGEST.0);
        Self { status, kind, code: None, param: None, message, closes: false }
    }

    fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// A request that cannot be served as it is.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A parameter that cannot be served as it is.
    pub fn param(param: impl Into<String>, why: impl std::fmt::Display) -> Self {
        let param = shortened(param.into(), LONGEST.1);
        let message = format!("{param}: {why}");
        Self { param: Some(param), ..Self::invalid(message) }
    }

    /// The same, where the parameter is a field of the object `outer`.
    pub fn within(self, outer: &str) -> Self {
        match self.param {
            Some(param) if !param.starts_with(outer) => {
                let message = format!("{outer}.{}", self.message);
                Self { param: Some(format!("{outer}.{param}")), message, ..self }
            }
            _ => self,
        }
    }

    /// A key that is missing or wrong.
    pub fn unauthorized() -> Self {
        let message = "wrong or missing API key: send `Authorization: Bearer KEY` or `x-api-key: \
                       KEY` with a key that the server knows";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message)
            .code("invalid_api_key")
    }

    /// A route for administrators, and no key of theirs.
    pub fn no_admin() -> Self {
        Self { message: "this route needs the admin key".into(), ..Self::unauthorized() }
    }

    /// An origin whose pages may not ask.
    pub fn foreign_origin() -> Self {
        let message = "pages of this origin may not ask: it is neither this server's nor one that \
                       --allowed-origins names";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
            .code("origin_not_allowed")
    }

    /// A name of the server that anybody may own.
    pub fn foreign_host() -> Self {
        let message = "the Host header has a public name, by which a page could reach this server \
                       behind its user's back: ask for localhost or an address, name the server's \
                       origin with --allowed-origins, or ask for keys with --api-key";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message).code("host_not_allowed")
    }

    /// A key with as many requests under way as a key may have.
    pub fn too_many(most: usize) -> Self {
        let message = format!("{most} requests of this key are under way, which is what a key may");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "requests", message).code("rate_limit_exceeded")
    }

    /// A model that is not the one served here.
    pub fn unknown_model(name: &str, served: &str) -> Self {
        let message = format!("the model `{name}` does not exist: this server has `{served}`");
        let refusal = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        Self { param: Some("model".into()), ..refusal.code("model_not_found") }
    }

    /// A path that leads nowhere.
    pub fn unknown_route(method: &str, path: &str) -> Self {
        let message = format!("unknown route: {method} {path}");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code("unknown_url")
    }

    /// A path of an API that needs another kind of model.
    pub fn unsupported_route(path: &str, why: &str) -> Self {
        let message = format!("{path}: {why}");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
            .code("unsupported_endpoint")
    }

    /// A response of before, of which none is kept.
    pub fn not_stored(id: &str) -> Self {
        let message = format!("the response `{id}` does not exist: responses are not stored");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code("not_found")
    }

    /// A path that is asked for in another way.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
            .code("method_not_allowed")
    }

    /// A body that is larger than bodies may be.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the body exceeds the {limit} bytes that this server takes");
        let refusal = Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message);
        Self { closes: true, ..refusal.code("request_too_large") }
    }

    /// A body that did not come in time.
    pub fn slow_body() -> Self {
        let message = "the body did not arrive in time";
        let refusal = Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message);
        Self { closes: true, ..refusal.code("request_timeout") }
    }

    /// More answers, to prompts that came as `param`, than may wait.
    pub fn too_many_answers(answers: usize, most: usize, param: &str) -> Self {
        let why = format!("asks for {answers} answers at once, but at most {most} may wait");
        Self::param(param, why)
    }

    /// Refuses a request because all places are taken.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", message).code("queue_full")
    }

    /// The server takes no more requests.
    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        let refusal = Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", message);
        Self { closes: true, ..refusal.code("shutting_down") }
    }

    /// The engine serves no more, for this reason.
    pub fn engine_failed(failure: &EngineFailure) -> Self {
        let message = SubmitError::Failed(failure.clone()).to_string();
        let refusal = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { closes: true, ..refusal.code("engine_failed") }
    }

    /// A request that took longer than requests may.
    pub fn out_of_time() -> Self {
        let message = "the request took longer than this server allows";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).code("timeout")
    }

    /// A client that did not read what it was sent.
    pub fn too_slow() -> Self {
        let message = "the answer was given up: its client reads too slowly";
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message).code("slow_client")
    }

    /// The fault is ours.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).code("internal_error")
    }

    /// A prompt that is longer than prompts may be.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        let refusal = Self::invalid(message).code("context_length_exceeded");
        Self { param: Some(param.into()), ..refusal }
    }

    /// Why a prompt, which came as `param`, was not taken.
    pub fn of(error: GenerateError, param: &str) -> Self {
        match error {
            GenerateError::Param(error) => error.into(),
            GenerateError::NoTokenizer | GenerateError::Text(_) => Self::param(param, error),
            GenerateError::Submit(error) => match error {
                SubmitError::QueueFull(_) => Self::busy(error.to_string()),
                SubmitError::ShuttingDown => Self::shutting_down(),
                SubmitError::Failed(failure) => Self::engine_failed(&failure),
                SubmitError::PromptTooLong { .. } => Self::too_long(param, error.to_string()),
                SubmitError::NoGrammars => Self::invalid(error.to_string()),
                SubmitError::NoPriorities => {
                    Self { param: Some("priority".into()), ..Self::invalid(error.to_string()) }
                }
                SubmitError::NotReturned(kind) => {
                    let param = match kind {
                        ReturnedKind::HiddenStates => "return_hidden_states",
                        ReturnedKind::RoutedExperts => "return_routed_experts",
                    };
                    Self::param(param, error)
                }
                SubmitError::EmptyPrompt | SubmitError::InvalidToken { .. } => {
                    Self { param: Some(param.into()), ..Self::invalid(error.to_string()) }
                }
            },
        }
    }

    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// What went wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The error as JSON, for a stream that has begun.
    pub fn json(&self) -> Vec<u8> {
        let error = Detail {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        serde_json::to_vec(&Wire { error }).expect("strings are always JSON")
    }

    /// What the log and metrics say of it: OpenAI's code, or its type.
    pub fn label(&self) -> &'static str {
        self.code.unwrap_or(self.kind)
    }

    /// All bytes of a response, for a client that is answered before its request is read.
    pub fn whole_response(&self) -> Vec<u8> {
        let body = self.json();
        let retry = match self.may_retry() {
            true => format!("retry-after: {RETRY_AFTER}\r\n"),
            false => String::new(),
        };
        let head = format!(
            "HTTP/1.1 {}\r\ncontent-type: application/json\r\n{retry}connection: close\r\n\
             content-length: {}\r\n\r\n",
            self.status,
            body.len()
        );
        [head.as_bytes(), &body].concat()
    }

    /// Whether the same request may be taken a little later.
    fn may_retry(&self) -> bool {
        matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS)
    }
}

/// A text, cut where it is too long.
fn shortened(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        text.truncate(text.floor_char_boundary(longest));
        text.push('…');
    }
    text
}

impl From<ParamError> for Refusal {
    fn from(error: ParamError) -> Self {
        Self::param(error.name, error.why)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response =
            (self.status, [(header::CONTENT_TYPE, json)], self.json()).into_response();
        response.extensions_mut().insert(Refused(self.label()));
        let headers = response.headers_mut();
        if self.may_retry() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.closes {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self);
        response
    }
}
