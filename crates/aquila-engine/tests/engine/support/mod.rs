//! A small real model, engines over it, and listeners that write down what they hear.
#![allow(dead_code)]

pub mod across;
pub mod answers;
pub mod counting;
pub mod deferring;
pub mod delayed;
pub mod learning;
pub mod logged;
pub mod oracle;
pub mod parity;
pub mod recorded;
pub mod scripted;
pub mod shipped;
pub mod simulated;
pub mod snapshot;
pub mod watched;
pub mod workload;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{Backend, KvDtype, WeightFormat};
use aquila_engine::{
    EngineConfig, FinishReason, Listener, Outcome, Request, Runner, Scheduler, Token, TokenRows,
    Usage, Verdict,
};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location};
use aquila_spec::{Shape, SpecStats};

/// The vocabulary of the fixture.
pub const VOCABULARY: u32 = 320;

/// A file of `crates/aquila-model/tests/fixtures`, or of the folder `AQUILA_FIXTURES` where an
/// example runs without the sources.
pub fn fixture(name: &str) -> PathBuf {
    let sources = || concat!(env!("CARGO_MANIFEST_DIR"), "/../aquila-model/tests/fixtures").into();
    std::env::var_os("AQUILA_FIXTURES").map_or_else(sources, PathBuf::from).join(name)
}

pub fn config() -> EngineConfig {
    EngineConfig {
        page_size: 1,
        max_total_tokens: 4096,
        max_running_requests: 16,
        max_queued_requests: 1000,
        chunked_prefill_size: 64,
        context_length: 512,
        prefix_cache: true,
        kv_dtype: KvDtype::F32,
        random_seed: 7,
        shape: Shape::PLAIN,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    }
}

/// An engine over the fixture `qwen2`, on a backend made by `wrap`.
pub fn engine_on<B: Backend>(
    config: EngineConfig,
    wrap: impl FnOnce(CpuBackend) -> B,
) -> Scheduler {
    let backend = Arc::new(wrap(CpuBackend::new(IsaChoice::Auto, 1).unwrap()));
    let checkpoint =
        Checkpoint::open(&Location::Folder(fixture("qwen2")), LoadFormat::Auto).unwrap();
    let decoder = Decoder::load(
        &*backend,
        &checkpoint,
        WeightFormat::Bf16,
        config.context_length,
        &mut |_| (),
    )
    .unwrap();
    with_overlap(
        Scheduler::new(Runner::new(backend, decoder, None, &config).unwrap(), config).unwrap(),
    )
}

/// The engine, with overlap if `AQUILA_TEST_OVERLAP` says `on`.
pub fn with_overlap(engine: Scheduler) -> Scheduler {
    match std::env::var("AQUILA_TEST_OVERLAP").as_deref() {
        Ok("on") => engine.overlapped().unwrap(),
        Ok("off") | Err(_) => engine,
        Ok(other) => panic!("AQUILA_TEST_OVERLAP is on or off, not {other}"),
    }
}

pub fn engine(config: EngineConfig) -> Scheduler {
    engine_on(config, |backend| backend)
}

/// What a listener heard.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Heard {
    pub prompt: Vec<Token>,
    pub tokens: Vec<Token>,
    /// How many tokens came at a time: those of the prefill, then those of each round.
    pub runs: Vec<usize>,
    pub end: Option<(FinishReason, Usage)>,
    pub spec: SpecStats,
    pub rows: TokenRows,
}

impl Heard {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    pub fn reason(&self) -> &FinishReason {
        &self.end.as_ref().expect("the request has ended").0
    }

    pub fn usage(&self) -> Usage {
        self.end.clone().expect("the request has ended").1
    }
}

/// Writes down what it hears; ends the request after `stop_after` tokens, if given.
pub struct Notes {
    pub heard: Arc<Mutex<Heard>>,
    pub stop_after: Option<usize>,
}

impl Listener for Notes {
    fn prompt(&mut self, tokens: Vec<Token>) {
        let mut heard = self.heard.lock().unwrap();
        assert!(heard.prompt.is_empty() && heard.tokens.is_empty(), "the prompt comes once, first");
        heard.prompt = tokens;
    }

    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        let mut heard = self.heard.lock().unwrap();
        heard.runs.push(tokens.len());
        for (kept, token) in tokens.iter().enumerate() {
            heard.tokens.push(token.clone());
            if self.stop_after == Some(heard.tokens.len()) {
                return Verdict::Stop { kept: kept + 1 };
            }
        }
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        let mut heard = self.heard.lock().unwrap();
        assert!(heard.end.is_none(), "a request ends once");
        heard.spec = outcome.usage.spec.clone();
        heard.rows = outcome.rows;
        heard.end = Some((outcome.reason, outcome.usage));
    }
}

/// A greedy request and what it hears.
pub fn request(prompt: &[u32], max_tokens: usize) -> (Request, Arc<Mutex<Heard>>) {
    let heard = Arc::new(Mutex::new(Heard::default()));
    let listener = Box::new(Notes { heard: heard.clone(), stop_after: None });
    (Request::new(prompt.to_vec(), max_tokens, listener), heard)
}

/// Rounds until nothing is left to do, with a check of every slot after each.
pub fn run(engine: &mut Scheduler) {
    while !engine.is_idle() {
        engine.step();
        engine.check().unwrap();
    }
    engine.wait_for_listeners();
}

/// A stream of numbers for test cases.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }

    pub fn prompt(&mut self, tokens: usize) -> Vec<u32> {
        (0..tokens).map(|_| self.below(u64::from(VOCABULARY)) as u32).collect()
    }
}
