//! The scheduler: takes requests, plans rounds, sends them to the executor and settles what comes
//! back.
//!
//! A step plans a round and sends it to the executor, then settles what came of an earlier one:
//! that very round without overlap, the one before it with overlap. What
//! is planned is in `plan.rs`, what is settled in `settle.rs`.

mod costs;
mod failed;
mod hand_over;
mod output_processor;
mod params;
mod plan;
mod preempt;
mod priority;
mod queue;
mod receive;
mod report;
mod request_state;
mod settle;
mod warm_up;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquila_compute::Backend;
use aquila_compute::round::DraftLimits;
use aquila_kv::{CacheConfig, Group, GroupConfig, KvCache};
use aquila_spec::policy::{Fixed, Policy, PromptRows};
use aquila_spec::{HiddenStates, MOST_DRAFT_GROUPS, Shape, Verify};

use aquila_spec::known_bugs::Bug;

use crate::config::{ConfigError, EngineConfig};
use crate::error::{Error, Result, SubmitError};
use crate::executor::{
    Departed, Executor, ExecutorHandle, ModelExecutor, Profile, RowWidths, Runner,
};
use crate::failure::FailureCell;
use crate::listener::{FinishReason, Outcome, Token};
use crate::request::{Request, RequestId};
use crate::scheduler::output_processor::{Last, OutputProcessor};
use crate::scheduler::plan::Planning;
use crate::scheduler::receive::Receiving;
use crate::scheduler::report::{REPORT_EVERY, Report};
use crate::scheduler::request_state::{RequestState, Running, TARGET, Waiting};
use crate::scheduler::settle::InFlightBatch;
use crate::stats::{DraftingState, Stats};
use crate::times::Times;
pub use priority::Priorities;
pub use queue::AdmissionOrder;
use queue::Queue;

/// Requests into rounds, on the caller's thread; rounds are run by what computes.
pub struct Scheduler {
    pub(crate) config: EngineConfig,
    pub(crate) profile: Profile,
    pub(crate) executor: ExecutorHandle,
    pub(crate) outputs: OutputProcessor,
    pub(crate) cache: KvCache,
    pub(crate) waiting: Queue,
    pub(crate) admission_order: AdmissionOrder,
    pub(crate) priorities: Priorities,
    /// How large the trees of each round are.
    pub(crate) drafting: Box<dyn Policy>,
    pub(crate) running: Vec<Running>,
    /// Requests whose prompt is processed by another engine, and which have slots.
    pub(crate) receiving: Vec<Receiving>,
    /// The rounds on their way, oldest first.
    pub(crate) in_flight: VecDeque<InFlightBatch>,
    /// Requests that departed since the last batch.
    pub(crate) departed: Vec<Departed>,
    pub(crate) batches: u64,
    pub(crate) epoch: u64,
    pub(crate) next_id: u64,
    pub(crate) stats: Arc<Stats>,
    /// Why nothing is served any more, if so.
    pub(crate) failure: Arc<FailureCell>,
    /// Whether the last step found nothing to do.
    stalled: bool,
    /// Whether trees are filled up to their shape.
    pub(crate) fill_trees: bool,
    /// How long the steps of the last settled round took.
    pub(crate) last_times: Times,
    pub(crate) settled: Instant,
    pub(crate) report: Report,
}

impl Scheduler {
    /// A scheduler over `runner`, which was made with the same settings. Nothing overlaps.
    pub fn new<B: Backend>(runner: Runner<B>, config: EngineConfig) -> Result<Self> {
        Self::over(ModelExecutor::new(runner, config.clone()), config)
    }

    /// A scheduler whose rounds are run by `compute`, on the same thread.
    pub fn over(compute: impl Executor, config: EngineConfig) -> Result<Self> {
        config.check()?;
        let profile = compute.profile();
        let group = |name: &str, lookahead| GroupConfig {
            name: name.into(),
            pages: config.pages(),
            lookahead,
        };
        let mut groups = vec![group("target", 0)];
        if let Some(declaration) = &profile.declaration {
            if declaration.groups.len() > MOST_DRAFT_GROUPS {
                return Err(Error::DraftGroups(declaration.name, declaration.groups.len()));
            }
            let draft = declaration.groups.iter().enumerate();
            groups.extend(draft.map(|(at, d)| group(&format!("draft {at}"), d.lookahead)));
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
        let drafting = Box::new(Fixed::new(config.shape));
        Ok(Self {
            config,
            profile,
            executor: ExecutorHandle::inline(Box::new(compute)),
            outputs: OutputProcessor::inline(stats.clone()),
            cache,
            waiting: Queue::default(),
            admission_order: AdmissionOrder::default(),
            priorities: Priorities::default(),
            drafting,
            running: Vec::new(),
            receiving: Vec::new(),
            stalled: false,
            in_flight: VecDeque::new(),
            departed: Vec::new(),
            batches: 0,
            epoch: 0,
            next_id: 0,
            stats,
            failure: Arc::default(),
            fill_trees: false,
            last_times: Times::default(),
            settled: Instant::now(),
            report: Report::new(REPORT_EVERY),
        })
    }

    /// Puts the executor on a thread of its own: a round is then planned while the one before
    /// it runs. Nothing else changes.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn overlapped(mut self) -> std::io::Result<Self> {
        self.executor = self.executor.overlapped()?;
        Ok(self)
    }

    /// Puts the listeners of all requests on one thread of their own: a round is then planned and
    /// run while they hear the tokens of the one before it. Nothing else changes, but for a round
    /// of a request that runs after its listener has ended it, which is void.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn with_output_thread(mut self) -> std::io::Result<Self> {
        self.outputs = self.outputs.on_a_thread()?;
        Ok(self)
    }

    /// Waits until listeners have heard all that was handed to them.
    pub fn wait_for_listeners(&mut self) {
        let mut replies = self.outputs.replies();
        replies.extend(self.outputs.round_ends());
        replies.extend(self.outputs.replies());
        self.follow_listeners(replies);
    }

    /// Whether rounds overlap.
    pub fn overlaps(&self) -> bool {
        self.executor.ahead() > 0
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
        self.profile.vocabulary
    }

    /// Whether requests may have grammars.
    pub fn follows_grammars(&self) -> bool {
        self.profile.grammars
    }

    /// How wide the rows are that requests may get.
    pub fn row_widths(&self) -> RowWidths {
        self.profile.row_widths
    }

    /// The name of the algorithm that drafts, if one does.
    pub fn algorithm(&self) -> Option<&'static str> {
        self.profile.declaration.as_ref().map(|declaration| declaration.name)
    }

    /// Takes a request, or says why not.
    pub fn submit(&mut self, request: Request) -> std::result::Result<RequestId, SubmitError> {
        request.check(&self.profile, &self.config, self.priorities)?;
        if let Some(failure) = self.failure() {
            return Err(failure.clone().into());
        }
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
        let rank = self.priorities.rank(request.priority);
        let longest = self.config.longest_sequence();
        let (state, listener) = RequestState::new(id, request, rank, longest, self.draft_limits());
        self.outputs.open(id, listener);
        let mut state = Box::new(state);
        if let Some(failure) = self.failure() {
            let why = failure.to_string();
            return self.finish(state, FinishReason::Abort(why));
        }
        let stays = state.handing_over.is_none() && state.source.is_none();
        if state.speculates && stays && !self.draft_reads_prompt(&state) {
            state.decode_plainly();
        }
        self.waiting.put(Waiting { state });
        self.count();
    }

    /// Whether the policy lets the draft of a request process its prompt.
    fn draft_reads_prompt(&mut self, state: &RequestState) -> bool {
        let there = self.running.len() + self.waiting.len() + 1;
        let batch = there.min(self.config.max_running_requests);
        let cached = |groups: &[Group]| {
            self.cache.peek(&state.namespace, &state.tokens, state.match_limit(), groups)
        };
        let both = cached(state.groups());
        let target = cached(&[TARGET]).saturating_sub(both);
        self.drafting.reads_prompt(batch, PromptRows { draft: state.tokens.len() - both, target })
    }

    pub(crate) fn draft_limits(&self) -> DraftLimits {
        let Some(declaration) = &self.profile.declaration else { return DraftLimits::NONE };
        // Pretended acceptance takes the target's choices.
        let simulated = self.config.simulate.is_some();
        DraftLimits {
            shape: self.config.shape,
            groups: declaration.groups.len(),
            lookahead: declaration.lookahead(),
            candidates: self.config.shape.topk(),
            verify: if simulated { Verify::Match } else { self.config.verify },
        }
    }

    /// Gives a request up; false if there is none of that name. What rounds on their way bring it
    /// is void.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let reason = FinishReason::Abort("aborted".into());
        if let Some(waiting) = self.waiting.take_by_id(id) {
            self.finish(waiting.state, reason);
        } else if let Some(at) = self.running.iter().position(|r| r.state.id() == id) {
            let request = self.running.remove(at);
            self.end(request, reason);
        } else if let Some(at) = self.receiving.iter().position(|r| r.state.id() == id) {
            let state = self.receiving.remove(at).discard(&mut self.cache);
            self.finish(state, reason);
        } else {
            return false;
        }
        self.count();
        true
    }

    /// Gives every request up.
    pub fn abort_all(&mut self, why: &str) {
        for request in self.waiting.take_if(|_| true) {
            self.finish(request.state, FinishReason::Abort(why.into()));
        }
        for receiving in std::mem::take(&mut self.receiving) {
            let state = receiving.discard(&mut self.cache);
            self.finish(state, FinishReason::Abort(why.into()));
        }
        for request in std::mem::take(&mut self.running) {
            self.end(request, FinishReason::Abort(why.into()));
        }
        self.count();
    }

    /// Drops every cached prefix that no request uses; answers how many pages that were.
    pub fn flush_cache(&mut self) -> usize {
        self.cache.flush()
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nothing waits, nothing runs, and the executor knows of no request.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
            && self.receiving.is_empty()
            && self.waiting.len() == 0
            && self.in_flight.is_empty()
            && self.departed.is_empty()
    }

    /// In which order requests are admitted, from now on.
    pub fn admit_by(&mut self, order: AdmissionOrder) {
        self.admission_order = order;
    }

    /// What becomes of the priorities of requests that are submitted from now on.
    pub fn prioritize(&mut self, priorities: Priorities) {
        self.priorities = priorities;
    }

    /// What becomes of priorities.
    pub fn priorities(&self) -> Priorities {
        self.priorities
    }

    /// Which policy decides how large the trees of each round are, from now on.
    ///
    /// # Errors
    /// If it may choose a tree that the engine has no room for.
    pub fn draft_by(&mut self, policy: Box<dyn Policy>) -> Result<()> {
        let shapes = policy.shapes();
        let all = Shape::covering(shapes.into_iter().chain([self.config.shape]));
        if all != self.config.shape {
            return Err(ConfigError::Trees { chosen: all, room: self.config.shape }.into());
        }
        let costs = policy.costs().cloned().map(Arc::new);
        let state = policy.state();
        self.stats.change_drafting(|drafting| {
            *drafting = DraftingState { policy: state, costs, ..DraftingState::default() };
        });
        self.drafting = policy;
        Ok(())
    }

    /// How many rounds a draft may miss and still return.
    pub(crate) fn most_missed(&self) -> usize {
        match &self.profile.declaration {
            Some(declaration) if declaration.hidden != HiddenStates::None => {
                self.config.parked_rows
            }
            _ => usize::MAX,
        }
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
            if self.running.is_empty() && self.receiving.is_empty() && usage.held != 0 {
                return Err(format!("nothing runs, but {} pages are held", usage.held));
            }
        }
        let running = self.running.iter().map(|request| &request.sequence);
        let receiving = self.receiving.iter().map(|receiving| &receiving.sequence);
        self.cache.check_with(running.chain(receiving))
    }

    /// Plans and sends a round, and settles the one that is due; false if there was no round, as
    /// after a [failure](Scheduler::failure).
    pub fn step(&mut self) -> bool {
        if self.failure().is_some() {
            return false;
        }
        let began = Instant::now();
        if self.running.is_empty() && self.in_flight.is_empty() {
            self.report.begin(began, &self.stats.snapshot());
        }
        self.give_up_expired(began);
        while self.plan() == Planning::NeedsResult {
            self.settle_oldest();
        }
        let batches = self.batches;
        let sent = self.send_round(began);
        let due = self.in_flight.len() > if sent { self.executor.ahead() } else { 0 };
        self.stalled = batches == self.batches && !due;
        let mut ran = sent;
        if due {
            ran |= self.settle_oldest();
        }
        self.count();
        if let Some(line) = self.report.line(Instant::now(), &self.stats.snapshot()) {
            tracing::info!("{line}");
        }
        ran
    }

    /// Whether the last step found nothing to do though there are requests: they wait for other
    /// engines.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    fn give_up_expired(&mut self, now: Instant) {
        let reason = || FinishReason::Abort("deadline exceeded".into());
        for waiting in self.waiting.take_if(|w| w.state.is_expired(now)) {
            self.finish(waiting.state, reason());
        }
        for index in (0..self.receiving.len()).rev() {
            if self.receiving[index].state.is_expired(now) {
                let state = self.receiving.remove(index).discard(&mut self.cache);
                self.finish(state, reason());
            }
        }
        for index in (0..self.running.len()).rev() {
            if self.running[index].state.is_expired(now) {
                let request = self.running.remove(index);
                self.end(request, reason());
            }
        }
    }

    /// Ends a request that holds KV; what it has committed goes to the prefix cache.
    pub(crate) fn end(&mut self, request: Running, reason: FinishReason) {
        self.leave(&request);
        let state = request.release(&mut self.cache);
        self.finish(state, reason);
    }

    /// Notes that the executor is to forget a request, if it knows it.
    pub(crate) fn leave(&mut self, request: &Running) {
        self.departed.extend(request.departed());
    }

    /// The same, with the last tokens of the answer, which its listener has not heard.
    pub(crate) fn end_with(&mut self, request: Running, reason: FinishReason, tokens: Vec<Token>) {
        if tokens.is_empty() {
            return self.end(request, reason);
        }
        self.leave(&request);
        let state = request.release(&mut self.cache);
        self.drafting.leave(state.id().0);
        let (id, drafts) = (state.id(), state.last_round.drafts);
        let RequestState { usage, rows, .. } = *state;
        self.outputs.last(id, Last { tokens, outcome: Outcome { reason, usage, rows }, drafts });
    }

    /// Tells a listener that its request has ended.
    pub(crate) fn finish(&mut self, mut state: Box<RequestState>, reason: FinishReason) {
        let id = state.id();
        self.drafting.leave(id.0);
        if let Some(handing_over) = state.handing_over.take() {
            handing_over.fail(&reason);
        }
        let RequestState { usage, rows, .. } = *state;
        self.outputs.end(id, Outcome { reason, usage, rows });
    }

    pub(crate) fn count(&self) {
        self.stats.waiting.store(self.waiting.len(), Relaxed);
        self.stats.running.store(self.running.len(), Relaxed);
        self.stats.receiving.store(self.receiving.len(), Relaxed);
        let free = self.cache.available(TARGET);
        let total = self.config.pages() * self.config.page_size;
        self.stats.used_slots.store(total - free, Relaxed);
    }
}

/// A seed for a request that has none.
fn derived_seed(random_seed: u64, id: RequestId) -> u64 {
    aquila_compute::sampling::noise::key(random_seed, 0, 0)
        .wrapping_add(aquila_compute::sampling::noise::key(id.0, 0, 1))
}
