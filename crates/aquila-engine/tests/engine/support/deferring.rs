//! A backend whose operations return nothing, are queued, and run only at a read: a value that the
//! host looked at early, or a bound that is too small, changes the answer. Operations can be
//! captured, and a graph repeats them as they were: what the host does beside is not repeated.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::round::{
    Batch, Candidates, ExtendRows, Extent, GraphKey, KeptLayout, PassRows, RequestOutput,
    ReturnedRows, StateBounds, Tree,
};
use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, DraftIds, Error, ForwardPlan, HeadShape,
    HostTensor, KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};

use aquila_spec::known_bugs::Bug;

use super::snapshot::{Memory, Snapshot};

type Cpu<T> = Arc<Mutex<T>>;
type Operation = Arc<dyn Fn(&CpuBackend) -> Result<()> + Send + Sync>;

pub struct Deferring {
    cpu: CpuBackend,
    queue: Mutex<VecDeque<Operation>>,
    /// The operations of the graph that is being captured, if one is.
    capturing: Mutex<Option<Vec<Operation>>>,
    /// What checks of replays compare.
    memory: Mutex<Vec<Memory>>,
    reads: AtomicU64,
    replays: AtomicU64,
    /// Rounds whose outputs are not read yet, and how many those were at most.
    unread: AtomicU64,
    most_unread: AtomicU64,
    lost: AtomicBool,
    /// The round that cannot be enqueued, if one cannot.
    pub refuses_round: Option<u64>,
    /// The round that was begun last, and its rows.
    round: AtomicU64,
    rows: AtomicUsize,
    /// Whether replays fail, and how many have.
    refuses_replays: bool,
    refused_replays: AtomicU64,
}

/// A plan, and what the host knows of its size.
pub struct Plan {
    placed: Cpu<<CpuBackend as Backend>::Plan>,
    bound: Extent,
}

fn shared<T>(value: T) -> Cpu<T> {
    Arc::new(Mutex::new(value))
}

fn lock<T>(value: &Cpu<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap()
}

/// A draft's vocabulary, until it is needed.
struct Ids(Option<(Vec<u32>, usize)>);

impl Ids {
    fn of(ids: Option<DraftIds<'_>>) -> Self {
        Self(ids.map(|ids| (ids.ids.to_vec(), ids.vocabulary)))
    }

    fn get(&self) -> Option<DraftIds<'_>> {
        self.0.as_ref().map(|(ids, vocabulary)| DraftIds { ids, vocabulary: *vocabulary })
    }
}

/// Queues an operation over clones of handles.
macro_rules! defer {
    ($self:ident, [$($handle:ident),*], |$cpu:ident| $run:expr) => {{
        $(let $handle = $handle.clone();)*
        $self.enqueue(Arc::new(move |$cpu: &CpuBackend| $run));
        Ok(())
    }};
}

impl Deferring {
    pub fn new() -> Self {
        let cpu = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        Self {
            cpu,
            queue: Mutex::default(),
            capturing: Mutex::default(),
            memory: Mutex::default(),
            reads: AtomicU64::new(0),
            replays: AtomicU64::new(0),
            unread: AtomicU64::new(0),
            most_unread: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            refuses_round: None,
            round: AtomicU64::new(0),
            rows: AtomicUsize::new(0),
            refuses_replays: false,
            refused_replays: AtomicU64::new(0),
        }
    }

    /// How many rounds were enqueued and not read at most.
    pub fn most_unread(&self) -> u64 {
        self.most_unread.load(Relaxed)
    }

    /// Loses the device: nothing can be read from now on.
    pub fn lose(&self) {
        self.lost.store(true, Relaxed);
    }

    /// A device that captures graphs and cannot replay them.
    pub fn without_replays() -> Self {
        Self { refuses_replays: true, ..Self::new() }
    }

    /// How often something was read.
    pub fn reads(&self) -> u64 {
        self.reads.load(Relaxed)
    }

    /// How often a graph was replayed.
    pub fn replays(&self) -> u64 {
        self.replays.load(Relaxed)
    }

    /// How often a replay failed.
    pub fn refused_replays(&self) -> u64 {
        self.refused_replays.load(Relaxed)
    }

    fn enqueue(&self, operation: Operation) {
        match &mut *self.capturing.lock().unwrap() {
            Some(graph) => graph.push(operation),
            None => self.queue.lock().unwrap().push_back(operation),
        }
    }

    /// Refuses what a graph would repeat as it was.
    fn outside_capture(&self) {
        assert!(self.capturing.lock().unwrap().is_none(), "a graph holds nothing of the host's");
    }

    /// Has checks of replays compare some memory.
    fn compared<T>(&self, made: T, memory: fn(Cpu<T>) -> Memory) -> Cpu<T> {
        let made = shared(made);
        self.memory.lock().unwrap().push(memory(made.clone()));
        made
    }

    /// What is in memory when all that is queued has run.
    fn snapshot(&self) -> Result<Snapshot> {
        self.catch_up()?;
        Ok(Snapshot::take(&self.cpu, &self.memory.lock().unwrap()))
    }

    /// Runs what is queued.
    fn catch_up(&self) -> Result<()> {
        self.outside_capture();
        self.reads.fetch_add(1, Relaxed);
        if self.lost.load(Relaxed) {
            return Err(Error::DeviceLost("it left the bus".into()));
        }
        loop {
            let next = self.queue.lock().unwrap().pop_front();
            let Some(operation) = next else { return Ok(()) };
            operation(&self.cpu)?;
        }
    }
}

impl Backend for Deferring {
    type Rows = Cpu<<CpuBackend as Backend>::Rows>;
    type Weight = Arc<<CpuBackend as Backend>::Weight>;
    type Experts = Arc<<CpuBackend as Backend>::Experts>;
    type Routing = Cpu<<CpuBackend as Backend>::Routing>;
    type Vector = Arc<<CpuBackend as Backend>::Vector>;
    type Table = Arc<<CpuBackend as Backend>::Table>;
    type Rope = Arc<<CpuBackend as Backend>::Rope>;
    type Kv = Cpu<<CpuBackend as Backend>::Kv>;
    type Plan = Plan;
    type State = Cpu<<CpuBackend as Backend>::State>;
    type Graph = Vec<Operation>;
    type Moment = Instant;

    fn kernel_family(&self) -> String {
        self.cpu.kernel_family()
    }

    fn describe(&self) -> String {
        "deferring".into()
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<Self::Weight> {
        self.cpu.pack(parts, format).map(Arc::new)
    }

    fn experts(
        &self,
        gate_up: Vec<Self::Weight>,
        down: Vec<Self::Weight>,
    ) -> Result<Self::Experts> {
        let owned = |weights: Vec<Self::Weight>| {
            weights.into_iter().map(|weight| Arc::into_inner(weight).unwrap()).collect()
        };
        self.cpu.experts(owned(gate_up), owned(down)).map(Arc::new)
    }

    fn routing(&self, rows: usize, per_token: usize) -> Result<Self::Routing> {
        self.cpu.routing(rows, per_token).map(shared)
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<Self::Vector> {
        self.cpu.vector(parts).map(Arc::new)
    }

    fn table(&self, tensor: &HostTensor) -> Result<Self::Table> {
        self.cpu.table(tensor).map(Arc::new)
    }

    fn rope(&self, table: &RopeTable) -> Result<Self::Rope> {
        self.cpu.rope(table).map(Arc::new)
    }

    fn kv(&self, shape: KvShape) -> Result<Self::Kv> {
        Ok(self.compared(self.cpu.kv(shape)?, Memory::Kv))
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<Self::Rows> {
        Ok(self.compared(self.cpu.rows(capacity, width)?, Memory::Rows))
    }

    fn plan(&self, bounds: PlanBounds) -> Result<Plan> {
        Ok(Plan { placed: shared(self.cpu.plan(bounds)?), bound: Extent::default() })
    }

    fn place(&self, host: &ForwardPlan, plan: &mut Plan) -> Result<()> {
        plan.bound = Extent { rows: host.rows(), outputs: host.outputs.len() };
        let placed = &plan.placed;
        defer!(self, [host, placed], |cpu| cpu.place(&host, &mut lock(&placed)))
    }

    fn embed(
        &self,
        table: &Self::Table,
        scale: f32,
        plan: &Plan,
        out: &mut Self::Rows,
    ) -> Result<()> {
        let plan = &plan.placed;
        defer!(self, [table, plan, out], |cpu| {
            cpu.embed(&table, scale, &lock(&plan), &mut lock(&out))
        })
    }

    fn add(&self, input: &Self::Rows, rows: usize, out: &mut Self::Rows) -> Result<()> {
        defer!(self, [input, out], |cpu| cpu.add(&lock(&input), rows, &mut lock(&out)))
    }

    fn soft_cap(&self, rows_of: &mut Self::Rows, rows: usize, cap: f32) -> Result<()> {
        defer!(self, [rows_of], |cpu| cpu.soft_cap(&mut lock(&rows_of), rows, cap))
    }

    fn rms_norm_columns(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        defer!(self, [input, weight, out], |cpu| {
            cpu.rms_norm_columns(&lock(&input), &weight, epsilon, rows, column, &mut lock(&out))
        })
    }

    fn project(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        input: &Self::Rows,
        rows: usize,
        accumulate: Accumulate,
        out: &mut Self::Rows,
    ) -> Result<()> {
        let bias = bias.cloned();
        defer!(self, [weight, input, out], |cpu| {
            cpu.project(&weight, bias.as_deref(), &lock(&input), rows, accumulate, &mut lock(&out))
        })
    }

    fn write_kv(
        &self,
        qkv: &mut Self::Rows,
        heads: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        rope: &Self::Rope,
        plan: &Plan,
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<()> {
        let norms = norms.map(|(q, k, epsilon)| (q.clone(), k.clone(), epsilon));
        let plan = &plan.placed;
        defer!(self, [qkv, rope, plan, kv], |cpu| {
            let norms = norms.as_ref().map(|(q, k, epsilon)| (&**q, &**k, *epsilon));
            let (qkv, kv) = (&mut *lock(&qkv), &mut *lock(&kv));
            cpu.write_kv(qkv, heads, norms, &rope, &lock(&plan), kv, layer)
        })
    }

    fn attend(
        &self,
        qkv: &Self::Rows,
        params: AttentionParams,
        plan: &Plan,
        kv: &Self::Kv,
        layer: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        let plan = &plan.placed;
        defer!(self, [qkv, plan, kv, out], |cpu| {
            let (plan, kv) = (&*lock(&plan), &*lock(&kv));
            cpu.attend(&lock(&qkv), params, plan, kv, layer, &mut lock(&out))
        })
    }

    fn gate(
        &self,
        activation: Activation,
        gate_up: &Self::Rows,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        defer!(self, [gate_up, out], |cpu| {
            cpu.gate(activation, &lock(&gate_up), rows, &mut lock(&out))
        })
    }

    fn route(
        &self,
        logits: &Self::Rows,
        rows: usize,
        normalize: bool,
        out: &mut Self::Routing,
    ) -> Result<()> {
        defer!(self, [logits, out], |cpu| {
            cpu.route(&lock(&logits), rows, normalize, &mut lock(&out))
        })
    }

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
    ) -> Result<()> {
        defer!(self, [experts, input, routing, both, activated, out], |cpu| {
            let (input, routing, out) = (&*lock(&input), &*lock(&routing), &mut *lock(&out));
            let (both, activated) = (&mut *lock(&both), &mut *lock(&activated));
            cpu.project_experts(
                &experts, activation, input, rows, routing, both, activated, accumulate, out,
            )
        })
    }

    fn routed(
        &self,
        routing: &Self::Routing,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        defer!(self, [routing, out], |cpu| {
            cpu.routed(&lock(&routing), rows, column, &mut lock(&out))
        })
    }

    fn copy_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        defer!(self, [input, out], |cpu| {
            cpu.copy_columns(&lock(&input), rows, column, &mut lock(&out))
        })
    }

    fn take_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        defer!(self, [input, out], |cpu| {
            cpu.take_columns(&lock(&input), rows, column, &mut lock(&out))
        })
    }

    fn gather_sources(&self, input: &Self::Rows, plan: &Plan, out: &mut Self::Rows) -> Result<()> {
        let plan = &plan.placed;
        defer!(self, [input, plan, out], |cpu| {
            cpu.gather_sources(&lock(&input), &lock(&plan), &mut lock(&out))
        })
    }

    fn gather_outputs(
        &self,
        input: &Self::Rows,
        plan: &Plan,
        first: usize,
        out: &mut Self::Rows,
    ) -> Result<usize> {
        let (bound, plan) = (plan.bound.outputs, &plan.placed);
        let count = (bound - first).min(lock(out).capacity());
        let queued: Result<()> = defer!(self, [input, plan, out], |cpu| {
            cpu.gather_outputs(&lock(&input), &lock(&plan), first, &mut lock(&out)).map(drop)
        });
        queued.map(|()| count)
    }

    fn move_slots(&self, kv: &mut Self::Kv, moves: &[(u32, u32)]) -> Result<()> {
        let moves = moves.to_vec();
        defer!(self, [kv], |cpu| cpu.move_slots(&mut lock(&kv), &moves))
    }

    fn move_rows(&self, rows: &mut Self::Rows, moves: &[(u32, u32)]) -> Result<()> {
        let moves = moves.to_vec();
        defer!(self, [rows], |cpu| cpu.move_rows(&mut lock(&rows), &moves))
    }

    fn scatter_outputs(&self, input: &Self::Rows, plan: &Plan, out: &mut Self::Rows) -> Result<()> {
        let plan = &plan.placed;
        defer!(self, [input, plan, out], |cpu| {
            cpu.scatter_outputs(&lock(&input), &lock(&plan), &mut lock(&out))
        })
    }

    fn clear_first(&self, plan: &Plan, rows: &mut Self::Rows) -> Result<()> {
        let plan = &plan.placed;
        defer!(self, [plan, rows], |cpu| cpu.clear_first(&lock(&plan), &mut lock(&rows)))
    }

    fn extent(&self, plan: &Plan) -> Extent {
        plan.bound
    }

    fn graph_key(&self, _state: &Self::State) -> Option<GraphKey> {
        Some(GraphKey(Vec::new()))
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Self::Graph>> {
        let before = self.capturing.lock().unwrap().replace(Vec::new());
        assert!(before.is_none(), "one graph at a time");
        let enqueued = enqueue();
        let graph = self.capturing.lock().unwrap().take();
        enqueued.map(|()| graph)
    }

    fn replay(&self, graph: &Self::Graph) -> Result<()> {
        self.outside_capture();
        if self.refuses_replays {
            self.refused_replays.fetch_add(1, Relaxed);
            return Err(Error::Device("no room for a graph".into()));
        }
        self.replays.fetch_add(1, Relaxed);
        self.queue.lock().unwrap().extend(graph.iter().cloned());
        Ok(())
    }

    fn check_replay(
        &self,
        graph: &Self::Graph,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<String>> {
        let before = self.snapshot()?;
        self.replay(graph)?;
        let replayed = self.snapshot()?;
        before.restore(&self.cpu);
        enqueue()?;
        Ok(replayed.differences(&self.snapshot()?))
    }

    fn moment(&self) -> Result<Instant> {
        Ok(Instant::now())
    }

    fn time_between(&self, from: &Instant, to: &Instant) -> Result<Duration> {
        Ok(to.saturating_duration_since(*from))
    }

    fn state(&self, bounds: StateBounds) -> Result<Self::State> {
        Ok(self.compared(self.cpu.state(bounds)?, Memory::State))
    }

    fn begin_round(&self, state: &mut Self::State, batch: Batch) -> Result<()> {
        self.outside_capture();
        self.round.store(batch.round, Relaxed);
        self.rows.store(batch.rows.len(), Relaxed);
        defer!(self, [state], |cpu| cpu.begin_round(&mut lock(&state), batch.clone()))
    }

    fn plan_rows(
        &self,
        state: &mut Self::State,
        pass: PassRows,
        bound: Extent,
        plan: &mut Plan,
    ) -> Result<()> {
        plan.bound = bound;
        // A device does not know which requests their grammars have ended: all have rows.
        let rows = if pass == PassRows::Target { self.rows.load(Relaxed) } else { 0 };
        assert!(rows <= bound.rows, "{rows} requests within {bound:?}");
        let plan = &plan.placed;
        // How often the operation has run: once where it is launched.
        let runs = Arc::new(std::sync::atomic::AtomicU32::new(0));
        defer!(self, [state, plan], |cpu| {
            let plan = &mut *lock(&plan);
            cpu.plan_rows(&mut lock(&state), pass, bound, plan)?;
            let Extent { rows, outputs } = cpu.extent(plan);
            assert!(rows <= bound.rows && outputs <= bound.outputs, "{pass:?} within {bound:?}");
            if Bug::GraphPositions.alive() {
                let mut advanced = plan.host().clone();
                let before = runs.fetch_add(1, Relaxed);
                advanced.positions.iter_mut().for_each(|position| *position += before);
                cpu.place(&advanced, plan)?;
            }
            Ok(())
        })
    }

    fn start_trees(&self, state: &mut Self::State, given: Vec<(usize, Tree)>) -> Result<()> {
        self.outside_capture();
        if self.refuses_round == Some(self.round.load(Relaxed)) {
            return Err(Error::Device("no room for a round".into()));
        }
        defer!(self, [state], |cpu| cpu.start_trees(&mut lock(&state), given.clone()))
    }

    fn propose(
        &self,
        state: &mut Self::State,
        logits: &Self::Rows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let ids = Ids::of(ids);
        defer!(self, [state, logits], |cpu| {
            cpu.propose(&mut lock(&state), &lock(&logits), ids.get())
        })
    }

    fn build_trees(&self, state: &mut Self::State) -> Result<()> {
        defer!(self, [state], |cpu| cpu.build_trees(&mut lock(&state)))
    }

    fn sample(&self, state: &mut Self::State, logits: &Self::Rows, first: usize) -> Result<()> {
        defer!(self, [state, logits], |cpu| cpu.sample(&mut lock(&state), &lock(&logits), first))
    }

    fn accept(&self, state: &mut Self::State) -> Result<()> {
        defer!(self, [state], |cpu| cpu.accept(&mut lock(&state)))
    }

    fn compact_slots(&self, state: &Self::State, kv: &mut Self::Kv) -> Result<()> {
        defer!(self, [state, kv], |cpu| cpu.compact_slots(&lock(&state), &mut lock(&kv)))
    }

    fn compact_rows(&self, state: &Self::State, rows: &mut Self::Rows) -> Result<()> {
        defer!(self, [state, rows], |cpu| cpu.compact_rows(&lock(&state), &mut lock(&rows)))
    }

    fn publish(&self, state: &mut Self::State) -> Result<()> {
        defer!(self, [state], |cpu| cpu.publish(&mut lock(&state)))
    }

    fn park_rows(&self, state: &Self::State, rows: &mut Self::Rows) -> Result<()> {
        defer!(self, [state, rows], |cpu| cpu.park_rows(&lock(&state), &mut lock(&rows)))
    }

    fn begin_extend(&self, state: &mut Self::State, rows: ExtendRows) -> Result<()> {
        defer!(self, [state], |cpu| cpu.begin_extend(&mut lock(&state), rows))
    }

    fn seed_trees(
        &self,
        state: &mut Self::State,
        logits: &Self::Rows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let ids = Ids::of(ids);
        defer!(self, [state, logits], |cpu| {
            cpu.seed_trees(&mut lock(&state), &lock(&logits), ids.get())
        })
    }

    fn keep_states(
        &self,
        state: &Self::State,
        layer: usize,
        kept: KeptLayout,
        rows: &mut Self::Rows,
    ) -> Result<()> {
        defer!(self, [state, rows], |cpu| {
            cpu.keep_states(&lock(&state), layer, kept, &mut lock(&rows))
        })
    }

    fn defers(&self) -> bool {
        true
    }

    fn copy_outputs(
        &self,
        state: &mut Self::State,
        returned: ReturnedRows<'_, Self::Rows>,
    ) -> Result<()> {
        self.outside_capture();
        let unread = self.unread.fetch_add(1, Relaxed) + 1;
        self.most_unread.fetch_max(unread, Relaxed);
        let hidden_states = returned.hidden_states.cloned();
        let routed_experts = returned.routed_experts.cloned();
        defer!(self, [state, hidden_states, routed_experts], |cpu| {
            let (hidden_states, routed_experts) =
                (hidden_states.as_ref().map(lock), routed_experts.as_ref().map(lock));
            let returned = ReturnedRows {
                hidden_states: hidden_states.as_deref(),
                routed_experts: routed_experts.as_deref(),
            };
            cpu.copy_outputs(&mut lock(&state), returned)
        })
    }

    fn outputs(&self, state: &mut Self::State) -> Result<Vec<Option<RequestOutput>>> {
        self.catch_up()?;
        self.unread.fetch_sub(1, Relaxed);
        self.cpu.outputs(&mut lock(state))
    }

    fn read(&self, rows_of: &Self::Rows, rows: usize) -> Result<Vec<f32>> {
        self.catch_up()?;
        self.cpu.read(&lock(rows_of), rows)
    }

    fn kv_shape(&self, kv: &Self::Kv) -> KvShape {
        self.cpu.kv_shape(&lock(kv))
    }

    fn read_slots(
        &self,
        kv: &Self::Kv,
        layers: Range<usize>,
        slots: &[u32],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        self.catch_up()?;
        self.cpu.read_slots(&lock(kv), layers, slots, out)
    }

    fn write_slots(
        &self,
        kv: &mut Self::Kv,
        layers: Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()> {
        let (slots, bytes) = (slots.to_vec(), bytes.to_vec());
        defer!(self, [kv], |cpu| cpu.write_slots(&mut lock(&kv), layers.clone(), &slots, &bytes))
    }

    fn read_row(&self, rows: &Self::Rows, row: usize) -> Result<Vec<f32>> {
        self.catch_up()?;
        self.cpu.read_row(&lock(rows), row)
    }

    fn write_row(&self, rows: &mut Self::Rows, row: usize, values: &[f32]) -> Result<()> {
        let values = values.to_vec();
        defer!(self, [rows], |cpu| cpu.write_row(&mut lock(&rows), row, &values))
    }

    fn read_seed(&self, state: &Self::State, place: usize) -> Result<Option<Candidates>> {
        self.catch_up()?;
        self.cpu.read_seed(&lock(state), place)
    }

    fn write_seed(
        &self,
        state: &mut Self::State,
        place: usize,
        seed: Option<Candidates>,
    ) -> Result<()> {
        defer!(self, [state], |cpu| cpu.write_seed(&mut lock(&state), place, seed.clone()))
    }
}
