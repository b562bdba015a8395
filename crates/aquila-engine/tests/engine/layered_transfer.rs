//! Rows of a prompt leave the engine that processes it layer by layer, while its pass still runs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice, Operation, Watch};
use aquila_engine::{
    Claim, EngineConfig, EnginePair, FinishReason, HandOver, KvRows, Prefilled, Runner, Scheduler,
    Transfer,
};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location};
use aquila_spec::Shape;

use crate::support::across::{across, counts, request, run_pair};
use crate::support::answers::*;
use crate::support::shipped::{self, Algorithm, engine_watched};
use crate::support::{fixture, run, with_overlap};

/// What happened on the executor's thread, in order.
#[derive(Default)]
struct Events(Mutex<Vec<Event>>);

#[derive(Debug, Clone, PartialEq)]
enum Event {
    Operation(Operation),
    Rows(KvRows),
    Prefilled,
}

impl Events {
    fn push(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Watch for Events {
    fn begin(&self, operation: Operation) {
        self.push(Event::Operation(operation));
    }
}

struct Kept(Arc<Events>);

impl HandOver for Kept {
    fn rows(&self, rows: KvRows) {
        self.0.push(Event::Rows(rows));
    }

    fn prefilled(&self, _: Prefilled) {
        self.0.push(Event::Prefilled);
    }

    fn failed(&self, why: &str) {
        panic!("{why}");
    }
}

/// The fixture with layers of two kinds, which has two stores of keys and values.
fn windowed(backend: CpuBackend, config: &EngineConfig) -> Scheduler {
    let folder = Location::Folder(fixture("gemma3"));
    let checkpoint = Checkpoint::open(&folder, LoadFormat::Auto).unwrap();
    let (bf16, positions) = (WeightFormat::Bf16, config.context_length);
    let decoder = Decoder::load(&backend, &checkpoint, bf16, positions, &mut |_| ()).unwrap();
    let runner = Runner::new(Arc::new(backend), decoder, None, config).unwrap();
    with_overlap(Scheduler::new(runner, config.clone()).unwrap())
}

fn backend() -> CpuBackend {
    CpuBackend::new(IsaChoice::Auto, 1).unwrap()
}

fn chunks_of_16(shape: Shape) -> EngineConfig {
    EngineConfig { chunked_prefill_size: 16, context_length: 256, ..shipped::config(shape) }
}

fn some_prompt() -> Vec<u32> {
    (0..50).map(|at| at * 7 % 300 + 3).collect()
}

#[test]
fn rows_of_a_layer_leave_before_the_next_layer_runs() {
    let eagle3 = |events| engine_watched(Algorithm::Eagle3, chunks_of_16(Shape::chain(3)), events);
    let gemma3 = |events| windowed(backend().watched(events), &chunks_of_16(Shape::PLAIN));
    // The stores of the layers of a pass, in order.
    let mut stores = [vec![0; 6], vec![0; 6]];
    stores[1][5] = 1;
    let engines: [&dyn Fn(Arc<dyn Watch>) -> Scheduler; 2] = [&eagle3, &gemma3];
    for (engine, stores) in engines.into_iter().zip(stores) {
        let events = Arc::new(Events::default());
        let mut engine = engine(events.clone());
        let prompt = some_prompt();
        let (mut first, _) = request(&prompt, 8, greedy, 0);
        first.transfer = Transfer::HandOver(Arc::new(Kept(events.clone())));
        let id = engine.submit(first).unwrap();
        assert!(engine.claim(id, Claim { have: 0, seed: 0, candidates: 1 }));
        run(&mut engine);
        let events = events.0.lock().unwrap();
        // Layers of the target that have run in a pass, and rows that each layer has given.
        let (mut layers, mut given) = (0, HashMap::<_, usize>::new());
        for event in &*events {
            match event {
                Event::Operation(Operation::Attend) => layers += 1,
                Event::Operation(Operation::Outputs) => layers = 0,
                Event::Rows(KvRows { group, store, layers: of, rows, .. }) => {
                    assert_eq!(of.len(), 1);
                    let given = given.entry((*group, *store, of.start)).or_default();
                    assert_eq!(rows.start, *given, "in the order of tokens, once");
                    *given = rows.end;
                    if *group == 0 {
                        let before = stores[..layers - 1].iter().filter(|&s| s == store).count();
                        assert_eq!((*store, of.start), (stores[layers - 1], before));
                    } else {
                        assert_eq!(layers, 0, "a draft's rows leave when the round is over");
                    }
                }
                _ => (),
            }
        }
        assert_eq!(events.last(), Some(&Event::Prefilled));
        let target: Vec<_> = given.iter().filter(|((group, ..), _)| *group == 0).collect();
        assert_eq!(target.len(), stores.len());
        assert!(target.iter().all(|&(_, &rows)| rows == prompt.len()), "{target:?}");
    }
}

#[test]
fn a_long_cached_prefix_leaves_in_pieces() {
    let config = EngineConfig {
        chunked_prefill_size: 512,
        context_length: 2400,
        max_total_tokens: 4800,
        ..shipped::config(Shape::PLAIN)
    };
    let prompt: Vec<u32> = (0..2200).map(|at| at * 7 % 300 + 3).collect();
    let mut engine = windowed(backend(), &config);
    let want = answers(&mut engine, std::slice::from_ref(&prompt), 1, greedy);
    // The prompt is in the cache now, and its rows leave with those of the last chunk.
    let events = Arc::new(Events::default());
    let (mut first, _) = request(&prompt, 8, greedy, 0);
    first.transfer = Transfer::HandOver(Arc::new(Kept(events.clone())));
    let id = engine.submit(first).unwrap();
    assert!(engine.claim(id, Claim { have: 0, seed: 0, candidates: 1 }));
    run(&mut engine);
    let events = std::mem::take(&mut *events.0.lock().unwrap());
    let pieces: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Rows(rows) if (rows.store, rows.layers.start) == (0, 0) => Some(&rows.rows),
            _ => None,
        })
        .collect();
    assert_eq!(pieces, [&(0..1024), &(1024..2048), &(2048..2200)]);
    let mut pair = EnginePair::new(engine, windowed(backend(), &config));
    assert_eq!(across(&mut pair, std::slice::from_ref(&prompt), 1, greedy), want);
    run_pair(&mut pair);
}

#[test]
fn layers_of_several_stores_are_received_as_they_were_sent() {
    let config = chunks_of_16(Shape::PLAIN);
    let prompts = vec![some_prompt(), vec![9; 33], vec![4, 5]];
    let want = answers(&mut windowed(backend(), &config), &prompts, 24, warm);
    let (prefill, decode) = (windowed(backend(), &config), windowed(backend(), &config));
    let mut pair = EnginePair::new(prefill, decode);
    assert_eq!(across(&mut pair, &prompts, 24, warm), want);
    assert_eq!(counts(&pair.decode).prompt_tokens, 0, "the prompts were processed elsewhere");
    run_pair(&mut pair);
}

/// Panics when attention runs for the time that is set.
struct Fails(AtomicUsize);

impl Watch for Fails {
    fn begin(&self, operation: Operation) {
        let left = &self.0;
        if operation == Operation::Attend
            && left.load(Relaxed) > 0
            && left.fetch_sub(1, Relaxed) == 1
        {
            panic!("the third layer is broken");
        }
    }
}

#[test]
fn a_pass_that_fails_between_layers_ends_its_requests_alone() {
    let config = chunks_of_16(Shape::PLAIN);
    let fails = Arc::new(Fails(AtomicUsize::new(0)));
    let prefill = windowed(backend().watched(fails.clone()), &config);
    let mut pair = EnginePair::new(prefill, windowed(backend(), &config));
    let prompt = some_prompt();
    let want = across(&mut pair, std::slice::from_ref(&prompt), 24, warm);
    pair.prefill.flush_cache();
    pair.decode.flush_cache();
    // In the second chunk, two layers of which have left by then.
    fails.0.store(6 + 3, Relaxed);
    let [failed] = &across(&mut pair, std::slice::from_ref(&prompt), 24, warm)[..] else {
        panic!("one request has one answer")
    };
    let Some(FinishReason::Abort(why)) = &failed.reason else { panic!("{failed:?}") };
    assert!(why.contains("the third layer is broken"), "{why}");
    assert_eq!(across(&mut pair, std::slice::from_ref(&prompt), 24, warm), want, "it serves on");
    run_pair(&mut pair);
}
