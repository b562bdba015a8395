//! How much room a state takes, and where everything is in it: counted before anything is made, for the
//! table at start, and then made.

use super::layout::{MOST_GROUPS, Node, Offered, Query, Round, Row, Sequence, State, Task};
use super::state::{LISTED, MAXIMA, MOST_PARTS};
use crate::Result;
use crate::round::{Shape, StateBounds, Verify};

/// Counts of what a state holds.
pub(super) struct Sizes {
    pub groups: usize,
    pool: usize,
    table_stride: usize,
    tokens_stride: usize,
    pub outputs: usize,
    /// Rows of logits that come at a time at most.
    pub pieces: usize,
    /// Distributions that drafts were drawn from, and values that verification leaves of them.
    drawn: usize,
    rest: usize,
    /// Bytes of a row's record, and of what the host sends with a batch.
    record: usize,
    batch: usize,
}

impl Sizes {
    pub fn of(bounds: &StateBounds) -> Self {
        let StateBounds { places, stride, shape, vocabulary, .. } = *bounds;
        let (steps, topk, nodes) = (shape.steps(), shape.topk(), shape.nodes());
        let tree = bounds.groups.iter().map(|group| group.tree.of(shape)).max().unwrap_or(0);
        Self {
            groups: 1 + bounds.groups.len(),
            pool: Shape::most_nodes(steps, topk),
            table_stride: stride + nodes.max(tree) + steps + 2,
            tokens_stride: stride + steps + 2,
            outputs: bounds.outputs.max(places * topk),
            pieces: bounds.logits.max(places * topk),
            drawn: match bounds.verify {
                Verify::Rejection => places * (1 + (steps.max(1) - 1) * topk),
                _ => 0,
            },
            rest: if bounds.verify == Verify::Match { 0 } else { places * vocabulary },
            record: size_of::<Row>() + 3 * 4 * (steps + 1),
            batch: size_of::<Round>() + places * size_of::<Task>(),
        }
    }

    /// Where everything is: `room` answers the address of so many bytes. Block tables, records, trees,
    /// nodes that drafts offered, queries, lists of likely tokens and what comes with a batch are made
    /// apart from it.
    pub fn parts(
        &self,
        bounds: &StateBounds,
        apart: [u64; 7],
        mut room: impl FnMut(usize) -> Result<u64>,
    ) -> Result<State> {
        let StateBounds { places, shape, vocabulary, .. } = *bounds;
        let (steps, topk, nodes) = (shape.steps(), shape.topk(), shape.nodes());
        let Self { groups, pool, table_stride, tokens_stride, outputs, pieces, .. } = *self;
        let [tables, records, trees, offered, queries, lists, batch] = apart;
        Ok(State {
            places: places as u32,
            groups: groups as u32,
            tokens_stride: tokens_stride as u32,
            table_stride: table_stride as u32,
            drafts: u32::from(bounds.drafts),
            hidden: u32::from(bounds.hidden),
            first_parked: bounds.first_parked as u32,
            parked_rows: bounds.parked_rows as u32,
            chunk: bounds.chunk as u32,
            pool: pool as u32,
            nodes: nodes as u32,
            topk: topk as u32,
            steps: steps as u32,
            candidates: topk as u32,
            record: self.record as u32,
            vocabulary: vocabulary as u32,
            lookahead: room(4 * bounds.groups.len())?,
            prior: room(4 * topk.max(1))?,
            round: batch,
            tasks: batch + size_of::<Round>() as u64,
            records,
            sequences: room(places * size_of::<Sequence>())?,
            committed: room(4 * places * MOST_GROUPS)?,
            tokens: room(4 * places * tokens_stride)?,
            tables,
            seed_tokens: room(4 * places * topk)?,
            seed_probabilities: room(4 * places * topk)?,
            offered,
            beams: room(4 * places * topk)?,
            trees,
            extending: room(8 * places * MOST_GROUPS)?,
            layer_rows: room(4 * places * MOST_GROUPS)?,
            moves: room(16 * places * (steps + 1))?,
            queries,
            best: room(8 * outputs)?,
            raw_best: room(8 * outputs)?,
            limits: room(8 * outputs)?,
            leader_scores: room(8 * outputs)?,
            log_totals: room(8 * outputs)?,
            part_scores: room(8 * pieces * MOST_PARTS)?,
            leaders: room(4 * outputs)?,
            part_tokens: room(4 * pieces * MOST_PARTS)?,
            arrivals: room(4 * pieces)?,
            counts: room(4 * outputs)?,
            candidate_tokens: room(4 * outputs * topk)?,
            candidate_probabilities: room(4 * outputs * topk)?,
            maxima: room(8 * pieces * 2 * MAXIMA)?,
            lists,
            totals: room(8 * pieces * 2)?,
            list_counts: room(4 * pieces * 2)?,
            drawn: room(4 * self.drawn * vocabulary)?,
            drawn_totals: room(8 * self.drawn)?,
            rest: room(8 * self.rest)?,
            masks: 0,
        })
    }

    /// Bytes of what is made apart.
    pub fn apart(&self, bounds: &StateBounds) -> [usize; 7] {
        let places = bounds.places;
        [
            4 * self.groups * places * self.table_stride,
            places * self.record,
            places * bounds.shape.nodes() * size_of::<Node>(),
            places * self.pool * size_of::<Offered>(),
            self.outputs * size_of::<Query>(),
            8 * self.pieces * 2 * LISTED,
            self.batch,
        ]
    }
}
