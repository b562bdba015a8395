//! What a round costs: a table measured once, and what real rounds say about it.
//!
//! The one invariant: in a table, more requests, more nodes or more steps never look cheaper,
//! however noisy the measurements were.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{PolicyError, Reading};

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
}

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
        let mut table = Self { key, batches, nodes, verify, steps, topk, draft, catch_up };
        table.make_monotone();
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
            || !self.draft.iter().flatten().flatten().chain([&self.catch_up]).all(sane)
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

    /// Seconds for each row beyond the first that a pass reads of one text.
    fn row(&self) -> f64 {
        let (first, last) = (self.nodes[0], self.nodes[self.nodes.len() - 1]);
        let more = self.verify(1.0, last as f64) - self.verify(1.0, first as f64);
        more / (last - first).max(1) as f64
    }

    fn verify_in(&self, batch: Place, nodes: f64) -> f64 {
        let nodes = Place::of(&self.nodes, nodes);
        batch.between(|b| nodes.between(|n| self.verify[b][n]))
    }

    /// Seconds of extending and drafting; none for 0 steps.
    pub fn draft(&self, batch: f64, steps: usize, topk: usize) -> f64 {
        self.draft_in(Place::of(&self.batches, batch), steps, topk)
    }

    fn draft_in(&self, batch: Place, steps: usize, topk: usize) -> f64 {
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
struct Place {
    low: usize,
    high: usize,
    part: f64,
    times: f64,
}

impl Place {
    fn of(axis: &[usize], value: f64) -> Self {
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

/// A table, corrected by real rounds.
///
/// A round that takes longer than the table says does so because the machine is slower than it was,
/// which all rounds share, or because the table is wrong about such rounds. Machines change often
/// and tables are wrong for good, so nearly all of a difference in the usual rounds is taken for the
/// machine's: else those rounds that are not run would keep costs of another day, and the comparison
/// with them fail. Rounds of another kind among them meet the same machine, so that what they take
/// longer is the table's.
#[derive(Debug, Clone)]
pub struct RoundCosts {
    table: CostTable,
    /// The logarithm of how much slower the machine is than when the table was measured.
    machine: f64,
    /// The same for rounds of one kind, beside that.
    corrections: HashMap<Kind, f64>,
    /// Rounds that were taken for the machine's.
    rounds: u32,
    /// The kind of which many rounds were run in a row: they say how fast the machine is.
    usual: Option<Kind>,
    /// The kind that was run last, and how many times in a row.
    run: (Kind, u32),
}

/// Batch, rows for each request, steps and width, about.
type Kind = (usize, usize, usize, usize);

/// The largest logarithm that counts in one round: outliers count no more than that.
const MOST_DIFFERENCE: f64 = 0.4;
/// The share of a difference that is taken for the machine's, and for that of a kind of rounds.
const MACHINE_SHARE: f64 = 0.05;
const CORRECTION_SHARE: f64 = 0.008;
/// The share that is taken for that of a kind of rounds which is run beside the usual one: of plain
/// rounds, which are few then and on which most depends, and of others.
const PLAIN_SHARE: f64 = 0.1;
const BESIDE_SHARE: f64 = 0.02;
/// Rounds in a row that make a kind the usual one.
const USUAL: u32 = 8;

impl RoundCosts {
    /// Begins with a table as it is.
    pub fn new(table: CostTable) -> Self {
        Self {
            table,
            machine: 0.0,
            rounds: 0,
            corrections: HashMap::new(),
            usual: None,
            run: ((0, 0, 0, 0), 0),
        }
    }

    /// The table as it was measured.
    pub fn table(&self) -> &CostTable {
        &self.table
    }

    /// What a round of this batch costs without drafts.
    pub fn plain(&self, batch: usize) -> f64 {
        self.table.verify(batch as f64, 1.0) * self.correction(batch, batch, 0, 1)
    }

    /// What it costs beside a round that the drafts of some of its requests return, who missed so
    /// many rows each, and say what they would draft first. Who missed nothing has said it
    /// already.
    pub fn returning(&self, batch: usize, missed: impl Iterator<Item = usize>) -> f64 {
        let missed = missed.filter(|&rows| rows > 0);
        let (requests, rows) = missed.fold((0, 0), |(n, sum), rows| (n + 1, sum + rows));
        let more = (rows - requests) as f64;
        let seconds = self.of_batch(batch).level(requests, 1, 1) + self.table.catch_up * more;
        seconds * self.machine.exp()
    }

    /// What it costs that a draft reads a prompt and says what it would draft first, beside
    /// `others` that do so in the same pass.
    pub fn reading(&self, others: usize, reading: Reading) -> f64 {
        let pass = |requests| self.of_batch(requests).level(requests, 1, 1);
        let first = (pass(others + 1) - pass(others)).max(0.0);
        let more = self.table.catch_up * reading.draft.saturating_sub(1) as f64;
        (first + more + self.table.row() * reading.target as f64) * self.machine.exp()
    }

    /// The costs of rounds of this batch, ready to be asked level by level.
    pub fn of_batch(&self, batch: usize) -> BatchCosts<'_> {
        BatchCosts { costs: self, batch, place: Place::of(&self.table.batches, batch as f64) }
    }

    /// What a round costs in which `at_level[l]` requests have at least l + 1 levels and `rows`
    /// rows are verified in all.
    pub fn round(&self, batch: usize, rows: usize, at_level: &[usize], topk: usize) -> f64 {
        let costs = self.of_batch(batch);
        let levels = at_level.iter().enumerate();
        let draft = levels.map(|(l, &requests)| costs.level(requests, l + 1, topk)).sum::<f64>();
        costs.total(rows, at_level.len(), topk, draft)
    }

    /// Takes in what a round took.
    pub fn refine(
        &mut self,
        (batch, rows): (usize, usize),
        at_level: &[usize],
        topk: usize,
        seconds: f64,
    ) {
        let expected = self.round(batch, rows, at_level, topk);
        if !(seconds > 0.0 && seconds.is_finite() && expected > 0.0) {
            return;
        }
        let off = (seconds / expected).ln().clamp(-MOST_DIFFERENCE, MOST_DIFFERENCE);
        let key = cell(batch, rows, at_level.len(), topk);
        let correction = self.corrections.entry(key).or_default();
        if self.usual.is_none_or(|usual| usual == key) {
            self.rounds = self.rounds.saturating_add(1);
            self.machine += off * MACHINE_SHARE.max(1.0 / f64::from(self.rounds + 3));
            *correction += off * CORRECTION_SHARE;
        } else {
            *correction += off * if at_level.is_empty() { PLAIN_SHARE } else { BESIDE_SHARE };
        }
        self.run = (key, if self.run.0 == key { self.run.1.saturating_add(1) } else { 1 });
        if self.run.1 >= USUAL {
            self.usual = Some(key);
        }
    }

    fn correction(&self, batch: usize, rows: usize, steps: usize, topk: usize) -> f64 {
        let key = cell(batch, rows, steps, topk);
        (self.machine + self.corrections.get(&key).unwrap_or(&0.0)).exp()
    }
}

/// Rounds that share a correction: the same steps and width, about the same batch and rows.
fn cell(batch: usize, rows: usize, steps: usize, topk: usize) -> Kind {
    let octave = |n: usize| (usize::BITS - n.leading_zeros()) as usize;
    (octave(batch), (2 * rows).div_ceil(batch.max(1)).min(16), steps, topk)
}

/// [`RoundCosts`] at one batch size.
#[derive(Debug, Clone, Copy)]
pub struct BatchCosts<'a> {
    costs: &'a RoundCosts,
    batch: usize,
    place: Place,
}

impl BatchCosts<'_> {
    /// What level `level` of the trees of `requests` requests adds to drafting.
    pub fn level(&self, requests: usize, level: usize, topk: usize) -> f64 {
        if requests == 0 {
            return 0.0;
        }
        let table = &self.costs.table;
        let place = match requests == self.batch {
            true => self.place,
            false => Place::of(&table.batches, requests as f64),
        };
        table.draft_in(place, level, topk) - table.draft_in(place, level - 1, topk)
    }

    /// The whole round, with what its levels add up to.
    pub fn total(&self, rows: usize, steps: usize, topk: usize, draft: f64) -> f64 {
        let nodes = rows as f64 / self.batch as f64;
        (self.costs.table.verify_in(self.place, nodes) + draft)
            * self.costs.correction(self.batch, rows, steps, topk)
    }
}
