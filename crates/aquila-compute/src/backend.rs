//! The seam between models and machines.

use crate::choose::{self, Ask, Candidate, Choice, Weights};
use crate::{
    ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};

/// The vocabulary of a draft that knows only some tokens of its target.
#[derive(Debug, Clone, Copy)]
pub struct DraftIds<'a> {
    /// The target's token of each of the draft's tokens, ascending.
    pub ids: &'a [u32],
    /// How many tokens the target has.
    pub vocabulary: usize,
}

/// What an operation does with what stands in its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sink {
    /// Replace it.
    Set,
    /// Add to it, after the result is complete.
    Add,
}

/// A machine that runs forward passes.
///
/// Operations are enqueued in program order and may complete later; only [`Backend::read`] and
/// the answers about logits ([`Backend::choose`], [`Backend::offer`], [`Backend::weigh`]) wait. Each has a plain twin in [`crate::reference`] that defines it.
/// Row counts are arguments rather than properties of buffers, so that buffers are allocated once.
pub trait Backend: Send + Sync + 'static {
    /// f32 rows on the device.
    type Rows: Send + Sync;
    /// A projection as this backend keeps it.
    type Weight: Send + Sync;
    /// A vector of f32: norm weights, biases.
    type Vector: Send + Sync;
    /// An embedding table.
    type Table: Send + Sync;
    /// Cosines and sines.
    type Rope: Send + Sync;
    /// Keys and values of one group.
    type Kv: Send + Sync;
    /// A plan placed on the device.
    type Plan: Send + Sync;

    /// One line for people: device, instruction set, threads.
    fn describe(&self) -> String;

    /// Packs matrices `[outputs, inputs]` of equal inputs as one projection whose outputs follow
    /// each other in the order given.
    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<Self::Weight>;

    /// Keeps vectors, joined in the order given.
    fn vector(&self, parts: &[HostTensor]) -> Result<Self::Vector>;

    /// Keeps a copy of an embedding table `[tokens, width]`.
    fn table(&self, tensor: &HostTensor) -> Result<Self::Table>;

    /// Keeps a rope table.
    fn rope(&self, table: &RopeTable) -> Result<Self::Rope>;

    /// Makes room for keys and values.
    fn kv(&self, shape: KvShape) -> Result<Self::Kv>;

    /// Makes room for `capacity` rows of `width`, all zeros.
    fn rows(&self, capacity: usize, width: usize) -> Result<Self::Rows>;

    /// Makes room for plans up to `bounds`.
    fn plan(&self, bounds: PlanBounds) -> Result<Self::Plan>;

    /// Places `host` in `plan`.
    fn place(&self, host: &ForwardPlan, plan: &mut Self::Plan) -> Result<()>;

    /// `out[r] = table[token of r]`, for every row of the plan.
    fn embed(&self, table: &Self::Table, plan: &Self::Plan, out: &mut Self::Rows) -> Result<()>;

    /// Root-mean-square norm of the first `rows` rows.
    fn rms_norm(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// `out = input * weight^T + bias`, set or added, for the first `rows` rows.
    fn project(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        input: &Self::Rows,
        rows: usize,
        sink: Sink,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Of rows that hold queries, keys and values: norms each query and key head where `norms`
    /// (of queries, of keys, epsilon) is given, turns both by position, leaves the queries in
    /// place and writes keys and values of `layer` to the rows' slots.
    #[allow(clippy::too_many_arguments)]
    fn write_kv(
        &self,
        qkv: &mut Self::Rows,
        heads: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        rope: &Self::Rope,
        plan: &Self::Plan,
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<()>;

    /// Attention of every row's queries over what the row sees; `out` has the width of the queries.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        qkv: &Self::Rows,
        heads: HeadShape,
        scale: f32,
        plan: &Self::Plan,
        kv: &Self::Kv,
        layer: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Of rows that hold gates, then ups: `out = silu(gate) * up`.
    fn swiglu(&self, gate_up: &Self::Rows, rows: usize, out: &mut Self::Rows) -> Result<()>;

    /// [`project`](Self::project) with a weight of gates, then ups, and [`swiglu`](Self::swiglu)
    /// of what comes out. `both` has room for gates and ups, and holds nothing of use afterwards.
    fn project_gated(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        input: &Self::Rows,
        rows: usize,
        both: &mut Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.project(weight, bias, input, rows, Sink::Set, both)?;
        self.swiglu(both, rows, out)
    }

    /// Copies the first `rows` rows of `input` into columns of `out`, from `column` on.
    fn copy_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Copies columns of the first `rows` rows of `input`, from `column` on, as many as `out` has.
    fn take_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// `out[r] = input[sources[r]]` for every row of the plan.
    fn gather_sources(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// `out[i] = input[outputs[i]]` for the plan's outputs; answers how many there are.
    fn gather_outputs(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<usize>;

    /// Moves the keys and values of all layers from slot to slot, in the order given.
    fn move_slots(&self, kv: &mut Self::Kv, moves: &[(u32, u32)]) -> Result<()>;

    /// Moves rows from place to place, in the order given.
    fn move_rows(&self, rows: &mut Self::Rows, moves: &[(u32, u32)]) -> Result<()>;

    /// Chooses a token for each row asked about.
    fn choose(&self, logits: &Self::Rows, asks: &[Ask<'_>]) -> Result<Vec<Choice>>;

    /// What a draft offers after each row asked about: up to `count` tokens, best first. Where the
    /// draft has a vocabulary of its own, `ids` says which token of the target each of its tokens
    /// is, ascending, and `vocabulary` how many the target has.
    fn offer(
        &self,
        logits: &Self::Rows,
        asks: &[Ask<'_>],
        count: usize,
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Vec<Candidate>>>;

    /// The distribution of which each choice is a sample. `ids` are those of [`Backend::offer`].
    fn weigh(
        &self,
        logits: &Self::Rows,
        asks: &[Ask<'_>],
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Weights>> {
        let rows = asks.iter().map(|ask| ask.row + 1).max().unwrap_or(0);
        let values = self.read(logits, rows)?;
        let width = values.len() / rows.max(1);
        let row = |row: usize| &values[row * width..(row + 1) * width];
        Ok(asks.iter().map(|ask| choose::weigh(row(ask.row), ask, ids)).collect())
    }

    /// Copies the first `rows` rows to the host, one after the other.
    fn read(&self, rows_of: &Self::Rows, rows: usize) -> Result<Vec<f32>>;
}
