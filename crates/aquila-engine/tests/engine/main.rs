//! The crate through its public surface.

mod costs;
mod deferring;
mod draft_rows;
mod draft_trees;
mod ends;
mod eviction;
mod executor;
mod fairness;
mod grammar;
mod heads;
mod layered_transfer;
mod load;
mod mixed;
mod ngram;
mod overlap;
mod policies;
mod priorities;
mod received_priorities;
mod report;
mod requests;
mod returned;
mod speculation;
mod support;
mod transfer;
mod uneven_transfer;
mod verify_modes;
