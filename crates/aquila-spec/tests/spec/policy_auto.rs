//! What `auto` chooses and what it may lose, and the table of costs that it goes by.

use std::collections::VecDeque;

use aquila_spec::Shape;
use aquila_spec::policy::{
    Acceptance, Auto, AutoSettings, CostTable, Decision, Policy, PromptRows, RequestOutcome,
    RequestView, RoundOutcome, RoundView, Timed, Timing,
};
use proptest::prelude::*;

use crate::race::{auto, uniform, worlds};

fn views(batch: usize) -> Vec<RequestView> {
    (0..batch as u64).map(RequestView::new).collect()
}

/// Takes the result of a round in which `right` says how many drafts of each request are right.
fn learn(auto: &mut Auto, decision: &Decision, right: impl Fn(usize, usize) -> usize) {
    let outcome = |(at, &shape): (usize, &Shape)| {
        let correct = right(at, shape.steps()).min(shape.steps());
        RequestOutcome::chain(at as u64, shape, correct)
    };
    let requests: Vec<_> = decision.shapes.iter().enumerate().map(outcome).collect();
    auto.learn(&RoundOutcome { setting: decision.setting, requests: &requests, seconds: None });
}

fn round(
    auto: &mut Auto,
    views: &[RequestView],
    right: impl Fn(usize, usize) -> usize,
) -> Decision {
    let decision = auto.choose(&RoundView { requests: views });
    learn(auto, &decision, right);
    decision
}

/// How an adversary decides what is right.
#[derive(Debug, Clone)]
enum Adversary {
    /// Whatever chance says.
    Chance(f64),
    /// All right for so many rounds, then all wrong for as many.
    Alternating(usize),
    /// Right just often enough to stay interesting.
    Rare(usize),
}

fn adversary() -> impl Strategy<Value = Adversary> {
    prop_oneof![
        (0.0..1.0).prop_map(Adversary::Chance),
        (1_usize..200).prop_map(Adversary::Alternating),
        (1_usize..20).prop_map(Adversary::Rare),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Over any n rounds in a row at one batch size, the time beyond what plain decoding takes for
    /// the same tokens is at most `loss_limit + loss_allowance * n` plain rounds, and what the
    /// results in flight when they began pay back. The costs are those of the table.
    #[test]
    fn the_loss_against_plain_is_bounded_whatever_is_accepted(
        adversary in adversary(),
        batch in prop_oneof![Just(1_usize), Just(3), Just(8), Just(32)],
        on_cpu in any::<bool>(),
        late in 0_usize..3,
        seed in any::<u64>(),
    ) {
        let table = worlds()[usize::from(!on_cpu)].table();
        let settings = AutoSettings::new(Shape::chain(7));
        let mut auto = Auto::new(settings.clone(), table.clone());
        let views = views(batch);
        let mut waiting = VecDeque::new();
        let (mut worst, mut total) = (0.0_f64, 0.0_f64);
        for n in 0..1500_usize {
            let decision = auto.choose(&RoundView { requests: &views });
            let right = |n: usize, at: usize, steps: usize| match adversary {
                Adversary::Chance(rate) => (0..steps)
                    .take_while(|&d| uniform(seed, (n * 64 + at) as u64, d as u64) < rate).count(),
                Adversary::Alternating(rounds) => if (n / rounds).is_multiple_of(2) { steps } else { 0 },
                Adversary::Rare(every) => if n.is_multiple_of(every) { steps } else { 0 },
            };
            let shapes = &decision.shapes;
            let drafting = shapes.iter().filter(|shape| shape.steps() > 0).count();
            let rows = decision.rows.unwrap_or(decision.most_rows());
            let steps = decision.setting.shape.steps();
            let seconds = table.verify(batch, rows) + table.draft(drafting, steps);
            let correct: usize = shapes.iter().enumerate()
                .map(|(at, shape)| right(n, at, shape.steps())).sum();
            let loss = seconds / table.verify(batch, batch) - 1.0 - correct as f64 / batch as f64;
            total += loss;
            prop_assert!(total <= settings.loss_limit + settings.loss_allowance * (n + 1) as f64 + 1e-9);
            worst = worst.max(0.0) + loss - settings.loss_allowance;
            prop_assert!(worst <= settings.loss_limit + (late * 7) as f64 + 1e-9, "{}", worst);
            waiting.push_back((n, decision));
            if waiting.len() > late {
                let (n, decision) = waiting.pop_front().unwrap();
                learn(&mut auto, &decision, |at, steps| right(n, at, steps));
            }
            prop_assert!(auto.account().balance() >= -1e-9);
        }
    }

    #[test]
    fn a_table_never_makes_more_look_cheaper(
        noise in proptest::collection::vec(0.2_f64..5.0, 64),
        batch in 1_usize..100, rows in 1_usize..50, steps in 0_usize..12, more in 0_usize..10,
    ) {
        let mut drawn = noise.into_iter().cycle();
        let mut seconds = || drawn.next().unwrap();
        let time = |timing: Timing| {
            let rows = match timing {
                Timing::Round { batch, steps } => batch * (steps + 1),
                Timing::DraftRow => 0,
            };
            Ok::<_, ()>(Some(Timed { rows, verify: seconds(), draft: seconds() }))
        };
        let table = CostTable::measure("noise".into(), &[1, 4, 16], 3, time).unwrap();
        let least = 1e-12;
        prop_assert!(table.verify(batch + more, rows) >= table.verify(batch, rows) - least);
        prop_assert!(table.verify(batch, rows + more) >= table.verify(batch, rows) - least);
        prop_assert!(table.draft(batch + more, steps) >= table.draft(batch, steps) - least);
        prop_assert!(table.draft(batch, steps + 1) >= table.draft(batch, steps) - least);
        let again = CostTable::from_json(&table.to_json()).unwrap();
        prop_assert!((again.verify(batch, rows) / table.verify(batch, rows) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn every_request_gets_a_shape_within_its_cap(
        caps in proptest::collection::vec(proptest::option::of(0_usize..5), 0..40),
        topk in 1_usize..5,
        seed in any::<u64>(),
    ) {
        let largest = Shape::new(5, topk, if topk == 1 { 6 } else { 12 }).unwrap();
        let mut auto = Auto::new(AutoSettings::new(largest), worlds()[1].table());
        let mut views = views(caps.len());
        views.iter_mut().zip(&caps).for_each(|(view, &cap)| view.cap = cap);
        for n in 0..40 {
            let right = |at, steps: usize| (uniform(seed, at as u64, n) * (steps + 1) as f64) as usize;
            let decision = round(&mut auto, &views, right);
            prop_assert_eq!(decision.shapes.len(), caps.len());
            for (shape, cap) in decision.shapes.iter().zip(&caps) {
                prop_assert!(shape.steps() <= cap.unwrap_or(5));
                prop_assert!(shape.steps() <= decision.setting.shape.steps());
            }
            // What may be verified is bounded, and was charged.
            prop_assert_eq!(decision.rows.is_some(), decision.setting.shape.steps() > 0);
            if let Some(rows) = decision.rows {
                prop_assert!(rows > caps.len() && decision.weights.len() == caps.len());
            }
        }
    }
}

#[test]
fn a_request_that_is_right_more_weighs_more() {
    let mut auto = auto(&worlds()[1]);
    let views = views(2);
    let first = |at: usize, steps: usize| if at == 0 { steps } else { 0 };
    let mut last = round(&mut auto, &views, first);
    for _ in 0..100 {
        last = round(&mut auto, &views, first);
    }
    assert!(last.rows.is_some() && last.weights[0] > 2.0 * last.weights[1], "{last:?}");
}

#[test]
fn trees_are_wide_where_second_candidates_are_right() {
    let largest = Shape::new(3, 4, 16).unwrap();
    let mut rows = [0; 2];
    for (second_is_right, rows) in [false, true].into_iter().zip(&mut rows) {
        let mut auto = Auto::new(AutoSettings::new(largest), worlds()[0].table());
        for n in 0..600_u64 {
            let decision = auto.choose(&RoundView { requests: &views(1) });
            let shape = decision.shapes[0];
            // The best candidate is right half the time; else the second is, or none.
            let mut ranks = Vec::new();
            for depth in 0..shape.steps() as u64 {
                match (uniform(5, n, depth) < 0.5, second_is_right) {
                    (true, _) => ranks.push(0),
                    (false, true) => ranks.push(1),
                    (false, false) => break,
                }
            }
            let correct = ranks.len();
            let refused = if correct < shape.steps() { 4 } else { 0 };
            let outcome = RequestOutcome { id: 0, shape, correct, ranks: &ranks, refused };
            let (setting, requests) = (decision.setting, [outcome]);
            auto.learn(&RoundOutcome { setting, requests: &requests, seconds: None });
            *rows = decision.rows.unwrap_or(1);
        }
    }
    assert!(rows[1] > rows[0] + 1, "{rows:?}");
}

#[test]
fn where_drafts_cannot_pay_none_runs_at_all() {
    // Each row costs a whole plain round.
    let time = |timing| {
        let (batch, steps) = match timing {
            Timing::Round { batch, steps } => (batch, steps),
            Timing::DraftRow => (1, 1),
        };
        let rows = batch * (steps + 1);
        let draft = 0.1 * (batch * steps) as f64;
        Ok::<_, ()>(Some(Timed { rows, verify: rows as f64, draft }))
    };
    let table = CostTable::measure("rows".into(), &[1, 8], 7, time).unwrap();
    let mut auto = Auto::new(AutoSettings::new(Shape::chain(7)), table);
    assert!(!auto.reads_prompt(1, PromptRows::of(50)));
    for _ in 0..1000 {
        let decision = round(&mut auto, &views(1), |_, steps| steps);
        assert_eq!(decision.setting.shape, Shape::PLAIN);
    }
    assert_eq!(auto.state().probes, 0);
}

#[test]
fn prompts_that_drafts_processed_leave_enough_to_draft() {
    let mut auto = auto(&worlds()[0]);
    for _ in 0..8 {
        assert!(auto.reads_prompt(4, PromptRows::of(100)));
    }
    let decision = round(&mut auto, &views(4), |_, _| 1);
    assert!(decision.setting.shape.steps() > 0, "{decision:?}");
}

#[test]
fn probes_become_rare_while_nothing_pays() {
    let mut auto = auto(&worlds()[0]);
    let mut drafted = |rounds: usize| {
        let decisions = (0..rounds).map(|_| round(&mut auto, &views(1), |_, _| 0));
        decisions.filter(|decision| decision.setting.shape.steps() > 0).count()
    };
    let (first, later) = (drafted(500), drafted(500));
    assert!(first > later && later > 0 && later <= 24, "{first}, then {later}");
}

#[test]
fn between_its_points_a_table_is_a_straight_line() {
    let table = CostTable::from_json(
        r#"{"format": 3, "key": "", "rows": [1, 5], "verify": [1, 3], "request": 0.5,
            "batches": [1, 3], "steps": [1, 3], "draft": [[1, 3], [1, 5]], "draft_row": 0.1}"#,
    )
    .unwrap();
    assert_eq!([table.verify(1, 3), table.verify(2, 3), table.verify(1, 10)], [2.0, 2.5, 6.0]);
    assert_eq!([table.draft(1, 0), table.draft(1, 2), table.draft(2, 3)], [0.0, 2.0, 4.0]);
}

#[test]
fn drafts_of_larger_batches_grow_as_passes_do() {
    let table = CostTable::from_json(
        r#"{"format": 3, "key": "", "rows": [1, 8], "verify": [10, 12], "request": 0,
            "batches": [1], "steps": [1], "draft": [[5]], "draft_row": 0.1}"#,
    )
    .unwrap();
    assert_eq!([table.draft(8, 1), table.draft(16, 1)], [6.0, 12.0]);
}

#[test]
fn a_broken_table_says_what_is_wrong() {
    let error = |text: &str| CostTable::from_json(text).unwrap_err().to_string();
    let table = |format: u32, rows: &str, verify: &str| {
        format!(
            r#"{{"format": {format}, "key": "k", "rows": {rows}, "verify": {verify}, "request": 0,
                "batches": [1], "steps": [1], "draft": [[1.0]], "draft_row": 0}}"#
        )
    };
    assert!(error(&table(1, "[1]", "[1.0]")).contains("its format is 1"));
    assert!(error(&table(3, "[]", "[1.0]")).contains("rows must ascend from at least 1, not []"));
    assert!(error(&table(3, "[1, 2]", "[1.0]")).contains("lengths of their axes"));
    assert!(error(&table(3, "[1]", "[0.0]")).contains("above 0 for verify"));
    assert!(error("{").contains("not valid JSON"));
}

#[test]
fn drafts_that_were_never_right_are_expected_to_be_wrong() {
    let mut acceptance = Acceptance::new(0.6);
    for _ in 0..6 {
        acceptance.learn(&[RequestOutcome::chain(1, Shape::chain(7), 0)]);
    }
    assert!(acceptance.of_request(1).is_finite(), "{}", acceptance.of_request(1));
    assert!(acceptance.rate_of(1) < 0.02, "{}", acceptance.rate_of(1));

    for batch in [1, 8] {
        let mut auto = auto(&worlds()[0]);
        for n in 0..200 {
            let expected = round(&mut auto, &views(batch), |_, _| 0).expected.unwrap();
            assert!(n < 8 || expected < 1.2 * batch as f64, "round {n}: {expected} of {batch}");
        }
    }
}

#[test]
fn smaller_trees_are_paid_back_beside_void_requests() {
    let paid_back = |void: usize| {
        let mut auto = Auto::new(AutoSettings::new(Shape::chain(7)), worlds()[1].table());
        let views = views(8);
        let all = |decision: &Decision| decision.shapes.iter().all(|shape| shape.steps() > 0);
        let mut decision = round(&mut auto, &views, |_, steps| steps);
        for _ in 0..50 {
            decision = auto.choose(&RoundView { requests: &views });
            if all(&decision) {
                break;
            }
            learn(&mut auto, &decision, |_, steps| steps);
        }
        assert!(all(&decision));
        let before = auto.account().balance();
        let plain = |id| RequestOutcome::chain(id, Shape::PLAIN, 0);
        let requests: Vec<_> = (void as u64..8).map(plain).collect();
        let setting = decision.setting;
        auto.learn(&RoundOutcome { setting, requests: &requests, seconds: None });
        auto.account().balance() - before
    };
    let (none, one, all) = (paid_back(0), paid_back(1), paid_back(8));
    assert!(none > one && one > 0.0 && all == 0.0, "{none} {one} {all}");
}
