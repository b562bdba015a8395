//! What one request holds: for each group, the pages of its rows in the order of its tokens.
//!
//! Invariant: in each group the first `shared` pages are those of the tree's path to `end`, and
//! the rest are this sequence's alone.

use std::ops::Range;

use crate::prefix_tree::NodeId;
use crate::{Group, Namespace};

/// The slots of one request, from [`KvCache::admit`](crate::KvCache::admit) until they are given
/// back with [`release`](crate::KvCache::release) or [`discard`](crate::KvCache::discard).
///
/// The slots below [`committed`](Self::committed) hold the rows of the request's tokens; those
/// from there to [`reserved`](Self::reserved) are scratch, one for each row of a chunk or each
/// node of a draft tree, and no other request sees them.
#[derive(Debug)]
#[must_use = "a sequence must be given back with release() or discard()"]
pub struct Sequence {
    pub(crate) namespace: Namespace,
    pub(crate) page_size: usize,
    pub(crate) matched: usize,
    pub(crate) groups: Vec<Rows>,
}

/// The rows of a sequence in one group.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    pub pages: Vec<u32>,
    /// How many of the first pages are the tree's.
    pub shared: usize,
    /// The node where the shared pages end, on which this sequence has a lock; none if there are
    /// no shared pages.
    pub end: Option<NodeId>,
    pub committed: usize,
}

impl Sequence {
    /// How many of its tokens were found in the cache at admission.
    pub fn matched(&self) -> usize {
        self.matched
    }

    /// How many of its tokens have a committed row in `group`.
    pub fn committed(&self, group: Group) -> usize {
        self.groups[group.index()].committed
    }

    /// How many slots it has in `group`, committed ones included: whole pages, so this may exceed
    /// what was asked for.
    pub fn reserved(&self, group: Group) -> usize {
        self.groups[group.index()].pages.len() * self.page_size
    }

    /// The slot of the row at `index` in `group`.
    ///
    /// # Panics
    /// If `index` is not below [`reserved`](Self::reserved).
    pub fn slot(&self, group: Group, index: usize) -> u32 {
        let page = self.groups[group.index()].pages[index / self.page_size];
        self.first_slot(page) + (index % self.page_size) as u32
    }

    /// Appends the slots of the rows in `range` of `group` to `out`, in order.
    ///
    /// # Panics
    /// If `range` reaches beyond [`reserved`](Self::reserved).
    pub fn extend_slots(&self, group: Group, range: Range<usize>, out: &mut Vec<u32>) {
        if range.is_empty() {
            return;
        }
        out.reserve(range.len());
        let size = self.page_size;
        let first = range.start / size;
        let pages = &self.groups[group.index()].pages[first..range.end.div_ceil(size)];
        for (page, begin) in pages.iter().zip((first * size..).step_by(size)) {
            let from = range.start.max(begin) - begin;
            let to = range.end.min(begin + size) - begin;
            let slot = self.first_slot(*page);
            out.extend(slot + from as u32..slot + to as u32);
        }
    }

    // Slots fit 32 bits: the configuration was refused otherwise.
    fn first_slot(&self, page: u32) -> u32 {
        page * self.page_size as u32
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        debug_assert!(
            std::thread::panicking() || self.groups.iter().all(|rows| rows.pages.is_empty()),
            "a sequence was dropped with its pages: give it back with release() or discard()"
        );
    }
}
