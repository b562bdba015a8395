//! What rounds cost on this machine, timed with real requests before anything is served.
//!
//! Rounds of a fixed shape are run for requests that share a prompt (`warm_up.rs`), so that only the
//! first reads it where there is a prefix cache; trees that come out smaller are filled up.

use std::time::{Duration, Instant};

use aquila_spec::policy::{CostTable, Fixed, Timed, Timing};

use crate::error::{Error, Result};
use crate::scheduler::Scheduler;
use crate::times::Times;

/// How often each thing is timed; the least counts, since whatever else a machine does only adds.
const TIMES: usize = 5;

impl Scheduler {
    /// Times what rounds cost, for about as long as `limit`, but those of one request at least
    /// once: what there was no time or room for is estimated from what was timed.
    /// `key` says what the table is for. None where the engine has no room for a round.
    ///
    /// # Errors
    /// If a round fails, or if rounds overlap or requests are there already.
    pub fn measure_costs(&mut self, key: String, limit: Duration) -> Result<Option<CostTable>> {
        if !self.is_idle() || self.overlaps() {
            return Err(Error::WarmUp("costs are measured before anything is served"));
        }
        if self.prompt(1, TIMES) == 0 {
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
        let prompt = self.prompt(batch, TIMES);
        if prompt == 0 || (batch > 1 && !in_time()) {
            return Ok(None);
        }
        let shape = self.config.shape.capped(steps);
        self.drafting = Box::new(Fixed::new(shape));
        let failed = self.stats.snapshot().failed_rounds;
        let mut read = 0.0_f64;
        let read_by = |engine: &Self| read += engine.last_times.extend.as_secs_f64();
        let cause = self.begin_unheard(batch, prompt, read_by);
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
        self.end_unheard(failed, &cause)?;
        if timing == Timing::DraftRow {
            // Nothing of the prompt is to be found the next time.
            self.cache.flush();
        }
        Ok(Some(timed))
    }
}
