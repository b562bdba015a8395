//! What a round costs: a table measured once.
//!
//! The one invariant: more requests, more nodes or more steps never look cheaper,
//! however noisy the measurements were.

use serde::{Deserialize, Serialize};

use super::PolicyError;

/// Seconds of a verify pass by (batch, nodes of each request) and of drafting by (batch, steps,
/// topk), on one machine with one model and one set of flags.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// What it was measured for: machine, model and flags.
    pub key: String,
    /// Batch sizes, ascending.
    pub batches: Vec<usize>,
    /// Nodes of each request, ascending, from 1.
    pub nodes: Vec<usize>,
    /// Seconds of a target pass and the choice of its tokens: `verify[batch][nodes]`.
    pub verify: Vec<Vec<f64>>,
    /// Steps, ascending, from 1.
    pub steps: Vec<usize>,
    /// Widths, ascending.
    pub topk: Vec<usize>,
    /// Seconds of extending and drafting: `draft[batch][steps][topk]`.
    pub draft: Vec<Vec<Vec<f64>>>,
    /// Seconds for each row beyond the first that a draft takes in when it returns after it sat
    /// out.
    #[serde(default)]
    pub catch_up: f64,
    /// Seconds that a return among plain rounds takes beyond that, the rounds after it included: a
    /// draft that shares a cache with its target finds little of it left, and leaves less.
    #[serde(default)]
    pub apart: f64,
}

/// Seconds of a plain round that leave time to ask a draft how sure it is of its first token: to say
/// so takes longer than it gives where a round is shorter. On a model of 0.3 ms a round, 1.09 times as
/// fast as plain decoding without it was 1.01 with it.
const CONFIDENT: f64 = 1e-3;
/// Rows that a draft misses to see what its return costs.
const MISSED: usize = 17;

/// One thing to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measured {
    /// A target pass over `nodes` rows for each of `batch` requests.
    Verify {
        /// Requests.
        batch: usize,
        /// Rows of each.
        nodes: usize,
    },
    /// The draft's part of a round.
    Draft {
        /// Requests.
        batch: usize,
        /// Levels.
        steps: usize,
        /// Width.
        topk: usize,
    },
    /// The return of a draft that sat out.
    Return {
        /// Rows that it takes in.
        missed: usize,
    },
    /// What it takes longer to decode plainly if a draft returns once.
    Apart {
        /// Rows that it takes in.
        missed: usize,
    },
}

impl CostTable {
    /// Measures a table: `seconds` runs one thing and says what it took, and is asked `times`
    /// times for each, of which the least counts: whatever else a machine does only adds to it.
    pub fn measure<E>(
        key: String,
        (batches, nodes): (&[usize], &[usize]),
        (steps, topk): (&[usize], &[usize]),
        times: usize,
        mut seconds: impl FnMut(Measured) -> Result<f64, E>,
    ) -> Result<Self, E> {
        let mut least = |what| -> Result<f64, E> {
            let mut least = f64::INFINITY;
            for _ in 0..times.max(1) {
                least = least.min(seconds(what)?);
            }
            Ok(least)
        };
        let mut verify = Vec::new();
        let mut draft = Vec::new();
        for &batch in batches {
            let row = nodes.iter().map(|&nodes| least(Measured::Verify { batch, nodes }));
            verify.push(row.collect::<Result<Vec<_>, E>>()?);
            let mut levels = Vec::new();
            for &steps in steps {
                let row = topk.iter().map(|&topk| least(Measured::Draft { batch, steps, topk }));
                levels.push(row.collect::<Result<Vec<_>, E>>()?);
            }
            draft.push(levels);
        }
        let own = |list: &[usize]| list.to_vec();
        let (batches, nodes, steps, topk) = (own(batches), own(nodes), own(steps), own(topk));
        let few = least(Measured::Return { missed: 1 })?;
        let many = least(Measured::Return { missed: MISSED })?;
        let catch_up = (many - few).max(0.0) / (MISSED - 1) as f64;
        let mut apart: Vec<f64> = Vec::new();
        for _ in 0..times.max(1) {
            apart.push(seconds(Measured::Apart { missed: MISSED })?);
        }
        // A difference, which chance may make smaller too.
        apart.sort_by(f64::total_cmp);
        let apart = apart[apart.len() / 2];
        let mut table = Self { key, batches, nodes, verify, steps, topk, draft, catch_up, apart };
        table.make_monotone();
        let returning = table.draft(1.0, 1, 1) + catch_up * (MISSED - 1) as f64;
        table.apart = (apart - returning).max(0.0);
        Ok(table)
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
        let axes = [
            ("batches", &self.batches),
            ("nodes", &self.nodes),
            ("steps", &self.steps),
            ("topk", &self.topk),
        ];
        for (name, axis) in axes {
            if axis.is_empty() || axis[0] == 0 || axis.windows(2).any(|pair| pair[0] >= pair[1]) {
                return Err(format!("{name} must ascend from at least 1, not {axis:?}"));
            }
        }
        let fits = self.verify.len() == self.batches.len()
            && self.verify.iter().all(|row| row.len() == self.nodes.len())
            && self.draft.len() == self.batches.len()
            && self.draft.iter().all(|levels| levels.len() == self.steps.len())
            && self.draft.iter().flatten().all(|row| row.len() == self.topk.len());
        if !fits {
            return Err("verify and draft do not have the lengths of their axes".to_owned());
        }
        let sane = |seconds: &f64| seconds.is_finite() && *seconds >= 0.0;
        if !self.verify.iter().flatten().all(|s| sane(s) && *s > 0.0)
            || !self.draft.iter().flatten().flatten().chain([&self.catch_up, &self.apart]).all(sane)
        {
            return Err("seconds must be finite, and above 0 for verify".to_owned());
        }
        Ok(())
    }

    /// Noise makes things look dearer, so what is dearer than something larger counts no more than
    /// that.
    fn make_monotone(&mut self) {
        for b in (0..self.batches.len()).rev() {
            let above = b + 1;
            for n in (0..self.nodes.len()).rev() {
                let larger =
                    [self.verify.get(above).map(|row| row[n]), self.verify[b].get(n + 1).copied()];
                let most = larger.into_iter().flatten().fold(f64::INFINITY, f64::min);
                self.verify[b][n] = self.verify[b][n].min(most);
            }
            for s in (0..self.steps.len()).rev() {
                for k in (0..self.topk.len()).rev() {
                    let larger = [
                        self.draft.get(above).map(|levels| levels[s][k]),
                        self.draft[b].get(s + 1).map(|row| row[k]),
                        self.draft[b][s].get(k + 1).copied(),
                    ];
                    let most = larger.into_iter().flatten().fold(f64::INFINITY, f64::min);
                    self.draft[b][s][k] = self.draft[b][s][k].min(most);
                }
            }
        }
    }

    /// Seconds of a pass over `nodes` rows on average for each of `batch` requests.
    pub fn verify(&self, batch: f64, nodes: f64) -> f64 {
        self.verify_in(Place::of(&self.batches, batch), nodes)
    }

    /// Whether drafts are asked how sure they are of their first tokens.
    pub fn affords_confidence(&self) -> bool {
        Self::asks_confidence(self.verify(1.0, 1.0))
    }

    /// The same where a plain round of one request takes so long.
    pub fn asks_confidence(plain: f64) -> bool {
        plain >= CONFIDENT
    }

    /// Seconds for each row beyond the first that a pass reads of one text.
    pub(super) fn row(&self) -> f64 {
        let (first, last) = (self.nodes[0], self.nodes[self.nodes.len() - 1]);
        let more = self.verify(1.0, last as f64) - self.verify(1.0, first as f64);
        more / (last - first).max(1) as f64
    }

    pub(super) fn verify_in(&self, batch: Place, nodes: f64) -> f64 {
        let nodes = Place::of(&self.nodes, nodes);
        batch.between(|b| nodes.between(|n| self.verify[b][n]))
    }

    /// Seconds of extending and drafting; none for 0 steps.
    pub fn draft(&self, batch: f64, steps: usize, topk: usize) -> f64 {
        self.draft_in(Place::of(&self.batches, batch), steps, topk)
    }

    pub(super) fn draft_in(&self, batch: Place, steps: usize, topk: usize) -> f64 {
        if steps == 0 {
            return 0.0;
        }
        let steps = Place::of(&self.steps, steps as f64);
        let topk = Place::of(&self.topk, topk as f64);
        batch.between(|b| steps.between(|s| topk.between(|k| self.draft[b][s][k])))
    }
}

/// Where a value lies on an axis: between two of its points. Below the first it lies at the
/// first; beyond the last, what was measured there grows in proportion, which keeps the order of
/// things and makes what was not measured look dear rather than cheap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    low: usize,
    high: usize,
    part: f64,
    times: f64,
}

impl Place {
    pub(super) fn of(axis: &[usize], value: f64) -> Self {
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
