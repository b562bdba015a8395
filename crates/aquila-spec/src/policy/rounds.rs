//! What a round costs by a table and by what real rounds say about it.

use super::costs::Place;
use super::drift::Drift;
use super::{CostTable, Reading};

/// A table, corrected by real rounds.
#[derive(Debug, Clone)]
pub struct RoundCosts {
    table: CostTable,
    drift: Drift,
    /// Rounds in a row that all drafted, or all did not.
    alike: (bool, u32),
    /// What the returns of drafts take beyond what the table says, and how many said so.
    apart: (f64, f64),
}

/// Rounds that share a correction: the same steps and width, about the same batch and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    /// Octaves of requests.
    pub(super) batch: usize,
    /// Halves of a row for each request.
    pub(super) rows: usize,
    pub(super) steps: usize,
    pub(super) topk: usize,
}

impl Kind {
    fn of(batch: usize, rows: usize, steps: usize, topk: usize) -> Self {
        let octave = (usize::BITS - batch.leading_zeros()) as usize;
        let rows = (2 * rows).div_ceil(batch.max(1)).min(16);
        Self { batch: octave, rows, steps, topk }
    }

    pub(super) fn drafts(self) -> bool {
        self.steps > 0
    }
}

/// Rounds after others that tell little: a model that shares a cache with its draft finds it filled
/// with the draft's weights after a round that drafts, and the other way round.
pub(super) const UNLIKE: u32 = 6;
/// Plain rounds in a row after which one in so many tells enough.
const SETTLED: u32 = 32;
const HEARD: u32 = 4;
/// Returns of drafts after which the first of them are forgotten, and those that the table's word
/// counts for.
const LATE_RETURNS: f64 = 20.0;
const KNOWN_RETURNS: f64 = 2.0;
/// The most that a return counts for, in plain rounds of one request.
const MOST_APART: f64 = 2.0;

impl RoundCosts {
    /// Begins with a table as it is.
    pub fn new(table: CostTable) -> Self {
        let apart = (table.apart, KNOWN_RETURNS);
        Self { table, drift: Drift::new(), alike: (false, 0), apart }
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
        let apart = if requests > 0 { self.apart.0 } else { 0.0 };
        seconds * self.drift.of_machine().exp() + apart
    }

    /// What it costs that a draft reads a prompt and says what it would draft first, beside
    /// `others` that do so in the same pass.
    pub fn reading(&self, others: usize, reading: Reading) -> f64 {
        let pass = |requests| self.of_batch(requests).level(requests, 1, 1);
        let first = (pass(others + 1) - pass(others)).max(0.0);
        let more = self.table.catch_up * reading.draft.saturating_sub(1) as f64;
        let target = self.table.row() * reading.target as f64;
        let apart = if others == 0 { self.apart.0 } else { 0.0 };
        (first + more + target) * self.drift.of_machine().exp() + apart
    }

    /// Takes in what a return among plain rounds took that was expected to take so many seconds:
    /// caches that those have filled make it longer, and the rounds after it.
    pub fn refine_return(&mut self, expected: f64, seconds: f64) {
        let (apart, said) = self.apart;
        let most = MOST_APART * self.plain(1);
        let now = (seconds - (expected - apart)).clamp(-most, most);
        let said = (said + 1.0).min(LATE_RETURNS);
        self.apart = ((apart + (now - apart) / said).max(0.0), said);
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

    /// Takes in what a round took, unless it follows rounds unlike it.
    pub fn refine(
        &mut self,
        (batch, rows): (usize, usize),
        at_level: &[usize],
        topk: usize,
        seconds: f64,
    ) {
        let kind = Kind::of(batch, rows, at_level.len(), topk);
        let before = if self.alike.0 == kind.drafts() { self.alike.1 } else { 0 };
        self.alike = (kind.drafts(), before.saturating_add(1));
        self.drift.pass();
        let settled = !kind.drafts() && before > SETTLED;
        if before < UNLIKE || (settled && !before.is_multiple_of(HEARD)) {
            return;
        }
        let expected = self.round(batch, rows, at_level, topk);
        if seconds > 0.0 && seconds.is_finite() && expected > 0.0 {
            self.drift.see(kind, (seconds / expected).ln() + self.drift.of(kind));
        }
    }

    /// Whether the last rounds were plain ones.
    pub fn is_among_plain(&self) -> bool {
        !self.alike.0 && self.alike.1 >= UNLIKE
    }

    /// A round was unlike any in the table, and ran a draft if it was not `alike`.
    pub fn interrupt(&mut self, alike: bool) {
        if !alike {
            self.alike.1 = 0;
        }
        self.drift.pass();
    }

    /// How unsure it is by how much a round costs more than a plain one, as a share.
    pub fn doubt(&self, batch: usize, rows: usize, steps: usize, topk: usize) -> f64 {
        let plain = Kind::of(batch, batch, 0, 1);
        self.drift.doubt(Kind::of(batch, rows, steps, topk), plain)
    }

    fn correction(&self, batch: usize, rows: usize, steps: usize, topk: usize) -> f64 {
        self.drift.of(Kind::of(batch, rows, steps, topk)).exp()
    }
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
