//! Corpora that n-grams are drafted from: added, removed and listed while the server serves.

use std::path::PathBuf;
use std::sync::Arc;

use aquila_spec::ngram::Corpora;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::body;
use crate::corpus::{Added, CorpusTextError, add_documents, add_lines};
use crate::corpus_file::CorpusFolder;
use crate::fields::{Fields, OneOrMany};
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared};

/// What is said where nothing is drafted from n-grams.
const OFF: &str = "this server drafts nothing from corpora: start it with the algorithm NGRAM";

/// What is said of a path where clients may name none.
const NO_FOLDER: &str = "this server reads no files for clients: start it with a folder of \
                         corpora to take those below it, or send `documents`";

/// Where a corpus comes from.
enum Source {
    File(CorpusFolder, PathBuf),
    Documents(Vec<String>),
}

/// `{"corpus_id": …, "documents": […]}` or `{"corpus_id": …, "file_path": …}`; a corpus without a
/// name gets one.
pub(crate) async fn add(State(app): State<Shared>, request: Request) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let mut fields = body.work(|body| Fields::parse_with(body, &["documents"])).await?;
    let name = fields.take::<String>("corpus_id")?.filter(|name| !name.is_empty());
    let name = name.unwrap_or_else(|| app.identifiers.next("corpus-"));
    let file: Option<PathBuf> = fields.take("file_path")?;
    let documents = fields.prompts("documents").map(|documents| documents.texts("documents"));
    let documents = match documents.transpose()? {
        Some(OneOrMany::Many(documents)) => Some(documents),
        Some(OneOrMany::One(_)) => {
            return Err(Refusal::param("documents", "expected a list of strings"));
        }
        None => None,
    };
    let said = |success, message: String, tokens| {
        json!({
            "success": success,
            "corpus_id": name,
            "message": message,
            "loaded_token_count": tokens,
        })
    };
    let Some(corpora) = corpora(&app) else { return Ok(failed(said(false, OFF.into(), 0))) };
    let tokenizer = app.tokenizer("documents")?.clone();
    let source = match (file, documents, &app.settings.corpus_folder) {
        (Some(_), None, None) => return Ok(failed(said(false, NO_FOLDER.into(), 0))),
        (Some(path), None, Some(folder)) => Source::File(folder.clone(), path),
        (None, Some(documents), _) => Source::Documents(documents),
        _ => return Err(Refusal::invalid("give either `documents` or `file_path`")),
    };
    let named = name.clone();
    let turn = app.corpus_turn.clone().acquire_owned().await;
    let turn = turn.expect("nothing closes the semaphore");
    let load = move || {
        let added = match &source {
            Source::File(folder, path) => {
                folder.lines(path).and_then(|lines| add_lines(&corpora, &tokenizer, &named, lines))
            }
            Source::Documents(documents) => add_documents(&corpora, &tokenizer, &named, documents),
        };
        // The body holds the room of its documents.
        drop((source, body, turn));
        added
    };
    let added: Result<Added, CorpusTextError> = tokio::task::spawn_blocking(load)
        .await
        .map_err(|_| Refusal::failed("the corpus could not be loaded"))?;
    match added {
        Err(error) => Ok(failed(said(false, error.to_string(), 0))),
        Ok(Added { tokens, truncated }) => {
            let cut = if truncated { "; the rest was cut for want of room" } else { "" };
            let message = format!("loaded the corpus {name:?} of {tokens} tokens{cut}");
            tracing::info!("{message}");
            Ok(respond(&said(true, message, tokens), None))
        }
    }
}

/// `{"corpus_id": …}`. Requests draft from it no more from their next round on.
pub(crate) async fn remove(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let name: String = body.work(Fields::parse).await?.require("corpus_id")?;
    let removed = match corpora(&app) {
        Some(corpora) => corpora.remove(&name).map_err(|error| error.to_string()),
        None => Err(OFF.into()),
    };
    Ok(match removed {
        Ok(()) => {
            let message = format!("removed the corpus {name:?}");
            respond(&json!({ "success": true, "message": message }), None)
        }
        Err(message) => failed(json!({ "success": false, "message": message })),
    })
}

/// All corpora with their tokens.
pub(crate) async fn list(State(app): State<Shared>) -> Response {
    let Some(corpora) = corpora(&app) else {
        let none = Map::new();
        return failed(json!({ "success": false, "corpus_token_counts": none, "message": OFF }));
    };
    let all = corpora.snapshot();
    let tokens: Map<String, Value> =
        all.iter().map(|corpus| (corpus.name().into(), corpus.tokens().into())).collect();
    let bytes: Map<String, Value> =
        all.iter().map(|corpus| (corpus.name().into(), corpus.bytes().into())).collect();
    let list = json!({
        "success": true,
        "corpus_token_counts": tokens,
        "corpus_bytes": bytes,
        "message": "",
    });
    respond(&list, None)
}

fn corpora(app: &App) -> Option<Arc<Corpora>> {
    app.settings.corpora.clone()
}

/// A failure in SGLang's form for these routes.
fn failed(answer: Value) -> Response {
    (StatusCode::BAD_REQUEST, respond(&answer, None)).into_response()
}
