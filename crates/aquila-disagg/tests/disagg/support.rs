//! Engines of the shipped model with its EAGLE-3 head, and workers around them.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::round::Returned;
use aquila_compute::{KvDtype, WeightFormat};
use aquila_disagg::{
    DecodeSettings, DecodeWorker, Identity, PrefillAddress, PrefillSettings, PrefillWorker, Secret,
    Tcp,
};
use aquila_engine::{
    EngineConfig, EngineHandle, Listener, Outcome, Request, RequestId, Runner, Scheduler, Token,
    Transfer, Verdict,
};
use aquila_model::{Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, LoadFormat, resolve};
use aquila_spec::{Algorithm, Drafter, Eagle3, RecurrentDraft, Shape};

/// Bytes that may wait to be sent.
pub const MOST_UNSENT: usize = 1 << 20;
/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn engine() -> EngineHandle {
    let config = EngineConfig {
        page_size: 4,
        max_total_tokens: 4000,
        max_running_requests: 8,
        max_queued_requests: 1000,
        chunked_prefill_size: 32,
        context_length: 1024,
        prefix_cache: true,
        kv_dtype: KvDtype::F32,
        random_seed: 7,
        shape: Shape::chain(3),
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Returned { hidden_states: true, routed_experts: false },
    };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let positions = config.context_length;
    let bf16 = WeightFormat::Bf16;
    let target = Decoder::load(&*backend, &checkpoint, bf16, positions, &mut |_| ()).unwrap();
    let head = resolve("tiny-eagle3").unwrap();
    let head = HeadCheckpoint::open(&head, LoadFormat::Auto, target.spec()).unwrap();
    let embedding = target.embedding();
    let head = Eagle3Head::load(&*backend, &head, bf16, positions, embedding, &mut |_| ()).unwrap();
    let drafter: Box<dyn Drafter<CpuBackend>> =
        Box::new(Eagle3::new(&*backend, head, config.draft_bounds()).unwrap());
    let draft = RecurrentDraft::new(&*backend, drafter, config.slots(), config.kv_dtype).unwrap();
    let algorithm = Algorithm::on_device(draft);
    let runner = Runner::new(backend, target, Some(algorithm), &config).unwrap();
    EngineHandle::start(Scheduler::new(runner, config).unwrap()).unwrap()
}

/// What became of a request: its tokens, or why it was given up, and its draft counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub outcome: Outcome,
}

struct Heard {
    tokens: Vec<u32>,
    done: Sender<Answer>,
}

impl Listener for Heard {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        self.tokens.extend(tokens.iter().map(|token| token.id));
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        let _ = self.done.send(Answer { tokens: self.tokens, outcome });
    }
}

/// A request of some tokens, seeded, and where its answer comes.
pub fn request(index: usize) -> (Request, Receiver<Answer>) {
    let (done, answer) = channel();
    let prompt = (0..20 + 9 * index).map(|at| ((at * 31 + index * 7) % 4000) as u32).collect();
    let mut request = Request::new(prompt, 40, Box::new(Heard { tokens: Vec::new(), done }));
    request.sampling.temperature = if index.is_multiple_of(2) { 0.0 } else { 0.8 };
    request.sampling.seed = index as u64;
    request.seeded = true;
    (request, answer)
}

/// What one engine answers.
pub fn alone(count: usize) -> Vec<Answer> {
    static ENGINE: OnceLock<EngineHandle> = OnceLock::new();
    let engine = ENGINE.get_or_init(engine);
    engine.flush_cache();
    let ask = |index| {
        let (request, answer) = request(index);
        engine.submit(request).unwrap();
        answer.recv_timeout(PATIENCE).unwrap()
    };
    (0..count).map(ask).collect()
}

pub fn identity() -> Identity {
    Identity::default().with("model", "tiny").with("algorithm", "EAGLE3")
}

pub fn prefill_with(secret: Secret, identity: Identity, patience: Duration) -> Prefill {
    let engine = engine();
    let settings = PrefillSettings {
        address: "127.0.0.1:0".into(),
        identity,
        secret,
        patience,
        most_unsent: MOST_UNSENT,
    };
    let worker = PrefillWorker::start(&Tcp, settings, engine.clone()).unwrap();
    Prefill { engine, worker }
}

pub fn decode_with(secret: Secret, identity: Identity) -> Decode {
    let engine = engine();
    let settings = DecodeSettings { identity, secret, hosts: Vec::new(), port: 8998 };
    let worker = DecodeWorker::new(Box::new(Tcp), settings, engine.clone());
    Decode { engine, worker }
}

/// A worker that processes prompts.
pub struct Prefill {
    pub engine: EngineHandle,
    pub worker: PrefillWorker,
}

impl Prefill {
    pub fn new() -> Self {
        prefill_with(Secret::default(), identity(), PATIENCE)
    }

    /// Submits the request of a room.
    pub fn submit(&self, index: usize, room: u64) -> Receiver<Answer> {
        self.submit_numbered(index, room).1
    }

    /// The same, with the engine's number of the request.
    pub fn submit_numbered(&self, index: usize, room: u64) -> (RequestId, Receiver<Answer>) {
        let (mut request, answer) = request(index);
        let open = self.worker.open(room).unwrap();
        request.transfer = Transfer::HandOver(open.clone());
        let id = self.engine.submit(request).unwrap();
        open.admitted(id);
        (id, answer)
    }
}

/// A worker that decodes.
pub struct Decode {
    pub engine: EngineHandle,
    pub worker: Arc<DecodeWorker>,
}

impl Decode {
    pub fn new() -> Self {
        decode_with(Secret::default(), identity())
    }

    /// Submits the request of a room of the worker at this port.
    pub fn submit(&self, index: usize, port: u16, room: u64) -> Receiver<Answer> {
        let (mut request, answer) = request(index);
        let address = PrefillAddress { host: "127.0.0.1".into(), port: Some(port), room };
        request.transfer = Transfer::Receive(self.worker.source(&address).unwrap());
        self.engine.submit(request).unwrap();
        answer
    }
}

/// Waits until nothing of an engine's KV is held by requests.
pub fn no_slot_is_lost(engine: &EngineHandle) {
    let began = std::time::Instant::now();
    loop {
        engine.flush_cache();
        let counts = engine.stats().snapshot();
        if counts.used_slots == 0 {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{} slots are still held", counts.used_slots);
        std::thread::sleep(Duration::from_millis(20));
    }
}
