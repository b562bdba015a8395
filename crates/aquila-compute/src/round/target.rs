//! The target's pass: its rows, what is sampled at its outputs, and what of it is accepted.

use std::ops::Range;

use super::row::{RoundRow, Work};
use super::sequence::SequenceState;
use super::state::RoundState;
use super::{
    Accepted, Coins, DraftFeedback, Ended, RequestOutput, SamplingContext, Simulate,
    SimulatedRound, Tree, VerifiedTree, accept,
};
use crate::AttentionSpan;
use crate::sampling::{self, Choice, SampleQuery};

use crate::known_bugs::Bug;

impl RoundState {
    /// The rows of chunks, and a row for every node of every tree.
    pub(super) fn plan_target(&mut self) {
        self.paths.clear();
        for at in 0..self.rows.len() {
            let start = self.table_start(0, self.rows[at].place);
            let Self { rows, sequences, plan, paths, .. } = self;
            let RoundRow { place, first_row, first_token, work, .. } = &mut rows[at];
            let sequence = sequences[*place].as_mut().expect("it runs");
            let committed = sequence.rows[0];
            *first_row = plan.rows();
            *first_token = committed;
            match work {
                Work::Prefill { rows, outputs, .. } => {
                    sequence.place_table(plan, 0, start, rows.end);
                    for token in rows.clone() {
                        if outputs.contains(&token) {
                            plan.outputs.push(plan.rows() as u32);
                            paths.push(Vec::new());
                        }
                        plan.tokens.push(sequence.tokens[token]);
                        plan.positions.push(token as u32);
                        plan.writes.push(sequence.tables[0][token]);
                        plan.spans.push(AttentionSpan::in_table(start, token + 1));
                    }
                }
                Work::Verify { tree } => {
                    // The chain that a tree begins with is what its block table goes on with.
                    let nodes = tree.nodes().iter().enumerate();
                    let chain = nodes.take_while(|(at, node)| node.depth == *at).count();
                    sequence.place_table(plan, 0, start, committed + chain);
                    let slots = &sequence.tables[0];
                    for (at, node) in tree.nodes().iter().enumerate() {
                        let path = tree.path(at);
                        let span = if at < chain {
                            AttentionSpan::in_table(start, committed + at + 1)
                        } else {
                            let path = path.iter().map(|&node| slots[committed + node]);
                            plan.span_of_path(start, committed, path)
                        };
                        plan.outputs.push(plan.rows() as u32);
                        plan.tokens.push(node.token);
                        plan.positions.push((committed + node.depth) as u32);
                        plan.writes.push(slots[committed + at]);
                        plan.spans.push(span);
                        let tokens = path[1..].iter().map(|&node| tree.nodes()[node].token);
                        paths.push(tokens.collect());
                    }
                }
            }
        }
    }

    /// What is asked about the target's logits of a piece of the outputs: the rows for which a token is
    /// chosen, in their order, and the trees whose paths by probability go on there.
    pub fn sample_queries(
        &mut self,
        piece: Range<usize>,
    ) -> (Vec<SampleQuery<'_>>, Vec<TreeQuery<'_>>) {
        self.ask_grammars();
        let (mut chosen, mut trees) = (Vec::new(), Vec::new());
        let mut first_output = 0;
        for (at, row) in self.rows.iter().enumerate() {
            let sequence = &**self.sequences[row.place].as_ref().expect("it runs");
            let outputs = first_output..first_output + row.outputs();
            let here = outputs.start.max(piece.start)..outputs.end.min(piece.end);
            match &row.work {
                Work::Prefill { outputs: tokens, .. } => {
                    chosen.extend(here.map(|output| {
                        let token = tokens.start + output - first_output;
                        prompt_query(sequence, token, output)
                    }));
                }
                Work::Verify { tree } => {
                    let paths = &self.paths[outputs.clone()];
                    let node =
                        |output: usize| node_query(sequence, &paths[output - first_output], output);
                    if !row.by_probability(sequence.params.limits.verify) {
                        chosen.extend(here.map(node));
                    } else if !here.is_empty() {
                        let accepted = &row.accepted;
                        let end = here.end;
                        trees.push(TreeQuery {
                            row: at,
                            sequence,
                            tree,
                            accepted,
                            paths,
                            first_output,
                            end,
                        });
                    }
                }
            }
            first_output = outputs.end;
        }
        (chosen, trees)
    }

    /// Finds out what grammars allow at the outputs of the target's pass.
    fn ask_grammars(&mut self) {
        let mut output = 0;
        for row in &self.rows {
            let sequence = self.sequences[row.place].as_mut().expect("it runs");
            let outputs = row.outputs();
            if let Some(grammar) = &mut sequence.grammar {
                let paths = &self.paths[output..output + outputs];
                paths.iter().for_each(|path| grammar.ask(path));
            }
            output += outputs;
        }
    }

    /// Takes the answers about the outputs from `first` on: what was chosen, and how far paths have come.
    pub fn take_samples(&mut self, first: usize, choices: Vec<Choice>, paths: Vec<FollowedPath>) {
        if first == 0 {
            self.sampled.clear();
        }
        self.sampled.extend(choices);
        for FollowedPath { row, accepted, choices } in paths {
            self.rows[row].accepted = accepted;
            self.rows[row].choices.extend(choices);
        }
    }

    /// Gives each row what was chosen for it.
    fn share_samples(&mut self) {
        let mut choices = std::mem::take(&mut self.sampled).into_iter();
        let largest = self.sequences.iter().flatten().map(|s| s.params.limits.shape.nodes()).max();
        for row in &mut self.rows {
            let outputs = row.outputs();
            let outputs = match row.work {
                Work::Verify { .. } if Bug::ChoiceStride.alive() => largest.unwrap_or(outputs),
                _ => outputs,
            };
            let sequence = self.sequences[row.place].as_ref().expect("it runs");
            if !row.by_probability(sequence.params.limits.verify) {
                row.choices = choices.by_ref().take(outputs).collect();
            }
        }
    }

    /// Finds out what each row yields and adds it to the request's text.
    pub fn accept(&mut self) {
        self.share_samples();
        let Self { rows, sequences, kept, round, bounds, .. } = self;
        let simulate = bounds.simulate.as_ref();
        for row in rows {
            let sequence = &mut **sequences[row.place].as_mut().expect("it runs");
            let by_probability = row.by_probability(sequence.params.limits.verify);
            let choices = std::mem::take(&mut row.choices);
            row.output = match &row.work {
                Work::Prefill { rows, outputs, last } => {
                    read(sequence, rows, outputs, *last, choices)
                }
                Work::Verify { tree } => {
                    let (accepted, mut tokens) = if by_probability {
                        let accepted = std::mem::take(&mut row.accepted);
                        assert!(accepted.is_complete(), "all outputs were sampled");
                        (accepted, choices)
                    } else {
                        accept_chosen(simulate, *round, sequence, tree, choices)
                    };
                    let ended = sequence.take(&mut tokens);
                    let nodes = sequence.rows[0]..sequence.rows[0] + tree.len();
                    let slots = &sequence.tables[0][nodes];
                    kept.path(&accepted.path[..tokens.len()], slots, row.first_row);
                    sequence.rows[0] += tokens.len();
                    sequence.rounds += u64::from(sequence.params.drafts());
                    let told = sequence.params.draft_trees.then(|| {
                        let nodes = tree.nodes().to_vec();
                        Box::new(VerifiedTree { nodes, accepted: accepted.path.clone() })
                    });
                    RequestOutput {
                        proposed: tree.len() - 1,
                        correct: accepted.correct(),
                        feedback: feedback(tree, &accepted),
                        tokens,
                        ended,
                        tree: told,
                        ..RequestOutput::default()
                    }
                }
            };
        }
    }
}

/// What is asked at an output of a prompt, whose last token is `token`.
fn prompt_query(sequence: &SequenceState, token: usize, output: usize) -> SampleQuery<'_> {
    let given = sequence.tokens.get(token + 1).copied();
    SampleQuery {
        top_logprobs: match given {
            Some(_) => sequence.params.prompt_logprobs,
            None => sequence.params.logprobs,
        },
        given,
        allowed: sequence.allowed(&[]).filter(|_| given.is_none()),
        ..sequence.context().after(&[], output)
    }
}

/// What is asked at a node of a tree, which `path` leads to.
fn node_query<'a>(sequence: &'a SequenceState, path: &'a [u32], output: usize) -> SampleQuery<'a> {
    SampleQuery {
        top_logprobs: sequence.params.logprobs,
        allowed: sequence.allowed(path),
        ..sequence.context().after(path, output)
    }
}

/// A tree that is verified by probability, of which the target's logits have come up to some node.
#[derive(Debug, Clone, Copy)]
pub struct TreeQuery<'a> {
    row: usize,
    sequence: &'a SequenceState,
    tree: &'a Tree,
    accepted: &'a Accepted,
    /// The tokens on the way to each node, and the output of the root.
    paths: &'a [Vec<u32>],
    first_output: usize,
    /// Behind the last output whose logits are there.
    end: usize,
}

/// How far the accepted path of such a tree has come.
#[derive(Debug, Clone)]
pub struct FollowedPath {
    row: usize,
    accepted: Accepted,
    /// Of the tokens that were added to it.
    choices: Vec<Choice>,
}

impl TreeQuery<'_> {
    /// Goes on with the accepted path; `logits` has those of an output.
    pub fn follow<'l>(&self, logits: impl Fn(usize) -> &'l [f32]) -> FollowedPath {
        let &Self { row, sequence, tree, paths, first_output, end, .. } = self;
        let SamplingContext { sampling, choice, tokens, .. } = sequence.context();
        let coins = Coins { seed: sampling.seed, choice, position: tokens as u32 };
        let query = |node: usize| node_query(sequence, &paths[node], first_output + node);
        let target = |node: usize| {
            let is_there = first_output + node < end;
            is_there
                .then(|| sampling::filtered_probs(logits(first_output + node), &query(node), None))
        };
        let mut accepted = self.accepted.clone();
        let before = accepted.tokens.len();
        sequence.params.limits.verify.follow(tree, coins, &mut accepted, target);
        let added = accepted.path.iter().zip(&accepted.tokens).skip(before);
        let choices = added.map(|(&node, &token)| {
            let query = SampleQuery { given: Some(token), ..query(node) };
            sampling::choose(logits(first_output + node), &query)
        });
        FollowedPath { row, choices: choices.collect(), accepted }
    }
}

/// Commits the rows of a chunk; at the end of a fresh prompt, the first token is chosen.
fn read(
    sequence: &mut SequenceState,
    rows: &Range<usize>,
    outputs: &Range<usize>,
    last: bool,
    choices: Vec<Choice>,
) -> RequestOutput {
    let mut output = RequestOutput::default();
    for (at, choice) in outputs.clone().zip(choices) {
        let known = at + 1 < sequence.tokens.len();
        let tokens = if known { &mut output.prompt } else { &mut output.tokens };
        tokens.push(choice);
    }
    sequence.rows[0] += rows.len();
    if !output.tokens.is_empty() {
        output.ended = sequence.take(&mut output.tokens);
    } else if last && sequence.tokens.len() >= sequence.params.longest {
        // A resumed request has its bonus; one that wanted no answer is done.
        sequence.ended = true;
        output.ended = Some(Ended::Length);
    }
    output
}

/// What of a tree is the target's own choice.
fn accept_chosen(
    simulate: Option<&Simulate>,
    round: u64,
    sequence: &SequenceState,
    tree: &Tree,
    choices: Vec<Choice>,
) -> (Accepted, Vec<Choice>) {
    let chosen: Vec<u32> = choices.iter().map(|choice| choice.token).collect();
    let accepted = match simulate {
        Some(simulate) => {
            let (request, verified) = (sequence.params.id, sequence.rounds);
            simulate.accept(tree, &chosen, SimulatedRound { request, verified, round })
        }
        None => accept(tree, &chosen),
    };
    let mut choices: Vec<Option<Choice>> = choices.into_iter().map(Some).collect();
    let tokens = accepted
        .path
        .iter()
        .zip(&accepted.tokens)
        .filter_map(|(&node, &token)| Some(Choice { token, ..choices[node].take()? }))
        .collect();
    (accepted, tokens)
}

/// What there is to learn from the path through a tree.
fn feedback(tree: &Tree, accepted: &Accepted) -> DraftFeedback {
    let rank = |step: &[usize]| {
        tree.children(step[0]).take_while(|&child| child != step[1]).count().min(255) as u8
    };
    DraftFeedback {
        depth: tree.nodes().iter().map(|node| node.depth).max().unwrap_or(0),
        ranks: accepted.path.windows(2).map(rank).collect(),
        refused: accepted.path.last().map_or(0, |&end| tree.children(end).count()),
    }
}
