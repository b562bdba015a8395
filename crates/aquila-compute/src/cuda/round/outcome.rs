//! What the host reads of a round: one copy, and more where rows, log-probabilities or trees are asked
//! for.

use super::host_round::HostRow;
use super::layout::{ENDED_BY_LENGTH, ENDED_BY_TOKEN, Node, Row};
use super::state::CudaState;
use crate::cuda::c_layout::CStructure;
use crate::cuda::copies::HostCopy;
use crate::cuda::device::Device;
use crate::cuda::rows::CudaRows;
use crate::round::{
    self, DraftFeedback, Ended, RequestOutput, Returned, ReturnedRows, VerifiedTree,
};
use crate::sampling::Choice;
use crate::{Error, Result};

impl CudaState {
    /// Waits for the round and answers what came of each row of its batch.
    pub(in crate::cuda) fn outputs(
        &mut self,
        device: &Device,
        returned: ReturnedRows<'_, CudaRows>,
    ) -> Result<Vec<Option<RequestOutput>>> {
        let rows = self.round.rows.len();
        let record = self.parts.record as usize / 4;
        self.read_records.fetch(device, &self.records, rows * record)?;
        if self.round.told_trees {
            let words = rows * self.parts.nodes as usize * Node::WORDS;
            self.read_trees.fetch(device, &self.trees, words)?;
        }
        let tops = match self.round.tops {
            Some(_) => self.reported.fetch(device, self.outputs)?,
            None => 0,
        };
        // Rows that requests get are rare, so all rows of the pass are copied.
        for (rows, copy) in [
            (returned.hidden_states, &mut self.read_hidden_states),
            (returned.routed_experts, &mut self.read_routed_experts),
        ] {
            if let Some(rows) = rows {
                copy.fetch(device, &rows.values, rows.capacity * rows.stride)?;
            }
        }
        device.wait()?;
        let mut outputs = Vec::with_capacity(rows);
        for at in 0..rows {
            outputs.push(self.output(at, record, tops, &returned)?);
        }
        Ok(outputs)
    }

    /// What came of one row; nothing where its request had ended before.
    fn output(
        &mut self,
        at: usize,
        record: usize,
        tops: usize,
        returned: &ReturnedRows<'_, CudaRows>,
    ) -> Result<Option<RequestOutput>> {
        let HostRow { place, steps, .. } = self.round.rows[at];
        let decodes = steps.is_some();
        let words = &self.read_records.values()[at * record..][..record];
        let (row, lists) = (Row::read(words, 0), &words[Row::WORDS..]);
        if row.exceeded != 0 {
            return Err(Error::Device("a pass had more rows than were bounded".into()));
        }
        let Some(request) = self.requests[place].as_mut().filter(|_| row.live != 0) else {
            return Ok(None);
        };
        let longest = lists.len() / 3;
        let (answered, prompted) = (row.answered as usize, row.prompted as usize);
        let (tokens, rest) = lists.split_at(longest);
        let (nodes, ranks) = rest.split_at(longest);
        let params = &request.params;
        let choice = |token: u32, output: usize, asked: Option<usize>| {
            let Some(asked) = asked else {
                return Choice { token, logprob: None, top: Vec::new() };
            };
            let reported = &self.reported;
            let count = (reported.top_counts.values()[output] as usize).min(asked);
            let top = reported.tops.values()[2 * output * tops..].chunks_exact(2).take(count);
            Choice {
                token,
                logprob: Some(reported.logprobs.values()[output]),
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
            .map(|i| choice(request.sent[first_told + i], first_output + i, params.prompt_logprobs))
            .collect();
        let ended = request.keep_to_grammar(&row, &mut answer);
        let (params, answered) = (&request.params, answer.len());
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
            let nodes = tree_of(&self.read_trees.values()[first..], row.tree as usize);
            output.tree = Some(Box::new(VerifiedTree { nodes, accepted }));
        }
        let Returned { hidden_states, routed_experts } = params.returned;
        let first_row = row.first_row as usize;
        for at in first_row..first_row + committed {
            if let Some(rows) = returned.hidden_states.filter(|_| hidden_states) {
                let states = row_of(&self.read_hidden_states, rows, at);
                output.hidden_states.push(states.iter().copied());
            }
            if let Some(rows) = returned.routed_experts.filter(|_| routed_experts) {
                let ids = row_of(&self.read_routed_experts, rows, at);
                // Ids are far below the whole numbers that a f32 cannot hold.
                output.routed_experts.push(ids.iter().map(|&id| id as u32));
            }
        }
        // Of the tokens that the round could have brought, these came.
        request.tokens = request.known + answered;
        request.known = request.tokens;
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

/// A row of what was copied.
fn row_of<'a>(copy: &'a HostCopy<f32>, rows: &CudaRows, at: usize) -> &'a [f32] {
    &copy.values()[at * rows.stride..][..rows.width]
}
