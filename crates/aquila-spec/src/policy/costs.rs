//! What a round costs: a table of about twenty timings, made before anything is served.
//!
//! The one invariant: more requests, more rows or more steps never cost less, however noisy the
//! timings were.

use serde::{Deserialize, Serialize};

use super::PolicyError;

/// The format of the table's file; a file of another one is measured again.
const FORMAT: u32 = 2;

/// Rows of the pass that many requests share when their overhead is timed.
const MOST_SHARED: usize = 8;

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
    /// A target pass over `rows` rows, shared by `batch` requests.
    Verify {
        /// Requests.
        batch: usize,
        /// Rows of all of them.
        rows: usize,
    },
    /// The draft's part of a round.
    Draft {
        /// Requests.
        batch: usize,
        /// Draft steps.
        steps: usize,
    },
    /// A row of a prompt in the draft.
    DraftRow,
}

impl CostTable {
    /// Makes a table: `seconds` times one thing. What is needed at every batch size comes first,
    /// then smaller things before larger ones, so that `seconds` may extrapolate when its time is
    /// up.
    pub fn measure<E>(
        key: String,
        rows: &[usize],
        batches: &[usize],
        steps: &[usize],
        mut seconds: impl FnMut(Timing) -> Result<f64, E>,
    ) -> Result<Self, E> {
        let draft_row = seconds(Timing::DraftRow)?;
        let mut draft = Vec::new();
        for &batch in batches {
            let row = steps.iter().map(|&steps| seconds(Timing::Draft { batch, steps }));
            draft.push(row.collect::<Result<Vec<_>, E>>()?);
        }
        let verify = rows.iter().map(|&rows| seconds(Timing::Verify { batch: 1, rows }));
        let verify = verify.collect::<Result<Vec<_>, E>>()?;
        let (rows, batches, steps) = (rows.to_vec(), batches.to_vec(), steps.to_vec());
        let mut table = Self {
            format: FORMAT,
            key,
            rows,
            verify,
            request: 0.0,
            batches,
            steps,
            draft,
            draft_row,
        };
        table.make_monotone();
        let many = table.rows.iter().copied().filter(|&rows| rows <= MOST_SHARED).max();
        if let Some(many) = many.filter(|&many| many > 1 && many <= table.most_requests()) {
            let shared = seconds(Timing::Verify { batch: many, rows: many })?;
            table.request = ((shared - table.verify(1, many)) / (many - 1) as f64).max(0.0);
        }
        Ok(table)
    }

    /// The most requests of a batch.
    fn most_requests(&self) -> usize {
        self.batches[self.batches.len() - 1]
    }

    /// Reads a table from its file.
    pub fn from_json(text: &str) -> Result<Self, PolicyError> {
        let what = "the cost table";
        let mut table: Self =
            serde_json::from_str(text).map_err(|source| PolicyError::Json { what, source })?;
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
    pub fn draft(&self, requests: usize, steps: usize) -> f64 {
        if requests == 0 || steps == 0 {
            return 0.0;
        }
        let steps = Place::of(&self.steps, steps);
        Place::of(&self.batches, requests).between(|b| steps.between(|s| self.draft[b][s]))
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
