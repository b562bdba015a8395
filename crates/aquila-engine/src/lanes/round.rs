//! The pass of one round: which rows of which requests run, and what is asked about their logits.
//!
//! A turn is a chunk of a prefill, or the tree of a request that decodes; in plain decoding the
//! tree is the bonus alone. Its outputs are the rows whose logits say something.

use std::ops::Range;

use aquila_compute::choose::Ask;
use aquila_compute::{ForwardPlan, Sight};
use aquila_spec::{Seed, Shape, Tree, Verify, Weighted};

use super::job::Task;
use super::relay::Track;
use crate::config::EngineConfig;

/// What one request does in a round, with its row of the relay.
pub(crate) struct Turn {
    /// Which part of the job.
    pub part: usize,
    pub track: Box<Track>,
    /// The tree that it may get; plain for a chunk.
    pub shape: Shape,
    /// How likely its drafts are to be right.
    pub rate: f32,
    /// Whether its draft is paused where it gets no tree.
    pub pause: bool,
    /// What its tree begins with.
    pub seed: Option<Seed>,
    /// Whether its tree is still to be drafted.
    pub awaits_tree: bool,
    /// Its first row in the pass.
    pub first_row: usize,
    /// The token of that row: how many rows were committed before.
    pub first_token: usize,
    pub work: Work,
}

/// A chunk, or a tree.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Work {
    /// As [`Task::Read`](super::Task::Read) says.
    Read { rows: Range<usize>, outputs: Range<usize>, last: bool },
    /// The nodes of a tree, all of them asked about.
    Verify { tree: Tree },
}

impl Turn {
    /// What `task` asks of a request.
    pub fn new(part: usize, track: Box<Track>, task: &Task) -> Self {
        let (shape, rate, pause, work) = match task.clone() {
            Task::Read { rows, outputs, last } => {
                (Shape::PLAIN, 0.0, false, Work::Read { rows, outputs, last })
            }
            Task::Decode { shape, rate, pause } => {
                let shape = track.order.granted(shape, track.tokens.len());
                let tree = Tree::root(track.tokens[track.rows[0]]);
                (shape, rate, pause, Work::Verify { tree })
            }
        };
        Self {
            part,
            track,
            shape,
            rate,
            pause,
            seed: None,
            awaits_tree: false,
            first_row: 0,
            first_token: 0,
            work,
        }
    }

    /// Whether its draft has something to do in this round, before the target has.
    pub fn drafts(&self) -> bool {
        self.shape.steps() > 0
    }

    /// Takes what its draft left for this round, unless that is paused.
    pub fn take_seed(&mut self) {
        let decodes = matches!(self.work, Work::Verify { .. });
        if !decodes || !self.track.order.drafts() || self.track.parked.is_some() {
            return;
        }
        let seed = self.track.take_seed();
        if self.drafts() {
            self.begin(seed);
        }
    }

    /// Begins its tree.
    pub fn begin(&mut self, seed: Option<Seed>) {
        self.awaits_tree = seed.is_some();
        self.seed = seed;
    }

    /// Takes its tree.
    pub fn take_tree(&mut self, tree: Tree) {
        self.awaits_tree = false;
        self.work = Work::Verify { tree };
    }

    /// Adds nodes to its tree until it has as many as its shape.
    pub fn fill_tree(&mut self) {
        if let Work::Verify { tree } = &mut self.work {
            while tree.len() < self.shape.nodes() {
                let deepest =
                    (0..tree.len()).rev().find(|&at| tree.nodes()[at].depth < self.shape.steps());
                tree.add(deepest.unwrap_or(0), tree.nodes()[0].token, 0.0);
            }
        }
    }

    /// Its tree, where a row budget may prune it.
    pub fn weighted(&mut self) -> Option<Weighted<'_>> {
        let drawn = self.track.order.room.verify == Verify::Rejection;
        match &mut self.work {
            Work::Verify { tree } => Some(Weighted { tree, rate: self.rate, drawn }),
            Work::Read { .. } => None,
        }
    }

    /// Whether distributions are asked for rather than choices.
    pub fn is_weighed(&self) -> bool {
        matches!(self.work, Work::Verify { .. }) && self.track.order.room.verify != Verify::Match
    }

    /// How many of the pass's outputs are its own.
    pub fn outputs(&self) -> usize {
        match &self.work {
            Work::Read { outputs, .. } => outputs.len(),
            Work::Verify { tree } => tree.len(),
        }
    }
}

/// The plan of one pass.
#[derive(Default)]
pub(crate) struct PassPlan {
    pub forward: ForwardPlan,
    /// The tokens between the bonus and each node that is asked about, the node's own last.
    paths: Vec<Vec<u32>>,
}

impl PassPlan {
    /// Plans the rows of `turns`, whose slots are in their tables.
    pub fn fill(&mut self, turns: &mut [Turn], config: &EngineConfig) {
        self.forward.clear();
        self.paths.clear();
        for Turn { track, first_row, first_token, work, .. } in turns {
            *first_row = self.forward.rows();
            *first_token = track.rows[0];
            let seen = match work {
                Work::Read { rows, .. } => rows.end,
                Work::Verify { .. } => track.rows[0],
            };
            let table = track.table(0, config.max_running_requests, config.longest_sequence());
            if table.placed < seen {
                let slots = &track.tables[0][table.placed..seen];
                self.forward.change_table(table.start + table.placed, slots);
                track.placed[0] = seen;
            }
            let start = table.start as u32;
            match work {
                Work::Read { rows, outputs, .. } => {
                    self.add_chunk(rows.clone(), outputs, track, start);
                }
                Work::Verify { tree } => self.add_tree(tree, track, start),
            }
        }
    }

    fn add_chunk(&mut self, rows: Range<usize>, outputs: &Range<usize>, track: &Track, start: u32) {
        let plan = &mut self.forward;
        for token in rows {
            if outputs.contains(&token) {
                plan.outputs.push(plan.tokens.len() as u32);
                self.paths.push(Vec::new());
            }
            plan.tokens.push(track.tokens[token]);
            plan.positions.push(token as u32);
            plan.writes.push(track.tables[0][token]);
            plan.sights.push(Sight { start, prefix: token as u32 + 1, ..Sight::default() });
        }
    }

    fn add_tree(&mut self, tree: &Tree, track: &Track, start: u32) {
        let plan = &mut self.forward;
        let committed = track.rows[0];
        let slots = &track.tables[0];
        for (at, node) in tree.nodes().iter().enumerate() {
            let path = tree.path(at);
            let tail_start = plan.tails.len() as u32;
            plan.tails.extend(path.iter().map(|&node| slots[committed + node]));
            plan.outputs.push(plan.tokens.len() as u32);
            plan.tokens.push(node.token);
            plan.positions.push((committed + node.depth) as u32);
            plan.writes.push(slots[committed + at]);
            plan.sights.push(Sight {
                start,
                prefix: committed as u32,
                tail_start,
                tail: path.len() as u32,
            });
            self.paths.push(path[1..].iter().map(|&node| tree.nodes()[node].token).collect());
        }
    }

    /// What is asked about the logits, in the order of the plan's outputs: the turns for which a
    /// token is chosen, then those for which distributions are wanted.
    pub fn asks<'a>(&'a self, turns: &'a [Turn]) -> (Vec<Ask<'a>>, Vec<Ask<'a>>) {
        let (mut chosen, mut weighed) = (Vec::new(), Vec::new());
        let mut row = 0;
        for turn in turns {
            let track = &turn.track;
            let asking = track.asking();
            let asks = if turn.is_weighed() { &mut weighed } else { &mut chosen };
            match &turn.work {
                Work::Read { outputs, .. } => {
                    for token in outputs.clone() {
                        let given = track.tokens.get(token + 1).copied();
                        asks.push(Ask {
                            top_logprobs: match given {
                                Some(_) => track.order.prompt_logprobs,
                                None => track.order.logprobs,
                            },
                            given,
                            ..asking.after(&[], row)
                        });
                        row += 1;
                    }
                }
                Work::Verify { tree } => {
                    for _ in 0..tree.len() {
                        asks.push(Ask {
                            top_logprobs: track.order.logprobs,
                            ..asking.after(&self.paths[row], row)
                        });
                        row += 1;
                    }
                }
            }
        }
        (chosen, weighed)
    }
}
