//! The steps of a round, in their first form: on the host, over logits that are copied there.
//!
//! Forward passes run on the device; plans go there and logits come back once for each of `propose`,
//! `sample` and `seed_trees`.

use super::device::{Device, HostCopy};
use super::rows::CudaRows;
use crate::cpu::Pool;
use crate::round::{
    Candidates, DraftQuery, RequestOutput, ReturnedRows, RoundState, Simulate, StateBounds,
};
use crate::{DraftIds, Result, sampling};

/// The rows of all running requests, and the round that runs.
pub struct CudaState {
    pub(super) round: RoundState,
    logits: FetchedRows,
    hidden_states: FetchedRows,
    routed_experts: FetchedRows,
}

/// Rows on the host.
#[derive(Default)]
struct FetchedRows {
    copy: HostCopy,
    stride: usize,
    width: usize,
}

impl FetchedRows {
    /// Copies the first `count` rows here.
    fn fetch(&mut self, device: &Device, rows: &CudaRows, count: usize) -> Result<()> {
        rows.hold("rows to fetch", count, rows.width)?;
        (self.stride, self.width) = (rows.stride, rows.width);
        self.copy.fetch(device, &rows.values, count * rows.stride)
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.copy.values()[row * self.stride..][..self.width]
    }
}

impl CudaState {
    pub(super) fn new(bounds: StateBounds) -> Self {
        Self {
            round: RoundState::new(bounds),
            logits: FetchedRows::default(),
            hidden_states: FetchedRows::default(),
            routed_experts: FetchedRows::default(),
        }
    }

    pub(super) fn propose(
        &mut self,
        device: &Device,
        pool: &Pool,
        rows: &CudaRows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let (queries, count) = self.round.level_queries();
        let proposed = candidates(&mut self.logits, device, pool, rows, &queries, count, ids)?;
        self.round.take_level(proposed);
        Ok(())
    }

    pub(super) fn seed(
        &mut self,
        device: &Device,
        pool: &Pool,
        rows: &CudaRows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let (queries, count) = self.round.seed_queries();
        let seeds = candidates(&mut self.logits, device, pool, rows, &queries, count, ids)?;
        self.round.take_seeds(seeds);
        Ok(())
    }

    pub(super) fn sample(&mut self, device: &Device, pool: &Pool, rows: &CudaRows) -> Result<()> {
        let (chosen, weighed) = self.round.sample_queries();
        let end = chosen.iter().chain(&weighed).map(|query| query.row + 1).max();
        self.logits.fetch(device, rows, end.unwrap_or(0))?;
        let logits = &self.logits;
        let choices = pool.map(&chosen, |query| sampling::choose(logits.row(query.row), query));
        let weights = pool
            .map(&weighed, |query| sampling::filtered_probs(logits.row(query.row), query, None));
        self.round.take_samples(choices, weights);
        Ok(())
    }

    /// Over the logits that [`CudaState::sample`] has fetched.
    pub(super) fn accept(&mut self, simulate: Option<&Simulate>) {
        let Self { round, logits, .. } = self;
        round.accept(simulate, |query| sampling::choose(logits.row(query.row), query));
    }

    /// Rows that requests get are rare, so all rows of the pass are copied.
    pub(super) fn outputs(
        &mut self,
        device: &Device,
        returned: ReturnedRows<'_, CudaRows>,
    ) -> Result<Vec<Option<RequestOutput>>> {
        let Self { round, hidden_states, routed_experts, .. } = self;
        for (rows, fetched) in [
            (returned.hidden_states, &mut *hidden_states),
            (returned.routed_experts, &mut *routed_experts),
        ] {
            if let Some(rows) = rows {
                fetched.fetch(device, rows, rows.capacity)?;
            }
        }
        let returned = ReturnedRows {
            hidden_states: returned.hidden_states.map(|_| &*hidden_states),
            routed_experts: returned.routed_experts.map(|_| &*routed_experts),
        };
        round.take_returned(returned, FetchedRows::row);
        Ok(round.take_outputs())
    }
}

/// What a draft proposes by each query.
fn candidates(
    logits: &mut FetchedRows,
    device: &Device,
    pool: &Pool,
    rows: &CudaRows,
    queries: &[DraftQuery<'_>],
    count: usize,
    ids: Option<DraftIds<'_>>,
) -> Result<Vec<Candidates>> {
    let end = queries.iter().map(|query| query.query.row + 1).max().unwrap_or(0);
    logits.fetch(device, rows, end)?;
    Ok(pool.map(queries, |query| query.answer(logits.row(query.query.row), count, ids)))
}
