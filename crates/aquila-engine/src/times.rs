//! Where the time of decoding goes.
//!
//! Only rounds in which every request decodes are counted: what a prompt takes says nothing about
//! what a draft gives.

use std::time::Duration;

/// Time of the rounds in which every request decoded, by step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Times {
    /// Such rounds.
    pub rounds: u64,
    /// Drafting the trees.
    pub draft: Duration,
    /// The target's pass over the trees, and its choice at every node.
    pub verify: Duration,
    /// Following the choices down the trees.
    pub accept: Duration,
    /// Moving what is kept to where it belongs.
    pub commit: Duration,
    /// The draft's pass over what has become certain.
    pub extend: Duration,
    /// The whole rounds: with overlap, the time from one to the next.
    pub whole: Duration,
}

impl Times {
    /// What the steps leave of the rounds: admission, reservations, plans, handing the tokens out.
    /// With overlap, only what of it the executor waited for.
    pub fn host(&self) -> Duration {
        self.whole.saturating_sub(self.steps())
    }

    /// All steps together: what the executor took.
    pub fn steps(&self) -> Duration {
        self.draft + self.verify + self.accept + self.commit + self.extend
    }

    /// What came after `earlier`.
    pub fn since(&self, earlier: &Times) -> Times {
        Times {
            rounds: self.rounds - earlier.rounds,
            draft: self.draft - earlier.draft,
            verify: self.verify - earlier.verify,
            accept: self.accept - earlier.accept,
            commit: self.commit - earlier.commit,
            extend: self.extend - earlier.extend,
            whole: self.whole - earlier.whole,
        }
    }

    /// Adds the times of others.
    pub fn add(&mut self, other: &Times) {
        self.rounds += other.rounds;
        self.draft += other.draft;
        self.verify += other.verify;
        self.accept += other.accept;
        self.commit += other.commit;
        self.extend += other.extend;
        self.whole += other.whole;
    }
}
