//! Which drafts the target confirms: by its own choice, which gives plain decoding's output, or by
//! probability, with SGLang's thresholds or by rejection sampling.
//!
//! All walk down from the root. By choice, the child is gone to that carries the target's token. By
//! probability, the children of a node are tried one after the other; the first that is accepted is
//! gone to, and where none is, a token is drawn from what they left of the target's distribution.
//! Coins depend on seed, choice and position alone, so a run repeats. A child comes after its parent,
//! so a walk by probability needs each distribution once, in the order of the nodes, and can go on
//! where the logits of one piece of the outputs end and those of the next come.

use std::sync::Arc;

use crate::sampling::{Weights, noise};

use super::Tree;

/// The path through a tree that the target confirms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accepted {
    /// The nodes on the path, the root first. Their rows are committed.
    pub path: Vec<usize>,
    /// The token after each of them: what the round yields. The last one is the new bonus; the
    /// others are drafts that were right. While the path is followed, its last node has none.
    pub tokens: Vec<u32>,
}

impl Accepted {
    /// Whether it has come to its end; one without nodes has not begun.
    pub fn is_complete(&self) -> bool {
        !self.path.is_empty() && self.path.len() == self.tokens.len()
    }

    /// How many drafts were right.
    pub fn correct(&self) -> usize {
        self.path.len() - 1
    }
}

/// Follows the target's choices down a tree: a node's child is accepted if it carries the token
/// that the target chooses at that node.
pub fn accept(tree: &Tree, chosen: &[u32]) -> Accepted {
    assert_eq!(tree.len(), chosen.len(), "one choice for each node");
    let mut path = vec![0];
    let mut tokens = vec![chosen[0]];
    let mut at = 0;
    while let Some(child) = tree.child(at, chosen[at]) {
        path.push(child);
        tokens.push(chosen[child]);
        at = child;
    }
    Accepted { path, tokens }
}

/// How drafts are verified.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Verify {
    /// A draft is right if it is the token that the target chooses. Output equals plain decoding's.
    #[default]
    Match,
    /// A draft is accepted as often as the target would draw it, and always where one of the
    /// thresholds is passed. At thresholds of 1 the distribution is the target's.
    TargetOnly {
        /// Drafts at least this likely are accepted.
        single: f64,
        /// Coins are compared with the probability divided by this.
        accumulated: f64,
    },
    /// A draft that was drawn from q is accepted with probability p / q. The distribution is the
    /// target's.
    Rejection,
}

impl Verify {
    /// Whether answers are distributed as the target's.
    pub fn is_lossless(&self) -> bool {
        match *self {
            Verify::TargetOnly { single, accumulated } => single >= 1.0 && accumulated >= 1.0,
            Verify::Match | Verify::Rejection => true,
        }
    }

    /// Goes on with a path to its end, or to a node of which `target` does not have the target's
    /// distribution yet.
    ///
    /// # Panics
    /// For [`Verify::Match`], which needs choices and not distributions.
    pub fn follow(
        &self,
        tree: &Tree,
        coins: Coins,
        accepted: &mut Accepted,
        target: impl Fn(usize) -> Option<Weights>,
    ) {
        if accepted.path.is_empty() {
            accepted.path.push(0);
        }
        while !accepted.is_complete() {
            let depth = accepted.tokens.len();
            let at = accepted.path[depth];
            let Some(target) = target(at) else { return };
            let tried = match *self {
                Verify::Match => panic!("a match needs no distribution"),
                Verify::TargetOnly { single, accumulated } => {
                    by_threshold(tree, at, &target, coins.coin(depth, 0), single, accumulated)
                }
                Verify::Rejection => by_rejection(tree, at, &target, coins, depth),
            };
            match tried {
                Tried::Accepted(child) => {
                    accepted.path.push(child);
                    accepted.tokens.push(tree.nodes()[child].token);
                }
                Tried::Rejected(rest) => {
                    let drawn = rest.draw(coins.last(depth));
                    accepted.tokens.push(drawn.unwrap_or(target.tokens[0].0));
                }
            }
        }
    }
}

impl std::fmt::Display for Verify {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verify::Match => f.write_str("match"),
            Verify::TargetOnly { single, accumulated } => {
                write!(f, "target-only (thresholds {single} and {accumulated})")
            }
            Verify::Rejection => f.write_str("rejection"),
        }
    }
}

/// Where the coins of a round come from.
#[derive(Debug, Clone, Copy)]
pub struct Coins {
    /// The request's seed.
    pub seed: u64,
    /// Which of its answers.
    pub choice: u32,
    /// The position of the token that is chosen at the root.
    pub position: u32,
}

/// Streams of noise that must not be those of the target's own choices, nor each other.
const ACCEPT: u64 = 0x6163_6365_7074_0001;
const LAST: u64 = 0x6c61_7374_0000_0002;
const DRAFT: u64 = 0x6472_6166_7400_0003;

impl Coins {
    fn coin(&self, depth: usize, sibling: usize) -> f64 {
        let key = noise::key(self.seed ^ ACCEPT, self.choice, self.position + depth as u32);
        noise::uniform(key, sibling as u32)
    }

    fn last(&self, depth: usize) -> f64 {
        noise::uniform(noise::key(self.seed ^ LAST, self.choice, self.position + depth as u32), 0)
    }
}

enum Tried {
    Accepted(usize),
    Rejected(Rest),
}

/// What is left of a distribution, over its tokens.
struct Rest {
    tokens: Vec<(u32, f64)>,
    total: f64,
}

impl Rest {
    fn of(weights: &Weights) -> Self {
        Self { tokens: weights.tokens.clone(), total: weights.total }
    }

    fn get(&self, token: u32) -> f64 {
        let at = self.tokens.binary_search_by_key(&token, |&(token, _)| token);
        at.map_or(0.0, |at| self.tokens[at].1)
    }

    /// Takes a token out.
    fn remove(&mut self, token: u32) {
        if let Ok(at) = self.tokens.binary_search_by_key(&token, |&(token, _)| token) {
            self.tokens.remove(at);
            self.total = self.tokens.iter().map(|&(_, weight)| weight).sum();
        }
    }

    /// Takes another distribution off, both as probabilities.
    fn subtract(&mut self, other: &Rest) {
        let mut theirs = other.tokens.iter().peekable();
        let (total, scale) = (self.total, other.total);
        for (token, weight) in &mut self.tokens {
            while theirs.next_if(|(other, _)| other < token).is_some() {}
            let q = theirs.next_if(|(other, _)| other == token).map_or(0.0, |(_, w)| w / scale);
            *weight = to_rest_unit((*weight / total - q).max(0.0));
        }
        self.tokens.retain(|&(_, weight)| weight > 0.0);
        self.total = self.tokens.iter().map(|&(_, weight)| weight).sum();
    }

    /// The token under a coin in (0, 1); none where nothing is left.
    fn draw(&self, coin: f64) -> Option<u32> {
        let target = coin * self.total;
        let mut sum = 0.0;
        let under = self.tokens.iter().find(|&&(_, weight)| {
            sum += weight;
            sum > target
        });
        under.or(self.tokens.last()).map(|&(token, _)| token)
    }
}

/// To the nearest multiple of 2^-52, for probabilities: sums of those are exact in f64, so no order of
/// adding is part of the result.
fn to_rest_unit(probability: f64) -> f64 {
    (probability + 1.0) - 1.0
}

/// SGLang's rule: one coin for all children of a node.
fn by_threshold(
    tree: &Tree,
    at: usize,
    target: &Weights,
    coin: f64,
    single: f64,
    accumulated: f64,
) -> Tried {
    let mut rest = Rest::of(target);
    let mut sum = 0.0;
    for child in tree.children(at) {
        let token = tree.nodes()[child].token;
        // A token that was tried has nothing left to be accepted with.
        let p = rest.get(token) / target.total;
        sum += p;
        let accepted = coin <= sum / accumulated.max(1e-9) || p >= single;
        if p > 0.0 && accepted {
            return Tried::Accepted(child);
        }
        rest.remove(token);
    }
    Tried::Rejected(rest)
}

/// Children that were drawn from a distribution, one after the other without putting back, are
/// accepted with p / q; those of which nothing is known with p, as if they had been certain.
fn by_rejection(tree: &Tree, at: usize, target: &Weights, coins: Coins, depth: usize) -> Tried {
    let mut rest = Rest::of(target);
    let mut drawn = tree.proposal(at).map(Rest::of);
    for (sibling, child) in tree.children(at).enumerate() {
        let token = tree.nodes()[child].token;
        let coin = coins.coin(depth, sibling);
        let p = rest.get(token) / rest.total;
        let q = drawn.as_ref().map_or(1.0, |drawn| drawn.get(token) / drawn.total);
        if p > 0.0 && coin * q < p {
            return Tried::Accepted(child);
        }
        match &mut drawn {
            Some(drawn) => {
                rest.subtract(drawn);
                drawn.remove(token);
            }
            None => rest.remove(token),
        }
        if rest.tokens.is_empty() {
            // Only rounding gets here: q covered p, so that the child should have been accepted.
            return Tried::Accepted(child);
        }
    }
    Tried::Rejected(rest)
}

/// What a draft proposes after a node where its tokens are drawn: up to `count` of them in the
/// order of being drawn, none twice, and the distribution they were drawn from.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Where they come from.
    pub from: Arc<Weights>,
}

impl Proposal {
    /// Draws from a draft's distribution for the token at `position`.
    pub fn draw(from: Weights, seed: u64, choice: u32, position: u32, count: usize) -> Self {
        let key = noise::key(seed ^ DRAFT, choice, position);
        let mut rest = Rest::of(&from);
        let mut tokens = Vec::with_capacity(count);
        for draw in 0..count as u32 {
            let Some(token) = rest.draw(noise::uniform(key, draw)) else { break };
            rest.remove(token);
            tokens.push(token);
        }
        Self { tokens, from: Arc::new(from) }
    }

    /// How likely it is thought, before anything is drawn, that the child of this rank is right.
    /// Which nodes of a tree are verified may depend on ranks and not on tokens: leaving
    /// out what is unlikely to be accepted would change the distribution.
    pub fn prior(rank: usize) -> f32 {
        0.6 * 0.35f32.powi(rank as i32)
    }
}
