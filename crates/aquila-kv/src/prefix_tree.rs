//! The prefix tree of one group: cached pages by the tokens that their rows depend on.
//!
//! A page's key is its own tokens and the `lookahead` tokens after them, so pages whose last rows
//! looked at different continuations are different pages. Edges carry any number of pages and
//! split between pages.
//!
//! Invariant: a node is pinned while a sequence's prefix ends at it or a child of it is pinned;
//! pinned nodes are never evicted, and `idle` holds exactly the leaves that are not pinned.

use std::collections::{BTreeMap, BTreeSet};

use crate::Namespace;

/// A node's index in its tree, valid while the node is pinned.
pub(crate) type NodeId = u32;

#[derive(Debug, Default)]
pub(crate) struct Node {
    /// None for the root of a namespace.
    pub parent: Option<NodeId>,
    /// The tokens of `pages`, then `lookahead` more.
    pub tokens: Vec<u32>,
    pub pages: Vec<u32>,
    /// By the key of their first page.
    pub children: BTreeMap<Box<[u32]>, NodeId>,
    /// Sequences that end here, plus pinned children.
    pub pins: usize,
    /// When it was last unpinned. A parent is never older than its children.
    pub used: u64,
    /// The namespace, in a root.
    pub namespace: Option<Namespace>,
}

/// The tree of one group, over all namespaces.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    page_size: usize,
    lookahead: usize,
    pub(crate) nodes: Vec<Node>,
    pub(crate) vacant: Vec<NodeId>,
    pub(crate) roots: BTreeMap<Namespace, NodeId>,
    pub(crate) idle: BTreeSet<(u64, NodeId)>,
    cached: usize,
    pinned: usize,
    clock: u64,
}

/// Where a walk along some tokens ended.
struct Walk {
    node: NodeId,
    /// Pages of `node` that the tokens share.
    within: usize,
    /// Pages shared in all, from where the walk began.
    pages: usize,
}

impl PrefixTree {
    pub fn new(page_size: usize, lookahead: usize) -> Self {
        Self {
            page_size,
            lookahead,
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: BTreeMap::new(),
            idle: BTreeSet::new(),
            cached: 0,
            pinned: 0,
            clock: 0,
        }
    }

    /// Pages in the tree.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Pages in the tree that some sequence has locked.
    pub fn pinned(&self) -> usize {
        self.pinned
    }

    /// Pages that eviction could free.
    pub fn evictable(&self) -> usize {
        self.cached - self.pinned
    }

    /// How many pages `tokens` determine: those whose lookahead is known too.
    pub fn determined(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.lookahead) / self.page_size
    }

    /// How many pages of `tokens` are cached, `limit` at most.
    pub fn find(&self, namespace: &Namespace, tokens: &[u32], limit: usize) -> usize {
        self.roots.get(namespace).map_or(0, |root| self.walk(*root, tokens, limit).pages)
    }

    /// Locks the first `count` pages of `tokens`, which [`find`](Self::find) has found, appends
    /// them to `out` and answers the node where they end.
    pub fn lock(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        count: usize,
        out: &mut Vec<u32>,
    ) -> Option<NodeId> {
        if count == 0 {
            return None;
        }
        let walk = self.walk(*self.roots.get(namespace)?, tokens, count);
        debug_assert_eq!(walk.pages, count, "only what was found is locked");
        let end = self.split(walk.node, walk.within);
        self.copy_path(end, count, out);
        self.pin(end);
        Some(end)
    }

    /// Undoes a lock.
    pub fn unlock(&mut self, end: NodeId) {
        self.unpin(end);
    }

    /// Offers `pages`, the rows of the first tokens of `tokens`, as the continuation of the prefix
    /// that ends at `end` (none: an empty prefix), on which the caller has a lock. The lock moves
    /// to the end of the longer prefix, which is answered. Pages that the tree had already
    /// replace those in `pages`; the caller's own copies go to `spare`.
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        end: Option<NodeId>,
        tokens: &[u32],
        pages: &mut [u32],
        spare: &mut Vec<u32>,
    ) -> NodeId {
        let start = end.unwrap_or_else(|| {
            let root = self.root(namespace);
            self.pin(root);
            root
        });
        let walk = self.walk(start, tokens, pages.len());
        let (known, new) = pages.split_at_mut(walk.pages);
        let mut at = start;
        if !known.is_empty() {
            spare.extend_from_slice(known);
            at = self.split(walk.node, walk.within);
            self.pin(at);
            self.unpin(start);
            let mut path = Vec::with_capacity(known.len());
            self.copy_path(at, known.len(), &mut path);
            known.copy_from_slice(&path);
        }
        if new.is_empty() {
            return at;
        }
        let tokens = &tokens[known.len() * self.page_size..];
        self.cached += new.len();
        if self.grows(at) {
            self.pinned += new.len();
            let lookahead = self.lookahead;
            let node = self.node_mut(at);
            node.tokens.extend_from_slice(&tokens[lookahead..]);
            node.pages.extend_from_slice(new);
            return at;
        }
        let leaf = self.add(Node {
            parent: Some(at),
            tokens: tokens.to_vec(),
            pages: new.to_vec(),
            ..Node::default()
        });
        let key = tokens[..self.key_len()].into();
        self.node_mut(at).children.insert(key, leaf);
        self.pin(leaf);
        self.unpin(at);
        leaf
    }

    /// Drops `count` unlocked pages, from the end of the least recently used prefixes, and moves
    /// them to `out`; the caller has made sure that there are so many.
    pub fn evict(&mut self, count: usize, out: &mut Vec<u32>) {
        let mut missing = count;
        while missing > 0 {
            let (_, id) = *self.idle.first().expect("no more than the evictable pages are evicted");
            let (page_size, lookahead) = (self.page_size, self.lookahead);
            let node = self.node_mut(id);
            let kept = node.pages.len().saturating_sub(missing);
            let dropped = node.pages.len() - kept;
            out.extend(node.pages.drain(kept..));
            if kept == 0 {
                self.remove(id);
            } else {
                node.tokens.truncate(kept * page_size + lookahead);
            }
            self.cached -= dropped;
            missing -= dropped;
        }
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    /// Tokens in the key of one page.
    pub(crate) fn key_len(&self) -> usize {
        self.key_end(1)
    }

    /// Tokens on which the rows of the first `pages` pages depend.
    pub(crate) fn key_end(&self, pages: usize) -> usize {
        pages * self.page_size + self.lookahead
    }

    /// Follows `tokens` down from the end of `start`, for `limit` pages at most.
    fn walk(&self, start: NodeId, tokens: &[u32], limit: usize) -> Walk {
        let mut walk = Walk { node: start, within: self.node(start).pages.len(), pages: 0 };
        while walk.pages < limit {
            let rest = &tokens[walk.pages * self.page_size..];
            let Some(key) = rest.get(..self.key_len()) else { break };
            let Some(&child) = self.node(walk.node).children.get(key) else { break };
            let edge = self.node(child);
            let common = edge.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            let shared = self.determined(common).min(limit - walk.pages);
            walk = Walk { node: child, within: shared, pages: walk.pages + shared };
            if shared < edge.pages.len() {
                break;
            }
        }
        walk
    }

    /// Appends the last `count` pages of the path to `end`, where `count` begins with a node.
    fn copy_path(&self, end: NodeId, count: usize, out: &mut Vec<u32>) {
        let begin = out.len();
        out.resize(begin + count, 0);
        let (mut id, mut left) = (end, count);
        while left > 0 {
            let node = self.node(id);
            let from = left - node.pages.len();
            out[begin + from..begin + left].copy_from_slice(&node.pages);
            left = from;
            id = node.parent.unwrap_or(id);
        }
    }

    /// Whether a sequence that ends at `id` may lengthen it in place: no other sequence uses its end.
    fn grows(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.parent.is_some() && node.children.is_empty() && node.pins == 1
    }

    /// Makes the first `within` pages of a node a node of their own, and answers it. The rest
    /// keeps the id, since the sequences that lock it end where it ends.
    fn split(&mut self, id: NodeId, within: usize) -> NodeId {
        let (page_size, lookahead, key_len) = (self.page_size, self.lookahead, self.key_len());
        let lower = self.node_mut(id);
        if within == lower.pages.len() {
            return id;
        }
        let cut = within * page_size;
        let upper = Node {
            parent: lower.parent,
            tokens: lower.tokens[..cut + lookahead].to_vec(),
            pages: lower.pages.drain(..within).collect(),
            children: BTreeMap::new(),
            pins: usize::from(lower.pins > 0),
            used: lower.used,
            namespace: None,
        };
        lower.tokens.drain(..cut);
        let lower_key = lower.tokens[..key_len].into();
        let above = upper.parent.expect("a root has no pages to split");
        let upper_key: Box<[u32]> = upper.tokens[..key_len].into();
        let upper = self.add(upper);
        self.node_mut(id).parent = Some(upper);
        self.node_mut(upper).children.insert(lower_key, id);
        self.node_mut(above).children.insert(upper_key, upper);
        upper
    }

    fn root(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(root) = self.roots.get(namespace) {
            return *root;
        }
        let root = self.add(Node { namespace: Some(namespace.clone()), ..Node::default() });
        self.roots.insert(namespace.clone(), root);
        root
    }

    fn add(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            *self.node_mut(id) = node;
            return id;
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as NodeId
    }

    fn pin(&mut self, id: NodeId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.pins += 1;
            if node.pins > 1 {
                return;
            }
            next = node.parent;
            let (used, pages) = (node.used, node.pages.len());
            self.pinned += pages;
            self.idle.remove(&(used, id));
        }
    }

    fn unpin(&mut self, id: NodeId) {
        self.clock += 1;
        let clock = self.clock;
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.pins = node.pins.checked_sub(1).expect("every unlock undoes a lock");
            if node.pins > 0 {
                return;
            }
            node.used = clock;
            next = node.parent;
            self.pinned -= self.node(id).pages.len();
            self.settle(id);
        }
    }

    /// Removes an idle leaf from the tree.
    fn remove(&mut self, id: NodeId) {
        let key_len = self.key_len();
        let node = std::mem::take(self.node_mut(id));
        self.idle.remove(&(node.used, id));
        self.vacant.push(id);
        let parent = node.parent.expect("roots are not idle leaves");
        self.node_mut(parent).children.remove(&node.tokens[..key_len]);
        self.settle(parent);
    }

    /// Puts a node that may have lost its last pin or child where it belongs.
    fn settle(&mut self, id: NodeId) {
        let node = self.node(id);
        if node.pins > 0 || !node.children.is_empty() {
            return;
        }
        match node.namespace.clone() {
            None => {
                self.idle.insert((node.used, id));
            }
            Some(namespace) => {
                self.roots.remove(&namespace);
                self.vacant.push(id);
                *self.node_mut(id) = Node::default();
            }
        }
    }
}
