//! What it costs to turn tokens into text on the scheduler's thread, and on a thread of its own:
//! `cargo run --release -p aquila-text --example listeners` decodes the same requests both ways, in
//! turns, and prints the ratio of their speeds.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_engine::{EngineConfig, EngineHandle, Runner, Scheduler};
use aquila_model::{Checkpoint, Decoder, LoadFormat, resolve};
use aquila_text::{AnswerSink, Delta, End, Generator, SamplingParams, Tokenizer};

const TOKENS: usize = 128;
const TURNS: usize = 15;

/// Notes the end of an answer.
struct Sink(Sender<usize>, usize);

impl AnswerSink for Sink {
    fn delta(&mut self, delta: Delta) -> bool {
        self.1 += delta.tokens.len();
        true
    }

    fn end(self: Box<Self>, _: End) {
        // Whoever counts is there until all have ended.
        let _ = self.0.send(self.1);
    }
}

fn generator(batch: usize, apart: bool) -> Generator {
    let checkpoint = Checkpoint::open(&resolve("tiny").expect("shipped"), LoadFormat::Auto);
    let checkpoint = checkpoint.expect("a shipped model");
    let config = EngineConfig {
        page_size: 1,
        max_total_tokens: 512 * batch,
        max_running_requests: batch,
        max_queued_requests: batch,
        chunked_prefill_size: 512,
        context_length: 512,
        prefix_cache: false,
        kv_dtype: KvDtype::F32,
        random_seed: 0,
        shape: aquila_spec::Shape::PLAIN,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 0).expect("a CPU"));
    let decoder = Decoder::load(&*backend, &checkpoint, WeightFormat::Bf16, 512, &mut |_| {});
    let runner = Runner::new(backend, decoder.expect("fits"), None, &config).expect("fits");
    let mut engine = Scheduler::new(runner, config).expect("a sound config");
    if apart {
        engine = engine.with_output_thread().expect("a thread");
    }
    let tokenizer = Tokenizer::load(checkpoint.folder().expect("a folder")).expect("a tokenizer");
    let handle = EngineHandle::start(engine).expect("a thread");
    Generator::new(handle, tokenizer, Vec::new(), SamplingParams::default())
}

/// Tokens per second of so many requests.
fn speed(generator: &Generator, batch: usize) -> f64 {
    let params = SamplingParams {
        max_tokens: Some(TOKENS),
        temperature: Some(0.0),
        ignore_eos: Some(true),
        stop: Some(vec!["never written".into(), "nor this".into()]),
        ..SamplingParams::default()
    };
    let params = generator.check(params).expect("sound settings");
    let (done, ended) = channel();
    let since = Instant::now();
    for request in 0..batch as u32 {
        let prompt = (0..32).map(|at| 300 + 17 * at + request).collect();
        let sink = |_| -> Box<dyn AnswerSink> { Box::new(Sink(done.clone(), 0)) };
        generator.submit(prompt, &params, None, sink).expect("there is room");
    }
    drop(done);
    let tokens: usize = ended.iter().sum();
    tokens as f64 / since.elapsed().as_secs_f64()
}

fn main() {
    for batch in [1, 8, 64] {
        let engines = [false, true].map(|apart| generator(batch, apart));
        engines.iter().for_each(|engine| {
            speed(engine, batch);
        });
        let mut ratios = Vec::new();
        let mut inline = Vec::new();
        for turn in 0..TURNS {
            let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
            let mut speeds = [0.0; 2];
            order.into_iter().for_each(|at| speeds[at] = speed(&engines[at], batch));
            ratios.push(speeds[1] / speeds[0]);
            inline.push(speeds[0]);
        }
        ratios.sort_by(f64::total_cmp);
        inline.sort_by(f64::total_cmp);
        println!(
            "batch {batch}: {:.0} tokens a second inline; on a thread {:.3} of that ({:.3} to {:.3})",
            inline[TURNS / 2],
            ratios[TURNS / 2],
            ratios[TURNS / 4],
            ratios[3 * TURNS / 4]
        );
    }
}
