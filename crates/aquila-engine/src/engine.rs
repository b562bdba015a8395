//! The rounds, one after the other.
//!
//! A round: give up what expired, make sure that every request that decodes has slots for its tree
//! (retracting the youngest where memory ran out), admit what fits, draft the trees, run one pass
//! of the target over all of it, accept what it confirms, commit those rows, hand the tokens out,
//! and let the draft catch up.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquila_compute::Backend;
use aquila_compute::choose::{Ask, Choice, Weights};
use aquila_kv::{CacheConfig, GroupConfig, KvCache};
use aquila_spec::{
    Accepted, Asking, Coins, DraftGroup, Drafting, Extending, GroupRows, Kept, MOST_DRAFT_GROUPS,
    Shape, TargetRows, Tree, Verify, accept,
};

#[cfg(feature = "known-bugs")]
use aquila_spec::known_bugs::{Bug, spoil_footprint};

use crate::config::EngineConfig;
use crate::error::{Error, Failure, Result, SubmitError};
use crate::life::{DraftRoom, Phase, Running, Seat, TARGET, Waiting};
use crate::listener::{FinishReason, Outcome, StopCause, Token, Verdict};
use crate::queue::Queue;
use crate::report::{REPORT_EVERY, Report};
use crate::request::{Request, RequestId};
use crate::round::{Part, Room, RoundPlan, Work};
use crate::runner::Runner;
use crate::stats::Stats;
use crate::times::{Times, timed};

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
    /// Of the round that runs.
    times: Times,
    report: Report,
}

impl<B: Backend> Engine<B> {
    /// An engine over `runner`, which was made with the same settings.
    pub fn new(runner: Runner<B>, config: EngineConfig) -> Result<Self> {
        config.check().map_err(Error::Config)?;
        let group = |name: &str, lookahead| GroupConfig {
            name: name.into(),
            pages: config.pages(),
            lookahead,
        };
        let mut groups = vec![group("target", 0)];
        if let Some(declaration) = runner.declaration() {
            if declaration.groups.len() > MOST_DRAFT_GROUPS {
                return Err(Error::DraftGroups(declaration.name, declaration.groups.len()));
            }
            let draft = declaration.groups.iter().enumerate();
            groups.extend(draft.map(|(at, d)| group(&format!("draft {at}"), d.lookahead)));
            #[cfg(feature = "known-bugs")]
            if Bug::LookaheadLost.alive() {
                groups.iter_mut().for_each(|group| group.lookahead = 0);
            }
        }
        let cache = KvCache::new(CacheConfig {
            page_size: config.page_size,
            prefix_cache: config.prefix_cache,
            groups,
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
            times: Times::default(),
            report: Report::new(REPORT_EVERY),
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

    /// The name of the algorithm that drafts, if one does.
    pub fn algorithm(&self) -> Option<&'static str> {
        self.runner.declaration().map(|declaration| declaration.name)
    }

    /// Takes a request, or says why not.
    pub fn submit(&mut self, request: Request) -> std::result::Result<RequestId, SubmitError> {
        request.check(self.vocabulary(), &self.config)?;
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
        let seat =
            Box::new(Seat::new(id, request, self.config.longest_sequence(), self.draft_room()));
        self.waiting.put(Waiting { seat });
        self.count();
    }

    /// How drafts are verified: pretended acceptance takes the target's choices.
    fn verify(&self) -> Verify {
        if self.config.simulate.is_some() { Verify::Match } else { self.config.verify }
    }

    fn draft_room(&self) -> DraftRoom {
        match self.runner.declaration() {
            Some(declaration) => DraftRoom {
                shape: self.config.shape,
                groups: declaration.groups.len(),
                lookahead: declaration.lookahead(),
                verify: self.verify(),
            },
            None => {
                DraftRoom { shape: Shape::PLAIN, groups: 0, lookahead: 0, verify: Verify::Match }
            }
        }
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

    /// How often a line of the log says how decoding goes.
    pub fn report_every(&mut self, interval: Duration) {
        self.report = Report::new(interval);
    }

    /// Checks that every slot is free, held or cached; for tests.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.cache.check()?;
        for group in self.cache.groups() {
            let usage = self.cache.usage(group);
            if self.running.is_empty() && usage.held != 0 {
                return Err(format!("nothing runs, but {} pages are held", usage.held));
            }
        }
        self.cache.check_with(self.running.iter().map(|request| &request.sequence))
    }

    /// One round; false if there was nothing to do.
    pub fn step(&mut self) -> bool {
        let began = Instant::now();
        self.times = Times { rounds: 1, ..Times::default() };
        if self.running.is_empty() {
            self.report.begin(began, &self.stats.snapshot());
        }
        self.give_up_expired();
        self.make_room();
        self.admit();
        if self.running.is_empty() {
            self.count();
            return false;
        }
        let mut round = std::mem::take(&mut self.round);
        // What a panic leaves behind is scratch and the KV of this round's requests, both dropped.
        let outcome = match catch_unwind(AssertUnwindSafe(|| self.round(&mut round))) {
            Ok(outcome) => outcome.map_err(|error| Failure::Round(error.to_string())),
            Err(panic) => Err(Failure::Round(panic_text(&panic))),
        };
        if let Err(failure) = outcome {
            self.fail_round(failure);
        }
        self.stats.rounds.fetch_add(1, Relaxed);
        self.round = round;
        self.count();
        if self.round.only_decodes() {
            self.times.whole = began.elapsed();
            self.stats.add_times(&self.times);
        }
        if let Some(line) = self.report.line(Instant::now(), &self.stats.snapshot()) {
            tracing::info!("{line}");
        }
        true
    }

    fn round(&mut self, round: &mut RoundPlan) -> Result<()> {
        let trees = self.draft()?;
        let room = Room {
            prefill_rows: self.config.chunked_prefill_size,
            outputs: self.config.max_outputs(),
        };
        round.fill(&self.running, trees, room);
        let (chosen, weighed) = round.asks(&self.running);
        let (choices, weights) = timed(&mut self.times.verify, || -> Result<_> {
            self.runner.run(&round.forward)?;
            Ok((self.runner.choose(&chosen)?, self.runner.weigh(&weighed)?))
        })?;
        self.hand_out(round, choices, weights)
    }

    /// Fails every request that runs: what a failed round left of their KV is not to be trusted.
    fn fail_round(&mut self, failure: Failure) {
        tracing::error!(%failure, requests = self.running.len(), "a round failed");
        self.stats.failed_rounds.fetch_add(1, Relaxed);
        for request in std::mem::take(&mut self.running) {
            let seat = request.discard(&mut self.cache);
            self.finish(seat, FinishReason::Abort(failure.to_string()));
        }
    }

    /// The trees of the requests that decode, in the order of all that run.
    fn draft(&mut self) -> Result<Vec<Option<Tree>>> {
        let drafts = |r: &Running| r.phase == Phase::Decoding && r.seed.is_some();
        let declared = self.runner.declaration().map_or(&[][..], |d| &d.groups);
        let groups: Vec<Vec<GroupRows>> = self
            .running
            .iter()
            .filter(|request| drafts(request))
            .map(|Running { seat, sequence, .. }| {
                let rows = |(&group, draft): (_, &DraftGroup)| {
                    let certain = sequence.committed(group);
                    let end = certain + draft.tree.of(seat.next_shape());
                    let mut slots = Vec::new();
                    sequence.extend_slots(group, 0..end, &mut slots);
                    GroupRows { rows: 0..certain, slots }
                };
                seat.draft_groups().iter().zip(declared).map(rows).collect()
            })
            .collect();
        let requests: Vec<Drafting<'_>> = self
            .running
            .iter()
            .filter(|request| drafts(request))
            .zip(&groups)
            .filter_map(|(Running { seat, seed, .. }, groups)| {
                Some(Drafting {
                    request: seat.id.0,
                    tokens: &seat.tokens,
                    shape: seat.next_shape(),
                    seed: seed.as_ref()?,
                    groups,
                    asking: seat.draft_asking(),
                })
            })
            .collect();
        let trees = timed(&mut self.times.draft, || self.runner.draft(&requests))?;
        let mut trees = trees.into_iter();
        Ok(self.running.iter().map(|r| if drafts(r) { trees.next() } else { None }).collect())
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

    /// Reserves the slots of the next round of every request that decodes; the youngest go where
    /// they do not suffice.
    fn make_room(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let request = &mut self.running[index];
            let fits = request.phase != Phase::Decoding || {
                // A draft's tree is gone before its rows of the accepted tokens are made.
                let shape = request.seat.next_shape();
                let declared = self.runner.declaration().map_or(&[][..], |d| &d.groups);
                let draft = declared.iter().map(|d| d.tree.of(shape).max(shape.steps() + 1));
                #[cfg(feature = "known-bugs")]
                let draft = draft.map(|rows| spoil_footprint(rows, shape, self.config.page_size));
                let rows = std::iter::once(shape.nodes()).chain(draft);
                let mut groups = request.seat.groups().iter().zip(rows);
                groups.all(|(&g, rows)| self.cache.reserve(&mut request.sequence, g, rows).is_ok())
            };
            if fits {
                index += 1;
            } else {
                self.retract_youngest();
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
        self.runner.leave(id.0, &youngest.seat.tokens);
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

    fn hand_out(
        &mut self,
        round: &RoundPlan,
        choices: Vec<Choice>,
        weights: Vec<Weights>,
    ) -> Result<()> {
        let mut choices = choices.into_iter();
        let mut weights = weights.into_iter();
        let mut first_output = 0;
        let mut kept = Kept::default();
        let mut ended = Vec::new();
        let began = Instant::now();
        for part in &round.parts {
            let outputs = part.outputs();
            #[cfg(feature = "known-bugs")]
            let outputs = match part.work {
                Work::Verify { .. } if Bug::ChoiceStride.alive() => self.config.shape.nodes(),
                _ => outputs,
            };
            let reason = match &part.work {
                Work::Prefill { rows, outputs } => {
                    let choices = choices.by_ref().take(outputs.len()).collect();
                    self.settle_chunk(part, rows.clone(), outputs.clone(), choices)
                }
                Work::Verify { tree } => {
                    let seat = &self.running[part.index].seat;
                    let (accepted, tokens) = if part.is_weighed(seat) {
                        let weights: Vec<Weights> = weights.by_ref().take(outputs).collect();
                        self.accept_weighed(seat, tree, &weights, first_output)?
                    } else {
                        let choices: Vec<Choice> = choices.by_ref().take(outputs).collect();
                        self.accept_chosen(seat, tree, choices)
                    };
                    self.settle_tree(part, tree, &accepted, &tokens, &mut kept)
                }
            };
            first_output += outputs;
            ended.push(reason);
        }
        self.times.accept += began.elapsed();
        timed(&mut self.times.commit, || self.runner.commit(&kept))?;
        self.extend(round, &ended)?;
        for (part, reason) in round.parts.iter().zip(ended).rev() {
            if let Some(reason) = reason {
                let seat = self.running.remove(part.index).release(&mut self.cache);
                self.finish(seat, reason);
            }
        }
        Ok(())
    }

    /// Commits the rows of a chunk; at the end of a fresh prompt, the first token is chosen.
    fn settle_chunk(
        &mut self,
        part: &Part,
        rows: Range<usize>,
        outputs: Range<usize>,
        choices: Vec<Choice>,
    ) -> Option<FinishReason> {
        let Running { seat, sequence, phase, .. } = &mut self.running[part.index];
        self.cache.commit(sequence, TARGET, rows.len());
        self.stats.prompt_tokens.fetch_add(rows.len() as u64, Relaxed);
        let mut chosen = Vec::new();
        for (at, choice) in outputs.zip(choices) {
            let known = at + 1 < seat.tokens.len();
            if known { &mut seat.prompt_tokens } else { &mut chosen }.push(token_of(choice));
        }
        if *phase != (Phase::Prefilling { goal: rows.end }) {
            return None;
        }
        *phase = Phase::Decoding;
        if seat.is_fresh() && seat.request.prompt_logprobs.is_some() {
            let first = Token { id: seat.tokens[0], logprob: None, top: Vec::new() };
            let mut tokens = std::mem::take(&mut seat.prompt_tokens);
            tokens.insert(0, first);
            seat.request.listener.prompt(tokens);
        }
        if chosen.is_empty() {
            // A resumed request has its bonus; one that wanted no answer is done.
            return (seat.remaining() == 0).then_some(FinishReason::Length);
        }
        let (kept, reason) = take_tokens(seat, &chosen);
        self.stats.completion_tokens.fetch_add(kept as u64, Relaxed);
        reason
    }

    /// What of a tree is the target's own choice.
    fn accept_chosen(
        &self,
        seat: &Seat,
        tree: &Tree,
        choices: Vec<Choice>,
    ) -> (Accepted, Vec<Token>) {
        let chosen: Vec<u32> = choices.iter().map(|choice| choice.token).collect();
        let accepted = match &self.config.simulate {
            Some(simulate) => simulate.accept(tree, &chosen, seat.id.0, seat.usage.spec.verify_ct),
            None => accept(tree, &chosen),
        };
        let mut choices: Vec<Option<Choice>> = choices.into_iter().map(Some).collect();
        let tokens: Vec<Token> = accepted
            .path
            .iter()
            .zip(&accepted.tokens)
            .filter_map(|(&node, &id)| Some(Token { id, ..token_of(choices[node].take()?) }))
            .collect();
        (accepted, tokens)
    }

    /// What of a tree is accepted by the target's distribution at each node.
    fn accept_weighed(
        &self,
        seat: &Seat,
        tree: &Tree,
        weights: &[Weights],
        first_output: usize,
    ) -> Result<(Accepted, Vec<Token>)> {
        let Asking { sampling, choice, tokens, .. } = seat.asking();
        let coins = Coins { seed: sampling.seed, choice, position: tokens as u32 };
        let accepted = seat.room.verify.accept(tree, weights, coins);
        let token = |&id: &u32| Token { id, logprob: None, top: Vec::new() };
        let mut tokens: Vec<Token> = accepted.tokens.iter().map(token).collect();
        if let Some(top) = seat.request.logprobs {
            let given = |(&node, &token): (&usize, &u32)| Ask {
                given: Some(token),
                top_logprobs: Some(top),
                ..seat.asking().after(&[], first_output + node)
            };
            let asks: Vec<Ask<'_>> =
                accepted.path.iter().zip(&accepted.tokens).map(given).collect();
            tokens = self.runner.choose(&asks)?.into_iter().map(token_of).collect();
        }
        Ok((accepted, tokens))
    }

    /// Hands out what is accepted of a tree and commits the rows of what is kept.
    fn settle_tree(
        &mut self,
        part: &Part,
        tree: &Tree,
        accepted: &Accepted,
        tokens: &[Token],
        kept: &mut Kept,
    ) -> Option<FinishReason> {
        let Running { seat, sequence, .. } = &mut self.running[part.index];
        let (count, reason) = take_tokens(seat, tokens);
        if seat.drafts() {
            let correct = count.min(accepted.correct());
            seat.usage.spec.round(tree.len() - 1, correct);
            self.report.drafted.round(tree.len() - 1, correct);
        }
        self.stats.completion_tokens.fetch_add(count as u64, Relaxed);
        let committed = sequence.committed(TARGET);
        let mut slots = Vec::with_capacity(tree.len());
        sequence.extend_slots(TARGET, committed..committed + tree.len(), &mut slots);
        kept.path(&accepted.path[..count], &slots, part.first_row);
        self.cache.commit(sequence, TARGET, count);
        reason
    }

    /// Lets the draft catch up with what is certain, offers what is complete to the prefix cache.
    fn extend(&mut self, round: &RoundPlan, ended: &[Option<FinishReason>]) -> Result<()> {
        let goes_on = |(part, reason): (_, &Option<_>)| reason.is_none().then_some(part);
        let parts: Vec<&Part> = round.parts.iter().zip(ended).filter_map(goes_on).collect();
        self.extend_draft(&parts)?;
        for part in parts {
            let Running { seat, sequence, phase, .. } = &mut self.running[part.index];
            let read = matches!(part.work, Work::Prefill { .. }) && *phase == Phase::Decoding;
            if read {
                self.cache.publish(sequence, &seat.tokens);
            }
        }
        Ok(())
    }

    fn extend_draft(&mut self, parts: &[&Part]) -> Result<()> {
        let Some(declaration) = self.runner.declaration() else { return Ok(()) };
        let parts: Vec<&Part> =
            parts.iter().copied().filter(|p| self.running[p.index].seat.drafts()).collect();
        let groups: Vec<Vec<GroupRows>> = parts
            .iter()
            .map(|part| {
                let Running { seat, sequence, phase, .. } = &self.running[part.index];
                let rows = |(&group, draft): (_, &DraftGroup)| {
                    let certain = seat.tokens.len().saturating_sub(draft.lookahead);
                    let end = match phase {
                        Phase::Decoding => certain,
                        Phase::Prefilling { .. } => certain.min(sequence.committed(TARGET)),
                    };
                    let mut slots = Vec::new();
                    sequence.extend_slots(group, 0..end, &mut slots);
                    GroupRows { rows: sequence.committed(group)..end, slots }
                };
                seat.draft_groups().iter().zip(&declaration.groups).map(rows).collect()
            })
            .collect();
        let requests: Vec<Extending<'_>> = parts
            .iter()
            .zip(&groups)
            .map(|(part, groups)| {
                let Running { seat, phase, seed, extended, .. } = &self.running[part.index];
                let shape = seat.next_shape();
                let begins = *phase == Phase::Decoding && shape.steps() > 0;
                Extending {
                    request: seat.id.0,
                    tokens: &seat.tokens,
                    since: *extended,
                    groups,
                    target: TargetRows { row: part.first_row, token: part.first_token },
                    previous: seed.as_ref(),
                    seed: begins.then(|| (seat.draft_asking(), shape.topk())),
                }
            })
            .collect();
        let seeds = timed(&mut self.times.extend, || self.runner.extend(&requests))?;
        for ((part, groups), seed) in parts.iter().zip(groups).zip(seeds) {
            let Running { seat, sequence, seed: next, extended, .. } =
                &mut self.running[part.index];
            for (&group, rows) in seat.draft_groups().iter().zip(groups) {
                self.cache.commit(sequence, group, rows.rows.len());
            }
            *extended = seat.tokens.len();
            *next = seed;
        }
        Ok(())
    }

    fn finish(&mut self, seat: Box<Seat>, reason: FinishReason) {
        self.stats.finished.fetch_add(1, Relaxed);
        self.runner.leave(seat.id.0, &seat.tokens);
        let Seat { id, usage, request, .. } = *seat;
        self.stats.add_speculation(&usage.spec);
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

/// Gives tokens to a request until something ends it: how many it took, and what ended it.
fn take_tokens(seat: &mut Seat, tokens: &[Token]) -> (usize, Option<FinishReason>) {
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
        Ok(Verdict::Continue) => (taken, reason),
        Ok(Verdict::Stop { kept }) => {
            let kept = kept.min(taken);
            seat.tokens.truncate(seat.tokens.len() - (taken - kept));
            seat.usage.completion_tokens -= taken - kept;
            (kept, Some(FinishReason::Stop(StopCause::Listener)))
        }
        Ok(Verdict::Abort(why)) => (taken, Some(FinishReason::Abort(why))),
        Err(panic) => (taken, Some(FinishReason::Abort(panic_text(&panic)))),
    }
}

fn token_of(choice: Choice) -> Token {
    Token { id: choice.token, logprob: choice.logprob, top: choice.top }
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
