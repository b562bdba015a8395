//! What speculation may lose against plain decoding.
//!
//! Counted in plain rounds. A round that costs as much as c plain ones is charged c - 1 when it is
//! chosen, as if every draft were wrong; each draft that turns out right is paid back when the
//! result comes, late as it is. The account earns a little with every round and holds no more
//! than its limit.
//!
//! The one invariant: the account is never overdrawn. So over any n rounds in a row, whatever is
//! accepted, the time beyond what plain decoding would have taken for the same tokens is at most
//! `limit + allowance * n` plain rounds, and what rounds already in flight pay back. Costs are those
//! that are expected: a hiccup of the machine is nobody's loss. A prompt that takes a draft longer
//! to read than the account holds is read only where drafts have been worth it for answers as long
//! as those of late, and then little is left.

/// The account.
#[derive(Debug, Clone, PartialEq)]
pub struct LossAccount {
    balance: f64,
    limit: f64,
    allowance: f64,
}

impl LossAccount {
    /// A full account of `limit` plain rounds, which earns `allowance` of one with every round.
    pub fn new(limit: f64, allowance: f64) -> Self {
        Self { balance: limit, limit, allowance }
    }

    /// What is left, in plain rounds.
    pub fn balance(&self) -> f64 {
        self.balance
    }

    /// A round begins.
    pub fn earn(&mut self) {
        self.pay_back(self.allowance);
    }

    /// Whether a round that costs `extra` plain rounds more than a plain one may be run.
    pub fn affords(&self, extra: f64) -> bool {
        extra <= self.balance
    }

    /// Charges such a round; a cheaper one than plain is not charged.
    pub fn charge(&mut self, extra: f64) {
        self.balance -= extra.max(0.0);
    }

    /// Right drafts, in plain rounds: their number by the batch size.
    pub fn pay_back(&mut self, rounds: f64) {
        self.balance = (self.balance + rounds).min(self.limit);
    }
}
