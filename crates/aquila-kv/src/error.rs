//! What can go wrong: a configuration that makes no cache, and a cache that is full.

use crate::Group;

/// A configuration from which no cache can be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Pages without slots.
    #[error("the page size is 0: it must be at least 1 token")]
    EmptyPages,
    /// Nothing to hold.
    #[error("the cache has no groups: give it at least one")]
    NoGroups,
    /// Two groups that cannot be told apart in messages.
    #[error("two cache groups are called `{name}`: rename one")]
    SameName {
        /// The name that occurs twice.
        name: String,
    },
    /// A group in which no token fits.
    #[error("cache group `{name}` has no pages: give it memory for at least {page_size} tokens")]
    NoPages {
        /// The group.
        name: String,
        /// Tokens per page.
        page_size: usize,
    },
    /// Slots are numbered with 32 bits.
    #[error(
        "cache group `{name}` has {pages} pages of {page_size} tokens, more than the {} slots that \
         can be numbered: lower its total of tokens",
        u32::MAX
    )]
    TooManySlots {
        /// The group.
        name: String,
        /// Its pages.
        pages: usize,
        /// Tokens per page.
        page_size: usize,
    },
}

/// A reservation found too few pages, even with every unlocked cached page evicted. Nothing has
/// changed: neither the sequence nor the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{missing} pages are missing in cache group {}: wait for a request to end, preempt one, or \
     give the cache more memory",
    group.index()
)]
pub struct Full {
    /// The group that is short.
    pub group: Group,
    /// How many more pages the reservation would have needed.
    pub missing: usize,
}
