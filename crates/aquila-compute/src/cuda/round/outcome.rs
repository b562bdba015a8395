//! What the host reads of a round: one copy, and more where rows, log-probabilities or trees are asked
//! for.
//!
//! The copies are enqueued behind the round and read later, when the next round may be running. So all
//! that reading takes of the host's side is noted with them, and two sets of copies take turns.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::host_round::HostRow;
use super::layout::{ENDED_BY_LENGTH, ENDED_BY_TOKEN, Node, Row};
use super::state::CudaState;
use crate::cuda::c_layout::CStructure;
use crate::cuda::copies::HostCopy;
use crate::cuda::device::{Device, failed};
use crate::cuda::rows::CudaRows;
use crate::round::{
    self, DraftFeedback, Ended, RequestOutput, RequestParams, Returned, ReturnedRows, VerifiedTree,
};
use crate::sampling::Choice;
use crate::{Error, Result};

/// Rounds whose outputs are copied at a time at most.
const MOST_COPIED: usize = 2;

/// The rounds whose outputs were copied and not read yet, oldest first, and the copies.
#[derive(Default)]
pub(super) struct CopiedRounds {
    rounds: VecDeque<CopiedRound>,
    /// Page-locked memory that no round has.
    free: Vec<Copies>,
}

/// What the host must know of a round to read it.
struct CopiedRound {
    rows: Vec<CopiedRow>,
    copies: Copies,
    /// Likely tokens of each output.
    tops: usize,
}

/// What the host must know of one row to read it.
struct CopiedRow {
    row: HostRow,
    params: Arc<RequestParams>,
    sent: Arc<[u32]>,
}

/// What was copied of a round.
#[derive(Default)]
struct Copies {
    records: HostCopy<u32>,
    trees: HostCopy<u32>,
    logprobs: HostCopy<f32>,
    top_counts: HostCopy<u32>,
    tops: HostCopy<u32>,
    hidden_states: RowCopy,
    routed_experts: RowCopy,
    /// Behind the copies.
    done: Option<CudaEvent>,
}

impl Drop for Copies {
    fn drop(&mut self) {
        // A failed wait means a lost context, which no longer writes this memory.
        let _ = self.done.take().map(|done| done.synchronize());
    }
}

/// The rows of a pass, where a request gets some of them.
#[derive(Default)]
struct RowCopy {
    values: HostCopy<f32>,
    stride: usize,
    width: usize,
}

impl RowCopy {
    /// Enqueues a copy of the first `count` of `rows`; of nothing where there are none.
    fn fetch(&mut self, device: &Device, rows: Option<&CudaRows>, count: usize) -> Result<()> {
        let Some(rows) = rows else {
            self.width = 0;
            return Ok(());
        };
        (self.stride, self.width) = (rows.stride, rows.width);
        self.values.fetch(device, &rows.values, count.min(rows.capacity) * rows.stride)
    }

    /// A row of what was copied, if anything was.
    fn row(&self, at: usize) -> Option<&[f32]> {
        (self.width > 0).then(|| &self.values.values()[at * self.stride..][..self.width])
    }
}

impl CudaState {
    /// Enqueues copies of what came of the round.
    pub(in crate::cuda) fn copy_outputs(
        &mut self,
        device: &Device,
        returned: ReturnedRows<'_, CudaRows>,
    ) -> Result<()> {
        if self.copied.rounds.len() >= MOST_COPIED {
            return Err(Error::Device("the outputs of too many rounds were not read".into()));
        }
        let mut rows = Vec::with_capacity(self.round.rows.len());
        for &row in &self.round.rows {
            let request = self.requests[row.place].as_ref();
            let request = request.ok_or_else(|| Error::Device("a row without a request".into()))?;
            let (params, sent) = (request.params.clone(), request.sent.clone());
            rows.push(CopiedRow { row, params, sent });
        }
        let mut copies = self.copied.free.pop().unwrap_or_default();
        let tops = match self.fetch(device, rows.len(), returned, &mut copies) {
            Ok(tops) => tops,
            Err(error) => {
                device.catch_up();
                return Err(error);
            }
        };
        self.copied.rounds.push_back(CopiedRound { rows, copies, tops });
        Ok(())
    }

    /// Enqueues the copies; answers how many likely tokens each output has.
    fn fetch(
        &self,
        device: &Device,
        rows: usize,
        returned: ReturnedRows<'_, CudaRows>,
        copies: &mut Copies,
    ) -> Result<usize> {
        let words = rows * self.parts.record as usize / 4;
        copies.records.fetch(device, &self.records, words)?;
        if self.round.told_trees {
            let words = rows * self.parts.nodes as usize * Node::WORDS;
            copies.trees.fetch(device, &self.trees, words)?;
        }
        let room = self.round.tops.and_then(|_| self.reported.room());
        if let Some(room) = room {
            copies.logprobs.fetch(device, &room.logprobs, self.outputs)?;
            copies.top_counts.fetch(device, &room.top_counts, self.outputs)?;
            copies.tops.fetch(device, &room.tops, 2 * self.outputs * room.most)?;
        }
        // Rows that requests get are rare, so those of all requests are copied.
        let passed = self.round.passed;
        copies.hidden_states.fetch(device, returned.hidden_states, passed)?;
        copies.routed_experts.fetch(device, returned.routed_experts, passed)?;
        copies.done = Some(device.mark()?);
        Ok(room.map_or(0, |room| room.most))
    }

    /// Waits for the oldest round whose outputs were copied and answers what came of each row of its
    /// batch.
    pub(in crate::cuda) fn outputs(&mut self) -> Result<Vec<Option<RequestOutput>>> {
        let round = self.copied.rounds.pop_front();
        let round =
            round.ok_or_else(|| Error::Device("no outputs of a round were copied".into()))?;
        if let Some(done) = &round.copies.done {
            done.synchronize().map_err(failed("waiting for a round"))?;
        }
        let outputs = (0..round.rows.len()).map(|at| self.output(&round, at)).collect();
        self.copied.free.push(round.copies);
        outputs
    }

    /// What came of one row; nothing where its request had ended before.
    fn output(&mut self, round: &CopiedRound, at: usize) -> Result<Option<RequestOutput>> {
        let CopiedRound { rows, copies, tops } = round;
        let CopiedRow { row: host_row, params, sent } = &rows[at];
        // The request may have departed meanwhile, and another have its place.
        let mut request = self.requests[host_row.place]
            .as_mut()
            .filter(|request| request.admission == host_row.admission);
        if let Some(request) = &mut request {
            request.unread -= host_row.most_tokens();
        }
        let record = self.parts.record as usize / 4;
        let words = &copies.records.values()[at * record..][..record];
        let (row, lists) = (Row::read(words, 0), &words[Row::WORDS..]);
        if row.exceeded != 0 {
            return Err(Error::Device("a pass had more rows than were bounded".into()));
        }
        if row.live == 0 {
            return Ok(None);
        }
        let decodes = host_row.steps.is_some();
        let longest = lists.len() / 3;
        let (answered, prompted) = (row.answered as usize, row.prompted as usize);
        let (tokens, rest) = lists.split_at(longest);
        let (nodes, ranks) = rest.split_at(longest);
        let choice = |token: u32, output: usize, asked: Option<usize>| {
            let Some(asked) = asked else {
                return Choice { token, logprob: None, top: Vec::new() };
            };
            let count = (copies.top_counts.values()[output] as usize).min(asked);
            let top = copies.tops.values()[2 * output * tops..].chunks_exact(2).take(count);
            Choice {
                token,
                logprob: Some(copies.logprobs.values()[output]),
                top: top.map(|pair| (pair[0], f32::from_bits(pair[1]))).collect(),
            }
        };
        let first_output = row.first_output as usize;
        let mut answer: Vec<Choice> = (0..answered)
            .map(|i| choice(tokens[i], first_output + nodes[i] as usize, params.logprobs))
            .collect();
        // What of a prompt was told about are tokens that the host has sent.
        let first_told = row.task.first_output as usize + 1;
        let prompt = (0..prompted)
            .map(|i| choice(sent[first_told + i], first_output + i, params.prompt_logprobs))
            .collect();
        let ended = match &mut request {
            Some(request) => {
                // Of the tokens that the round could have brought, these came: on the device the
                // text goes on where a grammar ends it.
                request.known += answer.len();
                request.keep_to_grammar(&row, &mut answer)
            }
            None => None,
        };
        let answered = answer.len();
        let committed = if decodes { answered } else { (row.task.end - row.task.first) as usize };
        let mut output = RequestOutput {
            prompt,
            tokens: answer,
            proposed: row.proposed as usize,
            correct: row.correct as usize,
            ended: ended.or(match row.ended {
                ENDED_BY_TOKEN => Some(Ended::Token(row.ended_token)),
                ENDED_BY_LENGTH => Some(Ended::Length),
                _ => None,
            }),
            known: row.known as usize,
            feedback: DraftFeedback {
                depth: row.depth as usize,
                ranks: ranks[..row.correct as usize].iter().map(|&rank| rank as u8).collect(),
                refused: row.refused as usize,
            },
            ..RequestOutput::default()
        };
        if params.draft_trees && decodes {
            let accepted = nodes[..=output.correct].iter().map(|&node| node as usize).collect();
            let first = at * self.parts.nodes as usize * Node::WORDS;
            let nodes = tree_of(&copies.trees.values()[first..], row.tree as usize);
            output.tree = Some(Box::new(VerifiedTree { nodes, accepted }));
        }
        let Returned { hidden_states, routed_experts } = params.returned;
        let first_row = row.first_row as usize;
        for at in first_row..first_row + committed {
            if let Some(states) = copies.hidden_states.row(at).filter(|_| hidden_states) {
                output.hidden_states.push(states.iter().copied());
            }
            if let Some(ids) = copies.routed_experts.row(at).filter(|_| routed_experts) {
                // Ids are far below the whole numbers that a f32 cannot hold.
                output.routed_experts.push(ids.iter().map(|&id| id as u32));
            }
        }
        Ok(Some(output))
    }
}

/// The first nodes of the tree that was copied to `words`.
fn tree_of(words: &[u32], count: usize) -> Vec<round::Node> {
    let node = |at| {
        let Node { token, parent, depth, score, .. } = Node::read(words, at);
        round::Node { token, parent: parent as usize, depth: depth as usize, score }
    };
    (0..count).map(node).collect()
}
