//! Which slot holds which token: pages, the prefix tree, reservations. No tensors at all.
//!
//! A *slot* is where one token's row lives in the store of a *group* (the target's keys and
//! values, those of a draft layer, …); a *page* is `page_size` slots in a row. Every page of a
//! group is in exactly one place at any time: free, held by one [`Sequence`], or cached in the
//! group's prefix tree, where any number of sequences may share it. So
//! free + held + cached = total, whatever happens to the requests.
//!
//! - [`KvCache`] is the whole: it admits, reserves, commits, publishes and takes back.
//! - [`Sequence`] is what one request holds: slots by token index, in each group.
//! - [`CacheConfig`], [`GroupConfig`], [`Group`] and [`Namespace`] say what is cached, and apart
//!   from what.

mod audit;
mod cache;
mod config;
mod error;
mod pages;
mod prefix_tree;
mod sequence;

pub use cache::{KvCache, Usage};
pub use config::{CacheConfig, Group, GroupConfig, Namespace};
pub use error::{Error, Full};
pub use sequence::Sequence;
