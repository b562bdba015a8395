//! Grammars: while a pass runs, the host asks them what may follow at every output of it, and sends
//! the masks before tokens are chosen: the target's, and those of drafts that keep to them.
//!
//! The one invariant: what a grammar was told of a request is what the host has read of it, and what
//! came since is part of the path that it is asked about. So a round with grammars waits once for each
//! pass, and is launched and not captured.

use cudarc::driver::CudaEvent;

use super::choose::TokensOf;
use super::host_round::HostRow;
use super::layout::{ENDED_BY_TOKEN, Node, Offered, Query, Round, Row, State};
use super::state::{CudaState, HostRequest};
use crate::Result;
use crate::cuda::c_layout::CStructure;
use crate::cuda::copies::{HostCopy, Mailbox};
use crate::cuda::device::{Device, Memory, failed};
use crate::round::{Ended, Tree};
use crate::sampling::Choice;

/// No mask, so every token may follow; no node.
const NONE: u32 = u32::MAX;

/// What rounds with grammars need beside others.
#[derive(Default)]
pub(super) struct Masks {
    /// On their way to the device.
    mailbox: Option<Mailbox>,
    /// Behind the copies of what is asked about the pass that was planned last.
    copied: Option<CudaEvent>,
    round: HostCopy<u32>,
    records: HostCopy<u32>,
    queries: HostCopy<u32>,
    /// The nodes that paths to the outputs lead through: of whole trees, or of a level.
    nodes: HostCopy<u32>,
}

impl Masks {
    pub(super) fn memory(&self) -> Option<&Memory> {
        self.mailbox.as_ref().map(|mailbox| &mailbox.memory)
    }
}

impl CudaState {
    /// Takes from the trees that the host has drafted what grammars do not allow, and adds those of
    /// tokens that must come next, as `RoundRow::keep_to` does. Whether a draft of the device would go
    /// further is not known here; where there may be one, all its steps must be certain.
    pub(super) fn keep_to_grammars(&mut self, given: &mut Vec<(usize, Tree)>) {
        for &HostRow { place, steps, nodes, .. } in &self.round.rows {
            let (
                Some(steps),
                Some(HostRequest { grammar: Some(grammar), params, known, last, .. }),
            ) = (steps, &mut self.requests[place])
            else {
                continue;
            };
            if !grammar.guides_drafts() {
                continue;
            }
            let steps = steps.min(params.longest.saturating_sub(*known + 1));
            let at = given.iter().position(|(of, _)| *of == place);
            if let Some(at) = at {
                grammar.prune(&mut given[at].1);
            }
            if steps == 0 {
                continue;
            }
            let deepest = |at: usize| given[at].1.nodes().iter().map(|node| node.depth).max();
            let drafted = match at.and_then(deepest) {
                Some(deepest) => 1 + deepest,
                None if self.bounds.drafts && params.drafts() => steps,
                None => 1,
            };
            let forced = grammar.forced();
            if forced.len() < drafted {
                continue;
            }
            let mut tree = Tree::root(*last);
            // A tree may be deeper than it has nodes.
            let chain = forced.iter().take(steps.min(nodes - 1));
            chain.fold(0, |parent, &token| tree.add(parent, token, 1.0));
            match at {
                Some(at) => given[at].1 = tree,
                None => given.push((place, tree)),
            }
        }
    }

    /// Enqueues copies of what grammars will be asked about: the outputs of the pass that was planned
    /// last, and the paths to them.
    pub(super) fn fetch_queries(&mut self, device: &Device, tokens_of: TokensOf) -> Result<()> {
        (self.masks.copied, self.parts.masks) = (None, 0);
        self.copy_queries(device, tokens_of).inspect_err(|_| device.catch_up())
    }

    fn copy_queries(&mut self, device: &Device, tokens_of: TokensOf) -> Result<()> {
        if !self.round.masked || (tokens_of != TokensOf::Target && !self.round.guided) {
            return Ok(());
        }
        let rows = self.round.rows.len();
        let State { record, nodes, pool, .. } = self.parts;
        let masks = &mut self.masks;
        masks.round.fetch(device, &self.tasks.memory, Round::WORDS)?;
        masks.queries.fetch(device, &self.queries, self.asked * Query::WORDS)?;
        masks.records.fetch(device, &self.records, rows * record as usize / 4)?;
        match tokens_of {
            TokensOf::Target => {
                let nodes = rows * nodes as usize * Node::WORDS;
                masks.nodes.fetch(device, &self.trees, nodes)?;
            }
            TokensOf::Level => {
                let nodes = rows * pool as usize * Offered::WORDS;
                masks.nodes.fetch(device, &self.offered, nodes)?;
            }
            TokensOf::Seeds => {}
        }
        masks.copied = Some(device.mark()?);
        Ok(())
    }

    /// Asks the grammars about every output of the pass, and sends what they allow.
    pub(super) fn send_masks(&mut self, device: &Device, tokens_of: TokensOf) -> Result<()> {
        let Some(copied) = self.masks.copied.take() else { return Ok(()) };
        copied.synchronize().map_err(failed("waiting for what is asked"))?;
        let round = Round::read(self.masks.round.values(), 0);
        let of_mask = self.bounds.vocabulary.div_ceil(32);
        let mut index = vec![NONE; round.outputs as usize];
        let mut masks: Vec<u32> = Vec::new();
        for (output, place) in index.iter_mut().enumerate() {
            let query = Query::read(self.masks.queries.values(), output);
            let HostRow { place: of, .. } = self.round.rows[query.row as usize];
            if query.given != NONE {
                continue;
            }
            let path = self.path_to(tokens_of, &query);
            let Some(HostRequest { grammar: Some(grammar), .. }) = &mut self.requests[of] else {
                continue;
            };
            if tokens_of != TokensOf::Target && !grammar.guides_drafts() {
                continue;
            }
            grammar.ask(&path);
            let Some(allowed) = grammar.allowed(&path) else { continue };
            *place = round.outputs + masks.len() as u32;
            let first = masks.len();
            masks.extend(allowed.words().iter().take(of_mask));
            masks.resize(first + of_mask, 0);
        }
        let words = index.len() + masks.len();
        let mailbox = Self::mailbox(device, &mut self.masks.mailbox, words)?;
        mailbox.post(device, |sent| {
            sent[..index.len()].copy_from_slice(&index);
            sent[index.len()..words].copy_from_slice(&masks);
            words
        })?;
        self.parts.masks = mailbox.memory.at(0);
        Ok(())
    }

    /// The tokens between what the grammar has heard and an output.
    fn path_to(&self, tokens_of: TokensOf, query: &Query) -> Vec<u32> {
        let State { record, nodes, pool, .. } = self.parts;
        let values = self.masks.nodes.values();
        let (at, mut node, mut path) = (query.row as usize, query.node, Vec::new());
        match tokens_of {
            TokensOf::Target => {
                while node != NONE && node != 0 {
                    let of = Node::read(values, at * nodes as usize + node as usize);
                    path.push(of.token);
                    node = of.parent;
                }
            }
            TokensOf::Level => {
                while node != NONE {
                    let of = Offered::read(values, at * pool as usize + node as usize);
                    path.push(of.token);
                    node = of.parent;
                }
            }
            // What the round has brought: the host reads it when the round is over.
            TokensOf::Seeds => {
                let words = &self.masks.records.values()[at * record as usize / 4..];
                let answered = Row::read(words, 0).answered as usize;
                return words[Row::WORDS..][..answered].to_vec();
            }
        }
        path.reverse();
        path
    }
}

impl HostRequest {
    /// Tells the grammar of an answer; drops what came after its end and says how it ended, if the
    /// grammar ended it. `Sequence::take` is the definition.
    pub(super) fn keep_to_grammar(&mut self, row: &Row, answer: &mut Vec<Choice>) -> Option<Ended> {
        self.last = answer.last().map_or(self.last, |choice| choice.token);
        let grammar = self.grammar.as_mut()?;
        let tokens: Vec<u32> = answer.iter().map(|choice| choice.token).collect();
        let mut ended = None;
        for (at, &token) in tokens.iter().enumerate() {
            if let Some(why) = grammar.failure(&tokens[..at]) {
                ended = Some(Ended::GrammarFailed(why.into()));
                answer.truncate(at);
                break;
            }
            let stops = row.ended == ENDED_BY_TOKEN && at + 1 == tokens.len();
            if !stops && grammar.take(token) {
                ended = Some(Ended::Grammar);
                answer.truncate(at + 1);
                break;
            }
        }
        grammar.forget();
        ended
    }
}
