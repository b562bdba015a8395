//! Random numbers, tensors and plans.

use aquila_compute::{AttentionSpan, DType, ForwardPlan, HostTensor, Result};
use half::bf16;

/// splitmix64: small and fast.
pub struct Random(pub u64);

/// What values look like.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// Between -1 and 1.
    Even,
    /// Of very different sizes.
    Wide,
    /// A few large ones among many small ones.
    Outliers,
}

/// What the rows of a request see beside its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// The rows before, as a chunk of a prompt.
    Chunk,
    /// Their ancestors in a random tree.
    Tree,
    /// All rows before, each as a node of a tree.
    Path,
}

/// Rows of one request behind `context` positions.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    pub context: usize,
    pub rows: usize,
    pub kind: RowKind,
}

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn value(&mut self, kind: Kind) -> f32 {
        let even = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        match kind {
            Kind::Even => even,
            Kind::Wide => even * 2f32.powi(self.below(40) as i32 - 20),
            Kind::Outliers if self.below(100) == 0 => even * 60.0,
            Kind::Outliers => even * 0.3,
        }
    }

    pub fn values(&mut self, count: usize, kind: Kind) -> Vec<f32> {
        (0..count).map(|_| self.value(kind)).collect()
    }

    /// bfloat16 bits between -`spread` and `spread`, four out of one random number: for large
    /// tensors whose values do not matter.
    pub fn tensor(&mut self, shape: &[usize], spread: f32) -> Result<HostTensor> {
        let count: usize = shape.iter().product();
        let mut bytes = Vec::with_capacity(2 * count);
        let scale = spread / 32768.0;
        while bytes.len() < 2 * count {
            let mut bits = self.next();
            for _ in 0..4 {
                let value = f32::from((bits & 0xffff) as u16 as i16) * scale;
                bytes.extend(bf16::from_f32(value).to_le_bytes());
                bits >>= 16;
            }
        }
        bytes.truncate(2 * count);
        HostTensor::new("random", DType::Bf16, shape.to_vec(), bytes.into())
    }

    /// A permutation of `0..count`.
    pub fn permutation(&mut self, count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count as u32).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }

    /// A plan of requests with contexts of the lengths given: a draft tree of up to 9 nodes behind
    /// each, or its last positions as a chunk of a prompt.
    pub fn plan(&mut self, contexts: &[usize], tokens: usize) -> (ForwardPlan, usize) {
        let requests: Vec<Request> = contexts
            .iter()
            .enumerate()
            .map(|(r, &context)| Request {
                context,
                rows: 1 + self.below(9),
                kind: [RowKind::Tree, RowKind::Chunk][r % 2],
            })
            .collect();
        self.plan_of(&requests, tokens)
    }

    /// A plan of rows of these requests, in permuted slots of a store. Answers the plan and how many
    /// slots the store must have.
    pub fn plan_of(&mut self, requests: &[Request], tokens: usize) -> (ForwardPlan, usize) {
        let slots = requests.iter().map(|request| request.context + request.rows + 1).sum();
        let mut free = self.permutation(slots);
        let mut plan = ForwardPlan::default();
        for &Request { context, rows, kind } in requests {
            let first = plan.rows() as u32;
            if kind == RowKind::Chunk {
                let table: Vec<u32> = free.drain(..context + rows).collect();
                let start = plan.add_table(table.iter().copied());
                for row in 0..rows {
                    let position = context + row;
                    plan.positions.push(position as u32);
                    plan.writes.push(table[position]);
                    let prefix = position as u32 + 1;
                    plan.spans.push(AttentionSpan { start, prefix, ..AttentionSpan::default() });
                }
            } else {
                let table: Vec<u32> = free.drain(..context).collect();
                let start = plan.add_table(table.iter().copied());
                let mut paths: Vec<Vec<u32>> = Vec::new();
                for node in 0..rows {
                    let parent = match kind {
                        RowKind::Path => node.checked_sub(1),
                        _ if node == 0 => None,
                        _ => Some(self.below(node)),
                    };
                    let mut path = parent.map_or_else(Vec::new, |parent| paths[parent].clone());
                    let slot = free.remove(0);
                    path.push(slot);
                    plan.positions.push((context + path.len() - 1) as u32);
                    plan.writes.push(slot);
                    plan.spans.push(AttentionSpan {
                        start,
                        prefix: context as u32,
                        tree_start: plan.tree_slots.len() as u32,
                        tail: path.len() as u32,
                    });
                    plan.tree_slots.extend(&path);
                    paths.push(path);
                }
            }
            plan.tokens.extend((0..rows).map(|_| self.below(tokens) as u32));
            let outputs = (first..plan.rows() as u32).filter(|_| self.below(3) > 0);
            plan.outputs.extend(outputs);
        }
        let rows = plan.rows();
        plan.sources = (0..rows).map(|_| self.below(rows) as u32).collect();
        let places = self.permutation(rows);
        plan.destinations = places[..plan.outputs.len()].to_vec();
        (plan, slots)
    }

    /// A plan that writes all positions of every request, to fill a store before another plan.
    pub fn fill(&mut self, contexts: &ForwardPlan, tokens: usize) -> ForwardPlan {
        let mut plan = ForwardPlan {
            changes: contexts.changes.clone(),
            slots: contexts.slots.clone(),
            ..ForwardPlan::default()
        };
        for &(start, count) in &contexts.changes {
            for position in 0..count {
                plan.tokens.push(self.below(tokens) as u32);
                plan.positions.push(position);
                plan.spans.push(AttentionSpan { start, prefix: 1, ..AttentionSpan::default() });
            }
        }
        plan.writes = plan.slots.clone();
        plan
    }
}
