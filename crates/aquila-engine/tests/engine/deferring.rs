//! A round is a program of the backend: enqueued without looking at any value, and read once.

use std::sync::Arc;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::round::Returned;
use aquila_compute::{Backend, WeightFormat};
use aquila_engine::executor::{GraphSettings, ModelExecutor};
use aquila_engine::{EngineConfig, EnginePair, Request, Runner, Scheduler};
use aquila_model::{
    Decoder, Eagle3Head, EagleCheckpoint, HeadCheckpoint, LoadFormat, MtpCheckpoint, resolve,
};
use aquila_spec::ngram::{Corpora, Ngram, NgramScope, NgramSettings};
use aquila_spec::{
    Algorithm, Drafter, Eagle, Eagle3, Mtp, MtpRoom, RecurrentDraft, Shape, Standalone,
    TrustedNgrams, Verify,
};

use crate::support::across::across;
use crate::support::answers::*;
use crate::support::deferring::Deferring;
use crate::support::parity::Parity;
use crate::support::scripted::{Scripted, any_tree};
use crate::support::shipped::{config, decoder};

fn recurrent<B: Backend>(
    backend: &B,
    drafter: impl Drafter<B> + 'static,
    config: &EngineConfig,
) -> Algorithm<B> {
    let (slots, dtype) = (config.slots(), config.kv_dtype);
    let draft = RecurrentDraft::new(backend, Box::new(drafter), slots, dtype).unwrap();
    Algorithm::on_device(draft)
}

fn ngram(target: usize) -> Ngram {
    let settings = NgramSettings { scope: NgramScope::Request, ..NgramSettings::default() };
    Ngram::new(settings, Corpora::new(1 << 20, target)).unwrap()
}

/// An algorithm on any backend.
fn algorithm<B: Backend>(
    name: &str,
    backend: &B,
    target: &Decoder<B>,
    config: &EngineConfig,
) -> Option<Algorithm<B>> {
    let (format, load, spec) = (WeightFormat::Bf16, LoadFormat::Auto, target.spec());
    let (bounds, lm_head) = (config.draft_bounds(), target.lm_head());
    if let Some(model) = name.strip_suffix("+NGRAM") {
        let ngram = TrustedNgrams::new(ngram(spec.vocab_size));
        return Some(algorithm(model, backend, target, config)?.behind("MIX", ngram));
    }
    Some(match name {
        "EAGLE3" => {
            let location = resolve("tiny-eagle3").unwrap();
            let head = HeadCheckpoint::open(&location, load, spec).unwrap();
            let head = Eagle3Head::load_for(backend, &head, format, target, &mut |_| ()).unwrap();
            recurrent(backend, Eagle3::new(backend, head, bounds).unwrap(), config)
        }
        "EAGLE" => {
            let head = EagleCheckpoint::open(&resolve("tiny-eagle").unwrap(), load, spec).unwrap();
            let head = head.load(backend, format, target, lm_head, &mut |_| ()).unwrap();
            recurrent(backend, Eagle::new(backend, "EAGLE", head, bounds).unwrap(), config)
        }
        "MTP" => {
            let head = MtpCheckpoint::open(&resolve("tiny-mtp").unwrap(), load, spec).unwrap();
            let head = head.load(backend, format, target, lm_head, &mut |_| ()).unwrap();
            let (shape, requests) = (config.shape, config.max_running_requests);
            let (slots, dtype) = (config.slots(), config.kv_dtype);
            let room = MtpRoom { bounds, shape, requests, slots, dtype };
            Algorithm::on_device(Mtp::new(backend, head, room).unwrap())
        }
        "STANDALONE" => {
            let draft = decoder(backend, "draft", config.context_length);
            recurrent(backend, Standalone::new(backend, draft, bounds).unwrap(), config)
        }
        "NGRAM" => Algorithm::on_host("NGRAM", ngram(spec.vocab_size)),
        _ => return None,
    })
}

fn scheduler<B: Backend>(name: &str, backend: Arc<B>, config: &EngineConfig) -> Scheduler {
    with_graphs(name, backend, config, GraphSettings::default())
}

fn with_graphs<B: Backend>(
    name: &str,
    backend: Arc<B>,
    config: &EngineConfig,
    graphs: GraphSettings,
) -> Scheduler {
    let target = decoder(&*backend, "tiny", config.context_length);
    let algorithm = algorithm(name, &*backend, &target, config);
    let runner = Runner::new(backend, target, algorithm, config).unwrap();
    let executor = ModelExecutor::new(runner, config.clone()).with_graphs(graphs);
    crate::support::with_overlap(Scheduler::over(executor, config.clone()).unwrap())
}

/// Runs prompts on both backends: the answers, counts and histograms must be equal, and each round
/// must read once.
fn compare(name: &str, config: &EngineConfig, change: Change, scripted: bool) {
    compare_with(name, config, change, scripted, GraphSettings::default());
}

/// The same with rounds of these batch sizes captured on one of them.
fn compare_captured(
    name: &str,
    config: &EngineConfig,
    change: Change,
    scripted: bool,
    batches: &[usize],
) {
    let graphs = GraphSettings { batches: batches.to_vec(), check: false };
    compare_with(name, config, change, scripted, graphs);
}

/// The same with these graphs on one of them. A check of a replay reads three times.
fn compare_with(
    name: &str,
    config: &EngineConfig,
    change: Change,
    scripted: bool,
    graphs: GraphSettings,
) {
    let what = format!("{name}, {}, {}", config.shape, config.verify);
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(10).map(|(_, ids)| ids).collect();
    let run = |engine: &mut Scheduler| {
        if scripted {
            let policy = Scripted::new(&[config.shape], any_tree);
            engine.draft_by(Box::new(policy)).unwrap();
        }
        answers(engine, &prompts, 24, change)
    };
    let cpu = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let want = run(&mut scheduler(name, cpu, config));
    let backend = Arc::new(Deferring::new());
    let mut engine = with_graphs(name, backend.clone(), config, graphs.clone());
    let got = run(&mut engine);
    assert_eq!(got, want, "{what}");
    let rounds = engine.stats().snapshot().rounds;
    assert!(rounds > 20, "{what}: {rounds}");
    let replays = backend.replays();
    assert_eq!(replays > rounds / 4, !graphs.batches.is_empty(), "{what}: {replays} replays");
    let checks = if graphs.check { replays } else { 0 };
    assert_eq!(backend.reads(), rounds + 3 * checks, "{what}: one read a round, three a check");
    let drafts: u64 = got.iter().map(|answer| answer.spec.correct_drafts).sum();
    assert_eq!(drafts > 0, name != "NONE", "{what}: {drafts} drafts were right");
}

fn small(shape: Shape) -> EngineConfig {
    let (chunked_prefill_size, max_total_tokens) = (16, 2_000);
    let returned = Returned { hidden_states: true, routed_experts: false };
    let context_length = 256;
    EngineConfig {
        chunked_prefill_size,
        max_total_tokens,
        context_length,
        returned,
        ..config(shape)
    }
}

fn with_reports(request: &mut Request, index: usize) {
    hot(request, index);
    penalized(request, index);
    request.logprobs = Some(2);
    request.returned.hidden_states = true;
}

#[test]
fn a_round_of_any_proposer_is_read_once() {
    let (chain, tree) = (Shape::chain(3), shape(3, 4, 12));
    for (name, shape, change) in [
        ("NONE", Shape::PLAIN, greedy as Change),
        ("EAGLE3", chain, with_reports),
        ("EAGLE3", tree, greedy),
        ("EAGLE", chain, greedy),
        ("EAGLE", tree, with_reports),
        ("MTP", chain, with_reports),
        ("MTP", tree, greedy),
        ("STANDALONE", chain, greedy),
        ("STANDALONE", tree, with_reports),
        ("NGRAM", tree, greedy),
        ("EAGLE3+NGRAM", tree, greedy),
    ] {
        compare(name, &small(shape), change, false);
    }
}

/// Runs prompts with overlap on a backend that defers, and answers how many rounds were enqueued and
/// not read at most; answers, counts and histograms must be those without overlap.
fn most_unread(name: &str, config: &EngineConfig, change: Change) -> u64 {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(10).map(|(_, ids)| ids).collect();
    let cpu = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let want = answers(&mut scheduler(name, cpu, config), &prompts, 24, change);
    let backend = Arc::new(Deferring::new());
    let batches = vec![1, 2, 4, 8];
    let graphs = GraphSettings { batches, check: false };
    let mut engine = with_graphs(name, backend.clone(), config, graphs).overlapped().unwrap();
    assert_eq!(answers(&mut engine, &prompts, 24, change), want, "{name}, {}", config.shape);
    backend.most_unread()
}

#[test]
fn with_overlap_a_round_is_enqueued_before_the_last_is_read() {
    let (chain, tree) = (Shape::chain(3), shape(3, 4, 12));
    for (name, shape, change) in [
        ("NONE", Shape::PLAIN, with_reports as Change),
        ("EAGLE3", chain, with_reports),
        ("EAGLE", tree, greedy),
        ("MTP", chain, greedy),
        ("STANDALONE", tree, with_reports),
    ] {
        assert_eq!(most_unread(name, &small(shape), change), 2, "{name}");
    }
}

#[test]
fn a_round_whose_trees_the_host_drafts_waits_for_the_last() {
    for name in ["NGRAM", "EAGLE3+NGRAM"] {
        assert_eq!(most_unread(name, &small(shape(3, 4, 12)), greedy), 1, "{name}");
    }
}

#[test]
fn a_round_behind_the_end_of_a_grammar_does_not_fail() {
    // So short that all decode together.
    let prompts = prompts().into_iter().step_by(10).map(|(_, ids)| ids[..2].to_vec());
    let prompts: Vec<Vec<u32>> = prompts.collect();
    let ends = |request: &mut Request, index: usize| {
        let fails_at = (index == 1).then_some(5);
        let rule = Parity { length: 4 + 2 * index, fails_at, ..Parity::default() };
        request.grammar = Some(Arc::new(rule));
    };
    for (name, shape) in [("NONE", Shape::PLAIN), ("EAGLE3", Shape::chain(3))] {
        let cpu = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
        let want = answers(&mut scheduler(name, cpu, &small(shape)), &prompts, 24, ends);
        let mut engine = scheduler(name, Arc::new(Deferring::new()), &small(shape));
        engine = engine.overlapped().unwrap();
        assert_eq!(answers(&mut engine, &prompts, 24, ends), want, "{name}");
        assert_eq!(engine.stats().snapshot().failed_rounds, 0, "{name}");
    }
}

#[test]
fn a_round_of_any_verification_is_read_once() {
    for verify in [Verify::TargetOnly { single: 1.0, accumulated: 1.0 }, Verify::Rejection] {
        for (name, shape) in [("EAGLE3", shape(3, 4, 12)), ("STANDALONE", Shape::chain(3))] {
            compare(name, &EngineConfig { verify, ..small(shape) }, with_reports, false);
        }
    }
}

#[test]
fn a_round_in_which_drafts_resume_is_read_once() {
    let config = EngineConfig { parked_rows: 16, ..small(shape(5, 16, 64)) };
    for name in ["EAGLE3", "STANDALONE"] {
        compare(name, &config, greedy, true);
    }
}

#[test]
fn a_replayed_round_of_any_proposer_is_the_launched_one() {
    let (chain, tree) = (Shape::chain(3), shape(3, 4, 12));
    for (name, shape, change, batches) in [
        ("NONE", Shape::PLAIN, with_reports as Change, &[1, 2, 4, 8][..]),
        ("EAGLE3", chain, with_reports, &[2, 5, 8]),
        ("EAGLE3", tree, greedy, &[1, 2, 3, 4, 5, 6, 7, 8]),
        ("EAGLE", tree, with_reports, &[8]),
        ("MTP", chain, with_reports, &[4, 8]),
        ("MTP", tree, greedy, &[8]),
        ("STANDALONE", chain, greedy, &[3, 6, 8]),
        ("NGRAM", tree, greedy, &[4, 8]),
        ("EAGLE3+NGRAM", tree, greedy, &[4, 8]),
    ] {
        compare_captured(name, &small(shape), change, false, batches);
    }
}

#[test]
fn a_replayed_round_of_trees_of_any_size_is_the_launched_one() {
    let config = EngineConfig { parked_rows: 16, ..small(shape(5, 16, 64)) };
    for name in ["EAGLE3", "STANDALONE"] {
        compare_captured(name, &config, greedy, true, &[2, 8]);
    }
    let config = EngineConfig { verify: Verify::Rejection, ..small(shape(3, 4, 12)) };
    compare_captured("EAGLE3", &config, with_reports, false, &[2, 8]);
}

#[test]
fn a_graph_that_cannot_be_replayed_is_launched() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(10).map(|(_, ids)| ids).collect();
    let config = small(Shape::chain(3));
    let run = |mut engine: Scheduler| {
        let answers = answers(&mut engine, &prompts, 24, greedy);
        (answers, engine.stats().snapshot())
    };
    let backend = Arc::new(Deferring::without_replays());
    let graphs = GraphSettings { batches: vec![1, 2, 4, 8], check: false };
    let (got, stats) = run(with_graphs("EAGLE3", backend.clone(), &config, graphs));
    let cpu = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let (want, _) = run(scheduler("EAGLE3", cpu, &config));
    assert_eq!(got, want);
    assert_eq!((stats.failed_rounds, backend.replays()), (0, 0));
    // Each graph was tried once: a round of this chain has three parts.
    let refused = backend.refused_replays();
    assert!((1..stats.rounds).contains(&refused), "{refused} of {} rounds", stats.rounds);
}

#[test]
fn a_warm_up_says_which_batches_were_captured() {
    let config = EngineConfig { max_total_tokens: 64, ..small(Shape::chain(3)) };
    let graphs = GraphSettings { batches: vec![1, 2, 8], check: false };
    let backend = Arc::new(Deferring::new());
    let mut engine = with_graphs("EAGLE3", backend, &config, graphs);
    // There is no room for rounds of eight.
    let (batches, parts) = engine.capture_graphs(&[1, 2, 8], &mut |_| {}).unwrap();
    assert_eq!((batches, parts.len()), (vec![1, 2], 6));
}

#[test]
fn a_warm_up_that_fails_says_why() {
    let graphs = GraphSettings { batches: vec![1], check: true };
    let backend = Arc::new(Deferring::without_replays());
    let mut engine = with_graphs("EAGLE3", backend, &small(Shape::chain(3)), graphs);
    let why = engine.capture_graphs(&[1], &mut |_| {}).unwrap_err().to_string();
    assert!(
        why.contains("before anything was served") && why.contains("no room for a graph"),
        "{why}"
    );
}

#[test]
fn a_replay_of_any_proposer_leaves_what_its_launch_leaves() {
    let (chain, tree) = (Shape::chain(3), shape(3, 4, 12));
    for (name, shape, change, batches) in [
        ("NONE", Shape::PLAIN, with_reports as Change, &[1, 4, 8][..]),
        ("EAGLE3", tree, with_reports, &[2, 8]),
        ("MTP", chain, with_reports, &[4, 8]),
        ("STANDALONE", tree, greedy, &[3, 8]),
        ("NGRAM", tree, greedy, &[8]),
    ] {
        let graphs = GraphSettings { batches: batches.to_vec(), check: true };
        let config = EngineConfig { max_total_tokens: 600, ..small(shape) };
        compare_with(name, &config, change, false, graphs);
    }
}

#[test]
fn requests_are_handed_from_one_deferring_engine_to_another() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(10).map(|(_, ids)| ids).collect();
    for (name, shape) in [("EAGLE3", shape(3, 4, 12)), ("MTP+NGRAM", Shape::chain(3))] {
        let config = config(shape);
        let cpu = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
        let want = answers(&mut scheduler(name, cpu, &config), &prompts, 16, warm);
        let engine = || scheduler(name, Arc::new(Deferring::new()), &config);
        let mut pair = EnginePair::new(engine(), engine());
        assert_eq!(across(&mut pair, &prompts, 16, warm), want, "{name}");
        assert_eq!(pair.decode.stats().snapshot().rebuilt_drafts, 0, "{name}");
    }
}
