//! The rounds, one after the other.
//!
//! A round: give up what expired, make sure that every request that decodes has a slot (retracting
//! the youngest where memory ran out), admit what fits, run one forward pass over all of it, and
//! hand out what was chosen.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use aquila_compute::Backend;
use aquila_compute::choose::Choice;
use aquila_kv::{CacheConfig, GroupConfig, KvCache};

use crate::config::EngineConfig;
use crate::error::{Error, Failure, Result, SubmitError};
use crate::life::{Phase, Running, Seat, TARGET, Waiting};
use crate::listener::{FinishReason, Outcome, StopCause, Token, Verdict};
use crate::queue::Queue;
use crate::request::{Request, RequestId};
use crate::round::{Part, Room, RoundPlan};
use crate::runner::Runner;
use crate::stats::Stats;

/// Slots kept back for each request that decodes before another one is admitted, so that a
/// newcomer is not retracted at once.
const HEADROOM: usize = 16;

/// An engine that runs its rounds on the caller's thread.
pub struct Engine<B: Backend> {
    config: EngineConfig,
    runner: Runner<B>,
    cache: KvCache,
    waiting: Queue,
    running: Vec<Running>,
    round: RoundPlan,
    next_id: u64,
    stats: Arc<Stats>,
}

impl<B: Backend> Engine<B> {
    /// An engine over `runner`, which was made with the same settings.
    pub fn new(runner: Runner<B>, config: EngineConfig) -> Result<Self> {
        config.check().map_err(Error::Config)?;
        let cache = KvCache::new(CacheConfig {
            page_size: config.page_size,
            prefix_cache: config.prefix_cache,
            groups: vec![GroupConfig {
                name: "target".into(),
                pages: config.pages(),
                lookahead: 0,
            }],
        })?;
        let stats = Arc::new(Stats::default());
        stats.total_slots.store(config.pages() * config.page_size, Relaxed);
        Ok(Self {
            config,
            runner,
            cache,
            waiting: Queue::default(),
            running: Vec::new(),
            round: RoundPlan::default(),
            next_id: 0,
            stats,
        })
    }

    /// The engine's counters.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// The engine's settings.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The size of the model's vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.runner.vocabulary()
    }

    /// Takes a request, or says why not.
    pub fn submit(&mut self, request: Request) -> std::result::Result<RequestId, SubmitError> {
        request.check(
            self.vocabulary(),
            self.config.context_length,
            self.config.pages() * self.config.page_size,
        )?;
        if self.waiting.len() >= self.config.max_queued_requests {
            return Err(SubmitError::QueueFull(self.waiting.len()));
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.enqueue(id, request);
        Ok(id)
    }

    /// Takes a request that was checked already.
    pub(crate) fn enqueue(&mut self, id: RequestId, mut request: Request) {
        if !request.seeded {
            request.sampling.seed = derived_seed(self.config.random_seed, id);
        }
        let seat = Box::new(Seat::new(id, request, self.config.longest_sequence()));
        self.waiting.put(Waiting { seat });
        self.count();
    }

    /// Gives a request up; false if there is none of that name.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let seat = match self.waiting.take_by_id(id) {
            Some(waiting) => waiting.seat,
            None => match self.running.iter().position(|r| r.seat.id == id) {
                Some(at) => self.running.remove(at).release(&mut self.cache),
                None => return false,
            },
        };
        self.finish(seat, FinishReason::Abort("aborted".into()));
        self.count();
        true
    }

    /// Gives every request up.
    pub fn abort_all(&mut self, why: &str) {
        let waiting = self.waiting.take_if(|_| true);
        for request in waiting {
            self.finish(request.seat, FinishReason::Abort(why.into()));
        }
        for request in std::mem::take(&mut self.running) {
            let seat = request.release(&mut self.cache);
            self.finish(seat, FinishReason::Abort(why.into()));
        }
        self.count();
    }

    /// Drops every cached prefix that nobody uses; answers how many pages that were.
    pub fn flush_cache(&mut self) -> usize {
        self.cache.flush()
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.len() == 0
    }

    /// Checks that every slot is free, held or cached; for tests.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.cache.check()?;
        let usage = self.cache.usage(TARGET);
        if self.running.is_empty() && usage.held != 0 {
            return Err(format!("nothing runs, but {} pages are held", usage.held));
        }
        Ok(())
    }

    /// One round; false if there was nothing to do.
    pub fn step(&mut self) -> bool {
        self.give_up_expired();
        self.make_room();
        self.admit();
        let room = Room {
            prefill_rows: self.config.chunked_prefill_size,
            outputs: self.config.max_outputs(),
        };
        let mut round = std::mem::take(&mut self.round);
        round.fill(&self.running, room);
        let busy = !round.parts.is_empty();
        if busy {
            match self.run(&round) {
                Ok(choices) => self.hand_out(&round, choices),
                Err(failure) => self.fail_round(&round, failure),
            }
            self.stats.rounds.fetch_add(1, Relaxed);
        }
        self.round = round;
        self.count();
        busy
    }

    fn run(&mut self, round: &RoundPlan) -> std::result::Result<Vec<Choice>, Failure> {
        let (runner, running) = (&mut self.runner, &self.running);
        // What a panic leaves behind is scratch and the KV of this round's requests, both dropped.
        match catch_unwind(AssertUnwindSafe(|| runner.run(&round.forward, &round.asks(running)))) {
            Ok(result) => result.map_err(|error| Failure::Round(error.to_string())),
            Err(panic) => Err(Failure::Round(panic_text(&panic))),
        }
    }

    fn fail_round(&mut self, round: &RoundPlan, failure: Failure) {
        tracing::error!(%failure, requests = round.parts.len(), "a round failed");
        self.stats.failed_rounds.fetch_add(1, Relaxed);
        for part in round.parts.iter().rev() {
            let seat = self.running.remove(part.index).discard(&mut self.cache);
            self.finish(seat, FinishReason::Abort(failure.to_string()));
        }
    }

    fn give_up_expired(&mut self) {
        let now = Instant::now();
        for waiting in self.waiting.take_if(|w| w.seat.is_expired(now)) {
            self.finish(waiting.seat, FinishReason::Abort("deadline exceeded".into()));
        }
        for index in (0..self.running.len()).rev() {
            if self.running[index].seat.is_expired(now) {
                let seat = self.running.remove(index).release(&mut self.cache);
                self.finish(seat, FinishReason::Abort("deadline exceeded".into()));
            }
        }
    }

    /// Reserves the next slot of every request that decodes; the youngest go where none is left.
    fn make_room(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let request = &mut self.running[index];
            if request.phase == Phase::Decoding
                && self.cache.reserve(&mut request.sequence, TARGET, 1).is_err()
            {
                self.retract_youngest();
            } else {
                index += 1;
            }
        }
    }

    fn retract_youngest(&mut self) {
        let youngest = self.running.pop().expect("the request that found no slot runs");
        let id = youngest.seat.id;
        if self.running.is_empty() {
            let seat = youngest.discard(&mut self.cache);
            self.finish(seat, FinishReason::Abort(Failure::DoesNotFit(id).to_string()));
            return;
        }
        tracing::debug!(%id, "retracted");
        self.stats.retractions.fetch_add(1, Relaxed);
        let waiting = youngest.retract(&mut self.cache);
        self.waiting.put(waiting);
    }

    /// Admits waiting requests, first come first, while rows and memory last.
    fn admit(&mut self) {
        let mut rows: usize = self.running.iter().map(Running::unread).sum();
        let mut index = 0;
        while self.running.len() < self.config.max_running_requests
            && rows < self.config.chunked_prefill_size
        {
            let running = &self.running;
            let may_go = |waiting: &Waiting| !reads_the_same_prompt(running, waiting);
            let Some(at) = self.waiting.find(index, may_go) else { break };
            let headroom = self.running.iter().map(|r| r.seat.remaining().min(HEADROOM)).sum();
            match self.waiting.take(at).admit(&mut self.cache, headroom) {
                Ok(request) => {
                    rows += request.unread();
                    let cached = request.sequence.committed(TARGET) as u64;
                    self.stats.cached_tokens.fetch_add(cached, Relaxed);
                    self.running.push(request);
                    index = at;
                }
                Err(Waiting { seat }) if self.running.is_empty() => {
                    let why = Failure::DoesNotFit(seat.id).to_string();
                    self.finish(seat, FinishReason::Abort(why));
                }
                Err(waiting) => {
                    self.waiting.put(waiting);
                    break;
                }
            }
        }
    }

    fn hand_out(&mut self, round: &RoundPlan, choices: Vec<Choice>) {
        let mut choices = choices.into_iter();
        let mut ended = Vec::new();
        for part in &round.parts {
            let part_choices: Vec<Choice> = choices.by_ref().take(part.outputs.len()).collect();
            if let Some(reason) = self.settle(part, part_choices) {
                ended.push((part.index, reason));
            }
        }
        for (index, reason) in ended.into_iter().rev() {
            let seat = self.running.remove(index).release(&mut self.cache);
            self.finish(seat, reason);
        }
    }

    /// Commits one part's rows and gives its tokens to the request; says why it ended, if it did.
    fn settle(&mut self, part: &Part, choices: Vec<Choice>) -> Option<FinishReason> {
        let Running { seat, sequence, phase } = &mut self.running[part.index];
        self.cache.commit(sequence, TARGET, part.rows.len());
        let mut chosen = Vec::new();
        for (at, choice) in part.outputs.clone().zip(choices) {
            let token = Token { id: choice.token, logprob: choice.logprob, top: choice.top };
            if at + 1 < seat.tokens.len() {
                seat.prompt_tokens.push(token);
            } else {
                chosen.push(token);
            }
        }
        if let Phase::Prefilling { goal } = *phase {
            self.stats.prompt_tokens.fetch_add(part.rows.len() as u64, Relaxed);
            if part.rows.end < goal {
                return None;
            }
            *phase = Phase::Decoding;
            self.cache.publish(sequence, &seat.tokens);
            if seat.is_fresh() && seat.request.prompt_logprobs.is_some() {
                let first = Token { id: seat.tokens[0], logprob: None, top: Vec::new() };
                let mut tokens = std::mem::take(&mut seat.prompt_tokens);
                tokens.insert(0, first);
                seat.request.listener.prompt(tokens);
            }
        }
        if chosen.is_empty() {
            // A resumed request has its bonus; one that wanted no answer is done.
            return (seat.remaining() == 0).then_some(FinishReason::Length);
        }
        self.stats.completion_tokens.fetch_add(chosen.len() as u64, Relaxed);
        accept(seat, &chosen)
    }

    fn finish(&mut self, seat: Box<Seat>, reason: FinishReason) {
        self.stats.finished.fetch_add(1, Relaxed);
        let Seat { id, usage, request, .. } = *seat;
        let outcome = Outcome { reason, usage };
        let listener = request.listener;
        if catch_unwind(AssertUnwindSafe(|| listener.finished(outcome))).is_err() {
            tracing::error!(%id, "a listener panicked at the end of its request");
        }
    }

    fn count(&self) {
        self.stats.waiting.store(self.waiting.len(), Relaxed);
        self.stats.running.store(self.running.len(), Relaxed);
        let free = self.cache.available(TARGET);
        let total = self.config.pages() * self.config.page_size;
        self.stats.used_slots.store(total - free, Relaxed);
    }
}

/// Gives tokens to a request until something ends it.
fn accept(seat: &mut Seat, tokens: &[Token]) -> Option<FinishReason> {
    let mut reason = None;
    let mut taken = 0;
    for token in tokens {
        seat.push(token.id);
        taken += 1;
        if seat.request.limits.stop_ids.contains(&token.id) {
            reason = Some(FinishReason::Stop(StopCause::Token(token.id)));
        } else if seat.remaining() == 0 {
            reason = Some(FinishReason::Length);
        }
        if reason.is_some() {
            break;
        }
    }
    let listener = &mut seat.request.listener;
    match catch_unwind(AssertUnwindSafe(|| listener.tokens(&tokens[..taken]))) {
        Ok(Verdict::Continue) => reason,
        Ok(Verdict::Stop { kept }) => {
            let surplus = taken.saturating_sub(kept);
            seat.tokens.truncate(seat.tokens.len() - surplus);
            seat.usage.completion_tokens -= surplus;
            Some(FinishReason::Stop(StopCause::Listener))
        }
        Ok(Verdict::Abort(why)) => Some(FinishReason::Abort(why)),
        Err(panic) => Some(FinishReason::Abort(panic_text(&panic))),
    }
}

/// Whether a request of the same family is reading the prompt, which the cache will then have.
fn reads_the_same_prompt(running: &[Running], waiting: &Waiting) -> bool {
    let family = waiting.seat.request.family;
    family.is_some()
        && waiting.seat.request.prompt_logprobs.is_none()
        && running.iter().any(|r| r.phase != Phase::Decoding && r.seat.request.family == family)
}

/// A seed for a request that has none.
fn derived_seed(random_seed: u64, id: RequestId) -> u64 {
    aquila_compute::choose::noise::key(random_seed, 0, 0)
        .wrapping_add(aquila_compute::choose::noise::key(id.0, 0, 1))
}

fn panic_text(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}
