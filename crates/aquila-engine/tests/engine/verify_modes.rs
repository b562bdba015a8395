//! Verification other than by match: seeded runs repeat, whatever runs beside them, and `match`
//! keeps nearly as many drafts as the ways that change the text.

use aquila_engine::{EngineConfig, Request};
use aquila_spec::{Shape, Verify};

use crate::support::answers::*;
use crate::support::shipped::{Algorithm, config, engine};

const TARGET_ONLY: Verify = Verify::TargetOnly { single: 1.0, accumulated: 1.0 };

fn some_prompts(every: usize) -> Vec<Vec<u32>> {
    prompts().into_iter().map(|(_, ids)| ids).step_by(every).collect()
}

#[test]
fn a_seeded_run_repeats_at_any_batch_and_page_size() {
    let prompts = some_prompts(4);
    for verify in [TARGET_ONLY, Verify::Rejection] {
        for (algorithm, shape) in
            [(Algorithm::Eagle3, shape(3, 4, 12)), (Algorithm::Standalone, Shape::chain(3))]
        {
            let base = EngineConfig { verify, ..config(shape) };
            let alone = EngineConfig { max_running_requests: 1, ..base.clone() };
            let want = answers(&mut engine(algorithm, alone), &prompts, 40, hot);
            let others = [
                base.clone(),
                EngineConfig { page_size: 16, chunked_prefill_size: 4, ..base.clone() },
                EngineConfig { max_total_tokens: 600, ..base },
            ];
            for other in others {
                let got = answers(&mut engine(algorithm, other), &prompts, 40, hot);
                assert_eq!(got, want, "{algorithm:?}, {verify}");
            }
            let drafts: u64 = want.iter().map(|answer| answer.spec.correct_drafts).sum();
            assert!(drafts > 40, "{algorithm:?}, {verify}: drafts are accepted");
        }
    }
}

#[test]
fn paths_by_probability_go_on_from_piece_to_piece() {
    fn told(request: &mut Request, index: usize) {
        hot(request, index);
        request.logprobs = Some(2);
    }
    let prompts = some_prompts(2);
    let prompts = &prompts[..12];
    for verify in [TARGET_ONLY, Verify::Rejection] {
        let alone = EngineConfig { verify, max_running_requests: 1, ..config(shape(5, 16, 64)) };
        let together = EngineConfig { max_running_requests: 12, ..alone.clone() };
        assert!(together.max_outputs() > together.logit_rows(), "several pieces");
        let want = answers(&mut engine(Algorithm::Eagle3, alone), prompts, 12, told);
        let got = answers(&mut engine(Algorithm::Eagle3, together), prompts, 12, told);
        assert_eq!(got, want, "{verify}");
        assert!(want.iter().all(|answer| answer.logprobs.iter().all(Option::is_some)), "{verify}");
    }
}

#[test]
fn greedy_requests_get_the_plain_text_however_drafts_are_verified() {
    let prompts = some_prompts(6);
    let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 30, greedy);
    for verify in [Verify::TargetOnly { single: 0.3, accumulated: 0.3 }, Verify::Rejection] {
        let config = EngineConfig { verify, ..config(Shape::chain(3)) };
        let got = answers(&mut engine(Algorithm::Eagle3, config), &prompts, 30, greedy);
        assert_eq!(texts(&got), texts(&plain), "{verify}");
    }
}

#[test]
fn match_accepts_85_percent_of_rejections_length() {
    let prompts = some_prompts(1);
    let length = |verify, change: Change| {
        let config = EngineConfig { verify, ..config(Shape::chain(3)) };
        let got = answers(&mut engine(Algorithm::Eagle3, config), &prompts, 160, change);
        let tokens: usize = got.iter().map(|answer| answer.ids.len() - 1).sum();
        tokens as f64 / got.iter().map(|answer| answer.spec.verify_ct).sum::<u64>() as f64
    };
    for (name, change) in [("temperature 0.7", warm as Change), ("temperature 1.0", hot)] {
        let (matched, rejection) =
            (length(Verify::Match, change), length(Verify::Rejection, change));
        println!("{name}: match {matched:.3}, rejection {rejection:.3} tokens a round");
        assert!(matched >= 0.85 * rejection, "{name}: {matched} of {rejection}");
    }
}
