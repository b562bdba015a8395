//! What a draft algorithm is: what it declares that it needs, and how it runs its rows.

use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape};
use aquila_model::Result;

/// What an algorithm needs. Where it declares none, no buffer exists and no copy happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declaration {
    /// The algorithm's name, as `--speculative-algorithm` takes it.
    pub name: &'static str,
    /// The target's layers whose outputs its rows take; empty for none.
    pub hidden_layers: Vec<usize>,
    /// How many tokens beyond its position a row depends on: its row p consumes token
    /// p + lookahead.
    pub lookahead: usize,
}

/// A draft that runs on the backend, with keys and values of its own.
///
/// Rows whose tokens are certain are run by `extend`; rows of the tree being drafted by `expand`,
/// whose keys and values nobody sees after the round.
pub trait Drafter<B: Backend>: Send {
    /// What it needs.
    fn declaration(&self) -> &Declaration;

    /// The store of its keys and values for `slots` rows.
    fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape;

    /// Which tokens it knows, if not all of the target's.
    fn ids(&self) -> Option<DraftIds<'_>>;

    /// Runs certain rows. `hidden` has the target's rows, where declared; `plan.sources` says
    /// which each row takes. Logits are left for `plan.outputs`, whose rows are the seeds of the
    /// next tree.
    fn extend(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        hidden: Option<&B::Rows>,
        kv: &mut B::Kv,
    ) -> Result<()>;

    /// Runs one level of trees. `plan.sources` says which seed each row goes on from (`first`), or
    /// which row of the level before.
    fn expand(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        first: bool,
        kv: &mut B::Kv,
    ) -> Result<()>;

    /// The logits of the last pass.
    fn logits(&self) -> &B::Rows;
}
