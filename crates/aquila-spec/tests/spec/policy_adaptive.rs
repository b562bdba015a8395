//! SGLang's controller, on sequences computed by hand.

use aquila_spec::Shape;
use aquila_spec::policy::{
    Adaptive, AdaptiveTable, Decision, Fixed, Policy, RequestOutcome, RequestView, RoundOutcome,
    RoundView, Setting,
};

fn table(slots: &str) -> AdaptiveTable {
    AdaptiveTable::parse(slots).unwrap()
}

/// One slot that decides after every result.
fn eager(steps: &str, more: &str, launch: usize) -> Adaptive {
    let slot =
        format!(r#"{{"candidate_steps": {steps}, "warmup_batches": 0, "update_interval": 1"#);
    let text = format!(r#"{{"1": {slot}{more}}}}}"#);
    Adaptive::new(table(&text), Some(launch), Vec::new()).unwrap()
}

fn views(batch: usize) -> Vec<RequestView> {
    (0..batch as u64).map(RequestView::new).collect()
}

fn choose(policy: &mut dyn Policy, batch: usize) -> Decision {
    policy.choose(&RoundView { requests: &views(batch) })
}

fn steps(policy: &mut dyn Policy, batch: usize) -> usize {
    choose(policy, batch).setting.shape.steps()
}

fn learn(policy: &mut dyn Policy, setting: Setting, correct: &[usize]) {
    let outcome = |(id, &n): (usize, &usize)| RequestOutcome::chain(id as u64, setting.shape, n);
    let requests: Vec<_> = correct.iter().enumerate().map(outcome).collect();
    policy.learn(&RoundOutcome { setting, requests: &requests, seconds: None });
}

/// Runs a round of as many requests as there are results; answers the steps of the next.
fn round(policy: &mut Adaptive, correct: &[usize]) -> usize {
    let setting = choose(policy, correct.len()).setting;
    learn(policy, setting, correct);
    steps(policy, correct.len())
}

fn error(file: &str) -> String {
    AdaptiveTable::parse(file).unwrap_err().to_string()
}

#[test]
fn a_slot_starts_at_the_launch_steps_or_its_middle() {
    let file = r#"{"1": {"candidate_steps": [1, 5]}, "8": {"candidate_steps": [7, 3, 1, 3]}}"#;
    let mut policy = Adaptive::new(table(file), Some(7), Vec::new()).unwrap();
    assert_eq!(steps(&mut policy, 1), 5);
    assert_eq!(steps(&mut policy, 8), 7);
    assert_eq!((policy.ema(1), policy.ema(8)), (4.0, 6.0));
    let mut policy = Adaptive::new(table(file), None, Vec::new()).unwrap();
    // The union is 1, 3, 5, 7: its middle is 5, which the second slot lacks.
    assert_eq!((steps(&mut policy, 1), steps(&mut policy, 8)), (5, 3));
}

#[test]
fn nothing_moves_before_the_warm_up_and_between_the_intervals() {
    let slot = r#"{"1": {"candidate_steps": [1, 3, 7], "ema_alpha": 1, "warmup_batches": 1,
                   "update_interval": 2}}"#;
    let mut policy = Adaptive::new(table(slot), Some(3), Vec::new()).unwrap();
    assert_eq!(round(&mut policy, &[0, 0]), 3);
    assert_eq!(round(&mut policy, &[0, 0]), 3);
    assert_eq!(round(&mut policy, &[0, 0]), 1);
}

#[test]
fn an_empty_result_neither_counts_nor_teaches() {
    let slot = r#"{"1": {"candidate_steps": [1, 3, 7], "ema_alpha": 1, "warmup_batches": 1,
                   "update_interval": 1}}"#;
    let mut policy = Adaptive::new(table(slot), Some(3), Vec::new()).unwrap();
    let setting = choose(&mut policy, 2).setting;
    learn(&mut policy, setting, &[]);
    assert_eq!(policy.ema(1), 2.0);
    assert_eq!(round(&mut policy, &[0, 0]), 3);
    assert_eq!(round(&mut policy, &[0, 0]), 1);
}

#[test]
fn the_mean_follows_results_by_its_weight() {
    // 2 → 0.5·2 + 0.5·4 = 3 → 1.5 → 0.75 → 0.375. Thresholds without hysteresis: rise from 3
    // above 2.5, drop to 3 at 2.5, drop to 1 at 0.5.
    let more = r#", "ema_alpha": 0.5, "down_hysteresis": 0"#;
    let mut policy = eager("[1, 3, 7]", more, 3);
    let mut seen = Vec::new();
    for correct in [[4, 4], [0, 0], [0, 0], [0, 0]] {
        seen.push((round(&mut policy, &correct), policy.ema(1)));
    }
    assert_eq!(seen, [(7, 3.0), (3, 1.5), (3, 0.75), (1, 0.375)]);
}

#[test]
fn a_rise_exceeds_its_threshold_and_a_drop_reaches_it() {
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 1"#, 3);
    assert_eq!(round(&mut policy, &[2, 3]), 3, "2.5 is not above 2.5");
    assert_eq!(round(&mut policy, &[3, 3]), 7);
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 1, "down_hysteresis": 0"#, 3);
    assert_eq!(round(&mut policy, &[0, 1]), 1, "0.5 is down to 0.5");
}

#[test]
fn hysteresis_moves_both_thresholds() {
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 1, "up_hysteresis": 0.75"#, 3);
    assert_eq!(round(&mut policy, &[3, 3]), 3, "3 is not above 3.25");
    assert_eq!(round(&mut policy, &[4, 3]), 7, "3.5 is");
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 1, "down_hysteresis": -0.75"#, 7);
    assert_eq!(round(&mut policy, &[2, 2]), 7, "2 is above 1.75");
    assert_eq!(round(&mut policy, &[1, 1]), 3, "1 is not, but above -0.25");
}

#[test]
fn a_move_may_pass_over_candidates_both_ways() {
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 1"#, 7);
    assert_eq!(round(&mut policy, &[0, 0]), 1, "0 is down to 0.25, and that to below 2.25");
    let mut policy = eager("[1, 2, 3, 7]", r#", "ema_alpha": 1"#, 1);
    // A result of more than its steps can only be a late one; it counts as it is.
    assert_eq!(round(&mut policy, &[3, 3]), 7, "3 is above 0.5, 1.5 and 2.5");
}

#[test]
fn a_slot_goes_plain_when_nothing_is_right() {
    let more = r#", "ema_alpha": 1, "down_hysteresis": 0"#;
    let mut policy = eager("[0, 3]", more, 3);
    assert_eq!(round(&mut policy, &[0, 1]), 0, "0.5 is down to 0.5, the threshold towards plain");
    let decision = choose(&mut policy, 2);
    assert_eq!(decision.shapes, [Shape::PLAIN; 2]);
    assert_eq!(round(&mut policy, &[0, 0]), 3, "tried again after one interval");
    assert_eq!(policy.ema(1), 0.5, "plain rounds leave the mean alone");
    assert_eq!(round(&mut policy, &[0, 0]), 0);
    assert_eq!(policy.ema(1), 0.0);
}

#[test]
fn a_slot_that_starts_plain_has_a_neutral_mean() {
    let mut policy = eager("[0, 3, 5]", "", 0);
    assert_eq!(policy.ema(1), -1.0);
    assert_eq!(round(&mut policy, &[0]), 3);
    assert_eq!(policy.ema(1), 2.0);
    let mut only_plain = eager("[0]", "", 0);
    assert_eq!(round(&mut only_plain, &[0]), 0);
    assert_eq!(only_plain.ema(1), -1.0);
}

#[test]
fn a_ceiling_lowers_steps_and_never_hinders_a_rise() {
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 1, "ceiling_coeff": 1.5"#, 7);
    // 2.5 drafts hold 7 steps (2.5 > 2.25), but ceil(2.5 · 1.5) = 4 allows 3 at most.
    assert_eq!(round(&mut policy, &[2, 3]), 3);
    // 3 drafts rise from 3 to 7 although ceil(3 · 1.5) = 5.
    assert_eq!(round(&mut policy, &[3, 3]), 7);
    let mut policy = eager("[2, 4]", r#", "ema_alpha": 1, "ceiling_coeff": 0.1"#, 4);
    // The ceiling is 1 at least; no candidate is as low, so the lowest is taken.
    assert_eq!(round(&mut policy, &[4, 4]), 2);
    let mut policy = eager("[2, 4]", r#", "ema_alpha": 1"#, 4);
    assert_eq!(round(&mut policy, &[4, 4]), 4, "0 is no ceiling");
}

#[test]
fn a_batch_is_padded_and_then_floored_to_a_slot() {
    let policy = |captured: &[usize]| {
        Adaptive::new(AdaptiveTable::default(), Some(3), captured.to_vec()).unwrap()
    };
    let slot = |policy: &mut Adaptive, batch| choose(policy, batch).setting.slot;
    let mut cpu = policy(&[]);
    let sizes = [1, 7, 8, 31, 32, 63, 64, 1000];
    assert_eq!(sizes.map(|batch| slot(&mut cpu, batch)), [1, 1, 8, 8, 32, 32, 64, 64]);
    let mut graphs = policy(&[4, 8, 16, 32]);
    assert_eq!([4, 5, 17, 33, 100].map(|batch| slot(&mut graphs, batch)), [1, 8, 32, 32, 64]);
    let captured =
        |batch| -> Vec<usize> { graphs.shapes_of(batch).iter().map(Shape::steps).collect() };
    assert_eq!(
        [4, 8, 16, 32].map(captured),
        [vec![1, 3, 7], vec![0, 1, 3], vec![0, 1, 3], vec![0, 1]]
    );
    let mut late =
        Adaptive::new(table(r#"{"4": {"candidate_steps": [2]}}"#), None, vec![]).unwrap();
    assert_eq!(slot(&mut late, 1), 4, "below the first slot there is the first");
}

#[test]
fn a_late_result_teaches_its_own_slot_alone() {
    let slot = r#"{"candidate_steps": [1, 3], "warmup_batches": 0, "update_interval": 1,
                   "ema_alpha": 1}"#;
    let file = format!(r#"{{"1": {slot}, "8": {slot}}}"#);
    let mut policy = Adaptive::new(table(&file), Some(3), Vec::new()).unwrap();
    let small = choose(&mut policy, 2).setting;
    // Six requests more have joined before the result comes.
    let large = choose(&mut policy, 8).setting;
    learn(&mut policy, small, &[0, 0]);
    assert_eq!((steps(&mut policy, 2), steps(&mut policy, 8)), (1, 3));
    assert_eq!((policy.ema(2), policy.ema(8)), (0.0, 2.0));
    learn(&mut policy, large, &[3; 8]);
    assert_eq!((policy.ema(2), policy.ema(8)), (0.0, 3.0));
}

#[test]
fn a_late_result_counts_though_its_slot_moved_on() {
    let mut policy = eager("[1, 3, 7]", r#", "ema_alpha": 0.5"#, 3);
    let first = choose(&mut policy, 1).setting;
    let second = choose(&mut policy, 1).setting;
    learn(&mut policy, first, &[3]);
    // 0.5 · 2 + 0.5 · 3 = 2.5 does not rise; another 3 gives 2.75, which does.
    learn(&mut policy, second, &[3]);
    assert_eq!(steps(&mut policy, 1), 7);
    learn(&mut policy, second, &[1]);
    assert_eq!(policy.ema(1), 1.875);
    assert_eq!(steps(&mut policy, 1), 3);
}

#[test]
fn a_late_plain_result_says_nothing_about_drafts() {
    let mut policy = eager("[0, 3]", r#", "ema_alpha": 1, "down_hysteresis": 0"#, 0);
    let first = choose(&mut policy, 1).setting;
    let second = choose(&mut policy, 1).setting;
    learn(&mut policy, first, &[0]);
    assert_eq!(steps(&mut policy, 1), 3);
    learn(&mut policy, second, &[0]);
    assert_eq!((policy.ema(1), steps(&mut policy, 1)), (2.0, 3));
    // And a slot that has gone plain holds its mean when drafts come in late.
    let (third, fourth) = (choose(&mut policy, 1).setting, choose(&mut policy, 1).setting);
    learn(&mut policy, third, &[0]);
    assert_eq!((policy.ema(1), steps(&mut policy, 1)), (0.0, 0));
    learn(&mut policy, fourth, &[3]);
    assert_eq!(policy.ema(1), 0.0);
}

#[test]
fn a_request_without_speculation_leaves_the_mean_alone() {
    let mut policy = eager("[1, 3]", r#", "ema_alpha": 1"#, 3);
    let mut requests = views(2);
    requests[1].cap = Some(0);
    let decision = policy.choose(&RoundView { requests: &requests });
    assert_eq!(decision.shapes, [Shape::chain(3), Shape::PLAIN]);
    let outcomes =
        [(0, 3), (1, 0)].map(|(id, n)| RequestOutcome::chain(id as u64, decision.shapes[id], n));
    let setting = decision.setting;
    policy.learn(&RoundOutcome { setting, requests: &outcomes, seconds: None });
    assert_eq!(policy.ema(1), 3.0);
}

#[test]
fn the_default_table_is_sglangs() {
    let table = AdaptiveTable::default();
    let steps = |bound: usize| table.slots[&bound].candidate_steps.clone();
    assert_eq!(table.slots.keys().copied().collect::<Vec<_>>(), [1, 8, 32, 64]);
    assert_eq!([steps(1), steps(8)], [vec![1, 3, 7], vec![0, 1, 3]]);
    assert_eq!([steps(32), steps(64)], [vec![0, 1], vec![0]]);
    let down: Vec<f64> = table.slots.values().map(|slot| slot.down_hysteresis).collect();
    assert_eq!(down, [-0.25, 0.0, 0.0, 0.0]);
    for slot in table.slots.values() {
        assert_eq!((slot.ema_alpha, slot.update_interval, slot.warmup_batches), (0.2, 5, 10));
        assert_eq!((slot.up_hysteresis, slot.ceiling_coeff), (0.0, 0.0));
        let most = slot.candidate_steps[slot.candidate_steps.len() - 1];
        assert_eq!(slot.largest, Shape::chain(most));
    }
    assert_eq!(table.union(), [0, 1, 3, 7]);
    assert_eq!(table.launch_steps(None).unwrap(), 3);
}

#[test]
fn the_table_published_earlier_never_goes_plain() {
    let table = table(include_str!("../../policies/sglang-published.json"));
    let steps: Vec<_> = table.slots.values().map(|slot| slot.candidate_steps.clone()).collect();
    assert_eq!(steps, [vec![1, 3, 7], vec![1, 3], vec![1]]);
    assert!(table.warnings.is_empty());
    let mut policy = Adaptive::new(table, Some(3), Vec::new()).unwrap();
    for batch in [1, 8, 32] {
        for _ in 0..40 {
            let setting = choose(&mut policy, batch).setting;
            learn(&mut policy, setting, &vec![0; batch]);
        }
        assert_eq!(self::steps(&mut policy, batch), 1);
    }
}

#[test]
fn a_slots_own_settings_override_the_defaults_of_the_file() {
    let table = table(
        r#"{"up_hysteresis": 0.5, "update_interval": 3, "seed": 1, "strategy": "ema",
            "1": {"candidate_steps": [1, 3], "up_hysteresis": 0.1}, "32": {"candidate_steps": [2]}}"#,
    );
    assert_eq!((table.slots[&1].up_hysteresis, table.slots[&32].up_hysteresis), (0.1, 0.5));
    assert_eq!((table.slots[&1].update_interval, table.slots[&1].warmup_batches), (3, 10));
    assert_eq!(table.warnings, ["the defaults: seed means nothing here"]);
}

#[test]
fn a_slot_may_have_trees() {
    let file = r#"{"topk": 4, "draft_tokens": 16, "1": {"candidate_steps": [0, 1, 5]},
                   "8": {"candidate_steps": [2], "topk": 1}}"#;
    let mut policy = Adaptive::new(table(file), Some(5), Vec::new()).unwrap();
    assert_eq!(choose(&mut policy, 1).setting.shape, Shape::new(5, 4, 16).unwrap());
    assert_eq!(choose(&mut policy, 8).setting.shape, Shape::chain(2));
    let shapes = [Shape::PLAIN, Shape::new(1, 4, 5).unwrap(), Shape::new(5, 4, 16).unwrap()];
    assert_eq!(policy.shapes()[..3], shapes);
    assert_eq!(
        error(r#"{"1": {"candidate_steps": [3], "topk": 4}}"#),
        "batch size 1: draft_tokens must be given with topk, a whole number of at least 2, not null"
    );
    assert_eq!(
        error(r#"{"16": {"candidate_steps": [1], "topk": 2, "draft_tokens": 9}}"#),
        "batch size 16: 9 draft tokens do not suit 1 steps of topk 2: they must be from 2 to 3"
    );
}

#[test]
fn candidates_that_are_none_are_named_with_their_slot() {
    for (got, json) in [
        ("\"bad\"", "\"bad\""),
        ("[]", "[]"),
        ("[1,-1]", "[1, -1]"),
        ("[1.5]", "[1.5]"),
        ("null", "null"),
    ] {
        let file =
            format!(r#"{{"1": {{"candidate_steps": [1]}}, "8": {{"candidate_steps": {json}}}}}"#);
        assert_eq!(
            error(&file),
            format!(
                "batch size 8: candidate_steps must be a non-empty list of whole numbers of at least 0, not {got}"
            )
        );
    }
    assert!(error(r#"{"4": {}}"#).contains("batch size 4: candidate_steps must be"));
    assert!(error(r#"{"4": [1, 3]}"#).contains("not [1,3]"));
    // A default does not stand in for a slot's own candidates.
    assert!(error(r#"{"candidate_steps": [1], "4": {}}"#).contains("not null"));
}

#[test]
fn a_file_of_the_older_format_is_printed_in_todays() {
    let message = error(r#"{"candidate_steps": [2, 4], "ema_alpha": 0.3}"#);
    assert!(message.contains("no batch size among its keys (candidate_steps, ema_alpha)"));
    let today = &message[message.find('{').unwrap()..];
    let table = table(today);
    assert_eq!(table.slots[&1].candidate_steps, [2, 4]);
    assert_eq!(table.slots[&1].ema_alpha, 0.3);
    assert!(error("{}").contains("there are none"));
}

#[test]
fn other_faults_are_named_with_key_and_value() {
    let slot = |setting: &str| error(&format!(r#"{{"8": {{"candidate_steps": [1], {setting}}}}}"#));
    assert_eq!(
        slot(r#""ema_alpha": 0"#),
        "batch size 8: ema_alpha must be a number above 0 and up to 1, not 0"
    );
    assert!(slot(r#""update_interval": 0"#).contains("update_interval must be a whole number"));
    assert!(slot(r#""warmup_batches": -1"#).contains("warmup_batches must be a whole number"));
    assert!(slot(r#""up_hysteresis": "x""#).contains("up_hysteresis must be a number, not \"x\""));
    let global = error(r#"{"down_hysteresis": [], "8": {"candidate_steps": [1]}}"#);
    assert!(global.contains("the defaults: down_hysteresis must be a number, not []"));
    let strategy = error(r#"{"strategy": "throughput_aware", "8": {"candidate_steps": [1]}}"#);
    assert!(strategy.contains("not \"throughput_aware\""));
    assert!(error("[1]").contains("must be a JSON object, not [1]"));
    assert!(error("{").contains("not valid JSON"));
}

#[test]
fn launch_steps_must_be_a_candidate_somewhere() {
    let error = Adaptive::new(AdaptiveTable::default(), Some(5), Vec::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "5 steps are not among the candidate_steps of any batch size (0, 1, 3, 7); give one of \
         them, or add it to the table"
    );
}

#[test]
fn the_same_log_gives_the_same_shapes_again() {
    let play = || {
        let mut policy = Adaptive::new(AdaptiveTable::default(), None, vec![4, 16, 64]).unwrap();
        let mut late: Option<(Setting, Vec<usize>)> = None;
        let mut shapes = Vec::new();
        for round in 0..600_usize {
            let batch = [1, 5, 20, 3][round / 40 % 4];
            let decision = choose(&mut policy, batch);
            let most = decision.setting.shape.steps();
            if let Some((setting, correct)) = late.take() {
                learn(&mut policy, setting, &correct);
            }
            let correct = (0..batch).map(|i| (round / 70 + i) % (most + 1)).collect();
            late = Some((decision.setting, correct));
            shapes.push(decision.shapes);
        }
        (shapes, policy.state())
    };
    let (first, second) = (play(), play());
    assert!(first.1.switches > 3, "{:?}", first.1);
    assert_eq!(first, second);
}

#[test]
fn a_fixed_policy_is_limited_by_a_requests_cap() {
    let shape = Shape::new(5, 4, 16).unwrap();
    let mut policy = Fixed::new(shape);
    let mut requests = views(3);
    requests[1].cap = Some(0);
    requests[2].cap = Some(1);
    let decision = policy.choose(&RoundView { requests: &requests });
    assert_eq!(decision.shapes, [shape, Shape::PLAIN, Shape::new(1, 4, 5).unwrap()]);
    assert_eq!(decision.most_rows(), 16 + 1 + 5);
    assert!(choose(&mut policy, 0).shapes.is_empty());
}
