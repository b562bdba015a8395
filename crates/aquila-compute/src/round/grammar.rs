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
    /// Adds a token; false, and nothing is added, where the grammar does not allow it.
    fn push(&mut self, token: u32) -> Result<bool, String>;

    /// Takes the last `count` tokens back.
    fn pop(&mut self, count: usize) -> Result<(), String>;

    /// The tokens that may come next, one at least; asked only while it is not complete.
    fn allowed(&mut self) -> Result<TokenSet, String>;

    /// Whether the answer is complete and nothing can be added to it.
    fn is_complete(&self) -> bool;

    /// The tokens that must come next, as far as that is known.
    fn forced(&mut self) -> Result<Vec<u32>, String>;
}

/// What may come after a path below the bonus.
#[derive(Debug)]
enum Mask {
    Allowed(TokenSet),
    /// The grammar does not allow the path, or the answer is complete with it: what comes after is
    /// never looked at.
    Unreachable,
    Failed(String),
}

/// A request's grammar, and how far its answer has come.
#[derive(Debug)]
pub(super) struct GrammarRow {
    grammar: Arc<dyn Grammar>,
    state: Box<dyn GrammarState>,
    answer: Vec<u32>,
    /// What may come after paths that were asked about since the answer last grew.
    masks: HashMap<Vec<u32>, Mask>,
    /// Why the grammar cannot be followed any more.
    failure: Option<String>,
}

impl GrammarRow {
    /// After `answer`, which keeps to the grammar.
    pub fn new(grammar: Arc<dyn Grammar>, answer: &[u32]) -> Self {
        let state = grammar.begin();
        let (answer, masks) = (answer.to_vec(), HashMap::new());
        let mut row = Self { grammar, state, answer, masks, failure: None };
        row.begin_anew();
        row
    }

    /// Follows the answer from its beginning.
    fn begin_anew(&mut self) {
        self.state = self.grammar.begin();
        self.failure = None;
        for &token in &self.answer {
            match self.state.push(token) {
                Ok(true) => {}
                Ok(false) => self.failure = Some(format!("it does not allow token {token}")),
                Err(why) => self.failure = Some(why),
            }
            if self.failure.is_some() {
                return;
            }
        }
    }

    /// Whether drafts keep to it.
    pub fn guides_drafts(&self) -> bool {
        self.grammar.guides_drafts()
    }

    /// Finds out what may come after `path`.
    pub fn ask(&mut self, path: &[u32]) {
        if self.masks.contains_key(path) {
            return;
        }
        let mask = match &self.failure {
            Some(why) => Mask::Failed(why.clone()),
            None => self.mask(path),
        };
        if matches!(mask, Mask::Failed(_)) && self.failure.is_none() {
            // The path may not be the one that is chosen.
            self.begin_anew();
        }
        self.masks.insert(path.to_vec(), mask);
    }

    fn mask(&mut self, path: &[u32]) -> Mask {
        let mut pushed = 0;
        let mut mask = Mask::Unreachable;
        for &token in path {
            match self.state.push(token) {
                Ok(true) => pushed += 1,
                Ok(false) => break,
                Err(why) => return Mask::Failed(why),
            }
        }
        if pushed == path.len() && !self.state.is_complete() {
            mask = match self.state.allowed() {
                Ok(allowed) => Mask::Allowed(allowed),
                Err(why) => return Mask::Failed(why),
            };
        }
        match self.state.pop(pushed) {
            Ok(()) => mask,
            Err(why) => Mask::Failed(why),
        }
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
        self.answer.push(token);
        match self.state.push(token) {
            Ok(true) => self.state.is_complete(),
            Ok(false) => {
                self.failure = Some(format!("it does not allow token {token}"));
                false
            }
            Err(why) => {
                self.failure = Some(why);
                false
            }
        }
    }

    /// Forgets what was asked: the answer has grown.
    pub fn forget(&mut self) {
        self.masks.clear();
    }

    /// The tokens that must come next.
    pub fn forced(&mut self) -> Vec<u32> {
        if self.failure.is_some() || self.state.is_complete() {
            return Vec::new();
        }
        self.state.forced().unwrap_or_else(|_| {
            self.begin_anew();
            Vec::new()
        })
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
