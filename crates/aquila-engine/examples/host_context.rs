//! What the host does in a round, whatever the device does: with a backend that computes nothing,
//! `cargo run --release -p aquila-engine --example host_context` times rounds of 64 requests with a
//! short and with a long context, and counts the bytes that are handed to the backend.
//!
//! Nothing of either may grow with the context.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use aquila_compute::choose::{Ask, Candidate, Choice};
use aquila_compute::{
    Backend, DraftIds, ForwardPlan, HeadShape, HostTensor, KvDtype, KvShape, PlanBounds, Result,
    RopeTable, Sink, WeightFormat,
};
use aquila_engine::{EngineConfig, Listener, Outcome, Request, Runner, Scheduler, Token, Verdict};
use aquila_model::{Checkpoint, Decoder, LoadFormat, resolve};
use aquila_spec::{Shape, Speculator, Standalone, Verify};

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

    fn asked(&self, asks: &[Ask<'_>]) {
        self.told(asks.iter().map(|ask| size_of_val(ask) + size_of_val(ask.path)).sum());
    }
}

impl Backend for Null {
    type Rows = ();
    type Weight = ();
    type Vector = ();
    type Table = ();
    type Rope = ();
    type Kv = ();
    type Plan = usize;

    fn describe(&self) -> String {
        "nothing".into()
    }

    fn pack(&self, _: &[HostTensor], _: WeightFormat) -> Result<()> {
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
        let words = [&host.tokens, &host.positions, &host.writes, &host.slots, &host.tails]
            .into_iter()
            .chain([&host.outputs, &host.sources]);
        let words: usize = words.map(|list| size_of_val(&list[..])).sum();
        self.told(words + size_of_val(&host.sights[..]) + size_of_val(&host.changes[..]));
        Ok(())
    }

    fn embed(&self, _: &(), _: &usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn rms_norm(&self, _: &(), _: &(), _: f32, _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn project(&self, _: &(), _: Option<&()>, _: &(), _: usize, _: Sink, _: &mut ()) -> Result<()> {
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
        _: HeadShape,
        _: f32,
        _: &usize,
        _: &(),
        _: usize,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn swiglu(&self, _: &(), _: usize, _: &mut ()) -> Result<()> {
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

    fn gather_outputs(&self, _: &(), plan: &usize, _: &mut ()) -> Result<usize> {
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

    /// Every other draft is right.
    fn choose(&self, _: &(), asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        self.asked(asks);
        let choice = |ask: &Ask<'_>| {
            let token = 7 + u32::from(ask.position.is_multiple_of(2));
            Choice { token, logprob: None, top: Vec::new() }
        };
        Ok(asks.iter().map(choice).collect())
    }

    fn offer(
        &self,
        _: &(),
        asks: &[Ask<'_>],
        _: usize,
        _: Option<DraftIds<'_>>,
    ) -> Result<Vec<Vec<Candidate>>> {
        self.asked(asks);
        Ok(asks.iter().map(|_| vec![Candidate { token: 7, probability: 1.0 }]).collect())
    }

    fn read(&self, _: &(), _: usize) -> Result<Vec<f32>> {
        Ok(Vec::new())
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
    };
    let decoder = |name: &str| {
        let checkpoint = Checkpoint::open(&resolve(name).expect("shipped"), LoadFormat::Auto);
        let checkpoint = checkpoint.expect("a shipped model");
        Decoder::load(&*backend, &checkpoint, WeightFormat::Bf16, positions, &mut |_| ())
            .expect("nothing is computed")
    };
    let draft = Standalone::new(&*backend, decoder("draft"), config.draft_bounds());
    let draft = Box::new(draft.expect("nothing is computed"));
    let algorithm = Speculator::new(&*backend, draft, config.slots(), config.kv_dtype);
    let algorithm = Box::new(algorithm.expect("nothing is computed"));
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
