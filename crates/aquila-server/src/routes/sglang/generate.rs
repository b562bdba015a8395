//! `/generate`: texts or tokens, and how they go on, in SGLang's form.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use aquila_engine::{FinishReason, Returned, StopCause, Token, TokenRows, Usage};
use aquila_text::{Prompt, SamplingParams, Tokenizer};
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::item::{End, Item, Report, SoFar};
use crate::answer::{Answer, StreamEvent};
use crate::body;
use crate::constraint::Constraint;
use crate::disaggregation::Bootstrap;
use crate::draft_round::{self, RoundReporter};
use crate::fields::{Fields, OneOrMany, checked_name};
use crate::generation::GenerationSettings;
use crate::intake::Received;
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::{App, Shared};
use crate::stream::{self, EventWriter, ResponseFormat};
use crate::submit::{RequestGuards, Submission};
use crate::unserved::{EVERYWHERE, GENERATE, WITHOUT_EFFECT};

/// Sampling settings by SGLang's names, and by ours where they differ.
const SAMPLING: &[(&str, &str)] = &[
    ("max_new_tokens", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("sampling_seed", "seed"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("ignore_eos", "ignore_eos"),
    ("logit_bias", "logit_bias"),
    ("n", "n"),
];

/// How one prompt is to be answered, as the request says it.
struct PromptSettings {
    settings: GenerationSettings,
    keep_stop: bool,
}

impl PromptSettings {
    fn take(object: Map<String, Value>) -> Result<Self, Refusal> {
        let mut fields = Fields::of(object);
        let mut params = SamplingParams::default();
        for (name, key) in SAMPLING {
            fields.set(&mut params, name, key)?;
        }
        let settings = GenerationSettings {
            show_special_tokens: !fields.take("skip_special_tokens")?.unwrap_or(true),
            constraint: Constraint::take_sglang(&mut fields)?,
            params,
            ..GenerationSettings::default()
        };
        fields.refuse(EVERYWHERE)?;
        let keep_stop = fields.flag("no_stop_trim")?;
        fields.finish("sampling_params.", WITHOUT_EFFECT)?;
        Ok(Self { settings, keep_stop })
    }
}

/// What is reported of one prompt's answers.
struct Plan {
    report: Report,
    keep_stop: bool,
    n: usize,
}

pub(crate) async fn generate(
    State(app): State<Shared>,
    request: Request,
) -> Result<Response, Refusal> {
    let asked = Instant::now();
    let body = body::read(request, &app).await?;
    let mut fields = body.work(|body| Fields::parse_with(body, &["text", "input_ids"])).await?;
    app.check_model(fields.take::<String>("model")?.as_deref())?;
    let (prompts, mut is_list, param) = prompts(&mut fields)?;
    let stream = fields.flag("stream")?;
    let draft_trees = draft_round::take(&mut fields, stream)?;
    let (mut submissions, plans) = submissions(&app, body, fields, prompts, param).await?;
    submissions.iter_mut().for_each(|submission| submission.params.draft_trees = draft_trees);
    is_list |= plans.iter().any(|plan| plan.n > 1);
    if app.hands_over() {
        return app.hand_over(submissions, param).await;
    }
    let name = submissions[0].name.clone();

    if stream {
        let reporters = submissions.iter().map(|submission| {
            RoundReporter::for_answers(&app, &submission.params, submission.answers())
        });
        let rounds = reporters.flatten().collect();
        let pieces = app.submit_streaming(submissions, param, true)?;
        let items =
            plans.iter().flat_map(|plan| std::iter::repeat_n(&plan.report, plan.n).map(Item::new));
        let items = items.collect();
        let put_off = BTreeSet::new();
        let format = Updates { app, asked, plans, items, put_off, rounds, is_list };
        return Ok(stream::respond(pieces, format, &name));
    }
    let answers = app.submit_whole(submissions, param).await?;
    let write = move |answers: Vec<Answer>| {
        let plan_of = plans.iter().flat_map(|plan| (0..plan.n).map(move |choice| (plan, choice)));
        let mut prompt = Arc::default();
        let items = plan_of.zip(answers).map(|((plan, choice), answer)| {
            let mut item = Item::new(&plan.report);
            // The prompt's tokens come with the first of the answers to it.
            if choice == 0 {
                prompt = plan.report.prompt(&answer.prompt);
            }
            item.set_prompt(prompt.clone());
            item.add(&answer.text, answer.tokens);
            let Answer { reason, stop, usage, rows, .. } = answer;
            Finish { asked, reason, stop, usage, rows }.put(&mut item, plan);
            item
        });
        let items: Vec<Item> = items.collect();
        let answers: Vec<SoFar<'_>> =
            items.iter().map(|item| item.so_far(app.generator.tokenizer(), None)).collect();
        match answers.as_slice() {
            [answer] if !is_list => respond(answer, Some(&name)),
            answers => respond(&answers, Some(&name)),
        }
    };
    answers.respond(write).await
}

/// The prompts, whether they came as a list, and as which parameter.
fn prompts(fields: &mut Fields) -> Result<(Vec<Prompt>, bool, &'static str), Refusal> {
    let text = fields.prompts("text").map(|prompts| prompts.texts("text")).transpose()?;
    let ids = fields.prompts("input_ids").map(|prompts| prompts.ids("input_ids")).transpose()?;
    fields.refuse(EVERYWHERE)?;
    fields.refuse(GENERATE)?;
    let (prompts, is_list, param) = match (text, ids) {
        (Some(OneOrMany::One(text)), None) => (vec![Prompt::Text(text)], false, "text"),
        (Some(OneOrMany::Many(texts)), None) => {
            (texts.into_iter().map(Prompt::Text).collect(), true, "text")
        }
        (None, Some(OneOrMany::One(ids))) => (vec![Prompt::Ids(ids)], false, "input_ids"),
        (None, Some(OneOrMany::Many(lists))) => {
            (lists.into_iter().map(Prompt::Ids).collect(), true, "input_ids")
        }
        (Some(_), Some(_)) => {
            return Err(Refusal::param("input_ids", "give `text` or `input_ids`, not both"));
        }
        (None, None) => return Err(Refusal::param("text", "give `text` or `input_ids`")),
    };
    if prompts.is_empty() {
        return Err(Refusal::param(param, "must have at least one prompt"));
    }
    Ok((prompts, is_list, param))
}

/// One submission for each prompt, and what is to be reported of it.
async fn submissions(
    app: &App,
    body: Arc<Received>,
    mut fields: Fields,
    prompts: Vec<Prompt>,
    param: &'static str,
) -> Result<(Vec<Submission>, Vec<Plan>), Refusal> {
    let count = prompts.len();
    fields.check_prompts(count, app.generator.engine().config().max_queued_requests, param)?;
    let objects: Option<OneOrMany<Map<String, Value>>> = fields.take("sampling_params")?;
    // Settings for all prompts are read and checked once.
    let objects = match objects {
        None => vec![Map::new()],
        Some(OneOrMany::One(object)) => vec![object],
        Some(objects) => objects.spread(count, "sampling_params")?,
    };
    let names: Option<OneOrMany<String>> = fields.take("rid")?;
    let names: Vec<String> = match names {
        Some(OneOrMany::Many(names)) => {
            let names = OneOrMany::Many(names).spread(count, "rid")?;
            names.into_iter().map(checked_name).collect::<Result<_, _>>()?
        }
        Some(OneOrMany::One(name)) => vec![checked_name(name)?; count],
        None => (0..count).map(|_| app.identifiers.next("")).collect(),
    };
    let wanted = fields.take("return_logprob")?.unwrap_or(OneOrMany::One(false));
    let wanted = wanted.spread(count, "return_logprob")?;
    let start = fields.take("logprob_start_len")?.unwrap_or(OneOrMany::One(-1_i64));
    let start = start.spread(count, "logprob_start_len")?;
    let top = fields.take("top_logprobs_num")?.unwrap_or(OneOrMany::One(0_usize));
    let top = top.spread(count, "top_logprobs_num")?;
    let with_text = fields.flag("return_text_in_logprobs")?;
    let states = fields.take("return_hidden_states")?.unwrap_or(OneOrMany::One(false));
    let states = states.spread(count, "return_hidden_states")?;
    let experts = fields.take("return_routed_experts")?.unwrap_or(OneOrMany::One(false));
    let experts = experts.spread(count, "return_routed_experts")?;
    let experts_from = fields.take("routed_experts_start_len")?.unwrap_or(OneOrMany::One(0));
    let experts_from = experts_from.spread(count, "routed_experts_start_len")?;
    let speculation = fields.speculation()?;
    let priority = fields.take("priority")?;
    let bootstrap = Bootstrap::take(&mut fields)?;
    fields.finish("", WITHOUT_EFFECT)?;

    let tokens = app.tokens(&body, prompts, param).await?;
    let mut checked = Vec::with_capacity(objects.len());
    for object in objects {
        let PromptSettings { mut settings, keep_stop } = PromptSettings::take(object)?;
        (settings.speculation, settings.priority) = (speculation, priority);
        checked.push((settings.check(app, None, param).await?, keep_stop));
    }
    let mut submissions = Vec::with_capacity(count);
    let mut plans = Vec::with_capacity(count);
    let settings = checked.iter().cycle().zip(wanted).zip(start).zip(top);
    let rows = states.into_iter().zip(experts).zip(experts_from);
    for (
        ((name, prompt), ((((params, keep_stop), wanted), start), top)),
        ((states, experts), experts_from),
    ) in names.into_iter().zip(tokens).zip(settings).zip(rows)
    {
        if experts && experts_from > prompt.len() {
            let why = format!("must be at most the {} tokens of the prompt", prompt.len());
            return Err(Refusal::param("routed_experts_start_len", why));
        }
        let from = usize::try_from(start).ok().filter(|_| wanted);
        let mut params = params.clone();
        params
            .set_logprobs(wanted.then_some(top), from.is_some())
            .map_err(|error| Refusal::param("top_logprobs_num", error.why))?;
        params.returned = Returned { hidden_states: states, routed_experts: experts };
        params.returned_from = if states || !experts { 0 } else { experts_from };
        let report = Report {
            id: name.clone(),
            prompt_tokens: prompt.len(),
            logprobs: wanted,
            prompt_logprobs_from: from,
            top_logprobs: wanted && top > 0,
            with_text,
            hidden_states: states,
            routed_experts_from: experts.then_some(experts_from),
        };
        plans.push(Plan { report, keep_stop: *keep_stop, n: params.n as usize });
        submissions.push(Submission::new(name, prompt, params));
    }
    app.check_size(&submissions, param)?;
    bootstrap.assign(app, &mut submissions)?;
    Ok((submissions, plans))
}

/// How an answer ended.
struct Finish {
    asked: Instant,
    reason: FinishReason,
    stop: Option<String>,
    usage: Usage,
    rows: TokenRows,
}

impl Finish {
    fn put(self, item: &mut Item, plan: &Plan) {
        let Finish { asked, reason, stop, usage, rows } = self;
        if let (true, Some(stop)) = (plan.keep_stop, &stop) {
            item.add(stop, Vec::new());
        }
        let reason = match (reason, stop) {
            (FinishReason::Stop(_), Some(text)) => {
                json!({ "type": "stop", "matched": text })
            }
            (FinishReason::Stop(StopCause::Token(id)), None) => {
                json!({ "type": "stop", "matched": id })
            }
            (FinishReason::Stop(StopCause::Listener | StopCause::Grammar), None) => {
                json!({ "type": "stop" })
            }
            (FinishReason::Length, _) => {
                json!({ "type": "length", "length": usage.completion_tokens })
            }
            (FinishReason::Abort(why) | FinishReason::GrammarFailed(why), _) => {
                json!({ "type": "abort", "message": why })
            }
        };
        item.finish(End { reason, usage, latency: asked.elapsed(), rows });
    }
}

/// Answers as they grow: every event holds the whole text so far, so that of pieces that wait
/// together one is written.
struct Updates {
    app: Shared,
    asked: Instant,
    plans: Vec<Plan>,
    items: Vec<Item>,
    /// Answers that have grown since their last event.
    put_off: BTreeSet<usize>,
    /// Of each answer, where draft trees are asked for.
    rounds: Vec<RoundReporter>,
    is_list: bool,
}

impl ResponseFormat for Updates {
    fn write(
        &mut self,
        index: usize,
        event: StreamEvent,
        guards: &RequestGuards,
        out: &mut EventWriter,
    ) {
        let item = &mut self.items[index];
        match event {
            StreamEvent::Prompt(tokens) => {
                // They come with the first of the answers to it.
                let plan = &self.plans[guards.prompt_of(index)];
                let prompt = plan.report.prompt(&tokens);
                let items = self.items.iter_mut().skip(index).take(plan.n);
                return items.for_each(|item| item.set_prompt(prompt.clone()));
            }
            StreamEvent::Delta(delta) => {
                let round = self.rounds.get_mut(index).map(|rounds| rounds.report(&delta));
                item.add(&delta.text, delta.tokens);
                if round.is_none() {
                    self.put_off.insert(index);
                    return;
                }
                item.set_round(round);
            }
            StreamEvent::End(end) => {
                self.put_off.remove(&index);
                item.set_round(None);
                item.add(&end.text, Vec::<Token>::new());
                let aquila_text::End { reason, stop, usage, rows, .. } = end;
                let finish = Finish { asked: self.asked, reason, stop, usage, rows };
                finish.put(item, &self.plans[guards.prompt_of(index)]);
            }
        }
        let tokenizer: Option<&Tokenizer> = self.app.generator.tokenizer();
        out.event(&item.so_far(tokenizer, self.is_list.then_some(index)));
    }

    fn flush(&mut self, out: &mut EventWriter) {
        let tokenizer = self.app.generator.tokenizer();
        while !out.is_full()
            && let Some(index) = self.put_off.pop_first()
        {
            out.event(&self.items[index].so_far(tokenizer, self.is_list.then_some(index)));
        }
    }

    fn close(&mut self, _: &mut EventWriter) {}
}
