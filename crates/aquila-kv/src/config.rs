//! What a cache is made of, and what keeps its keys apart.

use std::sync::Arc;

use crate::Error;

/// The shape of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// Slots per page, in every group; at least 1.
    pub page_size: usize,
    /// The stores of rows, each with its own slot space.
    pub groups: Vec<GroupConfig>,
    /// Whether full pages stay for later sequences with the same prefix.
    pub prefix_cache: bool,
}

/// One store of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// What messages call it.
    pub name: String,
    /// How many pages it has.
    pub pages: usize,
    /// How many tokens beyond its position a row depends on: the target and a standalone draft 0,
    /// an EAGLE head 1, layer j of multi-token prediction j.
    pub lookahead: usize,
}

impl CacheConfig {
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let page_size = self.page_size;
        if page_size == 0 {
            return Err(Error::EmptyPages);
        }
        if self.groups.is_empty() {
            return Err(Error::NoGroups);
        }
        for (index, group) in self.groups.iter().enumerate() {
            let (name, pages) = (group.name.clone(), group.pages);
            if self.groups[..index].iter().any(|other| other.name == name) {
                return Err(Error::SameName { name });
            }
            if pages == 0 {
                return Err(Error::NoPages { name, page_size });
            }
            if pages.checked_mul(page_size).is_none_or(|slots| slots > u32::MAX as usize) {
                return Err(Error::TooManySlots { name, pages, page_size });
            }
        }
        Ok(())
    }
}

/// A group, by its index in [`CacheConfig::groups`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group(usize);

impl Group {
    /// The group at `index` of the configuration.
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// Its index in the configuration.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What else than its tokens a row depends on (model, adapter, a user's salt), in words. Prefixes
/// of different namespaces never meet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(Arc<str>);

impl Namespace {
    /// The namespace of that name; a clone costs a reference count.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }
}

impl Default for Namespace {
    fn default() -> Self {
        Self::new("")
    }
}
