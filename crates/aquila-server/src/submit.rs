//! From checked prompts to the engine, and its answers back.
//!
//! The answers to all prompts of one request are numbered through: those to the first prompt, then
//! those to the second.

use std::sync::Arc;
use std::time::Instant;

use aquila_disagg::PrefillAddress;
use aquila_engine::FinishReason;
use aquila_text::{AnswerSink, CheckedParams};
use axum::response::Response;
use tokio::sync::{Semaphore, mpsc};

use crate::active_requests::Hold;
use crate::answer::{Answer, Collector, Event, LogprobRoom, Relay};
use crate::disaggregation::Transfers;
use crate::http_metrics::HttpMetrics;
use crate::metrics::Stopwatch;
use crate::refusal::Refusal;
use crate::returned::{HeldRoom, keep_room};
use crate::state::App;

/// One prompt, and how it is to be answered.
#[derive(Debug, Clone)]
pub(crate) struct Submission {
    /// The name by which the client may abort it.
    pub name: String,
    pub prompt: Vec<u32>,
    pub params: CheckedParams,
    /// Where the prompt is processed for each answer, if two workers have a part in it.
    pub prefill: Vec<PrefillAddress>,
}

impl Submission {
    /// A prompt that is processed here.
    pub fn new(name: String, prompt: Vec<u32>, params: CheckedParams) -> Self {
        Self { name, prompt, params, prefill: Vec::new() }
    }

    /// How many answers it asks for.
    pub fn answers(&self) -> usize {
        self.params.n as usize
    }
}

/// What a request holds while its answers are made.
pub(crate) struct RequestGuards {
    /// One for each prompt.
    guards: Vec<Hold>,
    /// Which prompt each answer belongs to.
    prompts: Vec<usize>,
    deadline: Option<Instant>,
    /// For what the answers return beside tokens.
    room: Option<Arc<HeldRoom>>,
}

impl RequestGuards {
    /// How many answers there will be.
    pub fn answers(&self) -> usize {
        self.prompts.len()
    }

    /// Which prompt an answer belongs to.
    pub fn prompt_of(&self, answer: usize) -> usize {
        self.prompts[answer]
    }

    /// Why an answer that ended like this is no answer; an abort that the client asked for leaves
    /// it one.
    pub fn failure(&self, answer: usize, reason: &FinishReason) -> Option<Refusal> {
        if let Some(refusal) = self.room.as_ref().and_then(|room| room.refusal()) {
            return Some(refusal);
        }
        if let FinishReason::GrammarFailed(why) = reason {
            return Some(Refusal::invalid(why.clone()));
        }
        let FinishReason::Abort(why) = reason else { return None };
        if self.guards[self.prompts[answer]].was_aborted() {
            return None;
        }
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Some(Refusal::out_of_time());
        }
        Some(Refusal::failed(why.clone()))
    }

    /// The room for what the answers return beside tokens.
    pub fn room(&self) -> Option<Arc<HeldRoom>> {
        self.room.clone()
    }

    /// Notes that all answers have ended.
    pub fn complete(&mut self) {
        self.guards.iter_mut().for_each(Hold::complete);
    }
}

/// Answers on their way, piece by piece.
pub(crate) struct AnswerStream {
    pub events: mpsc::Receiver<Event>,
    pub guards: RequestGuards,
    /// Hears of errors that no status can tell any more.
    pub metrics: Arc<HttpMetrics>,
}

/// Answers that are whole, with the room of what they return beside tokens.
pub(crate) struct WholeAnswers {
    pub list: Vec<Answer>,
    room: Option<Arc<HeldRoom>>,
}

impl WholeAnswers {
    /// The response that `write` makes of them; where there is much to write, on a thread where it
    /// keeps no other request waiting.
    pub async fn respond(
        self,
        write: impl FnOnce(Vec<Answer>) -> Response + Send + 'static,
    ) -> Result<Response, Refusal> {
        let Self { list, room } = self;
        if !room.as_ref().is_some_and(|room| room.is_long()) {
            return Ok(keep_room(write(list), room));
        }
        let written = tokio::task::spawn_blocking(move || write(list)).await;
        let response = written.map_err(|_| Refusal::failed("the answer could not be written"))?;
        Ok(keep_room(response, room))
    }
}

impl App {
    /// Submits prompts, and hands the answers on as they come. `param` is what the prompts came as;
    /// `keeps_tokens` says whether the stream keeps the tokens that it was handed.
    pub fn submit_streaming(
        &self,
        submissions: Vec<Submission>,
        param: &str,
        keeps_tokens: bool,
    ) -> Result<AnswerStream, Refusal> {
        let answers: usize = submissions.iter().map(Submission::answers).sum();
        let room = self.settings.limits.unread_pieces.max(1).saturating_mul(answers.max(1));
        let (sender, events) = mpsc::channel(room.min(Semaphore::MAX_PERMITS));
        let guards = self.submit(submissions, param, |index, stopwatch, room| {
            let events = sender.clone();
            Box::new(Relay { index, events, stopwatch, room, keeps_tokens, broken: false })
        })?;
        Ok(AnswerStream { events, guards, metrics: self.metrics.http.clone() })
    }

    /// Submits prompts, and waits for all answers, in their order.
    pub async fn submit_whole(
        &self,
        submissions: Vec<Submission>,
        param: &str,
    ) -> Result<WholeAnswers, Refusal> {
        let (done, mut inbox) = mpsc::unbounded_channel();
        let mut guards = self.submit(submissions, param, |index, stopwatch, room| {
            Box::new(Collector {
                index,
                prompt: Vec::new(),
                tokens: Vec::new(),
                text: String::new(),
                done: done.clone(),
                stopwatch,
                room,
            })
        })?;
        drop(done);
        let mut answers: Vec<Option<Answer>> = vec![None; guards.answers()];
        while let Some((index, answer)) = inbox.recv().await {
            if let Some(refusal) = guards.failure(index, &answer.reason) {
                return Err(refusal);
            }
            answers[index] = Some(answer);
        }
        let answers: Option<Vec<Answer>> = answers.into_iter().collect();
        guards.complete();
        let list = answers
            .ok_or_else(|| Refusal::failed("the engine ended before the answer was complete"))?;
        Ok(WholeAnswers { list, room: guards.room() })
    }

    fn submit(
        &self,
        submissions: Vec<Submission>,
        param: &str,
        mut sink: impl FnMut(usize, Stopwatch, LogprobRoom) -> Box<dyn AnswerSink>,
    ) -> Result<RequestGuards, Refusal> {
        self.check_size(&submissions, param)?;
        submissions.iter().try_for_each(|submission| self.check_ids(&submission.params))?;
        let asked = Instant::now();
        let deadline = self.settings.limits.request_time.map(|time| asked + time);
        let engine = self.generator.engine();
        let room = self.returned_room.hold(engine, &submissions)?;
        let mut guards = RequestGuards { guards: Vec::new(), prompts: Vec::new(), deadline, room };
        for (number, submission) in submissions.into_iter().enumerate() {
            let first = guards.prompts.len();
            let mut transfers = Transfers::open(self, &submission.prefill)?;
            let hold = self.active_requests.begin(engine, &submission.name);
            let answers = submission.answers();
            let sink = |choice: u32| {
                let stopwatch = self.metrics.stopwatch(asked, choice == 0);
                let room = LogprobRoom { room: guards.room(), copies: answers };
                sink(first + choice as usize, stopwatch, room)
            };
            let transfer = |_| transfers.next();
            let Submission { prompt, params, .. } = submission;
            match self.generator.submit_across(prompt, &params, deadline, sink, transfer) {
                Ok(ids) => {
                    transfers.admitted(&ids);
                    hold.add(ids);
                }
                Err(error) => {
                    transfers.close();
                    self.metrics.refused();
                    return Err(Refusal::of(error, param));
                }
            }
            guards.guards.push(hold);
            guards.prompts.extend(std::iter::repeat_n(number, answers));
        }
        Ok(guards)
    }

    /// Refuses token ids that the model does not have, by the parameter that they came in.
    fn check_ids(&self, params: &CheckedParams) -> Result<(), Refusal> {
        let vocabulary = self.generator.engine().vocabulary();
        let stops = params.limits.stop_ids.iter().map(|&id| ("stop_token_ids", id));
        let biased = params.sampling.logit_bias.iter().map(|&(id, _)| ("logit_bias", id));
        match stops.chain(biased).find(|&(_, id)| id as usize >= vocabulary) {
            Some((name, id)) => {
                let why = format!("has token id {id}, but the vocabulary has {vocabulary} tokens");
                Err(Refusal::param(name, why))
            }
            None => Ok(()),
        }
    }

    /// Refuses what could never be queued at once, and prompts beyond the server's own limit.
    pub fn check_size(&self, submissions: &[Submission], param: &str) -> Result<(), Refusal> {
        let answers: usize = submissions.iter().map(Submission::answers).sum();
        let most = self.generator.engine().config().max_queued_requests;
        if answers > most {
            return Err(Refusal::too_many_answers(answers, most, param));
        }
        let Some(limit) = self.settings.limits.prompt_tokens else { return Ok(()) };
        match submissions
            .iter()
            .map(|submission| submission.prompt.len())
            .find(|&tokens| tokens > limit)
        {
            Some(tokens) => Err(Refusal::too_long(
                param,
                format!("the prompt has {tokens} tokens, but this server takes at most {limit}"),
            )),
            None => Ok(()),
        }
    }
}
