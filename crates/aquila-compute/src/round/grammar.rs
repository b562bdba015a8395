//! Grammars: which tokens may follow, by what was chosen before.
//!
//! The one invariant: what a grammar allows after a text is a function of that text. So a tree's
//! nodes are asked about one by one, each as if its path had been chosen, and speculation changes
//! no answer.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

use super::Tree;
use crate::sampling::TokenSet;

/// What an answer must be like.
pub trait Grammar: Debug + Send + Sync {
    /// At the beginning of an answer.
    fn begin(&self) -> Box<dyn GrammarState>;

    /// Whether drafts keep to it, too. Texts are the same if they do not, only drafts are worse.
    fn guides_drafts(&self) -> bool {
        true
    }
}

/// How far an answer has come. What fails may leave it of no further use.
pub trait GrammarState: Debug + Send + Sync {
    /// A state at the same place, which goes on by itself.
    fn branch(&self) -> Box<dyn GrammarState>;

    /// Adds a token; false, and nothing is added, where the grammar does not allow it.
    fn push(&mut self, token: u32) -> Result<bool, String>;

    /// The tokens that may come next, one at least; asked only while it is not complete.
    fn allowed(&mut self) -> Result<TokenSet, String>;

    /// Whether the answer is complete and nothing can be added to it.
    fn is_complete(&self) -> bool;

    /// The tokens that must come next, as far as that is known.
    fn forced(&mut self) -> Result<Vec<u32>, String>;
}

impl Clone for Box<dyn GrammarState> {
    fn clone(&self) -> Self {
        self.branch()
    }
}

/// What may come after a path below the bonus.
#[derive(Debug, Clone)]
enum Mask {
    Allowed(TokenSet),
    /// The grammar does not allow the path, or the answer is complete with it: what comes after is
    /// never looked at.
    Unreachable,
    Failed(String),
}

/// A request's grammar, and how far its answer has come.
#[derive(Debug, Clone)]
pub(crate) struct GrammarRow {
    grammar: Arc<dyn Grammar>,
    state: Box<dyn GrammarState>,
    /// What may come after paths that were asked about since the answer last grew.
    masks: HashMap<Vec<u32>, Mask>,
    /// Where those paths have come to.
    branches: HashMap<Vec<u32>, Box<dyn GrammarState>>,
    /// Why the grammar cannot be followed any more.
    failure: Option<String>,
}

impl GrammarRow {
    /// After `answer`, which keeps to the grammar.
    pub fn new(grammar: Arc<dyn Grammar>, answer: &[u32]) -> Self {
        let state = grammar.begin();
        let (masks, branches) = (HashMap::new(), HashMap::new());
        let mut row = Self { grammar, state, masks, branches, failure: None };
        answer.iter().for_each(|&token| {
            row.take(token);
        });
        row
    }

    /// Whether drafts keep to it.
    pub fn guides_drafts(&self) -> bool {
        self.grammar.guides_drafts()
    }

    /// Finds out what may come after `path`.
    pub fn ask(&mut self, path: &[u32]) {
        if !self.masks.contains_key(path) {
            let mask = self.mask(path);
            self.masks.insert(path.to_vec(), mask.unwrap_or_else(Mask::Failed));
        }
    }

    fn mask(&mut self, path: &[u32]) -> Result<Mask, String> {
        if let Some(why) = &self.failure {
            return Err(why.clone());
        }
        if path.is_empty() {
            let mask = mask_of(&mut *self.state);
            self.failure = mask.as_ref().err().cloned();
            return mask;
        }
        // The longest part of the path that was asked about, and the rest of it.
        let known = (1..path.len()).rev().find(|&known| self.branches.contains_key(&path[..known]));
        let known = known.unwrap_or(0);
        let mut state = self.branches.get(&path[..known]).unwrap_or(&self.state).branch();
        for &token in &path[known..] {
            if state.is_complete() || !state.push(token)? {
                return Ok(Mask::Unreachable);
            }
        }
        let mask = mask_of(&mut *state)?;
        if matches!(mask, Mask::Allowed(_)) {
            self.branches.insert(path.to_vec(), state);
        }
        Ok(mask)
    }

    /// What may come after `path`, which was asked about.
    pub fn allowed(&self, path: &[u32]) -> Option<&TokenSet> {
        match self.masks.get(path)? {
            Mask::Allowed(allowed) => Some(allowed),
            Mask::Unreachable | Mask::Failed(_) => None,
        }
    }

    /// Why nothing could be chosen after `path`.
    pub fn failure(&self, path: &[u32]) -> Option<&str> {
        match self.masks.get(path)? {
            Mask::Failed(why) => Some(why),
            Mask::Allowed(_) | Mask::Unreachable => None,
        }
    }

    /// Adds a token to the answer; whether it is complete with it.
    pub fn take(&mut self, token: u32) -> bool {
        if self.failure.is_some() {
            return false;
        }
        match self.state.push(token) {
            Ok(true) => return self.state.is_complete(),
            Ok(false) => self.failure = Some(format!("it does not allow token {token}")),
            Err(why) => self.failure = Some(why),
        }
        false
    }

    /// Forgets what was asked: the answer has grown.
    pub fn forget(&mut self) {
        self.masks.clear();
        self.branches.clear();
    }

    /// The tokens that must come next.
    pub fn forced(&self) -> Vec<u32> {
        if self.failure.is_some() || self.state.is_complete() {
            return Vec::new();
        }
        // What fails here fails again where it matters.
        self.state.branch().forced().unwrap_or_default()
    }

    /// Takes the nodes from a tree that the grammar does not allow.
    pub fn prune(&mut self, tree: &mut Tree) {
        let mut kept = vec![true; tree.len()];
        for at in 1..tree.len() {
            let node = tree.nodes()[at];
            let path = tree.path(node.parent);
            let path: Vec<u32> = path[1..].iter().map(|&at| tree.nodes()[at].token).collect();
            kept[at] = kept[node.parent] && {
                self.ask(&path);
                self.allowed(&path).is_some_and(|allowed| allowed.contains(node.token))
            };
        }
        tree.retain(&kept);
    }
}

fn mask_of(state: &mut dyn GrammarState) -> Result<Mask, String> {
    Ok(if state.is_complete() { Mask::Unreachable } else { Mask::Allowed(state.allowed()?) })
}
