//! What drafting from n-grams is told.

use std::str::FromStr;

use crate::{MOST_STEPS, MOST_TOPK, Shape, ShapeError};

/// Which continuations a tree takes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MatchType {
    /// Level by level, the most recent first; fewer branches the longer the match.
    #[default]
    Bfs,
    /// The paths of the best joint probability first, by frequency.
    Prob,
}

impl FromStr for MatchType {
    type Err = NgramError;

    fn from_str(name: &str) -> Result<Self, NgramError> {
        match name.to_ascii_uppercase().as_str() {
            "BFS" => Ok(Self::Bfs),
            "PROB" => Ok(Self::Prob),
            _ => Err(NgramError::MatchType(name.into())),
        }
    }
}

/// Whose text a request's drafts come from; the corpora serve all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NgramScope {
    /// Everybody's: one trie for all requests.
    #[default]
    Server,
    /// The request's own. Then its drafts depend on its tokens and the corpora alone.
    Request,
}

impl FromStr for NgramScope {
    type Err = NgramError;

    fn from_str(name: &str) -> Result<Self, NgramError> {
        match name.to_ascii_lowercase().as_str() {
            "server" => Ok(Self::Server),
            "request" => Ok(Self::Request),
            _ => Err(NgramError::Scope(name.into())),
        }
    }
}

/// Why n-grams cannot be drafted from in the way that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NgramError {
    /// Branches that are none, more than trees can have, or fewer than the least.
    #[error(
        "a least breadth of {least} and a most of {most} must be from 1 to {MOST_TOPK}, the first \
         not above the second"
    )]
    Breadth {
        /// The least branches.
        least: usize,
        /// The most branches.
        most: usize,
    },
    /// A trie in which nothing follows anything, or one deeper than trees need.
    #[error("a trie depth of {0} must be from 2 to {MOST_TRIE_DEPTH}")]
    TrieDepth(usize),
    /// A trie that does not hold what one token adds, or that u32 cannot number.
    #[error("a capacity of {0} n-grams must be from {least} to {most}", least = LEAST_CAPACITY, most = MOST_CAPACITY)]
    Capacity(usize),
    /// No such match type.
    #[error("the match type {0} must be BFS or PROB")]
    MatchType(String),
    /// No such scope.
    #[error("the scope {0} must be server or request")]
    Scope(String),
}

/// The deepest trie.
pub const MOST_TRIE_DEPTH: usize = 64;
const LEAST_CAPACITY: usize = 1024;
const MOST_CAPACITY: usize = 1 << 30;

/// How n-grams are kept and drafted from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramSettings {
    /// The branches that the longest matches begin with.
    pub min_bfs_breadth: usize,
    /// The branches that the shortest matches begin with.
    pub max_bfs_breadth: usize,
    /// Which continuations come first.
    pub match_type: MatchType,
    /// Tokens of the longest n-gram that is kept: a context and the token after it.
    pub max_trie_depth: usize,
    /// Nodes of a trie; beyond them the leaves that were not used for longest go.
    pub capacity: usize,
    /// Whose text is drafted from.
    pub scope: NgramScope,
}

impl Default for NgramSettings {
    fn default() -> Self {
        Self {
            min_bfs_breadth: 1,
            max_bfs_breadth: 10,
            match_type: MatchType::default(),
            max_trie_depth: 18,
            capacity: 10_000_000,
            scope: NgramScope::default(),
        }
    }
}

impl NgramSettings {
    /// The nodes of a tree by default, the bonus included.
    pub const NODES: usize = 12;

    /// Refuses what cannot be.
    pub fn check(&self) -> Result<(), NgramError> {
        let (least, most) = (self.min_bfs_breadth, self.max_bfs_breadth);
        if least == 0 || least > most || most > MOST_TOPK {
            return Err(NgramError::Breadth { least, most });
        }
        if !(2..=MOST_TRIE_DEPTH).contains(&self.max_trie_depth) {
            return Err(NgramError::TrieDepth(self.max_trie_depth));
        }
        if !(LEAST_CAPACITY..=MOST_CAPACITY).contains(&self.capacity) {
            return Err(NgramError::Capacity(self.capacity));
        }
        Ok(())
    }

    /// Trees of `nodes` nodes, the bonus included: as deep as they have nodes.
    pub fn shape(&self, nodes: usize) -> Result<Shape, ShapeError> {
        let steps = nodes.saturating_sub(1).min(MOST_STEPS);
        Ok(Shape::new(steps, self.max_bfs_breadth, nodes)?.without_rows())
    }

    /// Tokens of the longest context that is matched.
    pub(super) fn longest_match(&self) -> usize {
        self.max_trie_depth - 1
    }
}
