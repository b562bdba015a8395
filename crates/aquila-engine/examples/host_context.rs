//! What the host does in a round, whatever the device does: with a backend that computes nothing,
//! `cargo run --release -p aquila-engine --example host_context` times rounds of 64 requests with a
//! short and with a long context, and counts the bytes that are handed to the backend.
//!
//! Nothing of either may grow with the context.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquila_compute::round::{
    Admitted, Batch, BatchRow, Candidates, ExtendRows, Extent, KeptLayout, PassRows, RequestOutput,
    ReturnedRows, RowWork, StateBounds, Tree,
};
use aquila_compute::sampling::Choice;
use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, DraftIds, ForwardPlan, HeadShape, HostTensor,
    KvDtype, KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};
use aquila_engine::{EngineConfig, Listener, Outcome, Request, Runner, Scheduler, Token, Verdict};
use aquila_model::{Checkpoint, Decoder, LoadFormat, resolve};
use aquila_spec::{Algorithm, RecurrentDraft, Shape, Standalone, Verify};

const REQUESTS: usize = 64;
const ROUNDS: usize = 400;
const STEPS: usize = 3;

/// Computes nothing, and counts what it is told.
#[derive(Default)]
struct Null {
    bytes: AtomicU64,
}

impl Null {
    fn told(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }
}

/// What it knows of requests: how many tokens each has, and what the round does.
#[derive(Default)]
struct Told {
    tokens: HashMap<usize, usize>,
    rows: Vec<BatchRow>,
}

impl Backend for Null {
    type Rows = ();
    type Weight = ();
    type Experts = ();
    type Routing = ();
    type Vector = ();
    type Table = ();
    type Rope = ();
    type Kv = ();
    type Plan = usize;
    type State = Told;
    type Graph = ();
    type Moment = Instant;

    fn kernel_family(&self) -> String {
        self.describe()
    }

    fn describe(&self) -> String {
        "nothing".into()
    }

    fn pack(&self, _: &[HostTensor], _: WeightFormat) -> Result<()> {
        Ok(())
    }

    fn experts(&self, _: Vec<()>, _: Vec<()>) -> Result<()> {
        Ok(())
    }

    fn routing(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn vector(&self, _: &[HostTensor]) -> Result<()> {
        Ok(())
    }

    fn table(&self, _: &HostTensor) -> Result<()> {
        Ok(())
    }

    fn rope(&self, _: &RopeTable) -> Result<()> {
        Ok(())
    }

    fn kv(&self, _: KvShape) -> Result<()> {
        Ok(())
    }

    fn rows(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn plan(&self, _: PlanBounds) -> Result<usize> {
        Ok(0)
    }

    fn place(&self, host: &ForwardPlan, plan: &mut usize) -> Result<()> {
        *plan = host.outputs.len();
        let words = [&host.tokens, &host.positions, &host.writes, &host.slots, &host.tree_slots]
            .into_iter()
            .chain([&host.outputs, &host.sources]);
        let words: usize = words.map(|list| size_of_val(&list[..])).sum();
        self.told(words + size_of_val(&host.spans[..]) + size_of_val(&host.changes[..]));
        Ok(())
    }

    fn embed(&self, _: &(), _: f32, _: &usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn add(&self, _: &(), _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn soft_cap(&self, _: &mut (), _: usize, _: f32) -> Result<()> {
        Ok(())
    }

    fn rms_norm_columns(
        &self,
        _: &(),
        _: &(),
        _: f32,
        _: usize,
        _: usize,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn project(
        &self,
        _: &(),
        _: Option<&()>,
        _: &(),
        _: usize,
        _: Accumulate,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn write_kv(
        &self,
        _: &mut (),
        _: HeadShape,
        _: Option<(&(), &(), f32)>,
        _: &(),
        _: &usize,
        _: &mut (),
        _: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn attend(
        &self,
        _: &(),
        _: AttentionParams,
        _: &usize,
        _: &(),
        _: usize,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn gate(&self, _: Activation, _: &(), _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn route(&self, _: &(), _: usize, _: bool, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn project_experts(
        &self,
        _: &(),
        _: Activation,
        _: &(),
        _: usize,
        _: &(),
        _: &mut (),
        _: &mut (),
        _: Accumulate,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn routed(&self, _: &(), _: usize, _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn copy_columns(&self, _: &(), _: usize, _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn take_columns(&self, _: &(), _: usize, _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn gather_sources(&self, _: &(), _: &usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn gather_outputs(&self, _: &(), plan: &usize, _: usize, _: &mut ()) -> Result<usize> {
        Ok(*plan)
    }

    fn move_slots(&self, _: &mut (), moves: &[(u32, u32)]) -> Result<()> {
        self.told(size_of_val(moves));
        Ok(())
    }

    fn move_rows(&self, _: &mut (), moves: &[(u32, u32)]) -> Result<()> {
        self.told(size_of_val(moves));
        Ok(())
    }

    fn scatter_outputs(&self, _: &(), _: &usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn clear_first(&self, _: &usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn extent(&self, plan: &usize) -> Extent {
        Extent { rows: *plan, outputs: *plan }
    }

    fn replay(&self, _: &()) -> Result<()> {
        Ok(())
    }

    fn check_replay(
        &self,
        _: &(),
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<String>> {
        enqueue().map(|()| None)
    }

    fn moment(&self) -> Result<Instant> {
        Ok(Instant::now())
    }

    fn time_between(&self, from: &Instant, to: &Instant) -> Result<Duration> {
        Ok(to.saturating_duration_since(*from))
    }

    fn state(&self, _: StateBounds) -> Result<Told> {
        Ok(Told::default())
    }

    fn begin_round(&self, told: &mut Told, batch: Batch) -> Result<()> {
        let Batch { departed, admitted, tables, slots, rows, .. } = batch;
        for Admitted { tokens, .. } in &admitted {
            self.told(size_of_val(&tokens[..]));
        }
        self.told(size_of_val(&departed[..]) + size_of_val(&admitted[..]));
        self.told(size_of_val(&tables[..]) + size_of_val(&slots[..]) + size_of_val(&rows[..]));
        for Admitted { place, tokens, .. } in admitted {
            told.tokens.insert(place, tokens.len());
        }
        told.rows = rows;
        Ok(())
    }

    fn plan_rows(&self, _: &mut Told, _: PassRows, bound: Extent, plan: &mut usize) -> Result<()> {
        self.told(size_of::<PassRows>() + size_of::<Extent>());
        *plan = bound.rows;
        Ok(())
    }

    fn start_trees(&self, _: &mut Told, given: Vec<(usize, Tree)>) -> Result<()> {
        self.told(size_of_val(&given[..]));
        Ok(())
    }

    fn propose(&self, _: &mut Told, _: &(), _: Option<DraftIds<'_>>) -> Result<()> {
        Ok(())
    }

    fn build_trees(&self, _: &mut Told) -> Result<()> {
        Ok(())
    }

    fn sample(&self, _: &mut Told, _: &(), _: usize) -> Result<()> {
        Ok(())
    }

    fn accept(&self, _: &mut Told) -> Result<()> {
        Ok(())
    }

    fn compact_slots(&self, _: &Told, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn compact_rows(&self, _: &Told, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn publish(&self, _: &mut Told) -> Result<()> {
        Ok(())
    }

    fn park_rows(&self, _: &Told, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn begin_extend(&self, _: &mut Told, _: ExtendRows) -> Result<()> {
        Ok(())
    }

    fn seed_trees(&self, _: &mut Told, _: &(), _: Option<DraftIds<'_>>) -> Result<()> {
        Ok(())
    }

    fn keep_states(&self, _: &Told, _: usize, _: KeptLayout, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn copy_outputs(&self, _: &mut Told, _: ReturnedRows<'_, Self::Rows>) -> Result<()> {
        Ok(())
    }

    /// One draft of each tree is right.
    fn outputs(&self, told: &mut Told) -> Result<Vec<Option<RequestOutput>>> {
        let Told { tokens, rows } = told;
        let output = |row: &BatchRow| {
            let known = tokens.get_mut(&row.place).expect("it was admitted");
            let chosen = match &row.work {
                RowWork::Prefill { outputs, .. } => outputs.len(),
                RowWork::Decode { shape, .. } => 1 + shape.steps().min(1),
            };
            *known += chosen;
            let token = Choice { token: 7, logprob: None, top: Vec::new() };
            // A chunk that is not the last has rows as far as it was read.
            let known = match &row.work {
                RowWork::Prefill { rows, last: false, .. } => rows.end,
                _ => *known,
            };
            let (tokens, correct) = (vec![token; chosen], chosen.saturating_sub(1));
            Some(RequestOutput { tokens, proposed: STEPS, correct, known, ..Default::default() })
        };
        Ok(rows.iter().map(output).collect())
    }

    fn read(&self, _: &(), _: usize) -> Result<Vec<f32>> {
        Ok(Vec::new())
    }

    fn kv_shape(&self, _: &()) -> KvShape {
        KvShape { layers: 0, slots: 0, kv_heads: 0, head_dim: 0, dtype: KvDtype::F32 }
    }

    fn read_slots(&self, _: &(), _: Range<usize>, _: &[u32], _: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }

    fn write_slots(&self, _: &mut (), _: Range<usize>, _: &[u32], _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read_row(&self, _: &(), _: usize) -> Result<Vec<f32>> {
        Ok(Vec::new())
    }

    fn write_row(&self, _: &mut (), _: usize, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn read_seed(&self, _: &Told, _: usize) -> Result<Option<Candidates>> {
        Ok(None)
    }

    fn write_seed(&self, _: &mut Told, _: usize, _: Option<Candidates>) -> Result<()> {
        Ok(())
    }
}

struct Ignored;

impl Listener for Ignored {
    fn tokens(&mut self, _: &[Token]) -> Verdict {
        Verdict::Continue
    }

    fn finished(self: Box<Self>, _: Outcome) {}
}

/// An engine whose requests have this many tokens of context each, all of them read.
fn engine(context: usize) -> (Scheduler, Arc<Null>) {
    let backend = Arc::new(Null::default());
    let positions = context + 2 * ROUNDS * (STEPS + 1);
    let config = EngineConfig {
        page_size: 16,
        max_total_tokens: (REQUESTS * (positions + 32)).next_multiple_of(16),
        max_running_requests: REQUESTS,
        max_queued_requests: REQUESTS,
        chunked_prefill_size: 8192,
        context_length: positions,
        prefix_cache: true,
        kv_dtype: KvDtype::F32,
        random_seed: 0,
        shape: Shape::chain(STEPS),
        verify: Verify::Match,
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    };
    let decoder = |name: &str| {
        let checkpoint = Checkpoint::open(&resolve(name).expect("shipped"), LoadFormat::Auto);
        let checkpoint = checkpoint.expect("a shipped model");
        Decoder::load(&*backend, &checkpoint, WeightFormat::Bf16, positions, &mut |_| ())
            .expect("nothing is computed")
    };
    let draft = Standalone::new(&*backend, decoder("draft"), config.draft_bounds());
    let draft = Box::new(draft.expect("nothing is computed"));
    let algorithm = RecurrentDraft::new(&*backend, draft, config.slots(), config.kv_dtype);
    let algorithm = Algorithm::on_device(algorithm.expect("nothing is computed"));
    let runner = Runner::new(backend.clone(), decoder("tiny"), Some(algorithm), &config);
    let mut engine = Scheduler::new(runner.expect("fits"), config).expect("a sound config");
    for request in 0..REQUESTS as u32 {
        let token = |at: usize| (at as u32 * 31 + request * 977) % 4000;
        let prompt = (0..context).map(token).collect();
        let request = Request::new(prompt, 2 * ROUNDS * (STEPS + 1) - 1, Box::new(Ignored));
        engine.submit(request).expect("there is room");
    }
    // Until every prompt is read.
    while engine.stats().snapshot().completion_tokens < REQUESTS as u64 {
        engine.step();
    }
    for _ in 0..20 {
        engine.step();
    }
    (engine, backend)
}

fn main() {
    let mut engines = [1_000, 32_000].map(|context| (context, engine(context)));
    let mut figures = engines.each_ref().map(|_| (f64::INFINITY, 0));
    // In turns, and the least of several stretches, since a machine only adds.
    for _ in 0..8 {
        for ((_, (engine, backend)), (seconds, bytes)) in engines.iter_mut().zip(&mut figures) {
            let (before, began) = (backend.bytes.load(Relaxed), Instant::now());
            for _ in 0..ROUNDS / 10 {
                engine.step();
            }
            let rounds = (ROUNDS / 10) as f64;
            *seconds = began.elapsed().as_secs_f64().min(*seconds * rounds) / rounds;
            *bytes = (backend.bytes.load(Relaxed) - before) * 10 / ROUNDS as u64;
        }
    }
    println!("{REQUESTS} requests, chains of {STEPS} steps, one round:");
    for ((context, _), (seconds, bytes)) in engines.iter().zip(figures) {
        println!("{context:>6} tokens of context: {:>7.1} µs, {bytes} bytes", seconds * 1e6);
    }
    let [(short, few), (long, many)] = figures;
    println!("ratio: {:.3} in time, {:.3} in bytes", long / short, many as f64 / few as f64);
}
