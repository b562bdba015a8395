//! What rounds cost on this machine, timed with real requests before anything is served.
//!
//! A verify pass is timed as the prefill of prompts all of whose rows are asked about, as those of
//! a tree are; drafting in rounds of a fixed shape. The one invariant: nothing of it
//! stays, neither requests nor cached prefixes, counters or what a draft learned.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquila_spec::policy::{CostTable, Fixed, Policy, Timing};

use crate::config::EngineConfig;
use crate::engine::Scheduler;
use crate::error::{Error, Result};
use crate::lanes::Compute;
use crate::listener::{FinishReason, Listener, Outcome, Token, Verdict};
use crate::report::{REPORT_EVERY, Report};
use crate::request::{Request, RequestId, Speculation};
use crate::stats::Stats;
use crate::times::Times;

/// How often each thing is timed; the least counts, since whatever else a machine does only adds.
const TIMES: usize = 5;
/// Tokens of the prompts before drafting is timed.
const PROMPT: usize = 4;
/// Rows of the prompt whose processing by the draft is timed.
const DRAFT_ROWS: usize = 256;

impl<C: Compute> Scheduler<C> {
    /// Times what rounds cost, for about as long as `limit`, but those of one request at least once: what there was no time or room for is taken to cost in proportion to what was timed.
    /// `key` says what the table is for. None where the engine has no room for a round.
    ///
    /// # Errors
    /// If a round fails, or if rounds overlap or requests are there already.
    pub fn measure_costs(&mut self, key: String, limit: Duration) -> Result<Option<CostTable>> {
        if !self.is_idle() || self.is_apart() {
            return Err(Error::Config("costs are measured before anything is served".into()));
        }
        let shape = self.config.shape;
        let points = |most: usize, points: &[usize]| -> Vec<usize> {
            points.iter().copied().filter(|&point| point < most).chain([most]).collect()
        };
        let running = self.config.max_running_requests;
        let rows = [1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512];
        let rows = points(running * shape.nodes(), &rows);
        let batches = points(running, &[1, 8, 32]);
        let steps = points(shape.steps().max(1), &[1]);
        if longest_answer(&self.config, 1) <= shape.steps() + 1 {
            return Ok(None);
        }
        let policy = std::mem::replace(&mut self.drafting, Box::new(Fixed::new(shape)));
        let mut clock = Clock { deadline: Instant::now() + limit, timed: Vec::new() };
        // The first pass of all touches memory for the first time.
        let warm = self.time(Timing::Verify { batch: 1, rows: 1 });
        let table = warm.and_then(|_| {
            CostTable::measure(key, &rows, &batches, &steps, |timing| {
                self.least(timing, &mut clock)
            })
        });
        self.forget(policy);
        table.map(Some)
    }

    /// The least of several timings, or, where there is no time or no room, what a smaller batch
    /// took in proportion.
    fn least(&mut self, timing: Timing, clock: &mut Clock) -> Result<f64> {
        let most = self.config.shape.nodes();
        let needed = match timing {
            Timing::Verify { rows, .. } => rows <= most,
            Timing::Draft { batch, .. } => batch == 1,
            Timing::DraftRow => true,
        };
        let mut least: Option<f64> = None;
        for _ in 0..TIMES {
            if (!needed || least.is_some()) && Instant::now() >= clock.deadline {
                break;
            }
            let Some(seconds) = self.time(timing)? else { break };
            least = Some(least.map_or(seconds, |least| least.min(seconds)));
        }
        let seconds = least.unwrap_or_else(|| clock.in_proportion(timing));
        clock.timed.push((timing, seconds));
        Ok(seconds)
    }

    /// Runs one thing; none where the engine has no room for it.
    fn time(&mut self, timing: Timing) -> Result<Option<f64>> {
        let seconds = |time: Duration| time.as_secs_f64();
        match timing {
            Timing::Verify { batch, rows } => {
                let fits = rows <= self.config.chunked_prefill_size
                    && rows + batch <= self.config.slots()
                    && rows / batch < self.config.longest_sequence();
                if !fits {
                    return Ok(None);
                }
                self.enter(batch, rows / batch, 1, Speculation::Off);
                let times = self.rounds(1)?;
                Ok(Some(seconds(times.verify)))
            }
            Timing::Draft { batch, steps } => {
                let answer = longest_answer(&self.config, batch).min(3 * (steps + 1) + 1);
                if answer <= steps + 1 || batch * PROMPT > self.config.chunked_prefill_size {
                    return Ok(None);
                }
                self.drafting = Box::new(Fixed::new(self.config.shape.capped(steps)));
                self.enter(batch, PROMPT, answer, Speculation::Free);
                let times = self.rounds(2)?;
                Ok(Some(seconds(times.draft + times.extend)))
            }
            Timing::DraftRow => {
                let most = self.config.longest_sequence().min(self.config.chunked_prefill_size);
                let rows = DRAFT_ROWS.min(most.saturating_sub(1)).max(1);
                self.enter(1, rows, 1 + self.config.shape.steps(), Speculation::Free);
                let times = self.rounds(1)?;
                Ok(Some(seconds(times.extend) / rows as f64))
            }
        }
    }

    /// Submits requests with prompts of so many tokens.
    fn enter(&mut self, batch: usize, prompt: usize, answer: usize, speculation: Speculation) {
        for request in 0..batch {
            let token = |at: usize| ((at * 37 + request * 101 + 5) % self.vocabulary()) as u32;
            let tokens = (0..prompt).map(token).collect();
            let mut request = Request::new(tokens, answer, Box::new(Ignored));
            request.speculation = speculation;
            // The logits of every row are wanted where a verify pass is timed.
            request.prompt_logprobs = (speculation == Speculation::Off).then_some(0);
            let id = RequestId(self.next_id);
            self.next_id += 1;
            self.enqueue(id, request);
        }
    }

    /// Runs so many rounds and gives all requests up; answers how long the steps of the last took.
    fn rounds(&mut self, rounds: usize) -> Result<Times> {
        let failed = self.stats.snapshot().failed_rounds;
        for _ in 0..rounds {
            self.step();
        }
        let times = self.last_times;
        self.abort_all("the measurement is over");
        while !self.is_idle() {
            self.step();
        }
        self.cache.flush();
        if self.stats.snapshot().failed_rounds > failed {
            return Err(Error::Config("a round that was to be timed failed".into()));
        }
        Ok(times)
    }

    /// Begins anew with this policy.
    fn forget(&mut self, policy: Box<dyn Policy>) {
        self.drafting = policy;
        if let Some(compute) = self.lanes.joined_mut() {
            compute.begin_anew();
        }
        self.next_id = 0;
        let stats = Stats::default();
        stats.total_slots.store(self.stats.total_slots.load(Relaxed), Relaxed);
        self.stats = Arc::new(stats);
        self.report = Report::new(REPORT_EVERY);
    }
}

/// Tokens that the answers of so many requests may have beside each other, with room for their
/// trees.
fn longest_answer(config: &EngineConfig, batch: usize) -> usize {
    let tree = config.shape.nodes().max(config.shape.draft_rows()) + config.shape.steps() + 2;
    let slots = (config.slots() / batch / config.page_size) * config.page_size;
    let sequence = slots.saturating_sub(tree).min(config.longest_sequence());
    sequence.saturating_sub(PROMPT + 1)
}

/// What was timed, and until when there is time for more.
struct Clock {
    deadline: Instant,
    timed: Vec<(Timing, f64)>,
}

impl Clock {
    /// What was timed last of the same kind, times as many rows or requests.
    fn in_proportion(&self, timing: Timing) -> f64 {
        let like = |&(other, seconds): &(Timing, f64)| match (timing, other) {
            (Timing::Verify { rows, .. }, Timing::Verify { rows: few, .. }) => {
                Some(seconds * rows as f64 / few as f64)
            }
            (Timing::Draft { batch, steps }, Timing::Draft { batch: few, steps: same })
                if steps == same =>
            {
                Some(seconds * batch as f64 / few as f64)
            }
            _ => None,
        };
        self.timed.iter().rev().find_map(like).unwrap_or(0.0)
    }
}

/// Takes tokens and forgets them.
struct Ignored;

impl Listener for Ignored {
    fn tokens(&mut self, _tokens: &[Token]) -> Verdict {
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        if let FinishReason::Abort(why) = outcome.reason {
            tracing::trace!("a request of a measurement ended: {why}");
        }
    }
}
