//! The draft of a round, for all requests at once.
//!
//! Let L be the target's committed rows and the bonus token L. A draft of lookahead a has the
//! rows 0 to L - a when it begins: its row p consumed token p + a, the last one the bonus. A node
//! of depth d runs at the position behind those and its ancestors. Positions are computed from
//! these counts, never kept.

use std::collections::HashMap;

use aquila_compute::choose::{Ask, Candidate, History, Sampling};
use aquila_compute::{Backend, ForwardPlan, Sight};
use aquila_model::Result;

use crate::{Drafter, Growth, Shape, Tree};

/// What a request asks of every token, wherever it is drafted.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// The request's settings.
    pub sampling: &'a Sampling,
    /// The tokens that count for penalties, the bonus included.
    pub history: &'a History,
    /// Which of the request's answers this is.
    pub choice: u32,
    /// Tokens of prompt and answer, the bonus included: the index of the next token.
    pub tokens: usize,
    /// Tokens that may not be chosen at depths below `banned_depths`.
    pub banned: &'a [u32],
    /// See `banned`.
    pub banned_depths: usize,
}

impl<'a> Asking<'a> {
    /// The ask about row `row`, after `path` below the bonus.
    pub fn after(&self, path: &'a [u32], row: usize) -> Ask<'a> {
        Ask {
            row,
            sampling: self.sampling,
            history: self.history,
            path,
            position: (self.tokens + path.len()) as u32,
            choice: self.choice,
            banned: if path.len() < self.banned_depths { self.banned } else { &[] },
            top_logprobs: None,
            given: None,
        }
    }
}

/// Where the next tree of a request begins: what follows the bonus.
#[derive(Debug, Clone, PartialEq)]
pub struct Seed {
    /// The seed's row, in the pass that left it.
    pub row: u32,
    /// What was offered after the bonus, best first.
    pub offered: Vec<Candidate>,
}

/// A request whose tree is to be drafted.
pub struct Drafting<'a> {
    /// How large the tree may be.
    pub shape: Shape,
    /// The bonus token.
    pub bonus: u32,
    /// Where it begins.
    pub seed: &'a Seed,
    /// Rows of the draft that are certain.
    pub rows: usize,
    /// The slots of those rows, then room for the tree's.
    pub slots: &'a [u32],
    /// What is asked.
    pub asking: Asking<'a>,
}

/// A request some of whose rows have become certain.
pub struct Extending<'a> {
    /// Its tokens.
    pub tokens: &'a [u32],
    /// The draft's rows to run.
    pub rows: std::ops::Range<usize>,
    /// The slots of all its rows up to those.
    pub slots: &'a [u32],
    /// For each of the rows, the target's row that it takes; empty where none is declared.
    pub sources: &'a [u32],
    /// What is asked after the last row, if a tree is to begin there: how many candidates.
    pub seed: Option<(Asking<'a>, usize)>,
}

/// A drafter with its keys and values.
pub struct Speculator<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    kv: B::Kv,
    plan: ForwardPlan,
}

impl<B: Backend> Speculator<B> {
    /// Over `drafter`, with keys and values of its own.
    pub fn new(drafter: Box<dyn Drafter<B>>, kv: B::Kv) -> Self {
        Self { drafter, kv, plan: ForwardPlan::default() }
    }

    /// The drafter.
    pub fn drafter(&self) -> &dyn Drafter<B> {
        &*self.drafter
    }

    /// Drafts a tree for each request.
    pub fn draft(&mut self, backend: &B, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let mut trees: Vec<Sapling> = requests
            .iter()
            .map(|r| Sapling {
                growth: Growth::start(r.shape, &r.seed.offered),
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
            self.drafter.expand(backend, &self.plan, first, &mut self.kv)?;
            let asks: Vec<Ask<'_>> = paths
                .iter()
                .enumerate()
                .map(|(row, (request, path))| requests[*request].asking.after(path, row))
                .collect();
            let count = requests.iter().map(|r| r.shape.topk()).max().unwrap_or(1);
            let ids = self.drafter.ids();
            let mut offers = backend.offer(self.drafter.logits(), &asks, count, ids)?.into_iter();
            for tree in &mut trees {
                if tree.growth.goes_on() {
                    let offered: Vec<_> = offers.by_ref().take(tree.growth.beam().len()).collect();
                    tree.growth.grow(&offered);
                }
            }
            first = false;
        }
        Ok(trees.into_iter().zip(requests).map(|(t, r)| t.growth.finish(r.bonus)).collect())
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
            let start = plan.slots.len();
            plan.slots.extend_from_slice(&request.slots[..request.rows]);
            let mut rows = HashMap::new();
            for &node in tree.growth.beam() {
                let depth = tree.growth.depth();
                let own = request.slots[request.rows + tree.slots.len()];
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
                plan.positions.push((request.rows + depth - 1) as u32);
                plan.writes.push(own);
                plan.sources.push(source);
                plan.sights.push(Sight {
                    start: start as u32,
                    prefix: request.rows as u32,
                    tail_start: tail_start as u32,
                    tail: depth as u32,
                });
                paths.push((index, tree.growth.path_tokens(node)));
            }
            tree.rows = rows;
        }
        paths
    }

    /// Runs rows that have become certain; answers a seed for each request that asked for one.
    /// `hidden` has the rows of the target's last pass, where declared.
    pub fn extend(
        &mut self,
        backend: &B,
        requests: &[Extending<'_>],
        hidden: Option<&B::Rows>,
    ) -> Result<Vec<Option<Seed>>> {
        let plan = &mut self.plan;
        plan.clear();
        let lookahead = self.drafter.declaration().lookahead;
        let mut asks = Vec::new();
        let mut count = 1;
        for request in requests {
            let start = plan.slots.len();
            plan.slots.extend_from_slice(&request.slots[..request.rows.end]);
            for (row, place) in request.rows.clone().zip(0..) {
                plan.tokens.push(request.tokens[row + lookahead]);
                plan.positions.push(row as u32);
                plan.writes.push(plan.slots[start + row]);
                plan.sights.push(Sight {
                    start: start as u32,
                    prefix: row as u32 + 1,
                    ..Sight::default()
                });
                if hidden.is_some() {
                    plan.sources.push(request.sources[place]);
                }
            }
            if let Some((asking, candidates)) = &request.seed {
                plan.outputs.push(plan.rows() as u32 - 1);
                asks.push(asking.after(&[], asks.len()));
                count = count.max(*candidates);
            }
        }
        if plan.rows() == 0 {
            return Ok(requests.iter().map(|_| None).collect());
        }
        self.drafter.extend(backend, plan, hidden, &mut self.kv)?;
        let ids = self.drafter.ids();
        let offers = backend.offer(self.drafter.logits(), &asks, count, ids)?;
        let mut seeds = (0..).zip(offers).map(|(row, offered)| Seed { row, offered });
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
