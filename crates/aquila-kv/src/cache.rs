//! The cache as its users see it: admission, reservation, commitment, publication, return.
//!
//! Invariant: every page is free, held by one sequence, or in the prefix tree of its group; only
//! committed rows of full pages ever enter a tree.
//!
//! Each group has a prefix tree of its own, because slot spaces are separate and lookaheads
//! differ. So a prefix is valid in just the groups in which a sequence left rows, a later sequence
//! fills in what is missing, and a group that runs short evicts in that group alone: freeing the
//! others' pages would not help it. What the others keep of such a prefix serves requests that do
//! not need the short group, is adopted when the missing rows are computed again, and else ages
//! out.

use crate::pages::Pages;
use crate::prefix_tree::PrefixTree;
use crate::sequence::Rows;
use crate::{CacheConfig, Error, Full, Group, Namespace, Sequence};

/// The slots of all groups, and which sequence or prefix has them.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) page_size: usize,
    prefix_cache: bool,
    pub(crate) stores: Vec<Store>,
}

/// One group's pages.
#[derive(Debug)]
pub(crate) struct Store {
    pub name: String,
    pub pages: Pages,
    pub tree: PrefixTree,
}

/// Where the pages of a group are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Pages that neither a sequence nor a prefix has.
    pub free: usize,
    /// Pages that one sequence has for itself.
    pub held: usize,
    /// Pages in the prefix tree.
    pub cached: usize,
    /// Those of `cached` that sequences have locked; the others can be evicted.
    pub locked: usize,
    /// All pages of the group.
    pub total: usize,
}

impl Usage {
    /// Whether free + held + cached = total: the cheap check against lost and doubled pages.
    pub fn balanced(&self) -> bool {
        self.free + self.held + self.cached == self.total && self.locked <= self.cached
    }
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Errors
    /// If the configuration has no page size, no groups, two groups of one name, a group without
    /// pages, or more slots than 32 bits can number.
    pub fn new(config: CacheConfig) -> Result<Self, Error> {
        config.validate()?;
        let CacheConfig { page_size, groups, prefix_cache } = config;
        let stores = groups.into_iter().map(|group| Store {
            name: group.name,
            pages: Pages::new(group.pages),
            tree: PrefixTree::new(page_size, group.lookahead),
        });
        Ok(Self { page_size, prefix_cache, stores: stores.collect() })
    }

    /// The groups, in the order of the configuration.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = Group> + use<> {
        (0..self.stores.len()).map(Group::new)
    }

    /// How many tokens [`admit`](Self::admit) would match. Nothing is locked, so eviction may
    /// shorten the answer.
    pub fn peek(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        limit: usize,
        groups: &[Group],
    ) -> usize {
        self.match_pages(namespace, tokens, limit, groups) * self.page_size
    }

    /// Begins a sequence with the longest cached prefix of `tokens`: whole pages, `limit` tokens
    /// at most, present in every one of `groups`. A page counts for a group with a lookahead only
    /// if the tokens that its rows looked ahead at are in `tokens` and the same. The prefix is
    /// locked and committed in `groups`; the sequence has no rows in other groups.
    ///
    /// The match may be empty, and admission never fails. Matched pages stop being
    /// [`available`](Self::available), so ask for that after admission.
    pub fn admit(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        limit: usize,
        groups: &[Group],
    ) -> Sequence {
        let count = self.match_pages(namespace, tokens, limit, groups);
        let matched = count * self.page_size;
        let rows = self.stores.iter_mut().enumerate().map(|(index, store)| {
            let mut rows = Rows::default();
            if groups.contains(&Group::new(index)) {
                rows.end = store.tree.lock(namespace, tokens, count, &mut rows.pages);
                rows.shared = count;
                rows.committed = matched;
            }
            rows
        });
        let groups = rows.collect();
        Sequence { namespace: namespace.clone(), page_size: self.page_size, matched, groups }
    }

    /// Makes sure that the sequence has slots for `rows` rows beyond its committed ones in
    /// `group`. Where free pages do not suffice, unlocked cached pages of that group are evicted,
    /// those of the least recently used prefixes first and from their ends.
    ///
    /// # Errors
    /// [`Full`], with the number of missing pages; then nothing has changed.
    pub fn reserve(&mut self, seq: &mut Sequence, group: Group, rows: usize) -> Result<(), Full> {
        let Store { pages, tree, .. } = &mut self.stores[group.index()];
        let held = &mut seq.groups[group.index()];
        let needed = (held.committed + rows).div_ceil(self.page_size);
        let more = needed.saturating_sub(held.pages.len());
        let short = more.saturating_sub(pages.free().len());
        if short > tree.evictable() {
            return Err(Full { group, missing: short - tree.evictable() });
        }
        if short > 0 {
            let mut evicted = Vec::with_capacity(short);
            tree.evict(short, &mut evicted);
            pages.evicted(evicted.into_iter());
        }
        pages.take(more, &mut held.pages);
        Ok(())
    }

    /// The next `rows` reserved slots of `group` now hold committed rows: those of the sequence's
    /// next tokens.
    ///
    /// # Panics
    /// If they were not reserved.
    pub fn commit(&mut self, seq: &mut Sequence, group: Group, rows: usize) {
        let reserved = seq.reserved(group);
        let held = &mut seq.groups[group.index()];
        held.committed += rows;
        assert!(
            held.committed <= reserved,
            "{} rows were committed in cache group `{}`, but only {reserved} reserved",
            held.committed,
            self.stores[group.index()].name
        );
    }

    /// Offers the committed full pages of each group to the prefix tree, where later sequences
    /// find them and this one keeps them locked. `tokens` are the sequence's tokens from the
    /// first on, all of them final, and at least as many as it has committed rows in any group;
    /// a page whose rows look ahead beyond them stays private for now. Costs what is new since
    /// the last call.
    ///
    /// Where another sequence was first, its pages take the place of this one's, which are freed:
    /// slots of committed rows may change here. Equal tokens in one namespace must therefore give
    /// bit-identical rows. A pass that was planned with the old slots stays right if it runs
    /// before passes that are planned later, since only those can write to the freed pages.
    pub fn publish(&mut self, seq: &mut Sequence, tokens: &[u32]) {
        if !self.prefix_cache {
            return;
        }
        for (store, held) in self.stores.iter_mut().zip(&mut seq.groups) {
            let full = (held.committed / self.page_size).min(store.tree.determined(tokens.len()));
            if full <= held.shared {
                continue;
            }
            let last = store.tree.key_end(full);
            let tokens = &tokens[held.shared * self.page_size..last];
            let own = &mut held.pages[held.shared..full];
            let mut spare = Vec::new();
            held.end = Some(store.tree.insert(&seq.namespace, held.end, tokens, own, &mut spare));
            store.pages.cache(own.len() - spare.len());
            store.pages.give(spare.into_iter());
            held.shared = full;
        }
    }

    /// Takes a sequence back: publishes it, as [`publish`](Self::publish) does, unlocks it and
    /// frees what is not cached. For requests that finish or are preempted.
    pub fn release(&mut self, mut seq: Sequence, tokens: &[u32]) {
        self.publish(&mut seq, tokens);
        self.discard(seq);
    }

    /// Takes a sequence back without publishing anything more.
    pub fn discard(&mut self, mut seq: Sequence) {
        for (store, held) in self.stores.iter_mut().zip(&mut seq.groups) {
            store.pages.give(held.pages.drain(held.shared..));
            held.pages.clear();
            if let Some(end) = held.end.take() {
                store.tree.unlock(end);
            }
        }
    }

    /// Drops every cached page that no sequence has locked, and says how many those were.
    pub fn flush(&mut self) -> usize {
        let mut dropped = 0;
        for Store { pages, tree, .. } in &mut self.stores {
            let mut evicted = Vec::with_capacity(tree.evictable());
            tree.evict(tree.evictable(), &mut evicted);
            dropped += evicted.len();
            pages.evicted(evicted.into_iter());
        }
        dropped
    }

    /// How many slots of `group` reservations could still get, by eviction too.
    pub fn available(&self, group: Group) -> usize {
        let Store { pages, tree, .. } = &self.stores[group.index()];
        (pages.free().len() + tree.evictable()) * self.page_size
    }

    /// Where the pages of `group` are.
    pub fn usage(&self, group: Group) -> Usage {
        let Store { pages, tree, .. } = &self.stores[group.index()];
        Usage {
            free: pages.free().len(),
            held: pages.held(),
            cached: tree.cached(),
            locked: tree.pinned(),
            total: pages.total(),
        }
    }

    fn match_pages(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        limit: usize,
        groups: &[Group],
    ) -> usize {
        if !self.prefix_cache || groups.is_empty() {
            return 0;
        }
        let limit = limit / self.page_size;
        groups.iter().fold(limit, |limit, group| {
            self.stores[group.index()].tree.find(namespace, tokens, limit)
        })
    }
}
