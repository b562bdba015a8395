//! Drafts from n-grams: invisible in the output, invariant in the scope of a request, and worth it.

use std::sync::Arc;

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_engine::{EngineConfig, Runner, Scheduler};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location, resolve};
use aquila_spec::ngram::{Corpora, MatchType, Ngram, NgramScope, NgramSettings};
use aquila_spec::{Algorithm, Shape};

use crate::support::answers::*;
use crate::support::shipped::config;
use crate::support::{Numbers, fixture};

/// An engine over the model at `location` that drafts from n-grams where there are settings, and
/// the corpora that it drafts from.
pub(crate) fn engine_at(
    location: &Location,
    settings: Option<NgramSettings>,
    config: EngineConfig,
) -> (Scheduler, Arc<Corpora>) {
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let checkpoint = Checkpoint::open(location, LoadFormat::Auto).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let decoder = Decoder::load(&*backend, &checkpoint, format, positions, &mut |_| ()).unwrap();
    let corpora = Corpora::new(1 << 20, decoder.spec().vocab_size);
    let algorithm = settings.map(|settings| {
        Algorithm::on_host("NGRAM", Ngram::new(settings, corpora.clone()).unwrap())
    });
    let runner = Runner::new(backend, decoder, algorithm, &config).unwrap();
    (crate::support::with_overlap(Scheduler::new(runner, config).unwrap()), corpora)
}

fn tiny(settings: Option<NgramSettings>, config: EngineConfig) -> Scheduler {
    engine_at(&resolve("tiny").unwrap(), settings, config).0
}

fn settings(scope: NgramScope, match_type: MatchType) -> NgramSettings {
    NgramSettings { scope, match_type, ..NgramSettings::default() }
}

fn trees() -> Shape {
    NgramSettings::default().shape(NgramSettings::NODES).unwrap()
}

#[test]
fn n_grams_are_invisible_in_the_output() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    let modes: [Change; 4] = [greedy, warm, hot, penalized];
    let plain: Vec<Vec<Answer>> = modes
        .iter()
        .map(|&mode| answers(&mut tiny(None, config(Shape::PLAIN)), &prompts, 32, mode))
        .collect();
    use MatchType::{Bfs, Prob};
    use NgramScope::{Request, Server};
    let cases = [
        (Request, Bfs, trees(), 1, 8, 0),
        (Request, Prob, shape(5, 4, 16), 16, 3, 1),
        (Request, Bfs, shape(8, 1, 9), 4, 1, 2),
        (Server, Bfs, trees(), 16, 8, 3),
        (Server, Prob, shape(5, 16, 64), 1, 8, 0),
        (Server, Prob, trees(), 4, 3, 2),
    ];
    for (scope, match_type, shape, page_size, batch, mode) in cases {
        let config = EngineConfig { page_size, max_running_requests: batch, ..config(shape) };
        let mut engine = tiny(Some(settings(scope, match_type)), config);
        assert_eq!(engine.algorithm(), Some("NGRAM"));
        let got = answers(&mut engine, &prompts, 32, modes[mode]);
        let what = format!("{scope:?} {match_type:?}, {shape}, pages of {page_size}, mode {mode}");
        assert_eq!(texts(&got), texts(&plain[mode]), "{what}");
        assert!(got.iter().any(|answer| answer.spec.correct_drafts > 0), "{what}");
    }
}

#[test]
fn drafts_do_not_depend_on_other_requests_or_memory() {
    let tiny = resolve("tiny").unwrap();
    let written: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    let mut numbers = Numbers(5);
    let random: Vec<Vec<u32>> = (0..30).map(|_| numbers.prompt(40)).collect();
    let [qwen2, qwen3] = ["qwen2", "qwen3"].map(|name| Location::Folder(fixture(name)));
    for (location, prompts, match_type, mode, length, crowd) in [
        (&tiny, &written, MatchType::Bfs, greedy as Change, 2048, 415),
        (&qwen2, &random, MatchType::Bfs, greedy, 256, 300),
        (&qwen3, &random, MatchType::Prob, hot, 256, 300),
    ] {
        let engine = |shape, config: EngineConfig| {
            let settings = settings(NgramScope::Request, match_type);
            let settings = (shape != Shape::PLAIN).then_some(settings);
            engine_at(location, settings, EngineConfig { shape, ..config }).0
        };
        let base = EngineConfig {
            max_running_requests: 1,
            chunked_prefill_size: 2048,
            context_length: length,
            ..config(trees())
        };
        let plain = answers(&mut engine(Shape::PLAIN, base.clone()), prompts, 40, mode);
        let want = answers(&mut engine(trees(), base.clone()), prompts, 40, mode);
        assert_eq!(texts(&want), texts(&plain), "{location:?}");
        let variants = [
            ("batch 8", EngineConfig { max_running_requests: 8, ..base.clone() }),
            ("pages of 16", EngineConfig { page_size: 16, ..base.clone() }),
            ("chunks of 4", EngineConfig { chunked_prefill_size: 4, ..base.clone() }),
        ];
        for (what, config) in variants {
            let got = answers(&mut engine(trees(), config), prompts, 40, mode);
            assert_eq!(got, want, "{location:?}: {what}");
        }
        let mut again = engine(trees(), EngineConfig { page_size: 4, ..base.clone() });
        answers(&mut again, prompts, 40, mode);
        let got = answers(&mut again, prompts, 40, mode);
        assert_eq!(got, want, "{location:?}: prefixes found in the cache");
        let small =
            EngineConfig { max_running_requests: 8, max_total_tokens: crowd, ..base.clone() };
        let mut crowded = engine(trees(), small);
        let got = answers(&mut crowded, prompts, 40, mode);
        assert_eq!(got, want, "{location:?}: a pool that is too small");
        assert!(crowded.stats().snapshot().preemptions > 0, "the pool was meant to be too small");
    }
}

/// Tokens per verification, the bonus included: those after the first, over verifications.
fn acceptance(answers: &[Answer]) -> f64 {
    // As in the tables of other drafts, texts that end within 16 tokens do not count.
    let long = || answers.iter().filter(|answer| answer.ids.len() > 16);
    let tokens: usize = long().map(|answer| answer.ids.len() - 1).sum();
    let rounds: u64 = long().map(|answer| answer.spec.verify_ct).sum();
    tokens as f64 / rounds as f64
}

#[test]
fn code_takes_fewer_rounds_with_a_corpus_of_its_continuation() {
    let prompts = prompts().into_iter().filter(|(kind, _)| kind == "code");
    let prompts: Vec<Vec<u32>> = prompts.map(|(_, ids)| ids).collect();
    for match_type in [MatchType::Bfs, MatchType::Prob] {
        let settings = settings(NgramScope::Request, match_type);
        let (mut engine, corpora) =
            engine_at(&resolve("tiny").unwrap(), Some(settings), config(trees()));
        let alone = answers(&mut engine, &prompts, 160, greedy);
        assert!(acceptance(&alone) >= 3.0, "{match_type:?}: {}", acceptance(&alone));
        let mut load = corpora.load("answers").unwrap();
        for answer in &alone {
            load.push(&answer.ids);
            load.end_document();
        }
        load.finish().unwrap();
        let helped = answers(&mut engine, &prompts, 160, greedy);
        assert_eq!(texts(&helped), texts(&alone));
        assert!(acceptance(&helped) >= 8.0, "{match_type:?}: {}", acceptance(&helped));
        println!("{match_type:?}: {:.2}, {:.2}", acceptance(&alone), acceptance(&helped));
    }
}
