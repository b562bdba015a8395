//! A server over the shipped model on a free port, and a client that speaks HTTP by hand.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_engine::{EngineConfig, EngineHandle, Runner, Scheduler, Snapshot};
use aquila_model::{Checkpoint, Decoder, LoadFormat, resolve};
use aquila_server::{Address, Limits, ModelCard, Server, Settings};
use aquila_text::{AnswerSink, Delta, End, Generator, Prompt, SamplingParams, Tokenizer};
use serde_json::Value;

use crate::gate::Gate;

/// How long anything may take before a test counts as hung. No verdict depends on it otherwise.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Asks until the answer is yes.
pub fn wait_for(what: &str, wished: impl Fn() -> bool) {
    let begun = Instant::now();
    while !wished() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
    }
}

pub fn engine_config() -> EngineConfig {
    EngineConfig {
        page_size: 1,
        max_total_tokens: 16384,
        max_running_requests: 64,
        max_queued_requests: 256,
        chunked_prefill_size: 256,
        context_length: 512,
        prefix_cache: true,
        kv_dtype: KvDtype::F32,
        random_seed: 7,
        shape: aquila_spec::Shape::PLAIN,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    }
}

pub fn settings() -> Settings {
    Settings {
        keys: Default::default(),
        tls: None,
        allowed_origins: Default::default(),
        traces: None,
        web_page: true,
        model: ModelCard {
            served_name: "tiny".into(),
            path: "models/tiny".into(),
            model_type: "llama".into(),
            architectures: vec!["LlamaForCausalLM".into()],
        },
        default_max_tokens: None,
        limits: Limits::default(),
        overlap_reason: "the test says so".into(),
        device: "a device of the test".into(),
        captured_batches: vec![1, 4],
        role: None,
        corpora: None,
        tool_calls: None,
        reasoning: None,
        corpus_folder: None,
    }
}

/// A generator over the shipped model, on a backend and an engine made of the usual ones.
pub fn generator_of(
    config: EngineConfig,
    watched: impl FnOnce(CpuBackend) -> CpuBackend,
    change: impl FnOnce(Scheduler) -> Scheduler,
) -> Generator {
    generator_over(config, watched, |runner, config| {
        change(Scheduler::new(runner, config).unwrap())
    })
}

/// The same, over an engine that `engine` makes of what runs the model.
pub fn generator_over(
    config: EngineConfig,
    watched: impl FnOnce(CpuBackend) -> CpuBackend,
    engine: impl FnOnce(Runner<CpuBackend>, EngineConfig) -> Scheduler,
) -> Generator {
    let backend = Arc::new(watched(CpuBackend::new(IsaChoice::Auto, 2).unwrap()));
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let decoder = Decoder::load(
        &*backend,
        &checkpoint,
        WeightFormat::Bf16,
        config.context_length,
        &mut |_| (),
    )
    .unwrap();
    let tokenizer = Tokenizer::load(checkpoint.folder().unwrap()).unwrap();
    let runner = Runner::new(backend, decoder, None, &config).unwrap();
    let handle = EngineHandle::start(engine(runner, config)).unwrap();
    let eos = checkpoint.eos_token_ids().to_vec();
    Generator::new(handle, tokenizer, eos, SamplingParams::default())
}

pub fn generator() -> Generator {
    generator_of(engine_config(), |cpu| cpu, |engine| engine)
}

/// A server on threads of its own; it drains when dropped.
pub struct Running {
    pub address: SocketAddr,
    pub generator: Generator,
    /// What holds the engine, where the test can.
    gate: Option<Arc<Gate>>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start(generator: Generator, settings: Settings) -> Self {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (tell, told) = channel();
        let engine = generator.clone();
        let thread = std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            let runtime = builder.worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let address = Address::take("127.0.0.1", 0).unwrap();
                let server = Server::listen(address, engine, settings).unwrap();
                tell.send(server.address()).unwrap();
                server.serve(async { drop(stopped.await) }).await;
            });
        });
        let address = told.recv().unwrap();
        Self { address, generator, gate: None, stop: Some(stop), thread: Some(thread) }
    }

    /// A server with the usual settings.
    pub fn usual() -> Self {
        Self::start(generator(), settings())
    }

    /// A server whose engine is held before each pass: requests stay where they are in their lives
    /// until [`Running::wait_until`] lets passes through one by one, or [`Running::run_freely`] all.
    pub fn held(config: EngineConfig, settings: Settings) -> Self {
        Self::held_with(config, settings, |engine| engine)
    }

    /// The same, over an engine that `change` has made of the usual one.
    pub fn held_with(
        config: EngineConfig,
        settings: Settings,
        change: impl FnOnce(Scheduler) -> Scheduler,
    ) -> Self {
        let gate = Arc::new(Gate::closed());
        let generator = generator_of(config, |cpu| cpu.watched(gate.clone()), change);
        let mut server = Self::start(generator, settings);
        server.gate = Some(gate);
        server
    }

    /// Holds the engine before its next pass.
    pub fn hold(&self) {
        self.gate.iter().for_each(|gate| gate.allow(Some(0)));
    }

    /// Holds the engine no longer.
    pub fn run_freely(&self) {
        self.gate.iter().for_each(|gate| gate.allow(None));
    }

    /// Has the next attention panic.
    pub fn inject_fault(&self) {
        self.gate.as_ref().expect("a server that was started held").inject_fault();
    }

    /// Asks the server to drain.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until the server has ended.
    pub fn join(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    pub fn get(&self, path: &str) -> Reply {
        self.connect().send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).reply()
    }

    pub fn post(&self, path: &str, body: &str) -> Reply {
        self.connect().post(path, body.as_bytes()).reply()
    }

    pub fn stats(&self) -> Snapshot {
        self.generator.engine().stats().snapshot()
    }

    /// Waits until the engine's counters are as wished. An engine that is held makes one pass after
    /// the other meanwhile, each once the server has answered a request: so passes never outrun what
    /// clients have sent or closed before.
    pub fn wait_until(&self, what: &str, wished: impl Fn(&Snapshot) -> bool) {
        let begun = Instant::now();
        while !wished(&self.stats()) {
            assert!(begun.elapsed() < PATIENCE, "never: {what}; {:?}", self.stats());
            if let Some(gate) = self.gate.as_ref().filter(|gate| gate.holds()) {
                self.get("/health");
                gate.allow(Some(1));
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// Waits until nothing runs, and checks that no slot is held.
    pub fn wait_until_idle(&self) {
        self.wait_until("idle", |s| s.running == 0 && s.waiting == 0 && s.used_slots == 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.run_freely();
        self.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(ended.is_none_or(|ended| ended.is_ok()), "the server failed");
        }
    }
}

/// A socket.
pub struct Connection {
    pub socket: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        let reader = BufReader::new(socket.try_clone().unwrap());
        Self { socket, reader }
    }

    pub fn send_bytes(mut self, bytes: &[u8]) -> Self {
        // A server may refuse before it has read all; what counts is its answer.
        let _ = self.socket.write_all(bytes);
        self
    }

    pub fn send(self, text: &str) -> Self {
        self.send_bytes(text.as_bytes())
    }

    pub fn post(self, path: &str, body: &[u8]) -> Self {
        let length = body.len();
        self.send(&format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"))
            .send_bytes(body)
    }

    pub fn half_close(self) -> Self {
        self.socket.shutdown(Shutdown::Write).unwrap();
        self
    }

    /// Whether the server closes the connection without another word.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.reader.read(&mut [0; 1]), Ok(0) | Err(_))
    }

    /// Reads a status line and headers.
    pub fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        let mut headers = Vec::new();
        loop {
            line.clear();
            self.reader.read_line(&mut line).unwrap();
            match line.trim_end().split_once(": ") {
                Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
                None => return (status, headers),
            }
        }
    }

    /// Reads a whole reply; the connection may then be used again.
    pub fn reply(&mut self) -> Reply {
        let (status, headers) = self.head();
        let find = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
        let mut body = Vec::new();
        if find("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        } else if let Some(length) = find("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.reader.read_exact(&mut body).unwrap();
        }
        Reply { status, headers, body: String::from_utf8(body).unwrap() }
    }

    /// Reads one chunk of a body; none if it was the last.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim_end(), 16).expect("a chunk's length");
        let mut chunk = vec![0; length + 2];
        self.reader.read_exact(&mut chunk).unwrap();
        chunk.truncate(length);
        (length > 0).then_some(chunk)
    }
}

/// What a server said.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    /// The JSON of a reply that must be a success.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// The events of a stream, which must be framed as such and end in `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let mut events: Vec<&str> = self.body.split("\n\n").collect();
        assert_eq!(events.pop(), Some(""), "a stream ends with an empty line");
        assert_eq!(events.pop(), Some("data: [DONE]"));
        let data = events.iter().map(|event| event.strip_prefix("data: ").expect("an event"));
        data.map(|json| serde_json::from_str(json).unwrap()).collect()
    }
}

impl Reply {
    /// The events of a stream whose events have names, with their names, and whether it ends in
    /// `[DONE]`.
    pub fn named_events(&self) -> (Vec<(String, Value)>, bool) {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let mut events: Vec<&str> = self.body.split("\n\n").collect();
        assert_eq!(events.pop(), Some(""), "a stream ends with an empty line");
        let done = events.pop_if(|event| *event == "data: [DONE]").is_some();
        let events = events.iter().map(|event| {
            let (name, data) = event.split_once('\n').expect("a name and data");
            let name = name.strip_prefix("event: ").expect("a name").to_owned();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(data["type"], name.as_str());
            (name, data)
        });
        (events.collect(), done)
    }
}

/// The text that the engine gives to a prompt without any server.
pub fn offline(generator: &Generator, prompt: &str, params: SamplingParams) -> String {
    struct Sink(String, std::sync::mpsc::Sender<String>);
    impl AnswerSink for Sink {
        fn delta(&mut self, delta: Delta) -> bool {
            self.0.push_str(&delta.text);
            true
        }
        fn end(self: Box<Self>, end: End) {
            self.1.send(self.0 + &end.text).unwrap();
        }
    }
    let params = generator.check(params).unwrap();
    let ids = generator.tokens(Prompt::Text(prompt.into())).unwrap();
    let (tell, told): (_, Receiver<String>) = channel();
    generator.submit(ids, &params, None, |_| Box::new(Sink(String::new(), tell.clone()))).unwrap();
    told.recv_timeout(PATIENCE).unwrap()
}
