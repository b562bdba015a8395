//! Rounds of requests without a client, before anything is served: `costs.rs` times them, and here
//! they have the executor capture its graphs.
//!
//! The one invariant: nothing of it stays, neither requests nor cached prefixes, counters or what a
//! draft learned.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use aquila_spec::Shape;
use aquila_spec::policy::{Decision, Fixed, Policy, PolicyState, RoundOutcome, RoundView};

use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::executor::CapturedPart;
use crate::listener::{Listener, Outcome, Token, Verdict};
use crate::request::{Request, RequestId};
use crate::scheduler::Scheduler;
use crate::scheduler::report::{REPORT_EVERY, Report};
use crate::scheduler::request_state::Running;
use crate::stats::Stats;

/// Tokens of the prompts, if there is room: every row attends to what is before it.
const PROMPT: usize = 64;
/// Rounds that a part needs to be captured: it is launched once, captured, and replayed.
const ROUNDS: usize = 3;

impl Scheduler {
    /// Runs rounds of each of `batches`, with the trees that the policy may choose for it, so that
    /// the executor captures them; answers the batches that something was captured for, ascending, and
    /// all that is captured. `progress` hears how many of the batches are done.
    ///
    /// # Errors
    /// If a round fails, or if rounds overlap or requests are there already.
    pub fn capture_graphs(
        &mut self,
        batches: &[usize],
        progress: &mut dyn FnMut(usize),
    ) -> Result<(Vec<usize>, Vec<CapturedPart>)> {
        if !self.is_idle() || self.overlaps() {
            return Err(Error::WarmUp("graphs are captured before anything is served"));
        }
        let drafting = self.stats.drafting();
        let unused = Box::new(Fixed::new(Shape::PLAIN));
        let policy = std::mem::replace(&mut self.drafting, unused);
        let mut outcome = Ok(());
        let (mut found, mut captured) = (Vec::new(), self.captured());
        // The largest first, so that the memory of passes is made once.
        for (done, &batch) in batches.iter().rev().enumerate() {
            for shape in policy.shapes_of(batch) {
                let bounds_rows = policy.costs().is_some();
                outcome =
                    outcome.and_then(|()| self.rehearse(batch, WarmUp { shape, bounds_rows }));
            }
            let before = std::mem::replace(&mut captured, self.captured()).len();
            if captured.len() > before {
                found.insert(0, batch);
            }
            progress(done + 1);
        }
        self.forget(policy);
        self.stats.change_drafting(|now| *now = drafting);
        outcome.map(|()| (found, captured))
    }

    /// What the executor has captured so far; nothing where rounds overlap.
    pub fn captured(&mut self) -> Vec<CapturedPart> {
        self.executor.inline_mut().map(|executor| executor.captured()).unwrap_or_default()
    }

    /// Runs a few rounds of `batch` requests; none where there is no room for them.
    fn rehearse(&mut self, batch: usize, policy: WarmUp) -> Result<()> {
        let prompt = self.prompt(batch, ROUNDS);
        if prompt == 0 {
            return Ok(());
        }
        self.drafting = Box::new(policy);
        let failed = self.stats.snapshot().failed_rounds;
        let cause = self.begin_unheard(batch, prompt, |_| {});
        for _ in 0..ROUNDS {
            self.step();
        }
        self.end_unheard(failed, &cause)
    }

    /// Admits `batch` requests that share a prompt of `prompt` tokens, all but its last one, and
    /// runs rounds until all of them decode, each of which `ran` hears. Answers why one of them ends.
    pub(super) fn begin_unheard(
        &mut self,
        batch: usize,
        prompt: usize,
        mut ran: impl FnMut(&Self),
    ) -> Cause {
        let cause = Cause::default();
        for request in 0..batch {
            let token = |at: usize| ((at * 37 + 5) % self.vocabulary()) as u32;
            let mut tokens: Vec<u32> = (0..prompt).map(token).collect();
            tokens[prompt - 1] = (request % self.vocabulary()) as u32;
            let id = RequestId(self.next_id);
            self.next_id += 1;
            self.enqueue(id, Request::new(tokens, usize::MAX, Box::new(Ignored(cause.clone()))));
        }
        while !self.is_idle()
            && (self.waiting() > 0 || self.running.iter().any(Running::is_reading))
        {
            self.step();
            ran(self);
        }
        cause
    }

    /// Ends all requests; `failed` is how many rounds had failed before they came, `cause` why the
    /// first of them has ended before.
    pub(super) fn end_unheard(&mut self, failed: u64, cause: &Cause) -> Result<()> {
        self.abort_all("the warm-up is over");
        while !self.is_idle() {
            self.step();
        }
        if let Some(failure) = self.failure() {
            return Err(failure.clone().into());
        }
        match self.stats.snapshot().failed_rounds > failed {
            true => Err(Error::WarmUpRound(cause.get().cloned().unwrap_or_default())),
            false => Ok(()),
        }
    }

    /// Tokens of the prompts of so many requests that leave room for `rounds` rounds; 0 where there
    /// is no room.
    pub(super) fn prompt(&self, batch: usize, rounds: usize) -> usize {
        let EngineConfig { shape, page_size, .. } = self.config;
        let tree = shape.nodes().max(shape.draft_rows());
        let rounds = (rounds + 1) * (shape.steps() + 1) + tree + 1;
        let slots = self.config.slots() / batch / page_size * page_size;
        let room = slots.min(self.config.longest_sequence()).saturating_sub(rounds);
        // Without a prefix cache every request reads all of its prompt.
        let wanted = if self.config.prefix_cache { PROMPT } else { (PROMPT / batch).max(1) };
        room.min(wanted)
    }

    /// Begins anew with this policy.
    pub(super) fn forget(&mut self, policy: Box<dyn Policy>) {
        self.drafting = policy;
        self.cache.flush();
        if let Some(compute) = self.executor.inline_mut() {
            compute.begin_anew();
        }
        self.next_id = 0;
        let stats = Stats::default();
        stats.total_slots.store(self.stats.total_slots.load(Relaxed), Relaxed);
        self.stats = Arc::new(stats);
        self.outputs.count_in(self.stats.clone());
        self.report = Report::new(REPORT_EVERY);
    }
}

/// One shape for every round, bounded in rows where the policy that follows bounds them.
struct WarmUp {
    shape: Shape,
    bounds_rows: bool,
}

impl Policy for WarmUp {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let mut decision = Fixed::new(self.shape).choose(round);
        if self.bounds_rows && self.shape.steps() > 0 {
            decision.rows = Some(decision.most_rows());
            decision.weights = vec![1.0; round.requests.len()];
        }
        decision
    }

    fn learn(&mut self, _outcome: &RoundOutcome<'_>) {}

    fn shapes(&self) -> Vec<Shape> {
        vec![self.shape]
    }

    fn state(&self) -> PolicyState {
        PolicyState::default()
    }
}

/// Why the first of some requests has ended, once one has.
pub(super) type Cause = Arc<OnceLock<String>>;

/// Takes tokens and forgets them.
struct Ignored(Cause);

impl Listener for Ignored {
    fn tokens(&mut self, _tokens: &[Token]) -> Verdict {
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        if let Some(why) = outcome.reason.failure() {
            self.0.get_or_init(|| why.into());
        }
    }
}
