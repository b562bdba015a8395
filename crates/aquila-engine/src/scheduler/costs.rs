//! What rounds cost on this machine, timed with real requests before anything is served.
//!
//! Rounds of a fixed shape are run for requests that share a prompt, so that only the first reads
//! it where there is a prefix cache; trees that come out smaller are filled up. The one invariant:
//! nothing of it stays, neither requests nor cached prefixes, counters or what a draft learned.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquila_spec::policy::{CostTable, Fixed, Policy, Timed, Timing};

use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::listener::{Listener, Outcome, Token, Verdict};
use crate::request::{Request, RequestId};
use crate::scheduler::Scheduler;
use crate::scheduler::report::{REPORT_EVERY, Report};
use crate::scheduler::request_state::Running;
use crate::stats::Stats;
use crate::times::Times;

/// How often each thing is timed; the least counts, since whatever else a machine does only adds.
const TIMES: usize = 5;
/// Tokens of the prompts, if there is room: every row attends to what is before it.
const PROMPT: usize = 64;

impl Scheduler {
    /// Times what rounds cost, for about as long as `limit`, but those of one request at least
    /// once: what there was no time or room for is estimated from what was timed.
    /// `key` says what the table is for. None where the engine has no room for a round.
    ///
    /// # Errors
    /// If a round fails, or if rounds overlap or requests are there already.
    pub fn measure_costs(&mut self, key: String, limit: Duration) -> Result<Option<CostTable>> {
        if !self.is_idle() || self.overlaps() {
            return Err(Error::Costs("costs are measured before anything is served"));
        }
        if self.prompt(1) == 0 {
            return Ok(None);
        }
        let (shape, running) = (self.config.shape, self.config.max_running_requests);
        let batches = [1, 8, 32, 128].into_iter().filter(|&batch| batch < running);
        let batches: Vec<usize> = batches.chain([running]).collect();
        let policy = std::mem::replace(&mut self.drafting, Box::new(Fixed::new(shape)));
        self.fill_trees = true;
        let deadline = Instant::now() + limit;
        // The first rounds of all touch memory for the first time.
        let first = self.time(Timing::DraftRow, deadline);
        let table = first.and_then(|first| {
            CostTable::measure(key, &batches, shape.steps().max(1), |timing| {
                let mut timed = self.time(timing, deadline)?;
                if let (Timing::DraftRow, Some(timed), Some(first)) = (timing, &mut timed, first) {
                    timed.draft = timed.draft.min(first.draft);
                }
                Ok(timed)
            })
        });
        self.fill_trees = false;
        self.forget(policy);
        table.map(Some)
    }

    /// Times one thing; nothing where there is no room for it, or no time and no need.
    fn time(&mut self, timing: Timing, deadline: Instant) -> Result<Option<Timed>> {
        let (batch, steps) = match timing {
            Timing::Round { batch, steps } => (batch, steps),
            Timing::DraftRow => (1, self.config.shape.steps()),
        };
        let in_time = || Instant::now() < deadline;
        let prompt = self.prompt(batch);
        if prompt == 0 || (batch > 1 && !in_time()) {
            return Ok(None);
        }
        let shape = self.config.shape.capped(steps);
        self.drafting = Box::new(Fixed::new(shape));
        for request in 0..batch {
            // All but the last token of the prompts are the same.
            let token = |at: usize| ((at * 37 + 5) % self.vocabulary()) as u32;
            let mut tokens: Vec<u32> = (0..prompt).map(token).collect();
            tokens[prompt - 1] = (request % self.vocabulary()) as u32;
            let id = RequestId(self.next_id);
            self.next_id += 1;
            self.enqueue(id, Request::new(tokens, usize::MAX, Box::new(Ignored)));
        }
        let failed = self.stats.snapshot().failed_rounds;
        let mut read = 0.0_f64;
        while !self.is_idle()
            && (self.waiting() > 0 || self.running.iter().any(Running::is_reading))
        {
            self.step();
            read += self.last_times.extend.as_secs_f64();
        }
        let rows = batch * shape.nodes();
        let mut timed = Timed { rows, verify: f64::INFINITY, draft: f64::INFINITY };
        for _ in 0..TIMES {
            self.step();
            let Times { draft, verify, extend, .. } = self.last_times;
            timed.verify = timed.verify.min(verify.as_secs_f64());
            timed.draft = timed.draft.min((draft + extend).as_secs_f64());
            if timing == Timing::DraftRow || !in_time() {
                break;
            }
        }
        if timing == Timing::DraftRow {
            timed.draft = read / prompt as f64;
        }
        self.abort_all("the measurement is over");
        while !self.is_idle() {
            self.step();
        }
        if timing == Timing::DraftRow {
            // Nothing of the prompt is to be found the next time.
            self.cache.flush();
        }
        if self.stats.snapshot().failed_rounds > failed {
            return Err(Error::Costs("a round that was to be timed failed"));
        }
        Ok(Some(timed))
    }

    /// Tokens of the prompts of so many requests that leave room for the rounds that are timed; 0
    /// where there is no room.
    fn prompt(&self, batch: usize) -> usize {
        let EngineConfig { shape, page_size, .. } = self.config;
        let tree = shape.nodes().max(shape.draft_rows());
        let rounds = (TIMES + 1) * (shape.steps() + 1) + tree + 1;
        let slots = self.config.slots() / batch / page_size * page_size;
        let room = slots.min(self.config.longest_sequence()).saturating_sub(rounds);
        // Without a prefix cache every request reads all of its prompt.
        let wanted = if self.config.prefix_cache { PROMPT } else { (PROMPT / batch).max(1) };
        room.min(wanted)
    }

    /// Begins anew with this policy.
    fn forget(&mut self, policy: Box<dyn Policy>) {
        self.drafting = policy;
        self.cache.flush();
        if let Some(compute) = self.executor.inline_mut() {
            compute.begin_anew();
        }
        self.next_id = 0;
        let stats = Stats::default();
        stats.total_slots.store(self.stats.total_slots.load(Relaxed), Relaxed);
        self.stats = Arc::new(stats);
        self.report = Report::new(REPORT_EVERY);
    }
}

/// Takes tokens and forgets them.
struct Ignored;

impl Listener for Ignored {
    fn tokens(&mut self, _tokens: &[Token]) -> Verdict {
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        if let Some(why) = outcome.reason.failure() {
            tracing::trace!("a request of a measurement ended: {why}");
        }
    }
}
