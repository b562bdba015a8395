//! The full check of a cache, for tests: every page in one place, every count what it counts.

use std::collections::BTreeMap;

use crate::cache::Store;
use crate::prefix_tree::{Node, NodeId, PrefixTree};
use crate::sequence::Rows;
use crate::{KvCache, Sequence};

/// Where the audit has seen a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Free,
    Cached,
    Held,
}

impl KvCache {
    /// Checks everything that can be checked without the sequences: that each page is in one
    /// place, that free + held + cached = total in each group, and that the trees are sound.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        for store in &self.stores {
            Audit::of(store, self.page_size).map_err(|what| format!("{}: {what}", store.name))?;
        }
        Ok(())
    }

    /// As [`check`](Self::check), and that `sequences`, which must be all that are not given back
    /// yet, hold just the pages and locks that the cache counts for them.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_with<'a>(
        &self,
        sequences: impl IntoIterator<Item = &'a Sequence>,
    ) -> Result<(), String> {
        let sequences: Vec<_> = sequences.into_iter().collect();
        for (index, store) in self.stores.iter().enumerate() {
            Audit::of(store, self.page_size)
                .and_then(|audit| audit.sequences(sequences.iter().map(|seq| &seq.groups[index])))
                .map_err(|what| format!("{}: {what}", store.name))?;
        }
        Ok(())
    }
}

struct Audit<'a> {
    store: &'a Store,
    page_size: usize,
    places: Vec<Place>,
    /// How many sequences end at each node, by the node's own count.
    ends: BTreeMap<NodeId, usize>,
}

impl<'a> Audit<'a> {
    fn of(store: &'a Store, page_size: usize) -> Result<Self, String> {
        let places = vec![Place::Nowhere; store.pages.total()];
        let mut audit = Self { store, page_size, places, ends: BTreeMap::new() };
        for &page in store.pages.free() {
            audit.see(page, Place::Free)?;
        }
        audit.tree(&store.tree)?;
        let (free, cached) = (store.pages.free().len(), store.tree.cached());
        let (held, total) = (store.pages.held(), store.pages.total());
        ensure(free + held + cached == total, || {
            format!("{free} free + {held} held + {cached} cached pages are not {total}")
        })?;
        Ok(audit)
    }

    fn see(&mut self, page: u32, place: Place) -> Result<(), String> {
        let Some(seen) = self.places.get_mut(page as usize) else {
            return Err(format!("page {page} does not exist"));
        };
        if *seen != Place::Nowhere {
            return Err(format!("page {page} is {seen:?} and {place:?}"));
        }
        *seen = place;
        Ok(())
    }

    fn tree(&mut self, tree: &PrefixTree) -> Result<(), String> {
        let (mut cached, mut pinned, mut visited, mut idle) = (0, 0, 0, 0);
        let mut next: Vec<NodeId> = tree.roots.values().copied().collect();
        while let Some(id) = next.pop() {
            visited += 1;
            let node = tree.node(id);
            self.node(tree, id, node)?;
            cached += node.pages.len();
            pinned += if node.pins > 0 { node.pages.len() } else { 0 };
            idle += usize::from(tree.idle.contains(&(node.used, id)));
            next.extend(node.children.values());
        }
        ensure(cached == tree.cached(), || {
            format!("the tree has {cached} pages, and counts {}", tree.cached())
        })?;
        ensure(pinned == tree.pinned(), || {
            format!("the tree has {pinned} pinned pages, and counts {}", tree.pinned())
        })?;
        ensure(idle == tree.idle.len(), || "a node that is gone is idle".into())?;
        ensure(visited + tree.vacant.len() == tree.nodes.len(), || "a node is lost".into())
    }

    fn node(&mut self, tree: &PrefixTree, id: NodeId, node: &Node) -> Result<(), String> {
        for &page in &node.pages {
            self.see(page, Place::Cached)?;
        }
        let root = node.parent.is_none();
        let empty = node.pages.is_empty();
        ensure(root == empty, || format!("node {id} has no pages"))?;
        ensure(root == node.namespace.is_some(), || format!("node {id} has a root's name"))?;
        let tokens = if root { 0 } else { tree.key_end(node.pages.len()) };
        ensure(node.tokens.len() == tokens, || format!("node {id} has a wrong edge"))?;
        let mut pinned_children = 0;
        for (key, &child) in &node.children {
            let below = tree.node(child);
            ensure(below.parent == Some(id), || format!("node {child} has a wrong parent"))?;
            ensure(below.tokens.starts_with(key), || format!("node {child} has a wrong key"))?;
            let seam = &below.tokens[..tree.key_len() - self.page_size];
            ensure(node.tokens.ends_with(seam) || root, || {
                format!("node {child} follows other tokens than its parent looked ahead at")
            })?;
            ensure(below.pins > 0 || node.pins > 0 || below.used <= node.used, || {
                format!("node {child} is younger than its parent")
            })?;
            pinned_children += usize::from(below.pins > 0);
        }
        let Some(ends) = node.pins.checked_sub(pinned_children) else {
            return Err(format!("node {id} has fewer pins than pinned children"));
        };
        if ends > 0 {
            ensure(!root, || "a sequence ends at a root".into())?;
            self.ends.insert(id, ends);
        }
        let leaf = node.children.is_empty();
        ensure(!(root && leaf), || format!("root {id} has outlived its prefixes"))?;
        let idle = !root && leaf && node.pins == 0;
        ensure(idle == tree.idle.contains(&(node.used, id)), || {
            format!(
                "node {id} is {}an idle leaf, and listed otherwise",
                if idle { "" } else { "not " }
            )
        })
    }

    fn sequences(mut self, rows: impl Iterator<Item = &'a Rows>) -> Result<(), String> {
        let mut held = 0;
        for rows in rows {
            let (shared, own) = rows.pages.split_at(rows.shared);
            for &page in own {
                self.see(page, Place::Held)?;
            }
            held += own.len();
            ensure(rows.committed <= rows.pages.len() * self.page_size, || {
                format!("{} rows are committed in {} pages", rows.committed, rows.pages.len())
            })?;
            ensure(shared.len() * self.page_size <= rows.committed, || {
                "rows are published that are not committed".into()
            })?;
            ensure(self.path(rows.end) == shared, || {
                "a sequence's shared pages are not those of its path".into()
            })?;
            if let Some(end) = rows.end {
                match self.ends.get_mut(&end) {
                    Some(ends) if *ends > 0 => *ends -= 1,
                    _ => return Err(format!("a sequence ends at node {end} without a lock")),
                }
            }
        }
        ensure(held == self.store.pages.held(), || {
            format!("sequences hold {held} pages, and {} are counted", self.store.pages.held())
        })?;
        ensure(self.ends.values().all(|ends| *ends == 0), || {
            "a lock outlived its sequence".into()
        })?;
        match self.places.iter().position(|place| *place == Place::Nowhere) {
            Some(page) => Err(format!("page {page} is nowhere")),
            None => Ok(()),
        }
    }

    fn path(&self, end: Option<NodeId>) -> Vec<u32> {
        let mut nodes = Vec::new();
        let mut next = end;
        while let Some(id) = next {
            let node = self.store.tree.node(id);
            nodes.push(&node.pages);
            next = node.parent;
        }
        nodes.into_iter().rev().flatten().copied().collect()
    }
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
