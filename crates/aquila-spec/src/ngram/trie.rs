//! A trie of n-grams: every token with up to `depth - 1` tokens before it, how often each was
//! seen, and which of them lately.
//!
//! Its one invariant: the nodes without children, and they alone, are in the list of leaves, from
//! the one used last to the one not used for longest, which is the next to go when room is short.
//! What is in the trie is a function of the order in which tokens came, never of how many came at
//! a time.

use super::MatchType;
use super::grow::{Child, Source};
use super::links::{Key, Links};

const NONE: u32 = u32::MAX;
const ROOT: u32 = 0;
/// Children that are looked at for the most frequent ones: the most recent of them.
const CONSIDERED: usize = 128;

/// Bytes of an n-gram: its node, and its share of a table that is mostly full.
pub(super) const NGRAM_BYTES: usize = size_of::<Node>() + 2 * size_of::<u32>();

/// An n-gram: the path from the root to its node.
#[derive(Debug, Clone, Copy)]
struct Node {
    token: u32,
    parent: u32,
    /// The child that was seen last.
    child: u32,
    /// Siblings, by when they were seen last.
    newer: u32,
    older: u32,
    /// Leaves, by when they were seen last; only for leaves.
    newer_leaf: u32,
    older_leaf: u32,
    /// How often it was seen.
    count: u32,
    /// When it was seen last.
    seen: u32,
    /// Tells it from others that had its place.
    born: u32,
}

impl Node {
    fn new(token: u32, parent: u32, born: u32) -> Self {
        let (child, newer, older, newer_leaf, older_leaf) = (NONE, NONE, NONE, NONE, NONE);
        let (count, seen) = (0, 0);
        Self { token, parent, child, newer, older, newer_leaf, older_leaf, count, seen, born }
    }
}

/// Where a text has come to: the nodes of its last token, its last two, and so on.
#[derive(Debug, Clone, Default)]
pub(super) struct TextCursor {
    tips: Vec<Option<Tip>>,
    /// How many of the text's tokens are in the trie.
    pub tokens: usize,
}

#[derive(Debug, Clone, Copy)]
struct Tip {
    node: u32,
    born: u32,
}

/// A trie of n-grams.
#[derive(Debug)]
pub(super) struct Trie {
    nodes: Vec<Node>,
    links: Links,
    depth: usize,
    capacity: usize,
    newest_leaf: u32,
    oldest_leaf: u32,
    clock: u32,
    births: u32,
}

impl Trie {
    /// An empty one for n-grams of up to `depth` tokens, of at most `capacity` nodes.
    pub fn new(depth: usize, capacity: usize, room: usize) -> Self {
        Self {
            nodes: vec![Node::new(0, NONE, 0)],
            links: Links::with_room(room),
            depth,
            capacity,
            newest_leaf: NONE,
            oldest_leaf: NONE,
            clock: 0,
            births: 0,
        }
    }

    /// How many n-grams are kept.
    pub fn len(&self) -> usize {
        self.nodes.len() - 1
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.links.bytes()
    }

    /// Takes in the next token of a text.
    pub fn push(&mut self, cursor: &mut TextCursor, token: u32) {
        self.clock = self.clock.wrapping_add(1);
        cursor.tokens += 1;
        if cursor.tips.len() < self.depth {
            cursor.tips.push(None);
        }
        let mut parent = Some(Tip { node: ROOT, born: 0 });
        for tip in &mut cursor.tips {
            // What room was made for may have been the parent itself.
            let living = parent.and_then(|parent| self.living(parent));
            let node = living.and_then(|parent| self.see(parent, token));
            let new = node.map(|node| Tip { node, born: self.at(node).born });
            parent = std::mem::replace(tip, new);
        }
    }

    /// The places of the contexts that end a text and that something followed, with their
    /// lengths, the longest first.
    pub fn matches(&self, cursor: &TextCursor) -> Vec<(usize, u32)> {
        let followed = |tip: &Option<Tip>| {
            tip.and_then(|tip| self.living(tip)).filter(|&node| self.at(node).child != NONE)
        };
        let places = cursor.tips.iter().enumerate().rev();
        places.filter_map(|(place, tip)| Some((place + 1, followed(tip)?))).collect()
    }

    fn at(&self, node: u32) -> &Node {
        &self.nodes[node as usize]
    }

    fn at_mut(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[node as usize]
    }

    fn living(&self, tip: Tip) -> Option<u32> {
        (self.at(tip.node).born == tip.born).then_some(tip.node)
    }

    fn find(&self, parent: u32, token: u32) -> Option<u32> {
        self.links.find((parent, token), key_of(&self.nodes))
    }

    /// Sees `token` behind `parent`: one more time, or for the first time. None where there is no
    /// room for it.
    fn see(&mut self, parent: u32, token: u32) -> Option<u32> {
        let node = match self.find(parent, token) {
            Some(node) => {
                self.unlink_sibling(node);
                if self.at(node).child == NONE {
                    self.unlink_leaf(node);
                }
                node
            }
            None => {
                let node = self.make(parent, token)?;
                if parent != ROOT && self.at(parent).child == NONE {
                    self.unlink_leaf(parent);
                }
                node
            }
        };
        self.link_sibling(node);
        if self.at(node).child == NONE {
            self.link_newest_leaf(node);
        }
        let clock = self.clock;
        let seen = self.at_mut(node);
        seen.count = seen.count.saturating_add(1);
        seen.seen = clock;
        Some(node)
    }

    /// A new node, in the place of the oldest leaf where all are taken.
    fn make(&mut self, parent: u32, token: u32) -> Option<u32> {
        self.births = self.births.wrapping_add(1);
        let new = Node::new(token, parent, self.births);
        let node = if self.len() < self.capacity {
            if self.nodes.len() == self.nodes.capacity() {
                // By a quarter: what stays unused of a large trie is to be small.
                let more = (self.nodes.len() / 4).max(64);
                self.nodes.reserve_exact(more.min(self.capacity - self.len()));
            }
            self.nodes.push(new);
            (self.nodes.len() - 1) as u32
        } else {
            let node = self.evict(parent)?;
            *self.at_mut(node) = new;
            node
        };
        self.links.insert(node, key_of(&self.nodes));
        Some(node)
    }

    /// Takes out the oldest leaf other than `kept`, which is to have a child.
    fn evict(&mut self, kept: u32) -> Option<u32> {
        let oldest = match self.oldest_leaf {
            NONE => return None,
            leaf if leaf == kept => self.at(leaf).newer_leaf,
            leaf => leaf,
        };
        if oldest == NONE {
            return None;
        }
        self.unlink_leaf(oldest);
        self.unlink_sibling(oldest);
        self.links.remove(oldest, key_of(&self.nodes));
        let Node { parent, seen, .. } = *self.at(oldest);
        if parent != ROOT && self.at(parent).child == NONE {
            // A text passes through the parent right before the child, so it is as old; unless it
            // was where a text ended, or where one now is.
            if self.at(parent).seen <= seen {
                self.link_oldest_leaf(parent);
            } else {
                self.link_newest_leaf(parent);
            }
        }
        Some(oldest)
    }

    fn link_sibling(&mut self, node: u32) {
        let parent = self.at(node).parent;
        let next = std::mem::replace(&mut self.at_mut(parent).child, node);
        self.at_mut(node).newer = NONE;
        self.at_mut(node).older = next;
        if next != NONE {
            self.at_mut(next).newer = node;
        }
    }

    fn unlink_sibling(&mut self, node: u32) {
        let Node { newer, older, parent, .. } = *self.at(node);
        match newer {
            NONE => self.at_mut(parent).child = older,
            newer => self.at_mut(newer).older = older,
        }
        if older != NONE {
            self.at_mut(older).newer = newer;
        }
    }

    fn link_newest_leaf(&mut self, node: u32) {
        let next = std::mem::replace(&mut self.newest_leaf, node);
        self.at_mut(node).newer_leaf = NONE;
        self.at_mut(node).older_leaf = next;
        match next {
            NONE => self.oldest_leaf = node,
            next => self.at_mut(next).newer_leaf = node,
        }
    }

    fn link_oldest_leaf(&mut self, node: u32) {
        let next = std::mem::replace(&mut self.oldest_leaf, node);
        self.at_mut(node).older_leaf = NONE;
        self.at_mut(node).newer_leaf = next;
        match next {
            NONE => self.newest_leaf = node,
            next => self.at_mut(next).older_leaf = node,
        }
    }

    fn unlink_leaf(&mut self, node: u32) {
        let Node { newer_leaf, older_leaf, .. } = *self.at(node);
        match newer_leaf {
            NONE => self.newest_leaf = older_leaf,
            newer => self.at_mut(newer).older_leaf = older_leaf,
        }
        match older_leaf {
            NONE => self.oldest_leaf = newer_leaf,
            older => self.at_mut(older).newer_leaf = newer_leaf,
        }
    }

    /// The node whose children go on behind `node`: itself, or, where n-grams end, that of its
    /// path without the first token.
    fn going_on(&self, node: u32) -> Option<u32> {
        if self.at(node).child != NONE {
            return Some(node);
        }
        let mut path = Vec::with_capacity(self.depth);
        let mut at = node;
        while at != ROOT {
            path.push(self.at(at).token);
            at = self.at(at).parent;
        }
        if path.len() < self.depth {
            return None;
        }
        path.iter().rev().skip(1).try_fold(ROOT, |at, &token| self.find(at, token))
    }
}

impl Source for Trie {
    fn children(&self, place: u32, most: usize, order: MatchType, found: &mut Vec<Child>) {
        found.clear();
        let considered = match order {
            MatchType::Bfs => most,
            MatchType::Prob => CONSIDERED.max(most),
        };
        let mut next = self.going_on(place).map_or(NONE, |node| self.at(node).child);
        while next != NONE && found.len() < considered {
            let &Node { token, count, older, .. } = self.at(next);
            found.push(Child { token, count, place: next });
            next = older;
        }
        if order == MatchType::Prob {
            // Stable: the more recent first where they were seen equally often.
            found.sort_by_key(|child| std::cmp::Reverse(child.count));
            found.truncate(most);
        }
    }
}

/// The way that leads to a node.
fn key_of(nodes: &[Node]) -> impl Fn(u32) -> Key {
    |node| (nodes[node as usize].parent, nodes[node as usize].token)
}
