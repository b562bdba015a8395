//! The crate through its public surface.

mod commit;
mod corpora;
mod mixed;
mod ngram;
mod policy_adaptive;
mod policy_auto;
mod policy_race;
mod race;
mod registry;
mod tree;
mod verify;
