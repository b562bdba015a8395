//! Captured parts of rounds: drafts, the target's pass with what follows from it, extends.
//!
//! A round of requests that all decode is enqueued for the next larger captured batch size, and its
//! passes for the next larger number of rows, so that few graphs serve batches of every size and
//! shape. A part is launched the first time that its key is met, captured the second time, and
//! replayed from then on. The one invariant: rounds of one key differ in nothing but what lies on
//! the backend, so a replay is what launching would be.

use std::time::{Duration, Instant};

use aquila_compute::Backend;
use aquila_compute::round::{Extent, GraphKey};
use aquila_spec::{DraftBound, Shape};

use aquila_spec::known_bugs::Bug;

use self::kept::{Entry, Kept};
use super::batch::CapturedPart;
use super::stores::Takers;
use crate::error::{Error, Result};

mod kept;

/// For which batches parts of rounds are captured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GraphSettings {
    /// Requests of a batch that a round is enqueued for, ascending; none: nothing is captured.
    pub batches: Vec<usize>,
    /// Whether each replay is compared with a launch of what was captured.
    pub check: bool,
}

/// A part of a round that a graph may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GraphPart {
    /// The levels of the trees.
    Draft,
    /// The target's pass, what is accepted of the trees, and what moves then.
    Verify,
    /// The draft's pass over what became certain.
    Extend,
}

/// What the operations of a part depend on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PartKey {
    part: GraphPart,
    bound: DraftBound,
    target: Extent,
    takers: Takers,
    round: GraphKey,
}

/// The graphs of an executor.
pub(super) struct Graphs<G> {
    settings: GraphSettings,
    /// Rows of the target's pass and of extends that these are enqueued for, ascending.
    target_rows: Vec<usize>,
    extend_rows: Vec<usize>,
    kept: Kept<PartKey, G>,
}

impl<G> Graphs<G> {
    /// For trees up to `shape`, and batches up to `running` requests.
    pub fn new(mut settings: GraphSettings, shape: Shape, running: usize) -> Self {
        settings.batches.retain(|batch| (1..=running).contains(batch));
        settings.batches.sort_unstable();
        settings.batches.dedup();
        Self {
            target_rows: row_bounds(&settings.batches, shape.nodes()),
            extend_rows: row_bounds(&settings.batches, shape.steps() + 1),
            settings,
            kept: Kept::new(),
        }
    }

    /// The batch size that a round of `requests` requests is enqueued for, if parts of it may be
    /// captured.
    pub fn batch(&self, requests: usize) -> Option<usize> {
        next(&self.settings.batches, requests).filter(|_| requests > 0)
    }

    /// Raises the bounds of the target's pass to those that are captured.
    pub fn pad_target(&self, extent: Extent) -> Extent {
        let rows = next(&self.target_rows, extent.rows.max(extent.outputs));
        rows.map_or(extent, |rows| Extent { rows, outputs: rows })
    }

    /// Raises the bounds of an extend in a round enqueued for `batch` requests.
    pub fn pad_extend(&self, bound: DraftBound, batch: usize) -> DraftBound {
        let rows = next(&self.extend_rows, bound.rows).unwrap_or(bound.rows);
        DraftBound { rows, requests: batch, ..bound }
    }

    /// Launches, captures or replays a part, whose operations `enqueue` enqueues.
    pub fn run<B: Backend<Graph = G>>(
        &mut self,
        backend: &B,
        key: Option<PartKey>,
        mut enqueue: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let Some(key) = key else { return enqueue() };
        let enqueue = &mut enqueue;
        let key = key.spoiled();
        match self.kept.meet(&key) {
            Some(Entry::Captured(graph, part)) => {
                return replay(backend, graph, part, self.settings.check, enqueue);
            }
            Some(Entry::Refused) => return enqueue(),
            Some(Entry::Launched) => {}
            None => {
                enqueue()?;
                self.kept.set(key, Entry::Launched);
                return Ok(());
            }
        }
        let began = Instant::now();
        let captured = backend.capture(&mut || enqueue().map_err(Error::of_backend));
        let refused = match captured {
            Ok(None) => None,
            Ok(Some(graph)) => {
                let mut part = key.captured(began.elapsed());
                match replay(backend, &graph, &mut part, self.settings.check, enqueue) {
                    // It was not begun, unless it was to be checked.
                    Err(Error::Executor(why)) if !self.settings.check => Some(why),
                    outcome => {
                        self.kept.set(key, Entry::Captured(graph, part));
                        return outcome;
                    }
                }
            }
            Err(why) => Some(why),
        };
        // The stream is as it was before: what was not captured is launched.
        if let Some(why) = refused {
            tracing::warn!("a part of rounds is launched, not captured: {key:?}: {why}");
        }
        self.kept.set(key, Entry::Refused);
        enqueue()
    }

    /// The parts that there are graphs of now.
    pub fn captured(&self) -> Vec<CapturedPart> {
        self.kept.captured()
    }
}

impl PartKey {
    /// The levels of trees within `bound`.
    pub fn draft(bound: DraftBound, round: GraphKey) -> Self {
        let (target, takers) = (Extent::default(), Takers::default());
        Self { part: GraphPart::Draft, bound, target, takers, round }
    }

    /// A target's pass within `target`, whose rows `takers` take.
    pub fn verify(target: Extent, takers: Takers, round: GraphKey) -> Self {
        Self { part: GraphPart::Verify, bound: DraftBound::default(), target, takers, round }
    }

    /// An extend within `bound`.
    pub fn extend(bound: DraftBound, round: GraphKey) -> Self {
        Self { part: GraphPart::Extend, ..Self::draft(bound, round) }
    }

    fn spoiled(self) -> Self {
        if Bug::GraphWidth.alive() {
            return Self { bound: DraftBound::default(), target: Extent::default(), ..self };
        }
        if Bug::GraphTakers.alive() {
            return Self { takers: Takers::default(), ..self };
        }
        self
    }

    fn captured(&self, time: Duration) -> CapturedPart {
        let rows = match self.part {
            GraphPart::Draft => self.bound.beam,
            GraphPart::Verify => self.target.rows,
            GraphPart::Extend => self.bound.rows,
        };
        CapturedPart { part: self.part, rows, steps: self.bound.steps, time, checks: 0 }
    }
}

/// Replays the graph of a part, and compares that with a launch where it is to be checked.
fn replay<B: Backend>(
    backend: &B,
    graph: &B::Graph,
    part: &mut CapturedPart,
    check: bool,
    enqueue: &mut impl FnMut() -> Result<()>,
) -> Result<()> {
    if !check {
        return Ok(backend.replay(graph)?);
    }
    let differs = backend.check_replay(graph, &mut || enqueue().map_err(Error::of_backend))?;
    part.checks += 1;
    differs.map_or(Ok(()), |what| Err(Error::Replay { part: *part, what }))
}

/// The least of ascending numbers that is not below `number`.
fn next(numbers: &[usize], number: usize) -> Option<usize> {
    if Bug::GraphPruned.alive() && numbers.last().is_some_and(|&last| last < number) {
        return numbers.last().copied();
    }
    numbers.get(numbers.partition_point(|&n| n < number)).copied()
}

/// So many rows for each request of each batch: powers of two up to `most`, and `most`.
fn row_bounds(batches: &[usize], most: usize) -> Vec<usize> {
    let each: Vec<usize> = std::iter::successors(Some(1), |rows| Some(rows * 2))
        .take_while(|&rows| rows < most)
        .chain([most])
        .collect();
    let mut rows: Vec<usize> =
        batches.iter().flat_map(|batch| each.iter().map(move |rows| batch * rows)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graphs(batches: &[usize], shape: Shape) -> Graphs<()> {
        let settings = GraphSettings { batches: batches.to_vec(), check: false };
        Graphs::new(settings, shape, 16)
    }

    #[test]
    fn a_batch_is_enqueued_for_the_next_captured_size() {
        let graphs = graphs(&[8, 1, 4, 64], Shape::PLAIN);
        let sizes: Vec<_> = [0, 1, 2, 4, 5, 8, 9].iter().map(|&n| graphs.batch(n)).collect();
        assert_eq!(sizes, [None, Some(1), Some(4), Some(4), Some(8), Some(8), None]);
    }

    #[test]
    fn a_batch_of_a_captured_size_is_not_padded() {
        let shape = Shape::chain(3);
        for batch in [1, 2, 6] {
            let graphs = graphs(&[1, 2, 6], shape);
            let extent = Extent { rows: batch * 4, outputs: batch * 4 };
            assert_eq!(graphs.pad_target(extent), extent);
            let bound = DraftBound { steps: 0, beam: 0, rows: batch * 4, requests: batch };
            assert_eq!(graphs.pad_extend(bound, batch), bound);
        }
    }

    #[test]
    fn no_pass_is_padded_beyond_the_largest_batch() {
        let graphs = graphs(&[1, 2, 16], Shape::new(5, 4, 9).unwrap());
        for rows in 1..=16 * 9 {
            let padded = graphs.pad_target(Extent { rows, outputs: rows });
            assert!((rows..=16 * 9).contains(&padded.rows), "{rows} as {padded:?}");
        }
    }
}
