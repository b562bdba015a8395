//! What a round costs: a table of about twenty timings, made before anything is served.
//!
//! The one invariant: more requests, more rows or more steps never cost less, however noisy the
//! timings were.

use serde::{Deserialize, Serialize};

use super::PolicyError;

/// The format of the table's file; a file of another one is measured again.
const FORMAT: u32 = 3;

/// Seconds of verify passes and of drafting, on one machine with one model and one set of flags.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// The format of the file.
    format: u32,
    /// What the table was measured for: machine, model and flags.
    pub key: String,
    /// Rows of a verify pass, ascending from 1.
    pub rows: Vec<usize>,
    /// Seconds of a verify pass over so many rows of one request.
    pub verify: Vec<f64>,
    /// Seconds that each request beyond the first adds to a verify pass.
    pub request: f64,
    /// Requests that draft, ascending.
    pub batches: Vec<usize>,
    /// Draft steps, ascending.
    pub steps: Vec<usize>,
    /// Seconds of drafting and of extending the draft: `draft[batch][steps]`.
    pub draft: Vec<Vec<f64>>,
    /// Seconds for each row of a prompt, or of rounds that it missed, that a draft processes.
    pub draft_row: f64,
}

/// One thing to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    /// A round in which each of `batch` requests drafts and verifies a tree of so many steps.
    Round {
        /// Requests.
        batch: usize,
        /// Draft steps; 0 is a plain round.
        steps: usize,
    },
    /// A row of a prompt in the draft, which counts as `draft`.
    DraftRow,
}

/// What was timed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timed {
    /// Rows that were verified.
    pub rows: usize,
    /// Seconds of the verify pass.
    pub verify: f64,
    /// Seconds of drafting and of extending the draft.
    pub draft: f64,
}

impl CostTable {
    /// Makes a table of rounds with `batches` requests and up to `most` steps. `time` times one
    /// thing, or answers nothing where there is no time or no room for it; the first batch must be
    /// timed. What was not timed is estimated from what was.
    pub fn measure<E>(
        key: String,
        batches: &[usize],
        most: usize,
        mut time: impl FnMut(Timing) -> Result<Option<Timed>, E>,
    ) -> Result<Self, E> {
        let draft_row = time(Timing::DraftRow)?.map_or(0.0, |timed| timed.draft);
        let up_to = |points: &[usize]| -> Vec<usize> {
            points.iter().copied().filter(|&point| point < most).chain([most]).collect()
        };
        let steps = if most > 1 { vec![1, most] } else { vec![1] };
        let (mut passes, mut drafts) = (Vec::new(), Vec::new());
        for (at, &batch) in batches.iter().enumerate() {
            // One request tells what rows cost; more of them, what requests do.
            let mut row = Vec::new();
            for of_round in if at == 0 { up_to(&[0, 1, 3, 5]) } else { up_to(&[0, 1]) } {
                let Some(timed) = time(Timing::Round { batch, steps: of_round })? else { break };
                passes.push((batch, timed.rows, timed.verify));
                if steps.contains(&of_round) {
                    row.push(timed.draft);
                }
            }
            if row.len() == steps.len() {
                drafts.push((batch, row));
            }
        }
        let mut table = Self { draft_row, steps, ..Self::of_passes(key, &passes) };
        (table.batches, table.draft) = drafts.into_iter().unzip();
        table.make_monotone();
        Ok(table)
    }

    /// The cost of rows and of requests, from passes of (requests, rows, seconds).
    fn of_passes(key: String, passes: &[(usize, usize, f64)]) -> Self {
        let mut table = Self {
            format: FORMAT,
            key,
            rows: Vec::new(),
            verify: Vec::new(),
            request: 0.0,
            batches: Vec::new(),
            steps: Vec::new(),
            draft: Vec::new(),
            draft_row: 0.0,
        };
        let insert = |table: &mut Self, rows: usize, seconds: f64| {
            let at = table.rows.partition_point(|&known| known < rows);
            if table.rows.get(at) == Some(&rows) {
                table.verify[at] = table.verify[at].min(seconds);
            } else {
                table.rows.insert(at, rows);
                table.verify.insert(at, seconds);
            }
        };
        let alone = passes.iter().filter(|(batch, ..)| *batch == 1);
        alone.for_each(|&(_, rows, seconds)| insert(&mut table, rows, seconds));
        // Requests beyond the first add what a plain round of several takes longer than a pass
        // over as many rows of one.
        let known = table.rows.last().copied().unwrap_or(0);
        let plain = passes.iter().find(|&&(batch, rows, _)| batch > 1 && rows == batch);
        if let Some(&(batch, rows, seconds)) = plain.filter(|pass| pass.1 <= known) {
            table.request = (seconds - table.verify(1, rows)).max(0.0) / (batch - 1) as f64;
        }
        for &(batch, rows, seconds) in passes.iter().filter(|(batch, ..)| *batch > 1) {
            let requests = table.request * (batch - 1) as f64;
            if rows > known {
                insert(&mut table, rows, (seconds - requests).max(f64::MIN_POSITIVE));
            }
        }
        table
    }

    /// Reads a table from its file.
    pub fn from_json(text: &str) -> Result<Self, PolicyError> {
        let mut table: Self = serde_json::from_str(text)?;
        table.check().map_err(|why| PolicyError::Costs { key: table.key.clone(), why })?;
        table.make_monotone();
        Ok(table)
    }

    /// The table as its file.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a table of numbers can be written")
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("its format is {}, not {FORMAT}", self.format));
        }
        for (name, axis) in
            [("rows", &self.rows), ("batches", &self.batches), ("steps", &self.steps)]
        {
            if axis.is_empty() || axis[0] == 0 || axis.windows(2).any(|pair| pair[0] >= pair[1]) {
                return Err(format!("{name} must ascend from at least 1, not {axis:?}"));
            }
        }
        let fits = self.verify.len() == self.rows.len()
            && self.draft.len() == self.batches.len()
            && self.draft.iter().all(|row| row.len() == self.steps.len());
        if !fits {
            return Err("verify and draft do not have the lengths of their axes".to_owned());
        }
        let finite = |seconds: &f64| seconds.is_finite() && *seconds >= 0.0;
        let others = [&self.draft_row, &self.request];
        if !self.verify.iter().all(|s| finite(s) && *s > 0.0)
            || !self.draft.iter().flatten().chain(others).all(finite)
        {
            return Err("seconds must be finite, and above 0 for verify".to_owned());
        }
        Ok(())
    }

    /// Seconds of a pass over `rows` rows of `batch` requests.
    pub fn verify(&self, batch: usize, rows: usize) -> f64 {
        let pass = Place::of(&self.rows, rows).between(|r| self.verify[r]);
        pass + self.request * batch.saturating_sub(1) as f64
    }

    /// Seconds of drafting so many steps for `requests` requests and of extending their drafts.
    /// More requests than were timed take longer as a pass of the target over as many rows does.
    pub fn draft(&self, requests: usize, steps: usize) -> f64 {
        if requests == 0 || steps == 0 {
            return 0.0;
        }
        let known = requests.min(self.batches[self.batches.len() - 1]);
        let steps = Place::of(&self.steps, steps);
        let timed =
            Place::of(&self.batches, known).between(|b| steps.between(|s| self.draft[b][s]));
        timed * self.verify(requests, requests) / self.verify(known, known)
    }

    /// Noise makes a timing longer, so one that is longer than a larger thing's counts no more
    /// than that.
    fn make_monotone(&mut self) {
        for row in (1..self.verify.len()).rev() {
            self.verify[row - 1] = self.verify[row - 1].min(self.verify[row]);
        }
        for batch in (0..self.draft.len()).rev() {
            for steps in (0..self.draft[batch].len()).rev() {
                let more = self.draft.get(batch + 1).map_or(f64::INFINITY, |more| more[steps]);
                let deeper = self.draft[batch].get(steps + 1).copied().unwrap_or(f64::INFINITY);
                self.draft[batch][steps] = self.draft[batch][steps].min(more).min(deeper);
            }
        }
    }
}

/// Where a value lies on an axis: between two of its points. Below the first it lies at the
/// first; beyond the last, what was measured there grows in proportion, so that what was not
/// measured looks expensive rather than cheap.
#[derive(Debug, Clone, Copy)]
struct Place {
    low: usize,
    high: usize,
    part: f64,
    times: f64,
}

impl Place {
    fn of(axis: &[usize], value: usize) -> Self {
        let value = value as f64;
        let last = axis.len() - 1;
        if value >= axis[last] as f64 {
            return Self { low: last, high: last, part: 0.0, times: value / axis[last] as f64 };
        }
        let high = axis.iter().position(|&point| point as f64 >= value).unwrap_or(last);
        let low = high.saturating_sub(1);
        let (from, to) = (axis[low] as f64, axis[high] as f64);
        let part = if low == high { 0.0 } else { (value - from) / (to - from) };
        Self { low, high, part, times: 1.0 }
    }

    fn between(self, at: impl Fn(usize) -> f64) -> f64 {
        let low = at(self.low);
        if self.low == self.high {
            return low * self.times;
        }
        low + (at(self.high) - low) * self.part
    }
}
