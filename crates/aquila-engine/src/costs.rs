//! What rounds cost on this machine, measured on the compute lane before anything is served.
//!
//! A policy that weighs trees needs to know what they cost. Passes are measured as chunks of
//! prompts, all of whose rows are asked about, as those of a tree are; drafts as rounds that draft.
//! The one invariant: nothing of it stays. Requests leave, and their slots are those of a pool in
//! which nobody is yet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquila_compute::choose::Sampling;
use aquila_spec::Shape;
use aquila_spec::policy::{CostTable, Measured};

use crate::config::EngineConfig;
use crate::engine::Scheduler;
use crate::error::{Error, Result};
use crate::lanes::{
    Admission, Compute, DraftRoom, Job, Left, Order, Part, TableChange, Task, Yield,
};
use crate::request::{Limits, RequestId};
use crate::times::Times;

/// How often each thing is measured; the least counts.
const TIMES: usize = 5;
/// Tokens of a request that are taken to be there already, if there is room: every row attends to
/// what is before it.
const CONTEXT: usize = 160;
/// Tokens of a prompt before drafting is measured.
const PROMPT: usize = 8;
/// Rounds that a return of a draft makes longer, about.
const AFTER: usize = 8;

impl<C: Compute> Scheduler<C> {
    /// Measures what rounds cost, for about as long as `limit`, but those of one request at least
    /// once: what there was no time for is taken to cost in proportion to what was measured. `key`
    /// says what the table is for. None where the engine has no room for a measurement.
    ///
    /// # Errors
    /// If a round fails, or if the lanes are apart or requests are there already.
    pub fn measure_costs(&mut self, key: String, limit: Duration) -> Result<Option<CostTable>> {
        let room = self.draft_room();
        let idle = self.is_idle();
        let busy = || Error::Config("costs are measured before anything is served".into());
        let compute = self.lanes.joined_mut().filter(|_| idle).ok_or_else(busy)?;
        let axes = Axes::of(&self.config);
        let deadline = Instant::now() + limit;
        let mut gauge = Gauge {
            compute,
            config: &self.config,
            room,
            vocabulary: self.profile.vocabulary,
            deadline,
            stage: None,
            passes: BTreeMap::new(),
            drafts: Vec::new(),
            returns: BTreeMap::new(),
            apart: None,
        };
        if gauge.room_for(1) < gauge.least_text() {
            return Ok(None);
        }
        // The first pass of all touches memory for the first time.
        gauge.pass(1, 1)?;
        let plain = gauge.pass(1, 1)?.verify.as_secs_f64();
        // Whoever weighs costs asks drafts how sure they are where that is worth it, which costs
        // something too.
        if CostTable::asks_confidence(plain) {
            gauge.room.candidates = gauge.room.candidates.max(2);
        }
        let measure = |what| gauge.seconds(what);
        let (batches, nodes) = (&axes.batches[..], &axes.nodes[..]);
        let table =
            CostTable::measure(key, (batches, nodes), (&axes.steps, &axes.topk), TIMES, measure)?;
        gauge.clear()?;
        Ok(Some(table))
    }
}

/// What is measured.
struct Axes {
    batches: Vec<usize>,
    nodes: Vec<usize>,
    steps: Vec<usize>,
    topk: Vec<usize>,
}

impl Axes {
    fn of(config: &EngineConfig) -> Self {
        let up_to = |most: usize, points: &[usize]| {
            let below = points.iter().copied().filter(|&point| point < most);
            below.chain([most]).collect::<Vec<_>>()
        };
        let shape = config.shape;
        Self {
            batches: up_to(config.max_running_requests, &[1, 2, 4, 8, 16, 32, 64, 128]),
            nodes: up_to(shape.nodes(), &[1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48]),
            steps: up_to(shape.steps().max(1), &[1, 2, 3, 4, 5, 6, 8, 12, 16]),
            topk: up_to(shape.topk(), &[1, 2, 4, 8, 16, 32]),
        }
    }
}

/// Runs rounds to see what they take.
struct Gauge<'a, C> {
    compute: &'a mut C,
    config: &'a EngineConfig,
    room: DraftRoom,
    vocabulary: usize,
    deadline: Instant,
    stage: Option<Stage>,
    /// Passes that were measured: the least seconds by rows.
    passes: BTreeMap<usize, f64>,
    /// Drafts that were measured: batch, steps, topk, seconds.
    drafts: Vec<(usize, usize, usize, f64)>,
    /// Returns of drafts that were measured: seconds by rows that they missed.
    returns: BTreeMap<usize, f64>,
    /// What a return among plain rounds took longer.
    apart: Option<f64>,
}

/// Requests that are there.
struct Stage {
    drafts: bool,
    /// Tokens of each request that have rows, and those that it may have.
    rows: Vec<usize>,
    longest: usize,
    /// Rows of each that nobody made: what they hold does not matter here.
    context: usize,
}

impl<C: Compute> Gauge<'_, C> {
    fn seconds(&mut self, what: Measured) -> Result<f64> {
        let late = Instant::now() > self.deadline;
        match what {
            Measured::Verify { batch, nodes } => {
                let rows = batch * nodes;
                let wanted = batch == 1 && !self.passes.contains_key(&rows);
                if let Some(seconds) = self.pass_like(rows)
                    && ((late && !wanted) || self.room_for(batch) < self.least_text())
                {
                    return Ok(seconds);
                }
                let seconds = self.pass(batch, nodes)?.verify.as_secs_f64();
                let least = self.passes.entry(rows).or_insert(seconds);
                *least = least.min(seconds);
                Ok(seconds)
            }
            Measured::Draft { batch, steps, topk } => {
                let shape = self.shape(steps, topk)?;
                let alike = self.drafts.iter().rev().find(|d| (d.1, d.2) == (steps, topk));
                let wanted = batch == 1 && alike.is_none();
                let nearest = alike.or(self.drafts.last());
                if let Some(&(b, s, k, seconds)) = nearest
                    && ((late && !wanted) || self.room_for(batch) < self.least_text())
                {
                    let rows = |batch, steps, topk| (batch * (steps + 1) * topk) as f64;
                    return Ok(seconds * rows(batch, steps, topk) / rows(b, s, k));
                }
                let times = self.round(batch, shape)?;
                let seconds = (times.draft + times.extend).as_secs_f64();
                self.drafts.push((batch, steps, topk, seconds));
                Ok(seconds)
            }
            Measured::Return { missed } => {
                if let Some(&seconds) = self.returns.get(&missed).filter(|_| late) {
                    return Ok(seconds);
                }
                let seconds = self.back_after(missed)?;
                self.returns.insert(missed, seconds);
                Ok(seconds)
            }
            Measured::Apart { missed } => {
                if let Some(seconds) = self.apart.filter(|_| late) {
                    return Ok(seconds);
                }
                let seconds = self.apart(missed)?;
                self.apart = Some(seconds);
                Ok(seconds)
            }
        }
    }

    /// What it takes longer to decode plainly if a draft returns once; nothing where there is no
    /// room to find out.
    fn apart(&mut self, missed: usize) -> Result<f64> {
        if self.room_for(1) < self.least_text() + missed + AFTER + 1 {
            return Ok(0.0);
        }
        self.stage_drafts(1)?;
        let mut decode = |rounds: usize, watch: bool| -> Result<f64> {
            let mut seconds = 0.0;
            for _ in 0..rounds {
                let task = Task::Decode { shape: Shape::PLAIN, watch };
                let parts = vec![Part { request: RequestId(0), task }];
                let (times, _) = self.run(Job { parts, ..Job::default() })?;
                seconds += times.steps().as_secs_f64();
            }
            Ok(seconds)
        };
        let warm = missed.min(AFTER);
        decode(missed - warm, false)?;
        let plain = decode(warm, false)? / warm as f64;
        let seconds = decode(1, true)? + decode(AFTER, false)?;
        let stage = self.stage.as_mut().expect("requests are there");
        stage.rows[0] += missed + 1 + AFTER;
        Ok(seconds - (AFTER + 1) as f64 * plain)
    }

    /// What the return of a draft takes that sat out for so many rounds; nothing where there is no
    /// room for them.
    fn back_after(&mut self, missed: usize) -> Result<f64> {
        if self.room_for(1) < self.least_text() + missed + 1 {
            return Ok(0.0);
        }
        // Anew, so that there is room for all of it.
        self.stage_drafts(1)?;
        let decode = |watch| Part {
            request: RequestId(0),
            task: Task::Decode { shape: Shape::PLAIN, watch },
        };
        for _ in 0..missed {
            self.run(Job { parts: vec![decode(false)], ..Job::default() })?;
        }
        let (times, _) = self.run(Job { parts: vec![decode(true)], ..Job::default() })?;
        let stage = self.stage.as_mut().expect("requests are there");
        stage.rows[0] += missed + 1;
        Ok(times.extend.as_secs_f64())
    }

    /// What a pass over so many rows should take by what others took: a pass of more rows bounds
    /// it, and beyond all of them it grows in proportion.
    fn pass_like(&self, rows: usize) -> Option<f64> {
        if let Some((_, &seconds)) = self.passes.range(rows..).next() {
            return Some(seconds);
        }
        let (&most, &seconds) = self.passes.last_key_value()?;
        Some(seconds * rows as f64 / most as f64)
    }

    /// The largest tree of so many steps and branches that the engine has room for.
    fn shape(&self, steps: usize, topk: usize) -> Result<Shape> {
        let nodes = self.config.shape.nodes().min(Shape::most_nodes(steps, topk));
        Shape::new(steps, topk, nodes.max(2)).map_err(|error| Error::Config(error.to_string()))
    }

    /// Tokens that a request must have room for if it is to be measured: a prompt, and what two of
    /// the largest rounds bring.
    fn least_text(&self) -> usize {
        PROMPT + self.config.shape.nodes() + 2 * (self.config.shape.steps() + 1) + 1
    }

    /// Tokens that each of so many requests may have, with room for a tree behind them: no more
    /// than a few measurements take.
    fn room_for(&self, batch: usize) -> usize {
        let tree = self.config.shape.nodes().max(self.config.shape.draft_rows());
        let room = (self.config.slots() / batch).min(self.config.context_length);
        let room = room.saturating_sub(tree + self.config.shape.steps() + 1);
        room.min(CONTEXT + 8 * self.least_text())
    }

    /// One pass over `nodes` rows of each of `batch` requests.
    fn pass(&mut self, batch: usize, nodes: usize) -> Result<Times> {
        let fits = |stage: &Stage| {
            !stage.drafts
                && stage.rows.len() == batch
                && stage.rows.iter().all(|rows| rows + nodes < stage.longest)
        };
        let mut job = Job::default();
        if !self.stage.as_ref().is_some_and(fits) {
            self.enter(&mut job, batch, false);
        }
        let stage = self.stage.as_mut().expect("requests are there");
        for (request, rows) in stage.rows.iter_mut().enumerate() {
            let range = *rows..*rows + nodes;
            *rows = range.end;
            let task = Task::Read { rows: range.clone(), outputs: range, last: false };
            job.parts.push(Part { request: RequestId(request as u64), task });
        }
        Ok(self.run(job)?.0)
    }

    /// One round that drafts trees of this shape for each of `batch` requests.
    fn round(&mut self, batch: usize, shape: Shape) -> Result<Times> {
        let fits = |stage: &Stage| {
            stage.drafts
                && stage.rows.len() == batch
                && stage.rows.iter().all(|rows| rows + 2 * (shape.steps() + 1) < stage.longest)
        };
        if !self.stage.as_ref().is_some_and(fits) {
            self.stage_drafts(batch)?;
        }
        let mut job = Job::default();
        for request in 0..batch {
            let task = Task::Decode { shape, watch: false };
            job.parts.push(Part { request: RequestId(request as u64), task });
        }
        let (times, yields) = self.run(job)?;
        let stage = self.stage.as_mut().expect("requests are there");
        for (rows, yielded) in stage.rows.iter_mut().zip(yields) {
            *rows += yielded.map_or(0, |yielded| yielded.tokens.len());
        }
        Ok(times)
    }

    /// Lets requests in that draft, and reads their prompts.
    fn stage_drafts(&mut self, batch: usize) -> Result<()> {
        let mut job = Job::default();
        self.enter(&mut job, batch, true);
        self.run(job)?;
        let context = self.stage.as_ref().map_or(0, |stage| stage.context);
        // In as small pieces as any engine may want.
        let piece = PROMPT.min(self.config.chunked_prefill_size);
        for (request, from) in (0..batch)
            .flat_map(|request| (0..PROMPT).step_by(piece).map(move |from| (request, from)))
        {
            let to = PROMPT.min(from + piece);
            let last = to == PROMPT;
            let rows = context + from..context + to;
            let outputs = if last { rows.end - 1..rows.end } else { rows.end..rows.end };
            let task = Task::Read { rows, outputs, last };
            let parts = vec![Part { request: RequestId(request as u64), task }];
            self.run(Job { parts, ..Job::default() })?;
        }
        let stage = self.stage.as_mut().expect("requests are there");
        stage.rows.fill(context + PROMPT);
        Ok(())
    }

    /// Lets others in, who have slots and a text.
    fn enter(&mut self, job: &mut Job, batch: usize, drafts: bool) {
        let longest = self.room_for(batch);
        let context = CONTEXT.min(longest - self.least_text());
        let room = if drafts { self.room } else { DraftRoom::NONE };
        let slots = (self.config.slots() / batch) as u32;
        job.left = self.leave();
        job.slots = (0..slots * batch as u32).collect();
        for request in 0..batch {
            let id = RequestId(request as u64);
            let tokens = if drafts { context + PROMPT } else { longest };
            let token = |at: usize| ((at * 37 + request * 101 + 5) % self.vocabulary) as u32;
            let order = Order {
                id,
                sampling: Sampling::default(),
                draft_sampling: None,
                choice: 0,
                limits: Limits::default(),
                prompt: tokens,
                longest,
                logprobs: None,
                prompt_logprobs: None,
                room,
            };
            let own = request * slots as usize..(request + 1) * slots as usize;
            for group in 0..order.groups() {
                job.tables.push(TableChange { request: id, group, from: 0, slots: own.clone() });
            }
            job.admitted.push(Admission {
                order: Arc::new(order),
                tokens: (0..tokens).map(token).collect(),
                matched: context,
                rounds: 0,
            });
        }
        self.stage = Some(Stage { drafts, rows: vec![context; batch], longest, context });
    }

    /// Who leaves with the next job.
    fn leave(&mut self) -> Vec<Left> {
        let there = self.stage.take().map_or(0, |stage| stage.rows.len());
        (0..there).map(|id| Left { request: RequestId(id as u64), tokens: 0 }).collect()
    }

    fn run(&mut self, job: Job) -> Result<(Times, Vec<Option<Yield>>)> {
        let done = self.compute.run(job);
        let failed = |why| Error::Config(format!("a round that was to be measured failed: {why}"));
        Ok((done.times, done.outcome.map_err(failed)?))
    }

    /// Sends everybody away.
    fn clear(&mut self) -> Result<()> {
        let left = self.leave();
        self.run(Job { left, ..Job::default() })?;
        self.compute.begin_anew();
        Ok(())
    }
}
