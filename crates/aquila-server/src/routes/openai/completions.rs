//! `/v1/completions`: texts or tokens, and how they go on.

use aquila_engine::{FinishReason, Token};
use aquila_text::{CheckedParams, Generator, Prompt};
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;

use super::completion_object::CompletionHead;
use super::logprobs::{Columns, CompletionLogprobs};
use super::{OpenAiSettings, UsageReport, finish_reason, matched_stop};
use crate::answer::{Answer, StreamEvent};
use crate::body;
use crate::draft_round::{DraftRound, RoundReporter};
use crate::fields::Fields;
use crate::prompts::Prompts;
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared};
use crate::stream::{self, EventWriter, ResponseFormat};
use crate::submit::{RequestGuards, Submission};
use crate::unserved::{COMPLETIONS, WITHOUT_EFFECT};

/// Tokens of an answer where nothing says how many, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Each prompt of a request.
fn list(prompts: Prompts) -> Result<Vec<Prompt>, Refusal> {
    Ok(match prompts {
        Prompts::Text(text) => vec![Prompt::Text(text)],
        Prompts::Ids(ids) => vec![Prompt::Ids(ids)],
        Prompts::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
        Prompts::ManyIds(lists) => lists.into_iter().map(Prompt::Ids).collect(),
        Prompts::Empty => return Err(Refusal::param("prompt", "must have at least one prompt")),
    })
}

/// A request, checked.
struct Completion {
    common: OpenAiSettings,
    prompts: Vec<Prompt>,
    echo: bool,
}

impl Completion {
    fn take(mut fields: Fields, most: usize) -> Result<Self, Refusal> {
        let prompts = list(fields.require_prompts("prompt")?)?;
        fields.check_prompts(prompts.len(), most, "prompt")?;
        let mut common = OpenAiSettings::take(&mut fields)?;
        let params = &mut common.settings.params;
        fields.set(params, "max_tokens", "max_tokens")?;
        let echo = fields.flag("echo")?;
        if let Some(top) = fields.take::<usize>("logprobs")? {
            params.logprobs = Some(true);
            params.top_logprobs = Some(top);
            params.prompt_logprobs = echo.then_some(true);
        }
        fields.refuse(COMPLETIONS)?;
        if fields.take::<u32>("best_of")?.is_some_and(|n| n != params.n.unwrap_or(1)) {
            return Err(Refusal::param("best_of", "must be equal to `n`"));
        }
        fields.finish("", WITHOUT_EFFECT)?;
        Ok(Self { common, prompts, echo })
    }
}

pub(crate) async fn completions(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let body = body::read(request, &app).await?;
    let most = app.generator.engine().config().max_queued_requests;
    let take = move |body: &[u8]| Completion::take(Fields::parse_with(body, &["prompt"])?, most);
    let completion = body.work(take).await?;
    let OpenAiSettings { settings, reported } = completion.common;
    app.check_model(settings.model.as_deref())?;
    let params = settings.check(&app, Some(DEFAULT_MAX_TOKENS), "prompt").await?;

    let given = if completion.echo { completion.prompts.clone() } else { Vec::new() };
    let prompts = app.tokens(&body, completion.prompts, "prompt").await?;
    let generator = app.generator.clone();
    let echo = move |_: &[u8]| Ok((echoes(&generator, given, &prompts)?, prompts));
    let (echoes, prompts) = body.work(echo).await?;
    drop(body);
    let echoed = echoes.iter().map(String::len).sum::<usize>().saturating_mul(params.n as usize);
    let most = app.settings.limits.body_bytes;
    if echoed > most {
        let why = format!("would repeat {echoed} bytes, but at most {most} are repeated");
        return Err(Refusal::param("echo", why));
    }
    let id = settings.name.unwrap_or_else(|| app.identifiers.next("cmpl-"));
    let submission = |prompt| Submission::new(id.clone(), prompt, params.clone());
    let mut submissions: Vec<Submission> = prompts.into_iter().map(submission).collect();
    app.check_size(&submissions, "prompt")?;
    settings.bootstrap.assign(&app, &mut submissions)?;
    if app.hands_over() {
        return app.hand_over(submissions, "prompt").await;
    }
    let head = CompletionHead::new(id.clone(), "text_completion", reported);
    if settings.stream {
        let pieces = app.submit_streaming(submissions, "prompt", false)?;
        let count = pieces.guards.answers();
        let answers = (0..count).map(|_| Progress::default()).collect();
        let rounds = RoundReporter::for_answers(&app, &params, count);
        let format = Chunks {
            app,
            head,
            params,
            prompt_tokens: vec![Vec::new(); echoes.len()],
            echoes,
            answers,
            rounds,
            usage: UsageReport::default(),
        };
        return Ok(stream::respond(pieces, format, &id));
    }
    let answers = app.submit_whole(submissions, "prompt").await?;
    let write = move |answers: Vec<Answer>| {
        let choices = choices(&app, &params, &echoes, &answers);
        let usage = UsageReport::of(&answers, params.n as usize);
        respond(&head.whole(&app, &choices, usage), Some(&id))
    };
    answers.respond(write).await
}

/// What stands before each prompt's answers: the prompts as they were given, if wanted.
fn echoes(
    generator: &Generator,
    given: Vec<Prompt>,
    prompts: &[Vec<u32>],
) -> Result<Vec<String>, Refusal> {
    let decode = |ids: &[u32]| match generator.tokenizer() {
        Some(tokenizer) => tokenizer.decode(ids, true).map_err(|e| Refusal::param("prompt", e)),
        None => Ok(String::new()),
    };
    let echo = |(given, ids): (Prompt, &Vec<u32>)| match given {
        Prompt::Text(text) => Ok(text),
        Prompt::Ids(_) => decode(ids),
    };
    given.into_iter().zip(prompts).map(echo).collect()
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    matched_stop: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_round: Option<DraftRound>,
}

fn choices(
    app: &App,
    params: &CheckedParams,
    echoes: &[String],
    answers: &[Answer],
) -> Vec<Choice> {
    let n = params.n as usize;
    answers
        .iter()
        .enumerate()
        .map(|(index, answer)| {
            let echo = echoes.get(index / n).map(String::as_str);
            // The prompt's tokens come with the first of the answers to it.
            let prompt = &answers[index / n * n].prompt;
            let mut progress = Progress::default();
            let mut columns = CompletionLogprobs::default();
            progress.echo(app, params, echo, prompt, &mut columns);
            progress.answer(app, params, &answer.tokens, &mut columns);
            Choice {
                index,
                text: format!("{}{}", echo.unwrap_or_default(), answer.text),
                logprobs: params.logprobs.map(|_| columns),
                finish_reason: Some(finish_reason(&answer.reason)),
                matched_stop: matched_stop(&answer.reason, answer.stop.as_ref()),
                draft_round: None,
            }
        })
        .collect()
}

/// How far one answer is told.
#[derive(Default)]
struct Progress {
    begun: bool,
    columns: Option<Columns>,
}

impl Progress {
    /// The columns of the answer, which begins at `offset`.
    fn columns(&mut self, app: &App, params: &CheckedParams, offset: usize) -> &mut Columns {
        let tokenizer = app.generator.tokenizer();
        let new = || Columns::new(tokenizer, offset, params, params.skip_special_tokens);
        self.columns.get_or_insert_with(new)
    }

    fn echo(
        &mut self,
        app: &App,
        params: &CheckedParams,
        echo: Option<&str>,
        prompt: &[Token],
        out: &mut CompletionLogprobs,
    ) {
        let Some(echo) = echo else { return };
        if params.logprobs.is_some() {
            // The prompt is echoed as it was given, without the special tokens around it.
            Columns::new(app.generator.tokenizer(), 0, params, true).prompt(prompt, out);
            // What follows is a text of its own, and begins where the prompt ends.
            self.columns(app, params, echo.chars().count());
        }
    }

    fn answer(
        &mut self,
        app: &App,
        params: &CheckedParams,
        tokens: &[Token],
        out: &mut CompletionLogprobs,
    ) {
        if params.logprobs.is_some() {
            self.columns(app, params, 0).answer(tokens, out);
        }
    }
}

/// Answers in chunks.
struct Chunks {
    app: Shared,
    head: CompletionHead,
    params: CheckedParams,
    echoes: Vec<String>,
    /// The tokens of each prompt that is echoed with log-probabilities.
    prompt_tokens: Vec<Vec<Token>>,
    answers: Vec<Progress>,
    /// Of each answer, where draft trees are asked for.
    rounds: Vec<RoundReporter>,
    usage: UsageReport,
}

impl Chunks {
    fn chunk(
        &self,
        index: usize,
        text: String,
        logprobs: Option<CompletionLogprobs>,
        draft_round: Option<DraftRound>,
        end: Option<(&FinishReason, Option<&String>)>,
        out: &mut EventWriter,
    ) {
        let choice = Choice {
            index,
            text,
            logprobs,
            finish_reason: end.map(|(reason, _)| finish_reason(reason)),
            matched_stop: end.map_or(Value::Null, |(reason, stop)| matched_stop(reason, stop)),
            draft_round,
        };
        out.event(&self.head.chunk(&self.app, &[choice]));
    }

    fn begin(&mut self, index: usize, prompt: usize, out: &mut EventWriter) {
        let progress = &mut self.answers[index];
        if std::mem::replace(&mut progress.begun, true) {
            return;
        }
        let Some(echo) = self.echoes.get(prompt).cloned() else { return };
        let mut columns = CompletionLogprobs::default();
        let tokens = &self.prompt_tokens[prompt];
        progress.echo(&self.app, &self.params, Some(&echo), tokens, &mut columns);
        let logprobs = Some(columns).filter(|columns| !columns.is_empty());
        self.chunk(index, echo, logprobs, None, None, out);
    }
}

impl ResponseFormat for Chunks {
    fn write(
        &mut self,
        index: usize,
        event: StreamEvent,
        guards: &RequestGuards,
        out: &mut EventWriter,
    ) {
        let prompt = guards.prompt_of(index);
        if let StreamEvent::Prompt(tokens) = event {
            if let Some(place) = self.prompt_tokens.get_mut(prompt) {
                *place = tokens;
            }
            return;
        }
        self.begin(index, prompt, out);
        match event {
            StreamEvent::Prompt(_) => (),
            StreamEvent::Delta(delta) => {
                let mut columns = CompletionLogprobs::default();
                let progress = &mut self.answers[index];
                progress.answer(&self.app, &self.params, &delta.tokens, &mut columns);
                let logprobs = Some(columns).filter(|columns| !columns.is_empty());
                let round = self.rounds.get_mut(index).map(|rounds| rounds.report(&delta));
                if !delta.text.is_empty() || logprobs.is_some() || round.is_some() {
                    self.chunk(index, delta.text, logprobs, round, None, out);
                }
            }
            StreamEvent::End(end) => {
                let last = Some((&end.reason, end.stop.as_ref()));
                self.chunk(index, end.text, None, None, last, out);
                self.usage.add(&end.usage, index.is_multiple_of(self.params.n as usize));
            }
        }
    }

    fn close(&mut self, out: &mut EventWriter) {
        if let Some(last) = self.head.last_chunk(&self.app, self.answers.len(), &self.usage) {
            out.event(&last);
        }
    }
}
