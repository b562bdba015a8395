//! Speculation: invisible in the output, invariant in its drafts, as effective as the references.

use aquila_engine::{EngineConfig, Request, Speculation};
use aquila_spec::{Shape, SpecStats};
use serde_json::Value;

use crate::support::answers::*;
use crate::support::oracle;
use crate::support::shipped::{Algorithm, config, engine};

#[test]
fn speculation_is_invisible_in_the_output() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(3).map(|(_, ids)| ids).collect();
    let modes: [Change; 4] = [greedy, warm, hot, penalized];
    let plain: Vec<Vec<Answer>> = modes
        .iter()
        .map(|&mode| {
            answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 32, mode)
        })
        .collect();
    // A covering sample: every value of every dimension, in changing company.
    let cases = [
        (Algorithm::Eagle3, shape(1, 1, 2), 1, 8, 0),
        (Algorithm::Eagle3, shape(3, 1, 4), 16, 3, 1),
        (Algorithm::Eagle3, shape(8, 1, 9), 4, 1, 3),
        (Algorithm::Eagle3, shape(5, 2, 8), 4, 8, 2),
        (Algorithm::Eagle3, shape(5, 4, 16), 1, 3, 3),
        (Algorithm::Eagle3, shape(5, 8, 32), 16, 8, 0),
        (Algorithm::Eagle3, shape(5, 16, 64), 1, 8, 1),
        (Algorithm::Standalone, shape(5, 1, 6), 1, 3, 2),
        (Algorithm::Standalone, shape(3, 1, 4), 16, 8, 3),
        (Algorithm::Standalone, shape(5, 4, 32), 4, 8, 1),
        (Algorithm::Standalone, shape(5, 8, 64), 16, 3, 0),
        (Algorithm::Standalone, shape(5, 2, 16), 1, 1, 2),
    ];
    for (algorithm, shape, page_size, batch, mode) in cases {
        let config = EngineConfig { page_size, max_running_requests: batch, ..config(shape) };
        let got = answers(&mut engine(algorithm, config), &prompts, 32, modes[mode]);
        let what =
            format!("{algorithm:?}, {shape}, pages of {page_size}, batch {batch}, mode {mode}");
        assert_eq!(texts(&got), texts(&plain[mode]), "{what}");
        assert!(got.iter().all(|h| h.spec.verify_ct > 0), "{what}");
    }
}

#[test]
fn outputs_beyond_the_logits_at_hand_come_in_pieces() {
    let prompts = prompts().into_iter().map(|(_, ids)| ids);
    let prompts: Vec<Vec<u32>> = prompts.step_by(2).take(12).collect();
    let config = |shape| EngineConfig { max_running_requests: 12, ..config(shape) };
    let wide = config(shape(5, 16, 64));
    assert!(prompts.len() == 12 && wide.max_outputs() > wide.logit_rows());
    for mode in [greedy as Change, warm, penalized] {
        let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 12, mode);
        let got = answers(&mut engine(Algorithm::Eagle3, wide.clone()), &prompts, 12, mode);
        assert_eq!(texts(&got), texts(&plain));
    }
}

#[test]
fn drafts_do_not_depend_on_other_requests_or_memory() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    for (algorithm, shape, mode) in [
        (Algorithm::Eagle3, shape(4, 1, 5), greedy as Change),
        (Algorithm::Eagle3, shape(4, 4, 12), warm),
        (Algorithm::Standalone, shape(4, 1, 5), hot),
        (Algorithm::Standalone, shape(4, 4, 12), greedy),
    ] {
        let what = format!("{algorithm:?}, {shape}");
        same_in_any_company(&what, &prompts, mode, config(shape), 430, |config| {
            engine(algorithm, config)
        });
    }
}

#[test]
fn opted_out_requests_are_plain_and_change_nothing_for_others() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(5).map(|(_, ids)| ids).collect();
    fn every_other(request: &mut Request, index: usize) {
        request.speculation = match index % 3 {
            0 => Speculation::Off,
            1 => Speculation::Steps(2),
            _ => Speculation::Free,
        };
    }
    let want =
        answers(&mut engine(Algorithm::Eagle3, config(shape(5, 1, 6))), &prompts, 40, greedy);
    let got =
        answers(&mut engine(Algorithm::Eagle3, config(shape(5, 1, 6))), &prompts, 40, every_other);
    assert_eq!(texts(&got), texts(&want));
    for (index, (got, want)) in got.iter().zip(&want).enumerate() {
        match index % 3 {
            0 => assert_eq!(got.spec, SpecStats::default()),
            1 => assert!(got.spec.histogram.len() <= 3, "at most two drafts: {:?}", got.spec),
            _ => assert_eq!(got.spec, want.spec),
        }
    }
}

#[test]
fn a_target_that_drafts_for_itself_is_always_right() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(6).map(|(_, ids)| ids).collect();
    for mode in [greedy as Change, hot, penalized] {
        let got =
            answers(&mut engine(Algorithm::Itself, config(shape(4, 1, 5))), &prompts, 41, mode);
        for heard in &got {
            // Every round keeps all its drafts; the last one as far as the text goes.
            let SpecStats { verify_ct, histogram, .. } = &heard.spec;
            let full: u64 = histogram.get(4).copied().unwrap_or(0);
            assert!(full + 1 >= *verify_ct, "{:?}", heard.spec);
        }
    }
}

#[test]
fn a_target_that_drafts_for_itself_keeps_the_best_paths() {
    for mode in [greedy as Change, hot, penalized] {
        for shape in [shape(4, 4, 12), shape(5, 2, 6), shape(3, 8, 40)] {
            let all = oracle::rounds(shape, 6, mode);
            for rounds in &all {
                assert_eq!(rounds.kept, rounds.best, "{shape}");
            }
            let deep = |drafts: &usize| *drafts == shape.steps();
            assert!(all.iter().flat_map(|r| &r.best).any(deep), "{shape}: some reach the bottom");
        }
    }
    let cut = oracle::rounds(shape(5, 2, 6), 6, hot);
    assert!(cut.iter().flat_map(|r| &r.best).any(|&drafts| drafts < 5), "some paths are cut short");
}

fn compare(algorithm: Algorithm, name: &str, shape: Shape, key: &str, table: &Value) {
    for (kind, got) in acceptance(algorithm, shape) {
        let want = table[name][&kind][key].as_f64().unwrap();
        println!("{name}, {shape}, {kind}: {got:.3}, reference {want:.3}");
        assert!((got / want - 1.0).abs() <= 0.02, "{name}, {shape}, {kind}: {got} against {want}");
    }
}

#[test]
fn chains_are_within_2_percent_of_the_reference() {
    let table = table("tiny-acceptance.json");
    for steps in [1, 3, 5] {
        compare(Algorithm::Eagle3, "eagle3", Shape::chain(steps), &steps.to_string(), &table);
        compare(
            Algorithm::Standalone,
            "standalone",
            Shape::chain(steps),
            &steps.to_string(),
            &table,
        );
    }
}

#[test]
fn trees_are_within_2_percent_of_the_reference() {
    let table = table("tiny-tree-acceptance.json");
    for (steps, topk, nodes) in [(3, 4, 16), (5, 8, 48)] {
        let key = format!("steps {steps} topk {topk} nodes {nodes}");
        compare(Algorithm::Eagle3, "eagle3", shape(steps, topk, nodes), &key, &table);
        compare(Algorithm::Standalone, "standalone", shape(steps, topk, nodes), &key, &table);
    }
}
