//! The executor of a model: draft, verify, accept, compact, publish, extend.
//!
//! It knows of requests what the scheduler told it; what they have chosen is in the backend's
//! state, and is read once, at the end of a round. So the bounds of passes follow from the batch
//! alone.

use std::collections::HashMap;
use std::sync::Arc;

use aquila_compute::Backend;
use aquila_compute::round::{
    Admitted, Batch, BatchRow, Ended, ExtendRows, Extent, RequestOutput, RequestParams, RowWork,
    Shape, TableChange, Tree, TreeLimits,
};
use aquila_spec::{DraftBound, DraftRequest};

use super::job::{Compute, Done, Job, Part, Profile, Yield};
use super::runner::Runner;
use crate::config::EngineConfig;
use crate::error::Result;
use crate::listener::{FinishReason, StopCause, Token};
use crate::request::RequestId;
use crate::times::{Times, timed};

/// Runs rounds on a model.
pub struct Lane<B: Backend> {
    runner: Runner<B>,
    config: EngineConfig,
    /// Places that no request has.
    places: Vec<usize>,
    held: HashMap<RequestId, Held>,
    /// The era of a round that did not come to its end.
    broken: Option<u64>,
}

/// A request that holds KV.
struct Held {
    place: usize,
    params: Arc<RequestParams>,
    /// Rounds that its draft has missed since it was paused.
    missed: usize,
    /// Its text, for what drafts on the host.
    text: Option<Vec<u32>>,
    ended: bool,
}

impl<B: Backend> Compute for Lane<B> {
    fn profile(&self) -> Profile {
        Profile {
            vocabulary: self.runner.vocabulary(),
            declaration: self.runner.declaration().cloned(),
        }
    }

    fn begin_anew(&mut self) {
        if let Some(host) = self.runner.host() {
            host.begin_anew();
        }
    }

    fn run(&mut self, mut job: Job) -> Done {
        let number = job.number;
        let mut times = Times { rounds: 1, ..Times::default() };
        let refused = self.broken == Some(job.era);
        let batch = self.batch(&mut job, refused);
        self.broken = Some(job.era);
        let outcome = self.runner.begin(batch).and_then(|()| {
            if refused || job.parts.is_empty() {
                return Ok(Vec::new());
            }
            self.round(&job, &mut times)
        });
        if !refused && outcome.is_ok() {
            self.broken = None;
        }
        let outcome = match refused {
            true => Err("a round before it failed".into()),
            false => outcome.map_err(|error| error.to_string()),
        };
        Done { number, outcome, times }
    }
}

impl<B: Backend> Lane<B> {
    /// An executor over `runner`, which was made with the same settings.
    pub fn new(runner: Runner<B>, config: EngineConfig) -> Self {
        let places = (0..config.max_running_requests).rev().collect();
        Self { runner, config, places, held: HashMap::new(), broken: None }
    }

    /// What the backend is told: who departed, who was admitted, and what runs unless the round is
    /// refused.
    fn batch(&mut self, job: &mut Job, refused: bool) -> Batch {
        let mut batch =
            Batch { round: job.number, slots: std::mem::take(&mut job.slots), ..Batch::default() };
        for left in &job.left {
            let Some(held) = self.held.remove(&left.request) else { continue };
            self.places.push(held.place);
            batch.departed.push(held.place);
            if let (Some(host), Some(text)) = (self.runner.host(), held.text) {
                host.leave(left.request.0, &text[..left.tokens.min(text.len())]);
            }
        }
        let reads = self.runner.host().is_some();
        for admission in job.admitted.drain(..) {
            let place = self.places.pop().expect("no more requests hold KV than may run");
            let held = Held {
                place,
                params: admission.params.clone(),
                missed: 0,
                text: reads.then(|| admission.tokens.clone()),
                ended: false,
            };
            let before = self.held.insert(RequestId(admission.params.id), held);
            assert!(before.is_none(), "request {} was admitted twice", admission.params.id);
            batch.admitted.push(Admitted {
                place,
                params: admission.params,
                tokens: admission.tokens,
                matched: admission.matched,
                rounds: admission.rounds,
            });
        }
        let place = |request: RequestId| self.held[&request].place;
        batch.tables.extend(job.tables.drain(..).map(|change| TableChange {
            place: place(change.request),
            group: change.group,
            from: change.from,
            slots: change.slots,
        }));
        if !refused {
            let row =
                |part: &Part| BatchRow { place: place(part.request), work: part.task.clone() };
            batch.rows.extend(job.parts.iter().map(row));
        }
        batch
    }

    fn round(&mut self, job: &Job, times: &mut Times) -> Result<Vec<Option<Yield>>> {
        let plan = self.plan(job);
        timed(&mut times.extend, || {
            let mut passes = plan.catch_up.iter().enumerate();
            passes.try_for_each(|(at, &bound)| self.runner.extend(ExtendRows::CatchUp(at), bound))
        })?;
        timed(&mut times.draft, || {
            let given = self.host_trees(&job.parts)?;
            let limits = TreeLimits { row_budget: job.row_budget, fill: job.fill_trees };
            self.runner.draft(given, plan.draft, limits)
        })?;
        timed(&mut times.verify, || self.runner.verify(plan.target, plan.hidden))?;
        let simulate = self.config.simulate.as_ref();
        timed(&mut times.accept, || self.runner.accept(simulate))?;
        timed(&mut times.commit, || self.runner.compact())?;
        timed(&mut times.extend, || match plan.extend.requests {
            0 => Ok(()),
            _ => self.runner.extend(ExtendRows::Round, plan.extend),
        })?;
        let outputs = self.runner.outputs()?;
        self.read(&job.parts, &outputs);
        Ok(outputs.into_iter().map(|output| output.map(yield_of)).collect())
    }

    /// Bounds on the passes of a round, by what the host knows of it.
    fn plan(&mut self, job: &Job) -> RoundPlan {
        let mut plan = RoundPlan::default();
        let (mut trees, mut roots) = (0, 0);
        let (drafts, captures) = (self.runner.drafts_on_device(), self.runner.captures());
        let most_missed = if captures { self.config.parked_rows } else { usize::MAX };
        let last = self.config.shape.steps() + 1;
        let mut room = 0;
        let mut resumed = DraftBound::default();
        for part in &job.parts {
            let held = self.held.get_mut(&part.request).expect("it was admitted");
            let drafts = drafts && held.params.drafts();
            plan.hidden |= drafts && captures && held.missed <= most_missed;
            match &part.task {
                RowWork::Prefill { rows, outputs, .. } => {
                    plan.target.rows += rows.len();
                    plan.target.outputs += outputs.len();
                    if drafts {
                        plan.extend.rows += rows.len() + 1;
                        plan.extend.requests += 1;
                    }
                }
                RowWork::Decode { shape, pause, .. } => {
                    let shape = if held.params.drafts() { *shape } else { Shape::PLAIN };
                    trees += shape.nodes();
                    roots += 1;
                    if !drafts {
                        continue;
                    }
                    let steps = shape.steps();
                    if steps > 0 && held.missed > 0 && held.missed <= most_missed {
                        let mut before = held.missed.saturating_sub(last);
                        while before > 0 {
                            if room == 0 {
                                plan.catch_up.push(DraftBound::default());
                                room = self.config.chunked_prefill_size;
                            }
                            let rows = room.min(before);
                            (before, room) = (before - rows, room - rows);
                            let pass = plan.catch_up.last_mut().expect("one was begun");
                            pass.rows += rows;
                            pass.requests += 1;
                        }
                        resumed.rows += held.missed.min(last);
                        resumed.requests += 1;
                        held.missed = 0;
                    }
                    if held.missed > 0 || (steps == 0 && *pause) {
                        held.missed += 1;
                    } else {
                        plan.extend.rows += steps + 1;
                        plan.extend.requests += 1;
                    }
                    if steps > 0 {
                        plan.draft.steps = plan.draft.steps.max(steps);
                        plan.draft.beam += shape.topk();
                        plan.draft.requests += 1;
                    }
                }
            }
        }
        if resumed.requests > 0 {
            plan.catch_up.push(resumed);
        }
        trees = trees.min(job.row_budget.map_or(usize::MAX, |rows| rows.max(roots)));
        plan.target.rows += trees;
        plan.target.outputs += trees;
        plan
    }

    /// The trees that the host drafts, by place.
    fn host_trees(&mut self, parts: &[Part]) -> Result<Vec<(usize, Tree)>> {
        let mut trees = Vec::new();
        if self.runner.host().is_none() {
            return Ok(trees);
        }
        for part in parts {
            let RowWork::Decode { shape, .. } = part.task else { continue };
            let Some(Held { place, params, text: Some(tokens), ended: false, .. }) =
                self.held.get(&part.request)
            else {
                continue;
            };
            let shape = params.granted(shape, tokens.len());
            if shape.steps() == 0 {
                continue;
            }
            let request = DraftRequest { request: part.request.0, tokens, shape };
            let tree = self.runner.host_tree(&request)?;
            trees.extend(tree.map(|tree| (*place, tree)));
        }
        Ok(trees)
    }

    /// Lets what drafts on the host read what was accepted.
    fn read(&mut self, parts: &[Part], outputs: &[Option<RequestOutput>]) {
        let Some(host) = self.runner.host() else { return };
        for (part, output) in parts.iter().zip(outputs) {
            let Some(Held { params, text: Some(text), ended, .. }) =
                self.held.get_mut(&part.request)
            else {
                continue;
            };
            let Some(output) = output else { continue };
            text.extend(output.tokens.iter().map(|choice| choice.token));
            *ended |= output.ended.is_some();
            if !*ended && params.drafts() {
                host.read(part.request.0, text);
            }
        }
    }
}

/// Bounds on the passes of a round.
#[derive(Debug, Default)]
struct RoundPlan {
    /// The passes in which resumed drafts process what they missed.
    catch_up: Vec<DraftBound>,
    draft: DraftBound,
    target: Extent,
    /// Whether a draft takes hidden rows of the target's pass.
    hidden: bool,
    extend: DraftBound,
}

fn yield_of(output: RequestOutput) -> Yield {
    let RequestOutput { prompt, tokens, proposed, correct, ended, known, feedback } = output;
    let tokens_of = |choices: Vec<aquila_compute::choose::Choice>| {
        let token = |choice: aquila_compute::choose::Choice| Token {
            id: choice.token,
            logprob: choice.logprob,
            top: choice.top,
        };
        choices.into_iter().map(token).collect()
    };
    let ended = ended.map(|ended| match ended {
        Ended::Token(id) => FinishReason::Stop(StopCause::Token(id)),
        Ended::Length => FinishReason::Length,
    });
    Yield {
        prompt: tokens_of(prompt),
        tokens: tokens_of(tokens),
        proposed,
        correct,
        ended,
        known,
        lesson: feedback,
    }
}
