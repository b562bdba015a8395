//! What is chosen, and what is reported about it.

use aquila_compute::sampling::{
    Choice, History, SampleQuery, Sampling, TokenSet, choose, definition, filtered_probs,
    topk_candidates,
};
use proptest::prelude::*;

/// Everything a query refers to.
#[derive(Debug, Clone, Default)]
struct Case {
    sampling: Sampling,
    prompt: Vec<u32>,
    output: Vec<u32>,
    path: Vec<u32>,
    banned: Vec<u32>,
    allowed: Option<TokenSet>,
    position: u32,
    choice: u32,
    top_logprobs: Option<usize>,
    given: Option<u32>,
}

impl Case {
    fn greedy() -> Self {
        Self::default()
    }

    fn sampled(temperature: f32) -> Self {
        Self { sampling: Sampling { temperature, ..Sampling::default() }, ..Self::default() }
    }

    fn by<T>(&self, rule: impl Fn(&[f32], &SampleQuery<'_>) -> T, logits: &[f32]) -> T {
        let mut history = History::of_prompt(&self.prompt);
        self.output.iter().for_each(|&token| history.push(token));
        let query = SampleQuery {
            row: 0,
            sampling: &self.sampling,
            history: &history,
            path: &self.path,
            position: self.position,
            choice: self.choice,
            banned: &self.banned,
            allowed: self.allowed.as_ref(),
            top_logprobs: self.top_logprobs,
            given: self.given,
        };
        rule(logits, &query)
    }

    fn on(&self, logits: &[f32]) -> Choice {
        self.by(choose, logits)
    }

    fn token(&self, logits: &[f32]) -> u32 {
        self.on(logits).token
    }

    /// The tokens that come up over many positions.
    fn support(&self, logits: &[f32]) -> Vec<u32> {
        let mut case = self.clone();
        let mut seen: Vec<u32> = (0..4000)
            .map(|position| {
                case.position = position;
                case.token(logits)
            })
            .collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }
}

fn logits_of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

#[test]
fn greedy_takes_the_largest_logit_then_the_lowest_id() {
    assert_eq!(Case::greedy().token(&[1.0, 3.0, 2.0]), 1);
    assert_eq!(Case::greedy().token(&[1.0, 3.0, 3.0, 3.0]), 1);
    assert_eq!(Case::greedy().token(&[-0.0, 0.0]), 0);
    let mut wide = vec![0.5f32; 1000];
    (wide[777], wide[990]) = (0.75, 0.75);
    assert_eq!(Case::greedy().token(&wide), 777);
}

#[test]
fn a_temperature_too_small_to_divide_by_is_greedy() {
    assert_eq!(Case::sampled(1e-30).token(&[-3.0, -1.0, -2.0]), 1);
}

#[test]
fn repetition_divides_positive_and_multiplies_negative_logits() {
    let mut case = Case::greedy();
    case.sampling.repetition_penalty = 2.0;
    case.prompt = vec![0];
    // 3 / 2 = 1.5 lies between 1.4 and 1.6.
    assert_eq!(case.token(&[3.0, 1.4]), 0);
    assert_eq!(case.token(&[3.0, 1.6]), 1);
    // -1 * 2 = -2 lies between -1.9 and -2.1.
    assert_eq!(case.token(&[-1.0, -1.9]), 1);
    assert_eq!(case.token(&[-1.0, -2.1]), 0);
    // A token of the output counts alike, and being in both counts once.
    (case.prompt, case.output) = (vec![0], vec![0, 0]);
    assert_eq!(case.token(&[3.0, 1.4]), 0);
    assert_eq!(case.token(&[3.0, 1.6]), 1);
}

#[test]
fn frequency_counts_presence_does_not_neither_sees_the_prompt() {
    let mut case = Case::greedy();
    (case.prompt, case.output) = (vec![1, 1, 1], vec![0, 0, 0]);
    case.sampling.frequency_penalty = 0.5;
    // 4 - 3 * 0.5 = 2.5.
    assert_eq!(case.token(&[4.0, 2.4]), 0);
    assert_eq!(case.token(&[4.0, 2.6]), 1);
    case.sampling.frequency_penalty = 0.0;
    case.sampling.presence_penalty = 0.5;
    // 4 - 0.5 = 3.5.
    assert_eq!(case.token(&[4.0, 3.4]), 0);
    assert_eq!(case.token(&[4.0, 3.6]), 1);
}

#[test]
fn penalties_apply_in_the_order_repetition_then_frequency_and_presence() {
    let mut case = Case::greedy();
    case.output = vec![0, 0];
    case.sampling.repetition_penalty = 2.0;
    case.sampling.frequency_penalty = 0.25;
    case.sampling.presence_penalty = 1.0;
    // 6 / 2 - 2 * 0.25 - 1 = 1.5; subtracting first would give 2.25.
    assert_eq!(case.token(&[6.0, 1.4]), 0);
    assert_eq!(case.token(&[6.0, 1.6]), 1);
}

#[test]
fn tokens_of_the_path_count_as_output() {
    let mut case = Case::greedy();
    case.sampling.frequency_penalty = 1.0;
    (case.output, case.path) = (vec![0], vec![0, 1, 0]);
    // 5 - 3, 3.5 - 1, and an untouched token between and below.
    assert_eq!(case.token(&[5.0, 3.5, 2.4]), 1);
    assert_eq!(case.token(&[5.0, 3.5, 2.6]), 2);
    assert_eq!(case.token(&[5.0, 2.9, 1.9]), 0);
}

#[test]
fn bias_is_added_and_cannot_lift_a_ban() {
    let mut case = Case::greedy();
    case.sampling.logit_bias = vec![(2, 100.0), (9, 5.0)];
    assert_eq!(case.token(&[3.0, 2.0, -90.0]), 2);
    case.banned = vec![2, 77];
    assert_eq!(case.token(&[3.0, 2.0, -90.0]), 0);
}

#[test]
fn where_nothing_is_possible_the_lowest_allowed_token_wins() {
    for mut case in [Case::greedy(), Case::sampled(1.0)] {
        case.top_logprobs = Some(2);
        assert_eq!(case.token(&[f32::NAN, f32::NEG_INFINITY, f32::NAN]), 0);
        case.banned = vec![0, 1];
        assert_eq!(case.token(&[1.0, 2.0, f32::NEG_INFINITY]), 2);
        case.banned = vec![0, 1, 2];
        assert_eq!(case.token(&[1.0, 2.0, 3.0]), 0);
        assert_eq!(case.token(&[]), 0);
        assert!(case.on(&[f32::NAN; 3]).top.is_empty());
    }
}

#[test]
fn a_grammar_leaves_what_it_allows() {
    let logits: Vec<f32> = (0..100).map(|token| token as f32 / 25.0).collect();
    let allowed = || Some([2, 31, 32, 70].into_iter().collect());
    let mut case = Case { allowed: allowed(), ..Case::greedy() };
    assert_eq!(case.token(&logits), 70);
    case.banned = vec![70];
    assert_eq!(case.token(&logits), 32);
    case.sampling.logit_bias = vec![(99, 100.0), (31, 5.0)];
    assert_eq!(case.token(&logits), 31);
    let case = Case { allowed: allowed(), ..Case::sampled(1.0) };
    assert_eq!(case.support(&logits), [2, 31, 32, 70]);
    // Where the model excludes all of them, or bans do, the lowest of them is taken.
    let mut case = Case { allowed: allowed(), ..Case::greedy() };
    assert_eq!(case.token(&[f32::NEG_INFINITY; 100]), 2);
    case.banned = vec![2, 31, 32, 70];
    assert_eq!(case.token(&logits), 2);
}

#[test]
fn what_is_not_a_number_never_wins() {
    let mut logits = vec![f32::NAN; 300];
    (logits[70], logits[200]) = (-5.0, -4.0);
    assert_eq!(Case::greedy().token(&logits), 200);
    assert_eq!(Case::sampled(2.0).support(&logits), [70, 200]);
}

#[test]
fn infinite_and_huge_logits_have_ordinary_answers() {
    let logits = [0.0, f32::INFINITY, f32::INFINITY, -f32::MAX, f32::MAX];
    let mut greedy = Case { top_logprobs: Some(5), ..Case::greedy() };
    assert_eq!(greedy.token(&logits), 1);
    let mut sampled = Case::sampled(0.01);
    sampled.sampling.top_p = 0.9;
    assert_eq!(sampled.token(&logits), 1);
    greedy.given = Some(3);
    assert!(greedy.on(&logits).logprob.is_some_and(|p| p < -1e38));
}

#[test]
fn top_k_keeps_k_and_prefers_low_ids() {
    let mut case = Case::sampled(1.0);
    case.sampling.top_k = 2;
    assert_eq!(case.support(&[1.0, 0.5, 1.2, 0.0]), [0, 2]);
    assert_eq!(case.support(&[1.0, 1.0, 1.0, 1.0]), [0, 1]);
    assert_eq!(case.support(&[1.0, 2.0, 1.0, 1.0]), [0, 1]);
    case.sampling.top_k = 5;
    let mut wide = vec![1.0f32; 500];
    (wide[450], wide[130]) = (2.0, 1.5);
    assert_eq!(case.support(&wide), [0, 1, 2, 130, 450]);
}

#[test]
fn top_p_keeps_the_fewest_tokens_that_reach_it() {
    let logits = logits_of(&[0.1, 0.4, 0.3, 0.2]);
    let mut case = Case::sampled(1.0);
    for (top_p, kept) in [
        (0.0, &[1][..]),
        (0.39, &[1]),
        (0.41, &[1, 2]),
        (0.69, &[1, 2]),
        (0.71, &[1, 2, 3]),
        (0.91, &[0, 1, 2, 3]),
        (1.0, &[0, 1, 2, 3]),
    ] {
        case.sampling.top_p = top_p;
        assert_eq!(case.support(&logits), kept, "top-p {top_p}");
    }
    // Four equal tokens: three quarters are three of them, those of the lowest ids.
    case.sampling.top_p = 0.75;
    assert_eq!(case.support(&[2.0; 4]), [0, 1, 2]);
}

#[test]
fn top_p_is_taken_of_what_top_k_left() {
    let logits = logits_of(&[0.4, 0.3, 0.2, 0.1]);
    let mut case = Case::sampled(1.0);
    case.sampling.top_k = 2;
    // Of the two left, the first has 4/7 = 0.571; of all, it has 0.4.
    case.sampling.top_p = 0.56;
    assert_eq!(case.support(&logits), [0]);
    case.sampling.top_p = 0.58;
    assert_eq!(case.support(&logits), [0, 1]);
}

#[test]
fn min_p_keeps_tokens_in_proportion_to_the_most_likely() {
    let logits = logits_of(&[0.4, 0.3, 0.2, 0.1]);
    let mut case = Case::sampled(1.0);
    for (min_p, kept) in [(0.24, 4), (0.26, 3), (0.49, 3), (0.51, 2), (0.76, 1), (1.0, 1)] {
        case.sampling.min_p = min_p;
        assert_eq!(case.support(&logits).len(), kept, "min-p {min_p}");
    }
    // It looks at the distribution after the temperature: at 2, ratios become their roots.
    case.sampling.temperature = 2.0;
    case.sampling.min_p = 0.49;
    assert_eq!(case.support(&logits).len(), 4);
}

#[test]
fn a_sample_depends_on_seed_choice_and_position_alone() {
    let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut case = Case::sampled(1.0);
    let mut draw = |seed, choice, position| {
        (case.sampling.seed, case.choice, case.position) = (seed, choice, position);
        case.token(&logits)
    };
    let first: Vec<u32> = (0..50).map(|p| draw(7, 0, p)).collect();
    let again: Vec<u32> = (0..50).rev().map(|p| draw(7, 0, p)).collect();
    assert!(first.iter().eq(again.iter().rev()));
    assert_ne!(first, (0..50).map(|p| draw(8, 0, p)).collect::<Vec<_>>());
    assert_ne!(first, (0..50).map(|p| draw(7, 1, p)).collect::<Vec<_>>());
    let elsewhere = std::thread::spawn(move || {
        (case.sampling.seed, case.choice, case.position) = (7, 0, 3);
        case.top_logprobs = Some(3);
        case.token(&logits)
    });
    assert_eq!(elsewhere.join().unwrap(), first[3]);
}

#[test]
fn a_given_token_is_reported_and_not_chosen() {
    let mut case = Case::sampled(1.0);
    case.given = Some(2);
    assert_eq!(case.on(&[3.0, 2.0, 1.0]), Choice { token: 2, logprob: None, top: vec![] });
    case.top_logprobs = Some(1);
    let choice = case.on(&[3.0, 2.0, 1.0]);
    let total = 3f64.exp() + 2f64.exp() + 1f64.exp();
    assert_eq!((choice.token, choice.top[0].0, choice.top.len()), (2, 0, 1));
    assert!((f64::from(choice.logprob.unwrap()) - (1.0 - total.ln())).abs() < 1e-6);
    case.given = Some(3);
    assert_eq!(case.on(&[3.0, 2.0, 1.0]).logprob, Some(f32::NEG_INFINITY));
}

#[test]
fn log_probabilities_are_of_the_model_alone() {
    let logits = [1.0, 4.0, 4.0, -2.0];
    let plain = Case { top_logprobs: Some(4), given: Some(0), ..Case::greedy() };
    let mut changed = plain.clone();
    changed.sampling = Sampling {
        temperature: 0.5,
        top_k: 2,
        min_p: 0.1,
        presence_penalty: 1.0,
        logit_bias: vec![(0, 9.0)],
        ..Sampling::default()
    };
    (changed.output, changed.banned) = (vec![0, 1], vec![1]);
    assert_eq!(plain.on(&logits), changed.on(&logits));
    let ids: Vec<u32> = plain.on(&logits).top.iter().map(|&(id, _)| id).collect();
    assert_eq!(ids, [1, 2, 0, 3]);
}

fn arbitrary_sampling() -> impl Strategy<Value = Sampling> {
    let filters = (
        prop_oneof![Just(0.0f32), Just(1.0), 0.02f32..3.0],
        prop_oneof![Just(0u32), 1u32..9, 1u32..400],
        prop_oneof![Just(1.0f32), 0.0f32..1.0, 0.9f32..1.0],
        prop_oneof![Just(0.0f32), 0.0f32..1.0, 0.0f32..0.05],
    );
    let penalties = (
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(Vec::new()), proptest::collection::vec((0u32..700, -20.0f32..20.0), 0..5)],
    );
    (filters, penalties, any::<u64>()).prop_map(|(f, p, seed)| Sampling {
        temperature: f.0,
        top_k: f.1,
        top_p: f.2,
        min_p: f.3,
        repetition_penalty: p.0,
        presence_penalty: p.1,
        frequency_penalty: p.2,
        logit_bias: p.3,
        seed,
    })
}

fn arbitrary_case() -> impl Strategy<Value = Case> {
    let tokens = |most| proptest::collection::vec(0u32..700, 0..most);
    (
        arbitrary_sampling(),
        (tokens(20), tokens(20), tokens(5)),
        prop_oneof![Just(Vec::new()), tokens(300)],
        (any::<u32>(), 0u32..4, proptest::option::of(tokens(300))),
        proptest::option::of(0usize..30),
        proptest::option::weighted(0.1, 0u32..700),
    )
        .prop_map(|(sampling, seen, banned, at, top_logprobs, given)| Case {
            sampling,
            prompt: seen.0,
            output: seen.1,
            path: seen.2,
            banned,
            allowed: at.2.map(|tokens| tokens.into_iter().collect()),
            position: at.0,
            choice: at.1,
            top_logprobs,
            given,
        })
}

/// Rows of several kinds: spread, narrow, full of ties, with impossible tokens, extreme.
fn arbitrary_logits() -> impl Strategy<Value = Vec<f32>> {
    let row = |value: BoxedStrategy<f32>| proptest::collection::vec(value, 1..600);
    prop_oneof![
        row((-30.0f32..30.0).boxed()),
        row((-1.0f32..1.0).boxed()),
        row((-3i32..4).prop_map(|i| i as f32).boxed()),
        row((0u32..40).prop_map(|i| f32::from_bits(0x4100_0000 + i)).boxed()),
        row(prop_oneof![
            -5.0f32..5.0,
            Just(f32::NEG_INFINITY),
            Just(f32::NAN),
            Just(0.0),
            Just(-0.0)
        ]
        .boxed()),
        row(any::<f32>().boxed()),
        row(prop_oneof![-1e5f32..1e5, Just(f32::INFINITY), Just(f32::MAX)].boxed()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn the_choice_is_the_defined_one(logits in arbitrary_logits(), case in arbitrary_case()) {
        let (got, want) = (case.on(&logits), case.by(definition::choose, &logits));
        prop_assert_eq!(got.logprob.map(f32::to_bits), want.logprob.map(f32::to_bits));
        prop_assert_eq!(got, want);
    }

    #[test]
    fn a_distribution_is_the_defined_one_and_holds_the_choice(
        logits in arbitrary_logits(), case in arbitrary_case(),
    ) {
        let case = Case { given: None, ..case };
        let got = case.by(|l, query| filtered_probs(l, query, None), &logits);
        prop_assert_eq!(&got, &case.by(definition::filtered_probs, &logits));
        prop_assert!(got.tokens.is_sorted_by(|a, b| a.0 < b.0));
        prop_assert_eq!(got.total, got.tokens.iter().map(|t| t.1).sum::<f64>());
    }

    #[test]
    fn an_offer_is_the_defined_one(
        logits in arbitrary_logits(), case in arbitrary_case(), count in 1usize..9,
    ) {
        // What overflows ties for candidates, but not for a greedy choice.
        let logits: Vec<f32> = logits.iter().map(|l| l.min(1e30)).collect();
        let case = Case { given: None, ..case };
        let got = case.by(|l, query| topk_candidates(l, query, count, None), &logits);
        let want = case.by(|l, query| definition::topk_candidates(l, query, count), &logits);
        prop_assert_eq!(&got, &want);
        // What is offered first is what would be chosen.
        if let Some(first) = got.first() {
            prop_assert_eq!(first.token, case.on(&logits).token);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn log_probabilities_agree_with_libm(
        logits in proptest::collection::vec(-20.0f32..20.0, 1..900),
        top in 0usize..21,
    ) {
        let case = Case { top_logprobs: Some(top), ..Case::greedy() };
        let choice = case.on(&logits);
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let want = |v: u32| f64::from(logits[v as usize]) - total.ln();
        prop_assert_eq!(choice.top.len(), top.min(logits.len()));
        let reported = choice.top.iter().copied().chain([(choice.token, choice.logprob.unwrap())]);
        for (v, logprob) in reported {
            prop_assert!((f64::from(logprob) - want(v)).abs() < 1e-5, "{v}: {logprob} {}", want(v));
        }
        prop_assert!(choice.top.is_sorted_by(|a, b| a.1 >= b.1));
    }

    #[test]
    fn a_wide_row_is_chosen_from_as_defined(
        seed: u64, spread in prop_oneof![0.01f32..0.5, 0.5f32..6.0], temperature in 0.3f32..1.5,
        top_p in prop_oneof![Just(1.0f32), 0.5f32..1.0], top_k in prop_oneof![Just(0u32), 1u32..200],
    ) {
        // Cheap and reproducible, with the long tail that models have.
        let logits: Vec<f32> = (0..5000u64)
            .map(|i| {
                let x = (seed ^ i).wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
                spread * -((x as f32 + 0.5) / 16_777_216.0).ln()
            })
            .collect();
        let mut case = Case { top_logprobs: Some(5), ..Case::sampled(temperature) };
        (case.sampling.top_p, case.sampling.top_k, case.sampling.seed) = (top_p, top_k, seed);
        prop_assert_eq!(case.on(&logits), case.by(definition::choose, &logits));
        let offered = case.by(|l, query| topk_candidates(l, query, 8, None), &logits);
        prop_assert_eq!(offered, case.by(|l, query| definition::topk_candidates(l, query, 8), &logits));
    }
}
