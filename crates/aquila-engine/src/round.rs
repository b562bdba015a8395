//! One round: which rows of which requests run, and what is asked about their logits.
//!
//! A part is a chunk of a prefill, or the tree of a request that decodes; in plain decoding the
//! tree is the bonus alone. Its outputs are the rows whose logits say something.

use std::ops::Range;

use aquila_compute::choose::Ask;
use aquila_compute::{ForwardPlan, Sight};
use aquila_spec::{Tree, Verify};

use crate::life::{Phase, Running, Seat, TARGET};

/// What one request does in a round.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    /// Which of the running requests.
    pub index: usize,
    /// Its first row in the pass.
    pub first_row: usize,
    /// The token of that row: how many rows were committed before.
    pub first_token: usize,
    pub work: Work,
}

/// A chunk, or a tree.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Work {
    /// The rows of tokens `rows`; the logits of those in `outputs`, which end where `rows` end,
    /// are asked about.
    Prefill { rows: Range<usize>, outputs: Range<usize> },
    /// The nodes of a tree, all of them asked about.
    Verify { tree: Tree },
}

impl Part {
    /// Whether distributions are asked for rather than choices.
    pub fn is_weighed(&self, seat: &Seat) -> bool {
        matches!(self.work, Work::Verify { .. }) && seat.room.verify != Verify::Match
    }

    /// How many of the pass's outputs are its own.
    pub fn outputs(&self) -> usize {
        match &self.work {
            Work::Prefill { outputs, .. } => outputs.len(),
            Work::Verify { tree } => tree.len(),
        }
    }
}

/// The plan of one round.
#[derive(Default)]
pub(crate) struct RoundPlan {
    pub parts: Vec<Part>,
    pub forward: ForwardPlan,
    /// The tokens between the bonus and each node that is asked about, the node's own last.
    paths: Vec<Vec<u32>>,
}

/// What may still be put into a round.
pub(crate) struct Room {
    pub prefill_rows: usize,
    pub outputs: usize,
}

impl RoundPlan {
    /// Plans the next round of `running`, whose slots are reserved: the tree of every request that
    /// decodes, and prefill rows as far as there is room, first come first. `trees` has the trees
    /// in the order of the requests; one that has none verifies its bonus.
    pub fn fill(&mut self, running: &[Running], mut trees: Vec<Option<Tree>>, mut room: Room) {
        self.parts.clear();
        self.forward.clear();
        self.paths.clear();
        let nodes = |tree: &Option<Tree>| tree.as_ref().map_or(1, Tree::len);
        let decoding = running.iter().zip(&trees).filter(|(r, _)| r.phase == Phase::Decoding);
        room.outputs -= decoding.map(|(_, tree)| nodes(tree)).sum::<usize>();
        for (index, request) in running.iter().enumerate() {
            let first_row = self.forward.rows();
            let done = request.sequence.committed(TARGET);
            let work = match request.phase {
                Phase::Decoding => {
                    let bonus = || Tree::root(request.seat.tokens[done]);
                    let tree = trees[index].take().unwrap_or_else(bonus);
                    self.add_tree(&tree, request);
                    Work::Verify { tree }
                }
                Phase::Prefilling { goal } => {
                    let seat = &request.seat;
                    let all = seat.is_fresh() && seat.request.prompt_logprobs.is_some();
                    let mut rows = (goal - done).min(room.prefill_rows);
                    if all {
                        rows = rows.min(room.outputs);
                    }
                    let ends = done + rows == goal;
                    let chooses = ends && seat.is_fresh() && seat.remaining() > 0;
                    if rows == 0 || (chooses && room.outputs == 0) {
                        continue;
                    }
                    // The last row of a prompt says nothing if no answer is wanted.
                    let last = if chooses || !ends { done + rows } else { done + rows - 1 };
                    let outputs = match (all, chooses) {
                        (true, _) => done..last,
                        (false, true) => last - 1..last,
                        (false, false) => last..last,
                    };
                    room.prefill_rows -= rows;
                    room.outputs -= outputs.len();
                    self.add_chunk(done..done + rows, &outputs, request);
                    Work::Prefill { rows: done..done + rows, outputs }
                }
            };
            self.parts.push(Part { index, first_row, first_token: done, work });
        }
    }

    fn add_chunk(&mut self, rows: Range<usize>, outputs: &Range<usize>, request: &Running) {
        let plan = &mut self.forward;
        let start = plan.slots.len();
        request.sequence.extend_slots(TARGET, 0..rows.end, &mut plan.slots);
        for token in rows {
            if outputs.contains(&token) {
                plan.outputs.push(plan.tokens.len() as u32);
                self.paths.push(Vec::new());
            }
            plan.tokens.push(request.seat.tokens[token]);
            plan.positions.push(token as u32);
            plan.writes.push(plan.slots[start + token]);
            let prefix = token as u32 + 1;
            plan.sights.push(Sight { start: start as u32, prefix, ..Sight::default() });
        }
    }

    fn add_tree(&mut self, tree: &Tree, request: &Running) {
        let plan = &mut self.forward;
        let committed = request.sequence.committed(TARGET);
        let start = plan.slots.len();
        request.sequence.extend_slots(TARGET, 0..committed, &mut plan.slots);
        for (at, node) in tree.nodes().iter().enumerate() {
            let path = tree.path(at);
            let tail_start = plan.tails.len() as u32;
            let slots = path.iter().map(|&node| request.sequence.slot(TARGET, committed + node));
            plan.tails.extend(slots);
            plan.outputs.push(plan.tokens.len() as u32);
            plan.tokens.push(node.token);
            plan.positions.push((committed + node.depth) as u32);
            plan.writes.push(request.sequence.slot(TARGET, committed + at));
            plan.sights.push(Sight {
                start: start as u32,
                prefix: committed as u32,
                tail_start,
                tail: path.len() as u32,
            });
            self.paths.push(path[1..].iter().map(|&node| tree.nodes()[node].token).collect());
        }
    }

    /// Whether every request of the round decodes.
    pub fn only_decodes(&self) -> bool {
        self.parts.iter().all(|part| matches!(part.work, Work::Verify { .. }))
    }

    /// What is asked about the logits, in the order of the plan's outputs: the parts for which a
    /// token is chosen, then those for which distributions are wanted.
    pub fn asks<'a>(&'a self, running: &'a [Running]) -> (Vec<Ask<'a>>, Vec<Ask<'a>>) {
        let asks = self.all_asks(running);
        let weighed = |part: &Part| part.is_weighed(&running[part.index].seat);
        let mut of_part = self.parts.iter().flat_map(|p| vec![weighed(p); p.outputs()]);
        asks.into_iter().partition(|_| of_part.next() == Some(false))
    }

    fn all_asks<'a>(&'a self, running: &'a [Running]) -> Vec<Ask<'a>> {
        let mut asks: Vec<Ask<'a>> = Vec::with_capacity(self.forward.outputs.len());
        for part in &self.parts {
            let seat = &running[part.index].seat;
            let asking = seat.asking();
            match &part.work {
                Work::Prefill { outputs, .. } => {
                    for token in outputs.clone() {
                        let row = asks.len();
                        let given = seat.tokens.get(token + 1).copied();
                        asks.push(Ask {
                            top_logprobs: match given {
                                Some(_) => seat.request.prompt_logprobs,
                                None => seat.request.logprobs,
                            },
                            given,
                            ..asking.after(&[], row)
                        });
                    }
                }
                Work::Verify { tree } => {
                    for _ in 0..tree.len() {
                        let row = asks.len();
                        asks.push(Ask {
                            top_logprobs: seat.request.logprobs,
                            ..asking.after(&self.paths[row], row)
                        });
                    }
                }
            }
        }
        asks
    }
}
