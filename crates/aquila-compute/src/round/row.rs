//! A request's row of the round that runs.

use std::collections::HashMap;
use std::ops::Range;

use super::grammar::GrammarRow;
use super::sequence::SequenceState;
use super::{
    Accepted, Candidates, RequestOutput, RowWork, Shape, Tree, TreeBuilder, Verify, Weighted,
};
use crate::sampling::Choice;

/// What one request does in the round that runs.
#[derive(Debug, Clone)]
pub(super) struct RoundRow {
    /// Which row of the batch.
    pub index: usize,
    pub place: usize,
    /// The tree that it may get; plain for a chunk.
    pub shape: Shape,
    /// How likely its drafts are to be right.
    pub rate: f32,
    /// Whether its draft is paused where it gets no tree.
    pub pause: bool,
    /// What its tree begins with, until the tree is started.
    pub seed: Option<Candidates>,
    /// Its tree, while it is drafted.
    pub draft: Option<DraftTree>,
    /// Its first row in the target's pass.
    pub first_row: usize,
    /// The token of that row: how many rows were committed before.
    pub first_token: usize,
    pub work: Work,
    /// What was sampled at its outputs; of a tree that is verified by probability, at the nodes of the
    /// path that is accepted.
    pub choices: Vec<Choice>,
    /// That path, as far as it has been followed.
    pub accepted: Accepted,
    pub output: RequestOutput,
}

/// A chunk, or a tree.
#[derive(Debug, Clone)]
pub(super) enum Work {
    /// As [`RowWork::Prefill`] says.
    Prefill { rows: Range<usize>, outputs: Range<usize>, last: bool },
    /// The nodes of a tree, all of them sampled.
    Verify { tree: Tree },
}

/// A tree that is being drafted, with where the rows of its nodes are.
#[derive(Debug, Clone)]
pub(super) struct DraftTree {
    pub builder: TreeBuilder,
    /// The first row of each node of the level before, in the pass of that level.
    pub rows: HashMap<usize, u32>,
    /// The slot of every node that was run.
    pub slots: HashMap<usize, u32>,
}

impl DraftTree {
    pub fn start(seed: &Candidates, shape: Shape) -> Self {
        Self { builder: seed.begin(shape), rows: HashMap::new(), slots: HashMap::new() }
    }
}

impl RoundRow {
    pub fn new(index: usize, place: usize, sequence: &SequenceState, work: &RowWork) -> Self {
        let (shape, rate, pause, work) = match work.clone() {
            RowWork::Prefill { rows, outputs, last } => {
                (Shape::PLAIN, 0.0, false, Work::Prefill { rows, outputs, last })
            }
            RowWork::Decode { shape, rate, pause } => {
                let shape = sequence.params.granted(shape, sequence.tokens.len());
                let tree = Tree::root(sequence.tokens[sequence.rows[0]]);
                (shape, rate, pause, Work::Verify { tree })
            }
        };
        Self {
            index,
            place,
            shape,
            rate,
            pause,
            seed: None,
            draft: None,
            first_row: 0,
            first_token: 0,
            work,
            choices: Vec::new(),
            accepted: Accepted::default(),
            output: RequestOutput::default(),
        }
    }

    /// Whether it decodes.
    pub fn decodes(&self) -> bool {
        matches!(self.work, Work::Verify { .. })
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

    /// Takes from a tree that was given what the grammar does not allow. Tokens that must come next
    /// need no draft: they are the tree where a draft would not go further.
    pub fn keep_to(&mut self, grammar: &mut GrammarRow) {
        let Work::Verify { tree } = &mut self.work else { return };
        if !grammar.guides_drafts() {
            return;
        }
        grammar.prune(tree);
        let steps = self.shape.steps();
        if steps == 0 {
            return;
        }
        let forced = grammar.forced();
        let drafted = match self.seed {
            Some(_) => steps,
            None => 1 + tree.nodes().iter().map(|node| node.depth).max().unwrap_or(0),
        };
        if forced.len() >= drafted {
            self.seed = None;
            *tree = Tree::root(tree.nodes()[0].token);
            // A tree may be deeper than it has nodes.
            let chain = forced.iter().take(steps.min(self.shape.nodes() - 1));
            chain.fold(0, |parent, &token| tree.add(parent, token, 1.0));
        }
    }

    /// Its tree, where a row budget may prune it; `drawn` says whether its drafts were drawn.
    pub fn weighted(&mut self, drawn: bool) -> Option<Weighted<'_>> {
        match &mut self.work {
            Work::Verify { tree } => Some(Weighted { tree, rate: self.rate, drawn }),
            Work::Prefill { .. } => None,
        }
    }

    /// Whether its tree is verified by the target's distributions rather than its choices.
    pub fn by_probability(&self, verify: Verify) -> bool {
        self.decodes() && verify != Verify::Match
    }

    /// How many of the target's outputs are its own.
    pub fn outputs(&self) -> usize {
        match &self.work {
            Work::Prefill { outputs, .. } => outputs.len(),
            Work::Verify { tree } => tree.len(),
        }
    }
}
