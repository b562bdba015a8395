//! Requests with contexts in permuted slots, and plans over them.

use aquila_compute::{AttentionSpan, Backend, ForwardPlan, Result};

use crate::layer::{Layer, ROWS, Random, SLOTS, TOKENS};

/// Context lengths of the requests.
pub const CONTEXTS: [usize; 4] = [5, 64, 200, 1000];
/// Slots of each request beyond its context.
const ROOM: usize = 64;

/// Requests that hold keys and values already.
pub struct Scene {
    /// The slot list of each request: its context, then room for new rows.
    pub lists: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    random: Random,
}

impl Scene {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut slots: Vec<u32> = (0..SLOTS as u32).collect();
        for i in (1..slots.len()).rev() {
            slots.swap(i, random.below(i + 1));
        }
        let lists: Vec<Vec<u32>> =
            CONTEXTS.iter().map(|context| slots.drain(..context + ROOM).collect()).collect();
        let mut token = || random.below(TOKENS as usize) as u32;
        let tokens = CONTEXTS.iter().map(|&c| (0..c).map(|_| token()).collect()).collect();
        Self { lists, tokens, random }
    }

    /// Writes the contexts.
    pub fn fill<B: Backend>(&self, b: &B, layer: &mut Layer<B>) -> Result<()> {
        for (list, tokens) in self.lists.iter().zip(&self.tokens) {
            for start in (0..tokens.len()).step_by(ROWS) {
                let rows = start..tokens.len().min(start + ROWS);
                let plan = ForwardPlan {
                    tokens: tokens[rows.clone()].to_vec(),
                    positions: rows.clone().map(|p| p as u32).collect(),
                    writes: list[rows.clone()].to_vec(),
                    spans: vec![
                        AttentionSpan { prefix: 1, ..AttentionSpan::default() };
                        rows.len()
                    ],
                    changes: vec![(0, 1)],
                    slots: list[..1].to_vec(),
                    ..ForwardPlan::default()
                };
                layer.fill(b, &plan)?;
            }
        }
        Ok(())
    }

    fn token(&mut self) -> u32 {
        self.random.below(TOKENS as usize) as u32
    }

    /// A random draft tree of `rows` nodes below request `r`: each row sees the context, then its
    /// ancestors, then itself.
    pub fn tree(&mut self, r: usize, rows: usize) -> ForwardPlan {
        let context = CONTEXTS[r];
        let mut plan = ForwardPlan::default();
        plan.add_table(self.lists[r][..context].iter().copied());
        let mut paths: Vec<Vec<u32>> = Vec::new();
        for node in 0..rows {
            let slot = self.lists[r][context + node];
            let mut path =
                if node == 0 { Vec::new() } else { paths[self.random.below(node)].clone() };
            path.push(slot);
            plan.tokens.push(self.token());
            plan.positions.push((context + path.len() - 1) as u32);
            plan.writes.push(slot);
            plan.spans.push(AttentionSpan {
                start: 0,
                prefix: context as u32,
                tree_start: plan.tree_slots.len() as u32,
                tail: path.len() as u32,
            });
            plan.tree_slots.extend(&path);
            plan.outputs.push(node as u32);
            paths.push(path);
        }
        plan
    }

    /// `rows` rows shared out over all requests, each request's in a row; the last one of each is
    /// an output. With one row per request that is plain decoding.
    pub fn batch(&mut self, rows: usize) -> ForwardPlan {
        let mut plan = ForwardPlan::default();
        for (r, context) in CONTEXTS.into_iter().enumerate() {
            let share = rows / CONTEXTS.len() + usize::from(r < rows % CONTEXTS.len());
            let start = plan.add_table(self.lists[r][..context + share].iter().copied());
            for row in 0..share {
                plan.tokens.push(self.token());
                plan.positions.push((context + row) as u32);
                plan.writes.push(self.lists[r][context + row]);
                let prefix = (context + row + 1) as u32;
                plan.spans.push(AttentionSpan { start, prefix, ..AttentionSpan::default() });
            }
            if share > 0 {
                plan.outputs.push(plan.rows() as u32 - 1);
            }
        }
        plan
    }
}

/// The plan of one row of `plan` alone.
pub fn alone(plan: &ForwardPlan, row: usize) -> ForwardPlan {
    ForwardPlan {
        tokens: vec![plan.tokens[row]],
        positions: vec![plan.positions[row]],
        writes: vec![plan.writes[row]],
        spans: vec![plan.spans[row]],
        changes: plan.changes.clone(),
        slots: plan.slots.clone(),
        tree_slots: plan.tree_slots.clone(),
        outputs: vec![0],
        sources: Vec::new(),
        destinations: Vec::new(),
    }
}
