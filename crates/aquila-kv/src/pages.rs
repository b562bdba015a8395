//! The pages of one group that no prefix holds: a stack of free ones and a count of held ones.
//!
//! Invariant: a page leaves the stack when it is taken and returns once, so what is neither on
//! the stack nor counted as held is in the prefix tree.

/// The pool of one group.
#[derive(Debug)]
pub(crate) struct Pages {
    free: Vec<u32>,
    held: usize,
    total: usize,
}

impl Pages {
    /// A pool of `total` free pages, handed out from page 0 upwards.
    pub fn new(total: usize) -> Self {
        let last = u32::try_from(total).expect("the configuration numbers slots with 32 bits");
        Self { free: (0..last).rev().collect(), held: 0, total }
    }

    pub fn free(&self) -> &[u32] {
        &self.free
    }

    pub fn held(&self) -> usize {
        self.held
    }

    pub fn total(&self) -> usize {
        self.total
    }

    /// Moves `count` free pages to the end of `out`; the caller has made sure that they exist.
    pub fn take(&mut self, count: usize, out: &mut Vec<u32>) {
        let rest =
            self.free.len().checked_sub(count).expect("pages are counted before they are taken");
        out.extend(self.free.drain(rest..).rev());
        self.held += count;
    }

    /// Takes back held pages.
    pub fn give(&mut self, pages: impl DoubleEndedIterator<Item = u32>) {
        let before = self.free.len();
        // Reversed, so that pages taken together are handed out in the same order again.
        self.free.extend(pages.rev());
        self.less_held(self.free.len() - before);
    }

    /// Held pages that now belong to the prefix tree.
    pub fn cache(&mut self, count: usize) {
        self.less_held(count);
    }

    /// Takes back pages that the prefix tree has dropped.
    pub fn evicted(&mut self, pages: impl DoubleEndedIterator<Item = u32>) {
        self.free.extend(pages.rev());
    }

    fn less_held(&mut self, count: usize) {
        self.held = self.held.checked_sub(count).expect("no page is given back twice");
    }
}
