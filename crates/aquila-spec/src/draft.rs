//! The algorithm of every draft that is one recurrent model: all requests at once, level by level.
//!
//! Let L be the target's committed rows and the bonus token L. A draft of lookahead a has the
//! rows 0 to L - a when it begins: its row p consumed token p + a, the last one the bonus. A node
//! of depth d runs at the position behind those and its ancestors. Positions are computed from
//! these counts, never kept.

use std::collections::HashMap;

use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape, Sight};
use aquila_model::Result;

use crate::algorithm::{Algorithm, Declaration, DraftAsk, Drafting, Extending, Offer, Seed};
use crate::{Growth, Tree};

/// A model that drafts recurrently, with keys and values of its own in one group.
///
/// Rows whose tokens are certain are run by `extend`; rows of the tree being drafted by `expand`,
/// whose keys and values nobody sees after the round.
pub trait Drafter<B: Backend>: Send {
    /// What it needs: one group.
    fn declaration(&self) -> &Declaration;

    /// The store of its keys and values for `slots` rows.
    fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape;

    /// Which tokens it knows, if not all of the target's.
    fn ids(&self) -> Option<DraftIds<'_>>;

    /// Runs certain rows. `hidden` has the target's rows, where declared; `plan.sources` says
    /// which each row takes. Logits are left for `plan.outputs`, whose rows are the seeds of the
    /// next tree.
    fn extend(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        hidden: Option<&B::Rows>,
        kv: &mut B::Kv,
    ) -> Result<()>;

    /// Runs one level of trees. `plan.sources` says which seed each row goes on from (`first`), or
    /// which row of the level before.
    fn expand(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        first: bool,
        kv: &mut B::Kv,
    ) -> Result<()>;

    /// The logits of the last pass.
    fn logits(&self) -> &B::Rows;
}

/// A drafter with its keys and values.
pub struct Speculator<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    kv: B::Kv,
    plan: ForwardPlan,
}

impl<B: Backend> Speculator<B> {
    /// Over `drafter`, with room for the keys and values of `slots` rows.
    pub fn new(
        backend: &B,
        drafter: Box<dyn Drafter<B>>,
        slots: usize,
        dtype: KvDtype,
    ) -> Result<Self> {
        let kv = backend.kv(drafter.kv_shape(slots, dtype))?;
        Ok(Self { drafter, kv, plan: ForwardPlan::default() })
    }

    /// Plans a row for every node of every beam; answers the request and the path of each row.
    fn plan_level(
        &mut self,
        requests: &[Drafting<'_>],
        trees: &mut [Sapling],
        first: bool,
    ) -> Vec<(usize, Vec<u32>)> {
        let plan = &mut self.plan;
        plan.clear();
        let mut paths = Vec::new();
        for (index, (request, tree)) in requests.iter().zip(trees).enumerate() {
            if !tree.growth.goes_on() {
                continue;
            }
            let group = &request.groups[0];
            let certain = group.rows.end;
            let start = group.place_table(plan, certain);
            let mut rows = HashMap::new();
            for &node in tree.growth.beam() {
                let depth = tree.growth.depth();
                let own = group.slots[certain + tree.slots.len()];
                tree.slots.insert(node, own);
                let tail_start = plan.tails.len();
                let mut at = Some(node);
                while let Some(ancestor) = at {
                    plan.tails.push(tree.slots[&ancestor]);
                    at = tree.growth.parent(ancestor);
                }
                plan.tails[tail_start..].reverse();
                let source = match tree.growth.parent(node) {
                    Some(parent) if !first => tree.rows[&parent],
                    _ => request.seed.row,
                };
                rows.insert(node, plan.rows() as u32);
                plan.outputs.push(plan.rows() as u32);
                plan.tokens.push(tree.growth.token(node));
                plan.positions.push((certain + depth - 1) as u32);
                plan.writes.push(own);
                plan.sources.push(source);
                plan.sights.push(Sight {
                    start,
                    prefix: certain as u32,
                    tail_start: tail_start as u32,
                    tail: depth as u32,
                });
                paths.push((index, tree.growth.path_tokens(node)));
            }
            tree.rows = rows;
        }
        paths
    }
}

impl<B: Backend> Algorithm<B> for Speculator<B> {
    fn declaration(&self) -> &Declaration {
        self.drafter.declaration()
    }

    fn draft(&mut self, backend: &B, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let mut trees: Vec<Sapling> = requests
            .iter()
            .map(|r| Sapling {
                growth: r.seed.offer.begin(r.shape),
                rows: HashMap::new(),
                slots: HashMap::new(),
            })
            .collect();
        let mut first = true;
        loop {
            let paths = self.plan_level(requests, &mut trees, first);
            if self.plan.rows() == 0 {
                break;
            }
            #[cfg(feature = "known-bugs")]
            crate::known_bugs::spoil_level(&mut self.plan, requests, &paths);
            self.drafter.expand(backend, &self.plan, first, &mut self.kv)?;
            let asks: Vec<DraftAsk<'_>> = paths
                .iter()
                .enumerate()
                .map(|(row, (request, path))| requests[*request].asking.draft(path, row))
                .collect();
            let count = requests.iter().map(|r| r.shape.topk()).max().unwrap_or(1);
            let ids = self.drafter.ids();
            let offers = Offer::of(backend, self.drafter.logits(), &asks, count, ids)?;
            let mut offers = offers.into_iter();
            for Sapling { growth, .. } in &mut trees {
                if growth.goes_on() {
                    let offers = offers.by_ref().take(growth.beam().len()).collect();
                    Offer::grow(growth, offers);
                }
            }
            first = false;
        }
        Ok(trees.into_iter().zip(requests).map(|(t, r)| t.growth.finish(r.bonus())).collect())
    }

    fn extend(
        &mut self,
        backend: &B,
        requests: &[Extending<'_>],
        hidden: Option<&B::Rows>,
    ) -> Result<Vec<Option<Seed>>> {
        let plan = &mut self.plan;
        plan.clear();
        let lookahead = self.drafter.declaration().lookahead();
        let mut asks = Vec::new();
        let mut count = 1;
        for request in requests {
            let group = &request.groups[0];
            let start = group.place_table(plan, group.rows.end);
            for row in group.rows.clone() {
                plan.tokens.push(request.tokens[row + lookahead]);
                plan.positions.push(row as u32);
                plan.writes.push(group.slots[row]);
                plan.sights.push(Sight { start, prefix: row as u32 + 1, ..Sight::default() });
                if hidden.is_some() {
                    plan.sources.push(request.target.of(row));
                }
            }
            if let Some((asking, candidates)) = &request.seed {
                plan.outputs.push(plan.rows() as u32 - 1);
                asks.push(asking.draft(&[], asks.len()));
                count = count.max(*candidates);
            }
        }
        let idle = plan.rows() == 0;
        #[cfg(feature = "known-bugs")]
        let idle = idle && !crate::known_bugs::Bug::IdlePass.alive();
        if idle {
            return Ok(requests.iter().map(|_| None).collect());
        }
        #[cfg(feature = "known-bugs")]
        crate::known_bugs::spoil_extend(plan, requests);
        self.drafter.extend(backend, plan, hidden, &mut self.kv)?;
        let ids = self.drafter.ids();
        let offers = Offer::of(backend, self.drafter.logits(), &asks, count, ids)?;
        let mut seeds = (0..).zip(offers).map(|(row, offer)| Seed { row, offer });
        Ok(requests.iter().map(|r| r.seed.as_ref().and_then(|_| seeds.next())).collect())
    }
}

/// A tree on its way, with where the rows of its nodes are.
struct Sapling {
    growth: Growth,
    /// The row of each node of the level before, in its pass.
    rows: HashMap<usize, u32>,
    /// The slot of every node that was run.
    slots: HashMap<usize, u32>,
}
