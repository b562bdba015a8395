//! `/v1/models`: the one model that is served.

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared};

fn card(app: &App) -> Value {
    json!({
        "id": app.settings.model.served_name,
        "object": "model",
        "created": app.started,
        "owned_by": "aquila",
        "root": app.settings.model.path,
        "max_model_len": app.generator.engine().config().context_length,
    })
}

pub(crate) async fn list(State(app): State<Shared>) -> Response {
    respond(&json!({ "object": "list", "data": [card(&app)] }), None)
}

pub(crate) async fn one(
    State(app): State<Shared>,
    Path(name): Path<String>,
) -> Result<Response, Refusal> {
    app.check_model(Some(&name))?;
    Ok(respond(&card(&app), None))
}
