//! What a draft is given to run: which tokens, at which positions, seeing what.
//!
//! The output cannot show a mistake here, since the target corrects every draft.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{Backend, BlockTables, WeightFormat};
use aquila_engine::{EngineConfig, FinishReason, Runner, Scheduler};
use aquila_model::{Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, LoadFormat, resolve};
use aquila_spec::policy::Fixed;
use aquila_spec::{Drafter, Eagle3, RecurrentDraft, Shape, Standalone};

use crate::support::counting::counting;
use crate::support::recorded::{Pass, Passes, Recorded, run_nothing};
use crate::support::shipped::{Algorithm, config, engine, engine_with};
use crate::support::{request, run};

const SEVEN: [u32; 7] = [1, 300, 45, 501, 77, 9, 210];

/// Runs one request alone; answers its prompt and answer, and what the draft ran.
fn passes(algorithm: Algorithm, config: EngineConfig, prompt: &[u32]) -> (Vec<u32>, Vec<Pass>) {
    let passes = Passes::default();
    let noted = passes.clone();
    let mut engine =
        engine_with(algorithm, config, |draft| Box::new(Recorded { draft, passes: noted }));
    let (request, heard) = request(prompt, 24);
    engine.submit(request).unwrap();
    run(&mut engine);
    let text = [prompt, &heard.lock().unwrap().ids()].concat();
    let passes = passes.lock().unwrap().clone();
    (text, passes)
}

fn whole(shape: Shape) -> EngineConfig {
    EngineConfig { chunked_prefill_size: 256, ..config(shape) }
}

#[test]
fn a_head_runs_the_bonus_at_the_last_committed_position() {
    let (text, passes) = passes(Algorithm::Eagle3, whole(Shape::chain(3)), &SEVEN);
    let [extend, first, second, ..] = &passes[..] else { panic!("{passes:?}") };
    assert_eq!(extend.plan.positions, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(extend.plan.tokens, text[1..8], "a head's row takes the token after its own");
    assert_eq!(first.plan.positions, [7]);
    assert_eq!(second.plan.positions, [8]);
}

#[test]
fn a_standalone_draft_runs_the_bonus_behind_committed_rows() {
    let (text, passes) = passes(Algorithm::Standalone, whole(Shape::chain(3)), &SEVEN);
    let [extend, first, second, ..] = &passes[..] else { panic!("{passes:?}") };
    assert_eq!(extend.plan.positions, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(extend.plan.tokens, text[..8], "it sees every token, the first included");
    assert_eq!(first.plan.positions, [8]);
    assert_eq!(second.plan.positions, [9]);
}

#[test]
fn nodes_follow_the_certain_rows_in_every_round() {
    for (algorithm, lookahead) in [(Algorithm::Eagle3, 1), (Algorithm::Standalone, 0)] {
        for shape in [Shape::chain(4), Shape::new(4, 3, 9).unwrap()] {
            let (text, passes) = passes(algorithm, whole(shape), &SEVEN);
            let what = format!("{algorithm:?}, {shape}");
            let (mut rows, mut depth) = (0, 0);
            let mut tables = BlockTables::default();
            for Pass { certain, plan, .. } in &passes {
                if *certain {
                    // Each certain row is run once, and none is left out.
                    let range = rows..rows + plan.rows();
                    let positions: Vec<u32> = range.clone().map(|row| row as u32).collect();
                    assert_eq!(plan.positions, positions, "{what}");
                    let end = range.end + lookahead;
                    assert_eq!(plan.tokens, text[range.start + lookahead..end], "{what}");
                    (rows, depth) = (range.end, 0);
                } else {
                    assert!(plan.rows() <= shape.topk(), "{what}");
                    assert!(plan.positions.iter().all(|&at| at as usize == rows + depth), "{what}");
                    depth += 1;
                    assert!(depth < shape.steps(), "{what}");
                }
                // A row sees what is before it and itself, and writes where no row reads.
                tables.change(plan);
                for row in 0..plan.rows() {
                    let seen: Vec<u32> = tables.seen(plan, row).collect();
                    assert_eq!(seen.len(), plan.positions[row] as usize + 1, "{what}");
                    assert_eq!(seen.last(), Some(&plan.writes[row]), "{what}");
                }
            }
            assert!(rows > SEVEN.len(), "{what}: the draft went on to the end");
        }
    }
}

#[test]
fn the_last_row_of_a_chunk_takes_the_next_token() {
    let prompt: Vec<u32> = (0..11).map(|i| 40 + 31 * i).collect();
    let chunked = EngineConfig { chunked_prefill_size: 4, ..config(Shape::chain(3)) };
    let (text, passes) = passes(Algorithm::Eagle3, chunked, &prompt);
    let chunks: Vec<&[u32]> = passes[..3].iter().map(|pass| &pass.plan.tokens[..]).collect();
    assert_eq!(chunks, [&prompt[1..5], &prompt[5..9], &text[9..12]]);
    assert!(passes[..2].iter().all(|pass| pass.plan.outputs.is_empty()), "no tree begins there");
}

#[test]
fn a_prefix_from_the_cache_leaves_a_draft_no_gap() {
    let prompt: Vec<u32> = (0..12).map(|i| 40 + 31 * i).collect();
    for (algorithm, lookahead) in [(Algorithm::Eagle3, 1), (Algorithm::Standalone, 0)] {
        let passes = Passes::default();
        let noted = passes.clone();
        let config = EngineConfig { page_size: 4, ..whole(Shape::chain(3)) };
        let mut engine =
            engine_with(algorithm, config, |draft| Box::new(Recorded { draft, passes: noted }));
        for _ in 0..2 {
            passes.lock().unwrap().clear();
            let (request, _) = request(&prompt, 8);
            engine.submit(request).unwrap();
            run(&mut engine);
        }
        let passes = passes.lock().unwrap();
        let plan = &passes[0].plan;
        assert!(plan.rows() < prompt.len(), "{algorithm:?}: something was found");
        // What it does not run is there already: the match is less by the lookahead.
        let first = plan.positions[0] as usize;
        assert_eq!(plan.tokens[0], prompt[first + lookahead], "{algorithm:?}");
        assert_eq!(plan.spans[0].len(), first + 1, "{algorithm:?}");
    }
}

#[test]
fn only_a_head_is_given_hidden_states() {
    for (algorithm, takes) in [(Algorithm::Eagle3, true), (Algorithm::Standalone, false)] {
        let (_, passes) = passes(algorithm, whole(Shape::new(3, 2, 6).unwrap()), &SEVEN);
        for pass in passes.iter().filter(|pass| pass.certain) {
            assert_eq!(pass.hidden, takes, "{algorithm:?}");
            assert_eq!(pass.plan.sources.is_empty(), !takes, "{algorithm:?}");
        }
    }
}

fn decoder<B: Backend>(backend: &B, name: &str, positions: usize) -> Decoder<B> {
    let checkpoint = Checkpoint::open(&resolve(name).unwrap(), LoadFormat::Auto).unwrap();
    Decoder::load(backend, &checkpoint, WeightFormat::Bf16, positions, &mut |_| ()).unwrap()
}

fn standalone<B: Backend>(backend: &B, config: &EngineConfig) -> Box<dyn Drafter<B>> {
    let draft = decoder(backend, "draft", config.context_length);
    Box::new(Standalone::new(backend, draft, config.draft_bounds()).unwrap())
}

fn eagle3<B: Backend>(
    backend: &B,
    target: &Decoder<B>,
    config: &EngineConfig,
) -> Box<dyn Drafter<B>> {
    let location = resolve("tiny-eagle3").unwrap();
    let head = HeadCheckpoint::open(&location, LoadFormat::Auto, target.spec()).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let head = Eagle3Head::load(backend, &head, format, positions, target.embedding(), &mut |_| ());
    Box::new(Eagle3::new(backend, head.unwrap(), config.draft_bounds()).unwrap())
}

#[test]
fn without_declared_hidden_states_none_are_stored_or_copied() {
    let config = whole(Shape::chain(3));
    let (backend, counts) = counting();
    // The bytes of rows that a runner makes around its draft, and whether it captures.
    type Counted = Option<Box<dyn Drafter<CpuBackend>>>;
    let made = |choose: &dyn Fn(&Decoder<CpuBackend>) -> Counted| {
        let target = decoder(&*backend, "tiny", config.context_length);
        let draft = choose(&target).map(|drafter| {
            let (slots, dtype) = (config.slots(), config.kv_dtype);
            let draft = RecurrentDraft::new(&*backend, drafter, slots, dtype).unwrap();
            aquila_spec::Algorithm::on_device(draft)
        });
        let before = counts.made();
        let runner = Runner::new(backend.clone(), target, draft, &config).unwrap();
        (counts.made() - before, runner)
    };
    let (plain, _) = made(&|_| None);
    let (alone, runner) = made(&|_| Some(standalone(&*backend, &config)));
    assert_eq!(alone, plain, "no room for hidden states");
    assert!(!runner.captures());
    let (head, captures) = made(&|target| Some(eagle3(&*backend, target, &config)));
    assert!(captures.captures() && head > plain, "the count would show them");

    for (runner, copies) in [(runner, false), (captures, true)] {
        let before = counts.copies();
        let mut engine =
            crate::support::with_overlap(Scheduler::new(runner, config.clone()).unwrap());
        let (request, heard) = request(&SEVEN, 24);
        engine.submit(request).unwrap();
        run(&mut engine);
        assert_eq!(heard.lock().unwrap().ids().len(), 24);
        assert_eq!(counts.copies() > before, copies);
    }
}

#[test]
fn nothing_is_copied_for_a_head_that_cannot_resume() {
    let config = EngineConfig { parked_rows: 4, ..whole(Shape::chain(3)) };
    let (backend, counts) = counting();
    let target = decoder(&*backend, "tiny", config.context_length);
    let (slots, dtype) = (config.slots(), config.kv_dtype);
    let head = RecurrentDraft::new(&*backend, eagle3(&*backend, &target, &config), slots, dtype);
    let head = aquila_spec::Algorithm::on_device(head.unwrap());
    let runner = Runner::new(backend.clone(), target, Some(head), &config);
    let mut engine = Scheduler::new(runner.unwrap(), config).unwrap();
    engine.draft_by(Box::new(Fixed::new(Shape::PLAIN))).unwrap();
    let (request, heard) = request(&SEVEN, 24);
    engine.submit(request).unwrap();
    // The prompt is read, four rows wait, and the fifth would be one too many.
    let copies = |engine: &mut Scheduler| {
        let before = counts.copies();
        engine.step();
        counts.copies() - before
    };
    let copied: Vec<u64> = (0..12).map(|_| copies(&mut engine)).collect();
    assert!(copied[..6].iter().all(|&copies| copies > 0), "{copied:?}");
    assert!(copied[6..].iter().all(|&copies| copies == 0), "{copied:?}");
    run(&mut engine);
    assert_eq!(heard.lock().unwrap().ids().len(), 24);
}

#[test]
fn an_empty_batch_is_drafted_without_a_pass() {
    let config = whole(Shape::chain(3));
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let passes = Passes::default();
    let draft = Recorded { draft: standalone(&backend, &config), passes: passes.clone() };
    run_nothing(&backend, Box::new(draft));
    assert!(passes.lock().unwrap().is_empty());
    assert!(!engine(Algorithm::Eagle3, config).step(), "an engine without requests has no round");
}

#[test]
fn trees_take_slots_by_nodes_at_any_page_size() {
    // Branches that had pages of their own would take 8 pages for each round; the pool has 2.
    let shape = Shape::new(5, 8, 64).unwrap();
    for algorithm in [Algorithm::Eagle3, Algorithm::Standalone] {
        let small = EngineConfig { page_size: 64, max_total_tokens: 128, ..whole(shape) };
        let mut engine = engine(algorithm, small);
        let (request, heard) = request(&SEVEN, 40);
        engine.submit(request).unwrap();
        engine.step();
        let used = |engine: &Scheduler| engine.stats().snapshot().used_slots;
        assert_eq!(used(&engine), 128, "{algorithm:?}: 7 rows of the prompt and 64 nodes");
        engine.step();
        assert_eq!(used(&engine), 128, "{algorithm:?}: at least 7 rows and 64 nodes");
        run(&mut engine);
        let heard = heard.lock().unwrap();
        assert_eq!(heard.reason(), &FinishReason::Length, "{algorithm:?}");
        assert_eq!(heard.ids().len(), 40, "{algorithm:?}");
        assert_eq!(engine.stats().snapshot().preemptions, 0, "{algorithm:?}");
    }
}

#[test]
fn rounds_without_prompts_are_timed_step_by_step() {
    let mut engine = engine(Algorithm::Eagle3, whole(Shape::new(3, 2, 6).unwrap()));
    let (request, heard) = request(&SEVEN, 12);
    engine.submit(request).unwrap();
    engine.step();
    assert_eq!(engine.stats().times().rounds, 0, "a round that reads a prompt is not counted");
    run(&mut engine);
    let times = engine.stats().times();
    assert_eq!(times.rounds, heard.lock().unwrap().spec.verify_ct);
    let steps = times.draft + times.verify + times.accept + times.commit + times.extend;
    assert_eq!(steps + times.host(), times.whole);
    assert!([times.draft, times.verify, times.extend].iter().all(|time| !time.is_zero()));
}
