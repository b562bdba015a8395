//! Multi-token prediction with a layer for each step.
//!
//! Let L be the target's committed rows and the bonus token L. Row p of layer j takes token
//! p + 1 + j and the hidden state of layer j - 1 at row p (the target's for layer 0), and runs at
//! position p + j; so layer j has L - j certain rows. A node of depth d goes on by layer d, whose
//! last d rows rest on the tokens of its path: they are run anew for every branch, behind the
//! certain rows, and nobody sees them after the round.
//!
//! The first of those rows takes the last certain hidden state of the layer before, and so does
//! the first row that becomes certain next. That state is kept for each request. The invariant:
//! what is kept changes only after all passes of an extend have read it.

use std::collections::HashMap;

use aquila_compute::{Backend, ForwardPlan, KvDtype, PlanBounds, Sight};
use aquila_model::{Error, FusedHead, LayerScratch, Result, Sources};

use crate::kept_states::{KeptStates, Seats};
use crate::{
    Algorithm, Declaration, DraftAsk, DraftGroup, Drafting, Extending, Growth, HiddenStates, Offer,
    Seed, Shape, Travels, Tree, TreeRows,
};

/// What there must be room for.
#[derive(Debug, Clone, Copy)]
pub struct MtpRoom {
    /// The largest pass of a draft with one row for each node.
    pub bounds: PlanBounds,
    /// The largest tree.
    pub shape: Shape,
    /// Requests that run at a time.
    pub requests: usize,
    /// Slots of each group.
    pub slots: usize,
    /// How keys and values are kept.
    pub dtype: KvDtype,
}

impl MtpRoom {
    /// The largest pass: a branch has as many rows as it is deep.
    pub fn passes(&self) -> PlanBounds {
        let depth = self.shape.steps().saturating_sub(1);
        let branches = self.requests * self.shape.topk();
        PlanBounds {
            rows: self.bounds.rows + branches * depth,
            outputs: self.bounds.outputs,
            // Each layer has block tables of its own.
            slots: self.bounds.slots * self.shape.steps().max(1) + branches * depth * depth,
        }
    }

    /// Bytes of the hidden states of `width` that passes leave and requests keep.
    pub fn state_bytes(&self, width: usize) -> u64 {
        let steps = self.shape.steps().max(2);
        4 * width as u64 * (steps * (self.passes().rows + self.requests)) as u64
    }
}

/// MTP layers that draft, one for each step.
pub struct Mtp<B: Backend> {
    declaration: Declaration,
    head: FusedHead<B>,
    kv: Vec<B::Kv>,
    scratch: LayerScratch<B>,
    states: KeptStates<B>,
    seats: Seats,
    plan: ForwardPlan,
}

impl<B: Backend> Mtp<B> {
    /// Drafts with the layers of `head`; refuses more steps than it has layers.
    pub fn new(backend: &B, head: FusedHead<B>, room: MtpRoom) -> Result<Self> {
        Self::check_steps(head.layers(), room.shape)?;
        let steps = room.shape.steps();
        let group = |layer| DraftGroup { lookahead: 1 + layer, tree: TreeRows::Level(layer) };
        let width = head.spec().hidden_size;
        let declaration = Declaration {
            name: "MTP",
            hidden: HiddenStates::Final,
            groups: (0..steps).map(group).collect(),
            // The last states that each layer but the last reads or leaves: one for each of them
            // where they are chained, else as many of the target's.
            travels: Travels::with_hidden(steps.saturating_sub(1), width),
        };
        let shape = head.kv_shape(room.slots, room.dtype);
        let kv = (0..steps).map(|_| Ok(backend.kv(shape)?)).collect::<Result<_>>()?;
        let passes = room.passes();
        let scratch = head.layer_scratch(backend, passes)?;
        let (chained, rows) = (head.chained(), passes.rows);
        let states = KeptStates::new(backend, steps, chained, rows, room.requests, width)?;
        let (seats, plan) = (Seats::new(room.requests), ForwardPlan::default());
        Ok(Self { declaration, head, kv, scratch, states, seats, plan })
    }

    /// Refuses trees deeper than there are layers.
    pub(crate) fn check_steps(layers: usize, shape: Shape) -> Result<()> {
        let steps = shape.steps();
        if steps <= layers {
            return Ok(());
        }
        Err(Error::Unsupported {
            origin: format!("--speculative-num-steps {steps}"),
            reason: format!(
                "the head has {layers} MTP layers, one for each step: at most {layers} steps"
            ),
        })
    }

    /// Plans the rows of every node of every beam, all of them at `depth`; answers the request and
    /// the path of each node.
    fn plan_level(
        &mut self,
        requests: &[Drafting<'_>],
        trees: &mut [Sapling],
        depth: usize,
    ) -> Result<Vec<(usize, Vec<u32>)>> {
        let Self { plan, head, states, seats, .. } = self;
        plan.clear();
        let mut paths = Vec::new();
        for (index, (request, tree)) in requests.iter().zip(trees).enumerate() {
            if !tree.growth.goes_on() {
                continue;
            }
            let Some(group) = request.groups.get(depth) else {
                return Err(Error::Plan(format!("a tree deeper than {depth} MTP layers")));
            };
            let (committed, certain) = (request.tokens.len() - 1, group.rows.end);
            // Where the parent's rows of the layer before begin.
            let before = committed.saturating_sub(depth - 1);
            let seat = seats.of(request.request)?;
            let start = group.place_table(plan, certain);
            let mut own = group.slots[certain..].iter();
            let mut firsts = HashMap::new();
            for &node in tree.growth.beam() {
                let path = tree.growth.path_tokens(node);
                let parent = tree.growth.parent(node).and_then(|at| tree.firsts.get(&at));
                let tail_start = plan.tails.len() as u32;
                firsts.insert(node, plan.rows());
                // Near the beginning of a text there are fewer rows than the node is deep.
                for (row, &slot) in (certain..committed).zip(own.by_ref()) {
                    plan.tokens.push(path[row + depth - committed]);
                    plan.positions.push((row + depth) as u32);
                    plan.writes.push(slot);
                    plan.tails.push(slot);
                    plan.sources.push(match parent {
                        _ if !head.chained() => states.kept(seat, committed - 1 - row),
                        Some(first) if row >= before => (first + row - before) as u32,
                        _ => states.kept(seat, 0),
                    });
                    let (prefix, tail) = (certain as u32, plan.tails.len() as u32 - tail_start);
                    plan.sights.push(Sight { start, prefix, tail_start, tail });
                }
                plan.outputs.push(plan.rows() as u32 - 1);
                paths.push((index, path));
            }
            tree.firsts = firsts;
        }
        Ok(paths)
    }

    /// Plans the rows of `layer` that have become certain; answers where those of each request
    /// begin. `before` says that of the layer before.
    fn plan_certain(
        &mut self,
        requests: &[Extending<'_>],
        layer: usize,
        before: &[usize],
    ) -> Result<Vec<usize>> {
        let Self { plan, head, states, seats, .. } = self;
        plan.clear();
        let mut firsts = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let group = &request.groups[layer];
            let seat = seats.take(request.request)?;
            firsts.push(plan.rows());
            let start = group.place_table(plan, group.rows.end);
            for row in group.rows.clone() {
                plan.tokens.push(request.tokens[row + 1 + layer]);
                plan.positions.push((row + layer) as u32);
                plan.writes.push(group.slots[row]);
                let prefix = row as u32 + 1;
                plan.sights.push(Sight { start, prefix, ..Sight::default() });
                plan.sources.push(if layer == 0 {
                    request.target.of(row)
                } else {
                    let from = if head.chained() { layer - 1 } else { 0 };
                    let new = request.groups[from].rows.start;
                    match row.checked_sub(new) {
                        Some(place) => (before[index] + place) as u32,
                        None => states.kept(seat, new - 1 - row),
                    }
                });
            }
            if layer == 0 && request.seed.is_some() {
                plan.outputs.push(plan.rows() as u32 - 1);
            }
        }
        Ok(firsts)
    }
}

impl<B: Backend> Algorithm<B> for Mtp<B> {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn draft(&mut self, backend: &B, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let mut trees: Vec<Sapling> = requests
            .iter()
            .map(|r| Sapling { growth: r.seed.offer.begin(r.shape), firsts: HashMap::new() })
            .collect();
        let count = requests.iter().map(|r| r.shape.topk()).max().unwrap_or(1);
        for depth in 1.. {
            let paths = self.plan_level(requests, &mut trees, depth)?;
            if paths.is_empty() {
                break;
            }
            let Self { head, kv, scratch, states, plan, .. } = self;
            let (rows, made) = states.behind(depth);
            let from = Sources { rows, count: usize::MAX };
            head.run(backend, depth, plan, from, &mut kv[depth], scratch, made)?;
            let asks: Vec<DraftAsk<'_>> = paths
                .iter()
                .enumerate()
                .map(|(row, (request, path))| requests[*request].asking.draft(path, row))
                .collect();
            let offers = Offer::of(backend, scratch.logits(), &asks, count, head.draft_ids())?;
            let mut offers = offers.into_iter();
            for Sapling { growth, .. } in &mut trees {
                if growth.goes_on() {
                    let offers = offers.by_ref().take(growth.beam().len()).collect();
                    Offer::grow(growth, offers);
                }
            }
        }
        Ok(trees.into_iter().zip(requests).map(|(t, r)| t.growth.finish(r.bonus())).collect())
    }

    fn extend(
        &mut self,
        backend: &B,
        requests: &[Extending<'_>],
        hidden: Option<&B::Rows>,
    ) -> Result<Vec<Option<Seed>>> {
        let missing = || Error::Plan("MTP layers without the target's hidden states".into());
        let hidden = hidden.ok_or_else(missing)?;
        let chained = self.head.chained();
        // Where the rows of each request begin in the pass of each layer.
        let mut firsts: Vec<Vec<usize>> = Vec::new();
        for layer in 0..self.kv.len() {
            let before = if chained { firsts.last() } else { firsts.first() };
            let before = before.cloned().unwrap_or_default();
            firsts.push(self.plan_certain(requests, layer, &before)?);
            let Self { head, kv, scratch, states, plan, .. } = self;
            if layer == 0 {
                let from = Sources { rows: hidden, count: usize::MAX };
                let made = states.first();
                head.run(backend, layer, plan, from, &mut kv[layer], scratch, made)?;
                if let Some(target) = states.target() {
                    backend.copy_columns(scratch.hidden(), plan.rows(), 0, target)?;
                }
            } else {
                let (rows, made) = states.behind(layer);
                let from = Sources { rows, count: usize::MAX };
                head.run(backend, layer, plan, from, &mut kv[layer], scratch, made)?;
            }
        }
        let keeping = if chained { self.kv.len().saturating_sub(1) } else { 1 };
        for (layer, firsts) in firsts.iter().enumerate().take(keeping) {
            let seats: Result<Vec<_>> = requests.iter().map(|r| self.seats.of(r.request)).collect();
            let rows = requests.iter().map(|r| r.groups[layer].rows.len());
            let ranges = seats?.into_iter().zip(firsts.iter().copied()).zip(rows);
            let ranges = ranges.map(|((seat, first), rows)| (seat, first, rows));
            self.states.keep(backend, layer, ranges)?;
        }
        // Only the first layer had outputs, so its logits still stand.
        let mut asks = Vec::new();
        let mut count = 1;
        for (asking, candidates) in requests.iter().filter_map(|r| r.seed.as_ref()) {
            asks.push(asking.draft(&[], asks.len()));
            count = count.max(*candidates);
        }
        let ids = self.head.draft_ids();
        let offers = Offer::of(backend, self.scratch.logits(), &asks, count, ids)?;
        let mut seeds = (0..).zip(offers).map(|(row, offer)| Seed { row, offer });
        Ok(requests.iter().map(|r| r.seed.as_ref().and_then(|_| seeds.next())).collect())
    }

    fn leave(&mut self, request: u64, _tokens: &[u32]) {
        self.seats.leave(request);
    }
}

/// A tree on its way, with where the rows of its nodes begin in the pass of the level before.
struct Sapling {
    growth: Growth,
    firsts: HashMap<usize, usize>,
}
