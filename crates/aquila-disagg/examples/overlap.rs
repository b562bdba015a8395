//! How much of a prompt's KV has left before the prompt ends, and how long after that the second
//! token comes, against one engine that does both. Two engines of one thread each, in one process,
//! with sockets between them; random weights.
//!
//!     cargo run --release -p aquila-disagg --example overlap [MODEL] [CHUNK] [PASSES] [PROMPT]...

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_disagg::{
    DecodeSettings, DecodeWorker, Identity, PrefillAddress, PrefillSettings, PrefillWorker, Room,
    Secret, Tcp,
};
use aquila_engine::{
    EngineConfig, EngineHandle, HandOver, KvRows, Listener, Outcome, Prefilled, Request, Runner,
    Scheduler, Token, Transfer, Verdict,
};
use aquila_model::{Checkpoint, Decoder, LoadFormat, resolve};
use aquila_spec::Shape;

/// Tokens of the prompts where none are given.
const PROMPTS: [usize; 3] = [500, 1500, 3500];

fn engine(model: &str, chunk: usize) -> EngineHandle {
    let config = EngineConfig {
        page_size: 16,
        max_total_tokens: 4096,
        max_running_requests: 2,
        max_queued_requests: 8,
        chunked_prefill_size: chunk,
        context_length: 4096,
        prefix_cache: false,
        kv_dtype: KvDtype::F32,
        random_seed: 7,
        shape: Shape::PLAIN,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let checkpoint = Checkpoint::open(&resolve(model).unwrap(), LoadFormat::Auto).unwrap();
    let positions = config.context_length;
    let decoder =
        Decoder::load(&*backend, &checkpoint, WeightFormat::Bf16, positions, &mut |_| ()).unwrap();
    let runner = Runner::new(backend, decoder, None, &config).unwrap();
    EngineHandle::start(Scheduler::new(runner, config).unwrap()).unwrap()
}

/// Says when tokens come.
struct Clock(Sender<Instant>);

impl Listener for Clock {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        for _ in tokens {
            let _ = self.0.send(Instant::now());
        }
        Verdict::Continue
    }

    fn finished(self: Box<Self>, _: Outcome) {}
}

fn request(prompt: usize) -> (Request, std::sync::mpsc::Receiver<Instant>) {
    let (sender, times) = channel();
    let tokens = (0..prompt).map(|at| (at * 31 % 1000) as u32).collect();
    (Request::new(tokens, 3, Box::new(Clock(sender))), times)
}

/// A room that notes when its prompt ends, and what was sent by then.
struct Noted {
    room: Arc<Room>,
    worker: Arc<PrefillWorker>,
    end: Mutex<Option<(Instant, u64)>>,
}

fn sent(worker: &PrefillWorker) -> u64 {
    worker.peers().snapshot().iter().map(|(_, counts)| counts.bytes).sum()
}

impl HandOver for Noted {
    fn has_room(&self) -> bool {
        self.room.has_room()
    }

    fn rows(&self, rows: KvRows) {
        self.room.rows(rows);
    }

    fn prefilled(&self, prefilled: Prefilled) {
        *self.end.lock().unwrap() = Some((Instant::now(), sent(&self.worker)));
        self.room.prefilled(prefilled);
    }

    fn failed(&self, why: &str) {
        panic!("{why}");
    }
}

fn second(times: &std::sync::mpsc::Receiver<Instant>) -> (Instant, Instant) {
    let patience = Duration::from_secs(300);
    let next = || times.recv_timeout(patience).expect("a token comes");
    (next(), next())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let model = arguments.first().map_or("preset:bench", String::as_str);
    let number = |at: usize, usual: usize| {
        arguments.get(at).map_or(usual, |text| text.parse().expect("a number"))
    };
    let (chunk, passes) = (number(1, 512), number(2, 5));
    let prompts: Vec<usize> = (3..arguments.len()).map(|at| number(at, 0)).collect();
    let prompts = if prompts.is_empty() { PROMPTS.to_vec() } else { prompts };
    let (prefill, decode) = (engine(model, chunk), engine(model, chunk));
    let settings = PrefillSettings {
        address: "127.0.0.1:0".into(),
        identity: Identity::default(),
        secret: Secret::default(),
        patience: Duration::from_secs(60),
        most_unsent: 1 << 30,
    };
    let worker = Arc::new(PrefillWorker::start(&Tcp, settings, prefill.clone()).unwrap());
    let (identity, secret) = (Identity::default(), Secret::default());
    let settings = DecodeSettings { identity, secret, hosts: Vec::new(), port: worker.port() };
    let decodes = DecodeWorker::new(Box::new(Tcp), settings, decode.clone());
    let mut room = 0;
    for prompt in prompts {
        let (mut shares, mut alone, mut apart) = (Vec::new(), Vec::new(), Vec::new());
        let (mut took, mut bytes) = (Vec::new(), 0);
        for _ in 0..passes {
            let (request_alone, times) = request(prompt);
            prefill.submit(request_alone).unwrap();
            let (first, next) = second(&times);
            alone.push((next - first).as_secs_f64());

            let before = sent(&worker);
            let opened = worker.open(room).unwrap();
            let end = Mutex::new(None);
            let noted = Arc::new(Noted { room: opened.clone(), worker: worker.clone(), end });
            let (mut first, _) = request(prompt);
            first.transfer = Transfer::HandOver(noted.clone());
            let (mut answer, times) = request(prompt);
            let address = PrefillAddress { host: "127.0.0.1".into(), port: None, room };
            answer.transfer = Transfer::Receive(decodes.source(&address).unwrap());
            let began = Instant::now();
            opened.admitted(prefill.submit(first).unwrap());
            decode.submit(answer).unwrap();
            let (_, next) = second(&times);
            let (end, then) = noted.end.lock().unwrap().expect("its prompt has ended");
            bytes = sent(&worker) - before;
            shares.push((then - before) as f64 / bytes as f64);
            apart.push((next - end).as_secs_f64());
            took.push((end - began).as_secs_f64());
            room += 1;
        }
        let spread = |values: &mut Vec<f64>, scale: f64| {
            values.sort_by(f64::total_cmp);
            let at = |at: usize| values[at] * scale;
            let (middle, last) = (values.len() / 2, values.len() - 1);
            format!("{:.1} ({:.1}-{:.1})", at(middle), at(0), at(last))
        };
        println!(
            "{prompt} tokens, {:.0} MB in chunks of {chunk}: prompt {} s; sent before its end {} %; \
             end to second token {} ms, one engine {} ms",
            bytes as f64 / 1e6,
            spread(&mut took, 1.0),
            spread(&mut shares, 100.0),
            spread(&mut apart, 1e3),
            spread(&mut alone, 1e3),
        );
    }
    prefill.stop();
    decode.stop();
}
