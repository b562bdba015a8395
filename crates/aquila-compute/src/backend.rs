//! The seam between models and machines.

use std::ops::Range;
use std::time::Duration;

use crate::round::{
    Batch, Candidates, ExtendRows, Extent, GraphKey, KeptLayout, PassRows, RequestOutput,
    ReturnedRows, StateBounds, Tree,
};
use crate::{
    Activation, AttentionParams, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result,
    RopeTable, WeightFormat,
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
pub enum Accumulate {
    /// Replace it.
    Set,
    /// Add to it, after the result is complete.
    Add,
}

/// Rows of which a projection reads the norm.
pub struct Normed<'a, B: Backend> {
    /// The rows before the norm.
    pub input: &'a B::Rows,
    /// The norm's weight.
    pub weight: &'a B::Vector,
    /// What is added to the mean of a row's squares.
    pub epsilon: f32,
    /// Room for the normed rows, which holds nothing of use afterwards.
    pub room: &'a mut B::Rows,
}

impl<'a, B: Backend> Normed<'a, B> {
    /// Norms the first `rows` rows, for a projection that does not.
    pub fn rows(self, backend: &B, rows: usize) -> Result<&'a B::Rows> {
        backend.rms_norm(self.input, self.weight, self.epsilon, rows, self.room)?;
        Ok(self.room)
    }
}

/// A machine that runs forward passes and the steps of a round.
///
/// Operations are enqueued in program order and may complete later; only [`Backend::read`],
/// [`Backend::outputs`] and [`Backend::check_replay`] wait. Each has a plain twin that defines it:
/// those of a forward pass in [`crate::reference`], the steps of a round in
/// [`crate::round::RoundState`]. Row counts are arguments rather than properties of buffers, so that
/// buffers are allocated once. They are bounds: a plan may have fewer rows, and what an operation
/// leaves in the others is undefined.
pub trait Backend: Sized + Send + Sync + 'static {
    /// f32 rows on the device.
    type Rows: Send + Sync;
    /// A projection as this backend keeps it.
    type Weight: Send + Sync;
    /// The experts of one layer.
    type Experts: Send + Sync;
    /// Which experts each row goes to, and their weights.
    type Routing: Send + Sync;
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
    /// The rows of all running requests, and the round that runs.
    type State: Send + Sync;
    /// Operations that were captured once and can be replayed.
    type Graph: Send + Sync;
    /// A moment between two operations.
    type Moment: Send;

    /// One line for people: device, instruction set, threads.
    fn describe(&self) -> String;

    /// Which kernels it has: two backends that answer alike compute the same bits.
    fn kernel_family(&self) -> String;

    /// Refuses passes and rounds that are larger than what this backend has kernels for, before a
    /// model is loaded: passes within `passes`, rounds within `bounds`, attention by `heads`.
    fn check_limits(
        &self,
        _passes: PlanBounds,
        _bounds: &StateBounds,
        _heads: HeadShape,
    ) -> Result<()> {
        Ok(())
    }

    /// Packs matrices `[outputs, inputs]` of equal inputs as one projection whose outputs follow
    /// each other in the order given.
    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<Self::Weight>;

    /// Keeps the experts of one layer, all of one shape and format: of each a projection to gates,
    /// then ups, and the one back.
    fn experts(&self, gate_up: Vec<Self::Weight>, down: Vec<Self::Weight>)
    -> Result<Self::Experts>;

    /// Makes room for the experts of `rows` rows, `per_token` each.
    fn routing(&self, rows: usize, per_token: usize) -> Result<Self::Routing>;

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

    /// The same for logits, which no projection reads.
    fn logits(&self, capacity: usize, width: usize) -> Result<Self::Rows> {
        self.rows(capacity, width)
    }

    /// Makes room for plans up to `bounds`.
    fn plan(&self, bounds: PlanBounds) -> Result<Self::Plan>;

    /// Places `host` in `plan`.
    fn place(&self, host: &ForwardPlan, plan: &mut Self::Plan) -> Result<()>;

    /// `out[r] = table[token of r] * scale`, for every row of the plan.
    fn embed(
        &self,
        table: &Self::Table,
        scale: f32,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// `out += input`, for the first `rows` rows.
    fn add(&self, input: &Self::Rows, rows: usize, out: &mut Self::Rows) -> Result<()>;

    /// `x = cap * tanh(x / cap)` of each element of the first `rows` rows.
    fn soft_cap(&self, rows_of: &mut Self::Rows, rows: usize, cap: f32) -> Result<()>;

    /// Root-mean-square norm of the first `rows` rows.
    fn rms_norm(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.rms_norm_columns(input, weight, epsilon, rows, 0, out)
    }

    /// The same into columns of `out`, from `column` on.
    fn rms_norm_columns(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// `out = input * weight^T + bias`, set or added, for the first `rows` rows.
    fn project(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        input: &Self::Rows,
        rows: usize,
        accumulate: Accumulate,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// [`project`](Self::project) of the [`rms_norm`](Self::rms_norm) of rows.
    fn project_normed(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        normed: Normed<'_, Self>,
        rows: usize,
        accumulate: Accumulate,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.project(weight, bias, normed.rows(self, rows)?, rows, accumulate, out)
    }

    /// Of rows that hold queries, keys and values: norms each query and key head where `norms`
    /// (of queries, of keys, epsilon) is given, rotates both by position, leaves the queries in
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
    fn attend(
        &self,
        qkv: &Self::Rows,
        params: AttentionParams,
        plan: &Self::Plan,
        kv: &Self::Kv,
        layer: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Of rows that hold gates, then ups: `out = activation(gate) * up`.
    fn gate(
        &self,
        activation: Activation,
        gate_up: &Self::Rows,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// [`project`](Self::project) with a weight of gates, then ups, and [`gate`](Self::gate) of
    /// what comes out. `both` has room for gates and ups, and holds nothing of use afterwards.
    #[allow(clippy::too_many_arguments)]
    fn project_gated(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        activation: Activation,
        input: &Self::Rows,
        rows: usize,
        both: &mut Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.project(weight, bias, input, rows, Accumulate::Set, both)?;
        self.gate(activation, both, rows, out)
    }

    /// [`project_gated`](Self::project_gated) of the [`rms_norm`](Self::rms_norm) of rows.
    #[allow(clippy::too_many_arguments)]
    fn project_gated_normed(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        activation: Activation,
        normed: Normed<'_, Self>,
        rows: usize,
        both: &mut Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<()> {
        let input = normed.rows(self, rows)?;
        self.project_gated(weight, bias, activation, input, rows, both, out)
    }

    /// Chooses the experts of the first `rows` rows: of the softmax of a row's `logits`, one for
    /// each expert, the `per_token` largest, of equal ones those of the lowest ids. Their weights
    /// are what the softmax gave them, divided by the sum of all chosen where `normalize` is set.
    fn route(
        &self,
        logits: &Self::Rows,
        rows: usize,
        normalize: bool,
        out: &mut Self::Routing,
    ) -> Result<()>;

    /// The sum over a row's experts, in ascending order of their ids, of weight times
    /// `down(activation(gate) * up)`, complete before it is set or added, for the first `rows` rows.
    ///
    /// `both` and `activated` have room for `rows * per_token` rows, `both` of gates and ups and
    /// `activated` of half their width; they hold nothing of use afterwards.
    #[allow(clippy::too_many_arguments)]
    fn project_experts(
        &self,
        experts: &Self::Experts,
        activation: Activation,
        input: &Self::Rows,
        rows: usize,
        routing: &Self::Routing,
        both: &mut Self::Rows,
        activated: &mut Self::Rows,
        accumulate: Accumulate,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Writes the ids of each row's experts, the likeliest first, as numbers into columns
    /// `column..column + per_token` of the first `rows` rows of `out`.
    fn routed(
        &self,
        routing: &Self::Routing,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()>;

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

    /// `out[i] = input[outputs[first + i]]` for the plan's outputs, as many as `out` has room for;
    /// answers how many.
    fn gather_outputs(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        first: usize,
        out: &mut Self::Rows,
    ) -> Result<usize>;

    /// Moves the keys and values of all layers from slot to slot, in the order given.
    fn move_slots(&self, kv: &mut Self::Kv, moves: &[(u32, u32)]) -> Result<()>;

    /// Moves rows from place to place, in the order given.
    fn move_rows(&self, rows: &mut Self::Rows, moves: &[(u32, u32)]) -> Result<()>;

    /// `out[destinations[i]] = input[i]` for the plan's outputs; `out[i]` where it names no
    /// destinations.
    fn scatter_outputs(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<()>;

    /// Sets the rows at position 0 to zeros.
    fn clear_first(&self, plan: &Self::Plan, rows: &mut Self::Rows) -> Result<()>;

    /// How many rows and outputs a plan has, or at most has where that is not known yet.
    fn extent(&self, plan: &Self::Plan) -> Extent;

    /// What the operations of the round that runs depend on; none where the backend has no use for
    /// graphs. What the host does beside enqueueing them is not repeated by a graph.
    fn graph_key(&self, _state: &Self::State) -> Option<GraphKey> {
        None
    }

    /// Captures the operations that `enqueue` calls, without running them; none where the backend
    /// has no use for it. Nothing inside may make room, place a plan or read.
    fn capture(&self, _enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Self::Graph>> {
        Ok(None)
    }

    /// Enqueues the operations of a graph once more.
    fn replay(&self, graph: &Self::Graph) -> Result<()>;

    /// Runs the operations of a graph, puts all memory back as it was, runs the operations that
    /// `enqueue` calls, and says where the graph has left other bytes than they have; nothing where
    /// it has left the same. What they have left stays.
    fn check_replay(
        &self,
        graph: &Self::Graph,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<String>>;

    /// The moment at which all operations enqueued so far are done.
    fn moment(&self) -> Result<Self::Moment>;

    /// The time between two moments, both of which have passed.
    fn time_between(&self, from: &Self::Moment, to: &Self::Moment) -> Result<Duration>;

    /// Makes room for the rows of all running requests.
    fn state(&self, bounds: StateBounds) -> Result<Self::State>;

    /// Bytes that such a state takes, and what attention by `heads` works in; nothing where that is
    /// small.
    fn round_bytes(&self, _bounds: &StateBounds, _heads: HeadShape) -> u64 {
        0
    }

    /// Begins a round: what changed, and what runs.
    fn begin_round(&self, state: &mut Self::State, batch: Batch) -> Result<()>;

    /// Plans the rows of a pass of the round, which has no more than `bound`.
    fn plan_rows(
        &self,
        state: &mut Self::State,
        pass: PassRows,
        bound: Extent,
        plan: &mut Self::Plan,
    ) -> Result<()>;

    /// Starts the trees of all requests that decode; `given` has those that the host has drafted,
    /// by place.
    fn start_trees(&self, state: &mut Self::State, given: Vec<(usize, Tree)>) -> Result<()>;

    /// Adds what the draft proposes after each row of the level that was planned last. `ids` says
    /// which tokens the draft knows, if not all.
    fn propose(
        &self,
        state: &mut Self::State,
        logits: &Self::Rows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()>;

    /// Ends the trees: the best nodes of each, and of those as many as the batch's limits say.
    fn build_trees(&self, state: &mut Self::State) -> Result<()>;

    /// Samples at outputs of the target's pass, each by its request's settings and with the history
    /// of its own path: `logits` has those from output `first` on, and pieces come in order. Where
    /// trees are verified by probability, goes on with the accepted paths as far as logits are there.
    fn sample(&self, state: &mut Self::State, logits: &Self::Rows, first: usize) -> Result<()>;

    /// Follows what was sampled down the trees, and adds what is accepted to the texts; or what
    /// the state was told to simulate.
    fn accept(&self, state: &mut Self::State) -> Result<()>;

    /// Moves keys and values of all layers to where the accepted paths belong.
    fn compact_slots(&self, state: &Self::State, kv: &mut Self::Kv) -> Result<()>;

    /// Moves what has a row for each row of the target's pass to where the accepted paths belong.
    fn compact_rows(&self, state: &Self::State, rows: &mut Self::Rows) -> Result<()>;

    /// Makes what was accepted the state that the next round begins with, and decides which drafts
    /// process it now and which are paused.
    fn publish(&self, state: &mut Self::State) -> Result<()>;

    /// Moves the hidden rows that paused drafts will need to where they are kept.
    fn park_rows(&self, state: &Self::State, rows: &mut Self::Rows) -> Result<()>;

    /// Says which tokens of the texts a draft processes next.
    fn begin_extend(&self, state: &mut Self::State, rows: ExtendRows) -> Result<()>;

    /// Leaves what the draft proposes after the last of those tokens: the seeds of the next trees.
    fn seed_trees(
        &self,
        state: &mut Self::State,
        logits: &Self::Rows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()>;

    /// Keeps the last hidden states that `layer` has made of those tokens.
    fn keep_states(
        &self,
        state: &Self::State,
        layer: usize,
        kept: KeptLayout,
        rows: &mut Self::Rows,
    ) -> Result<()>;

    /// Whether operations complete later than they are enqueued, so that a round can be enqueued while
    /// the one before it runs.
    fn defers(&self) -> bool {
        false
    }

    /// Copies what came of each row of the batch to the host, for [`outputs`](Self::outputs).
    /// `returned` has the rows that requests get beside tokens, compacted.
    fn copy_outputs(
        &self,
        state: &mut Self::State,
        returned: ReturnedRows<'_, Self::Rows>,
    ) -> Result<()>;

    /// What came of each row of the oldest round whose outputs were copied and not taken yet; nothing
    /// where the request had ended before. Later rounds may have been enqueued meanwhile, but for those
    /// that depend on what the host reads: trees that it drafts, and grammars.
    fn outputs(&self, state: &mut Self::State) -> Result<Vec<Option<RequestOutput>>>;

    /// Copies the first `rows` rows to the host, one after the other.
    fn read(&self, rows_of: &Self::Rows, rows: usize) -> Result<Vec<f32>>;

    /// The sizes of a store of keys and values.
    fn kv_shape(&self, kv: &Self::Kv) -> KvShape;

    /// Copies keys and values of `layers` at `slots` to the end of `out`, in an order that does not
    /// depend on how the backend keeps them: for each layer the keys of all slots, then their
    /// values, in the order of `slots`, heads side by side, elements as the store has them and
    /// little-endian.
    fn read_slots(
        &self,
        kv: &Self::Kv,
        layers: Range<usize>,
        slots: &[u32],
        out: &mut Vec<u8>,
    ) -> Result<()>;

    /// Writes what [`read_slots`](Self::read_slots) has read, on this machine or another.
    fn write_slots(
        &self,
        kv: &mut Self::Kv,
        layers: Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()>;

    /// Copies one row to the host.
    fn read_row(&self, rows: &Self::Rows, row: usize) -> Result<Vec<f32>>;

    /// Replaces one row.
    fn write_row(&self, rows: &mut Self::Rows, row: usize, values: &[f32]) -> Result<()>;

    /// What the next tree of the request at `place` begins with, if there is anything; it stays
    /// there.
    fn read_seed(&self, state: &Self::State, place: usize) -> Result<Option<Candidates>>;

    /// Replaces it.
    fn write_seed(
        &self,
        state: &mut Self::State,
        place: usize,
        seed: Option<Candidates>,
    ) -> Result<()>;
}
