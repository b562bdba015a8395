//! Grammars: the host asks them what may follow at every node of the trees, while the target's pass
//! runs, and sends a mask for each before tokens are chosen.
//!
//! The one invariant: what a grammar has heard of a request is what the host has read of it. So a round
//! with grammars waits once more, for its trees; it is launched and not captured. Drafts of the device
//! do not keep to grammars: texts are the same, and drafts that a grammar does not allow are refused.

use cudarc::driver::CudaEvent;

use super::device::{Device, Mailbox, Memory, failed};
use super::host_round::HostRow;
use super::layout::{ENDED_BY_TOKEN, Row};
use super::outcome::tree_of;
use super::state::{CudaState, Held};
use crate::Result;
use crate::round::{Ended, Tree};
use crate::sampling::Choice;

/// No mask: every token may follow.
const NONE: u32 = u32::MAX;

/// What rounds with grammars need beside others.
#[derive(Default)]
pub(super) struct Masks {
    /// On their way to the device.
    mailbox: Option<Mailbox>,
    /// Behind the copy of the trees.
    copied: Option<CudaEvent>,
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
        for &HostRow { place, steps } in &self.round.rows {
            let (Some(steps), Some(Held { grammar: Some(grammar), params, known, last, .. })) =
                (steps, &mut self.held[place])
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
            let chain = forced.iter().take(steps);
            chain.fold(0, |parent, &token| tree.add(parent, token, 1.0));
            match at {
                Some(at) => given[at].1 = tree,
                None => given.push((place, tree)),
            }
        }
    }

    /// Enqueues the copy of the trees whose nodes grammars will be asked about.
    pub(super) fn fetch_trees(&mut self, device: &Device) -> Result<()> {
        if !self.round.masked {
            return Ok(());
        }
        let rows = self.round.rows.len();
        self.read_records.fetch(device, &self.records, rows * self.parts.record as usize / 4)?;
        self.read_trees.fetch(device, &self.trees, rows * self.tree_words())?;
        self.masks.copied = Some(device.mark()?);
        Ok(())
    }

    /// Asks the grammars about every output of the target's pass, and sends what they allow.
    pub(super) fn send_masks(&mut self, device: &Device) -> Result<()> {
        let Some(copied) = self.masks.copied.take() else { return Ok(()) };
        copied.synchronize().map_err(failed("waiting for trees"))?;
        let nodes = self.parts.nodes as usize;
        let (record, tree_words) = (self.parts.record as usize / 4, self.tree_words());
        let words = self.bounds.vocabulary.div_ceil(32);
        let mut index = vec![NONE; self.round.rows.len() * nodes];
        let mut masks: Vec<u32> = Vec::new();
        for (at, &HostRow { place, steps }) in self.round.rows.iter().enumerate() {
            let Some(Held { grammar: Some(grammar), .. }) = &mut self.held[place] else { continue };
            let row = Row::of(&self.read_records.values()[at * record..]);
            let tree = &self.read_trees.values()[at * tree_words..];
            let paths = match steps {
                Some(_) => paths_of(&tree_of(tree, row.tree as usize)),
                None => vec![Vec::new()],
            };
            for (node, path) in paths.iter().enumerate() {
                grammar.ask(path);
                let Some(allowed) = grammar.allowed(path) else { continue };
                index[at * nodes + node] = (index.len() + masks.len()) as u32;
                let first = masks.len();
                masks.extend(allowed.words().iter().take(words));
                masks.resize(first + words, 0);
            }
        }
        let mailbox = Self::mailbox(device, &mut self.masks.mailbox, index.len() + masks.len())?;
        mailbox.post(device, |words| {
            words[..index.len()].copy_from_slice(&index);
            words[index.len()..index.len() + masks.len()].copy_from_slice(&masks);
            index.len() + masks.len()
        })?;
        self.parts.masks = mailbox.memory.at(0);
        Ok(())
    }

    /// Words of the tree of one row.
    fn tree_words(&self) -> usize {
        self.parts.nodes as usize * size_of::<super::layout::Node>() / 4
    }
}

impl Held {
    /// Lets the grammar hear an answer; drops what came after its end and says how it ended, if the
    /// grammar ended it. `Sequence::take` is the definition.
    pub(super) fn hear(&mut self, row: &Row, answer: &mut Vec<Choice>) -> Option<Ended> {
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

/// The tokens between the bonus and each node of a tree, the node's own last.
fn paths_of(nodes: &[crate::round::Node]) -> Vec<Vec<u32>> {
    let mut paths: Vec<Vec<u32>> = Vec::with_capacity(nodes.len());
    for (at, node) in nodes.iter().enumerate() {
        let mut path = if at == 0 { Vec::new() } else { paths[node.parent].clone() };
        if at > 0 {
            path.push(node.token);
        }
        paths.push(path);
    }
    paths
}
