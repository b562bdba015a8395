//! The known bugs stay dead: each is put back in turn, and its check must see it.

#[path = "engine/support/mod.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::round::Returned;
use aquila_engine::executor::{GraphSettings, ModelExecutor};
use aquila_engine::{EngineConfig, FinishReason, Request, Runner, Scheduler, Speculation};
use aquila_spec::Shape;
use aquila_spec::known_bugs::Bug;
use support::answers::*;
use support::deferring::Deferring;
use support::recorded::{Pass, Passes, Recorded, run_nothing};
use support::shipped::{Algorithm, config, decoder, engine, engine_with, standalone};
use support::{oracle, request, run};

/// Runs prompts one after the other; answers what the draft ran for the last one.
fn passes(algorithm: Algorithm, shape: Shape, prompts: &[&[u32]]) -> Vec<Pass> {
    let passes = Passes::default();
    let noted = passes.clone();
    let mut engine =
        engine_with(algorithm, config(shape), |draft| Box::new(Recorded { draft, passes: noted }));
    for prompt in prompts {
        passes.lock().unwrap().clear();
        engine.submit(request(prompt, 8).0).unwrap();
        run(&mut engine);
    }
    let passes = passes.lock().unwrap();
    passes.clone()
}

fn some_prompts() -> Vec<Vec<u32>> {
    prompts().into_iter().step_by(8).map(|(_, ids)| ids).collect()
}

fn nodes_run_right_behind_the_certain_rows() {
    let prompt = [1, 300, 45, 501, 77, 9, 210];
    for (algorithm, first) in [(Algorithm::Eagle3, 7), (Algorithm::Standalone, 8)] {
        let passes = passes(algorithm, Shape::chain(3), &[&prompt]);
        let nodes = passes.iter().filter(|pass| !pass.certain).take(2);
        let positions: Vec<&[u32]> = nodes.map(|pass| &pass.plan.positions[..]).collect();
        assert_eq!(positions, [[first], [first + 1]], "{algorithm:?}");
    }
}

fn a_standalone_draft_sees_the_first_token() {
    let prompt = [1, 300, 45, 501, 77, 9, 210];
    let passes = passes(Algorithm::Standalone, Shape::chain(3), &[&prompt]);
    let plan = &passes[0].plan;
    assert_eq!((plan.tokens[0], plan.positions[0]), (prompt[0], 0));
    assert_eq!(plan.rows(), prompt.len() + 1, "the prompt and the bonus");
}

fn a_target_that_drafts_for_itself_is_right() {
    for rounds in oracle::rounds(shape(4, 4, 12), 8, greedy) {
        assert_eq!(rounds.kept, rounds.best);
    }
}

fn drafts_do_not_depend_on_chunks() {
    let prompts = some_prompts();
    for algorithm in [Algorithm::Eagle3, Algorithm::Standalone] {
        let [whole, chunks] = [2048, 4].map(|chunked_prefill_size| {
            let config = EngineConfig { chunked_prefill_size, ..config(Shape::chain(4)) };
            answers(&mut engine(algorithm, config), &prompts, 32, greedy)
        });
        assert_eq!(whole, chunks, "{algorithm:?}");
    }
}

fn trees_are_within_2_percent_of_the_reference() {
    let table = table("tiny-tree-acceptance.json");
    for (kind, got) in acceptance(Algorithm::Eagle3, shape(3, 4, 16)) {
        let want = table["eagle3"][&kind]["steps 3 topk 4 nodes 16"].as_f64().unwrap();
        assert!((got / want - 1.0).abs() <= 0.02, "{kind}: {got} against {want}");
    }
}

fn texts_are_those_of_plain_decoding() {
    // Neighbours have trees of different sizes.
    fn mixed(request: &mut Request, index: usize) {
        if index % 2 == 1 {
            request.speculation = Speculation::Steps(1);
        }
    }
    let prompts = some_prompts();
    let want = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 32, greedy);
    let mut engine = engine(Algorithm::Eagle3, config(shape(4, 4, 12)));
    assert_eq!(texts(&answers(&mut engine, &prompts, 32, mixed)), texts(&want));
}

fn a_tree_takes_slots_by_its_nodes() {
    let shape = shape(5, 8, 64);
    let small = EngineConfig { page_size: 64, max_total_tokens: 128, ..config(shape) };
    let mut engine = engine(Algorithm::Eagle3, small);
    let (request, heard) = request(&[1, 300, 45, 501, 77, 9, 210], 40);
    engine.submit(request).unwrap();
    run(&mut engine);
    assert_eq!(heard.lock().unwrap().reason(), &FinishReason::Length);
}

fn rows_that_saw_another_text_are_not_shared() {
    let text: Vec<u32> = (0..12).map(|i| 40 + 31 * i).collect();
    let other = [&text[..8], &[7, 8, 9, 10]].concat();
    let passes = passes(Algorithm::Eagle3, Shape::chain(3), &[&text, &other]);
    let first = passes[0].plan.positions[0];
    assert!(first > 0, "something was found in the cache");
    assert!(first <= 7, "row 7 saw the token after the common 8, and must be run again");
}

fn a_batch_without_rows_runs_no_pass() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let config = config(Shape::chain(3));
    let passes = Passes::default();
    let draft = Recorded { draft: standalone(&backend, &config), passes: passes.clone() };
    run_nothing(&backend, Box::new(draft));
    assert!(passes.lock().unwrap().is_empty());
}

/// Answers of plain decoding, with rounds of these batch sizes captured: of one request, of several,
/// and of several one of which gets hidden states.
fn captured(batches: &[usize]) -> Vec<Answer> {
    with_graphs(GraphSettings { batches: batches.to_vec(), check: false })
}

fn with_graphs(graphs: GraphSettings) -> Vec<Answer> {
    fn states(request: &mut Request, index: usize) {
        request.returned.hidden_states = index == 3;
    }
    let returned = Returned { hidden_states: true, routed_experts: false };
    let max_total_tokens = 1_000;
    let config = EngineConfig { returned, max_total_tokens, ..config(Shape::PLAIN) };
    let backend = Arc::new(Deferring::new());
    let target = decoder(&*backend, "tiny", config.context_length);
    let runner = Runner::new(backend, target, None, &config).unwrap();
    let executor = ModelExecutor::new(runner, config.clone()).with_graphs(graphs);
    let mut engine = Scheduler::over(executor, config).unwrap();
    let prompts = some_prompts();
    let mut all = answers(&mut engine, &prompts[..1], 8, greedy);
    all.extend(answers(&mut engine, &prompts, 8, greedy));
    all.extend(answers(&mut engine, &prompts, 8, states));
    all
}

fn replayed_rounds_are_launched_ones() {
    assert_eq!(captured(&[1, 2, 3, 4]), captured(&[]));
}

fn padded_rounds_are_launched_ones() {
    assert_eq!(captured(&[8]), captured(&[]));
}

fn a_batch_beyond_the_captured_ones_is_launched() {
    assert_eq!(captured(&[1, 2]), captured(&[]));
}

/// The check that must see a bug.
fn check_of(bug: Bug) -> fn() {
    match bug {
        Bug::DraftPosition => nodes_run_right_behind_the_certain_rows,
        Bug::ShiftedText => a_standalone_draft_sees_the_first_token,
        Bug::BranchSlots => a_target_that_drafts_for_itself_is_right,
        Bug::ExtendWidth | Bug::ChunkTail => drafts_do_not_depend_on_chunks,
        Bug::HiddenNotMoved => trees_are_within_2_percent_of_the_reference,
        Bug::KvNotMoved | Bug::ChoiceStride => texts_are_those_of_plain_decoding,
        Bug::PageFootprint => a_tree_takes_slots_by_its_nodes,
        Bug::LookaheadLost => rows_that_saw_another_text_are_not_shared,
        Bug::IdlePass => a_batch_without_rows_runs_no_pass,
        Bug::GraphWidth | Bug::GraphTakers | Bug::GraphPositions => {
            replayed_rounds_are_launched_ones
        }
        Bug::GraphPadding => padded_rounds_are_launched_ones,
        Bug::GraphPruned => a_batch_beyond_the_captured_ones_is_launched,
    }
}

#[test]
fn every_check_passes_without_its_bug_and_fails_with_it() {
    let mut passed: Vec<fn()> = Vec::new();
    for bug in Bug::ALL {
        let check = check_of(bug);
        if !passed.iter().any(|&done| std::ptr::fn_addr_eq(done, check)) {
            check();
            passed.push(check);
        }
        let alive = bug.put_back();
        let outcome = catch_unwind(AssertUnwindSafe(check));
        drop(alive);
        assert!(outcome.is_err(), "{bug:?} was put back, and its check did not see it");
    }
}

#[test]
fn checked_replays_fail_rounds_with_a_bug_and_none_without() {
    let failures = || -> Vec<String> {
        let answers = with_graphs(GraphSettings { batches: vec![1, 2, 3, 4], check: true });
        let reasons = answers.iter().filter_map(|answer| answer.reason.as_ref()?.failure());
        reasons.map(str::to_owned).collect()
    };
    assert_eq!(failures(), [""; 0]);
    for bug in [Bug::GraphTakers, Bug::GraphPositions] {
        let _alive = bug.put_back();
        let why = failures();
        let differs = |why: &String| why.contains("a replay of a verification of");
        assert!(why.iter().any(differs), "{bug:?}: {why:?}");
    }
}
