//! `/tokenize` and `/detokenize`.

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::json;

use crate::body;
use crate::fields::{Fields, OneOrMany};
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::Shared;

/// Token ids of all lists that are decoded at once, each of which may be a long word.
const MOST_DECODED: usize = 1 << 18;

pub(crate) async fn tokenize(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let mut fields = body.work(|body| Fields::parse_with(body, &["prompt"])).await?;
    app.check_model(fields.take::<String>("model")?.as_deref())?;
    let prompt = fields.require_prompts("prompt")?.texts("prompt")?;
    let add_special: bool = fields.take("add_special_tokens")?.unwrap_or(true);
    let tokenizer = app.tokenizer("prompt")?.clone();
    let longest = app.generator.engine().config().context_length;
    let longest_text = app.longest_text;
    let answer = body.work(move |_| {
        let encode = |text: &String| {
            longest_text.check(text, "prompt")?;
            tokenizer.encode(text, add_special).map_err(|error| Refusal::param("prompt", error))
        };
        let answer = match prompt {
            OneOrMany::One(text) => {
                let tokens = encode(&text)?;
                json!({ "count": tokens.len(), "tokens": tokens, "max_model_len": longest })
            }
            OneOrMany::Many(texts) => {
                let lists = texts.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
                let counts: Vec<usize> = lists.iter().map(Vec::len).collect();
                json!({ "count": counts, "tokens": lists, "max_model_len": longest })
            }
        };
        Ok(respond(&answer, None))
    });
    answer.await
}

pub(crate) async fn detokenize(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let mut fields = body.work(|body| Fields::parse_with(body, &["tokens"])).await?;
    app.check_model(fields.take::<String>("model")?.as_deref())?;
    let tokens = fields.require_prompts("tokens")?.ids("tokens")?;
    let skip_special: bool = fields.take("skip_special_tokens")?.unwrap_or(true);
    let tokenizer = app.tokenizer("tokens")?.clone();
    let lists = match &tokens {
        OneOrMany::One(ids) => std::slice::from_ref(ids),
        OneOrMany::Many(lists) => lists.as_slice(),
    };
    lists.iter().try_for_each(|ids| app.longest_text.check_ids(ids, "tokens"))?;
    let count: usize = lists.iter().map(Vec::len).sum();
    if count > MOST_DECODED.max(app.generator.engine().config().context_length) {
        let why = format!("has {count} token ids, but at most {MOST_DECODED} are decoded at once");
        return Err(Refusal::param("tokens", why));
    }
    let answer = body.work(move |_| {
        let decode = |ids: &Vec<u32>| {
            tokenizer.decode(ids, skip_special).map_err(|error| Refusal::param("tokens", error))
        };
        let answer = match tokens {
            OneOrMany::One(ids) => json!({ "text": decode(&ids)? }),
            OneOrMany::Many(lists) => {
                json!({ "text": lists.iter().map(decode).collect::<Result<Vec<_>, _>>()? })
            }
        };
        Ok(respond(&answer, None))
    });
    answer.await
}
