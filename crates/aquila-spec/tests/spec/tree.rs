//! How trees grow and what of them is confirmed.

use aquila_spec::{
    Candidate, RateSchedule, Shape, Simulate, SimulateMethod, SimulatedRound, Tree, TreeBuilder,
    accept,
};
use proptest::prelude::*;

fn candidates(proposed: &[(u32, f32)]) -> Vec<Candidate> {
    proposed.iter().map(|&(token, probability)| Candidate { token, probability }).collect()
}

/// Tokens, parents and depths, which say all about a tree's form.
fn form(tree: &Tree) -> Vec<(u32, usize, usize)> {
    tree.nodes().iter().map(|n| (n.token, n.parent, n.depth)).collect()
}

#[test]
fn a_tree_keeps_the_likeliest_paths() {
    // By hand: 10 (0.6) and 11 (0.3); below 10: 20 (0.48), 21 (0.06); below 11: 30 (0.27), 31
    // (0.015). The beam is 20, 30; below 20: 40 (0.432), 41 (0.024); below 30: 50 (0.135), 51
    // (0.108). The best five: 0.6, 0.48, 0.432, 0.3, 0.27.
    let shape = Shape::new(3, 2, 6).unwrap();
    let mut builder = TreeBuilder::start(shape, &candidates(&[(10, 0.6), (11, 0.3)]));
    assert_eq!(builder.beam().len(), 2);
    builder.grow(&[candidates(&[(20, 0.8), (21, 0.1)]), candidates(&[(30, 0.9), (31, 0.05)])]);
    let beam: Vec<Vec<u32>> = builder.beam().iter().map(|&at| builder.path_tokens(at)).collect();
    assert_eq!(beam, [vec![10, 20], vec![11, 30]]);
    builder.grow(&[candidates(&[(40, 0.9), (41, 0.05)]), candidates(&[(50, 0.5), (51, 0.4)])]);
    assert!(!builder.goes_on());
    let tree = builder.finish(7);
    let want = [(7, 0, 0), (10, 0, 1), (11, 0, 1), (20, 1, 2), (30, 2, 2), (40, 3, 3)];
    assert_eq!(form(&tree), want);
    assert_eq!(tree.path(5), [0, 1, 3, 5]);
}

#[test]
fn a_beam_may_leave_a_branch_and_parents_stay_true() {
    let shape = Shape::new(3, 2, 5).unwrap();
    let mut builder = TreeBuilder::start(shape, &candidates(&[(10, 0.9), (11, 0.1)]));
    builder.grow(&[candidates(&[(20, 0.5), (21, 0.4)]), candidates(&[(30, 0.9), (31, 0.1)])]);
    // Both of the beam are children of 10: whoever sat in 11's place is no ancestor.
    let parents: Vec<_> = builder.beam().iter().map(|&at| builder.parent(at)).collect();
    assert_eq!(parents, [Some(0), Some(0)]);
    builder.grow(&[candidates(&[(40, 0.6)]), candidates(&[(50, 0.8)])]);
    let tree = builder.finish(1);
    assert_eq!(form(&tree)[1..], [(10, 0, 1), (20, 1, 2), (21, 1, 2), (50, 3, 3)]);
}

#[test]
fn a_plain_shape_drafts_nothing_and_chains_are_trees() {
    let builder = TreeBuilder::start(Shape::PLAIN, &candidates(&[(1, 1.0)]));
    assert!(!builder.goes_on());
    assert_eq!(form(&builder.finish(9)), [(9, 0, 0)]);
    let mut builder = TreeBuilder::start(Shape::chain(3), &candidates(&[(1, 1.0)]));
    builder.grow(&[candidates(&[(2, 1.0)])]);
    builder.grow(&[candidates(&[(3, 1.0)])]);
    assert_eq!(form(&builder.finish(9)), [(9, 0, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3)]);
}

#[test]
fn a_draft_that_offers_less_makes_a_smaller_tree() {
    let shape = Shape::new(4, 3, 12).unwrap();
    let mut builder = TreeBuilder::start(shape, &candidates(&[(1, 0.5)]));
    builder.grow(&[vec![]]);
    assert!(!builder.goes_on());
    assert_eq!(builder.finish(0).len(), 2);
}

#[test]
fn shapes_that_no_tree_has_are_refused_with_their_bounds() {
    let text = Shape::new(5, 4, 90).unwrap_err().to_string();
    assert!(text.contains("from 2 to 69"), "{text}");
    assert!(Shape::new(5, 4, 69).is_ok());
    assert!(Shape::new(5, 4, 1).is_err());
    assert!(Shape::new(5, 0, 6).is_err());
    // A chain has steps + 1 nodes, whatever was asked for.
    assert_eq!(Shape::new(5, 1, 64).unwrap(), Shape::chain(5));
    assert_eq!(Shape::new(5, 4, 69).unwrap().capped(1).nodes(), 5);
    assert_eq!(Shape::chain(5).capped(0), Shape::PLAIN);
    assert_eq!(Shape::chain(5).capped(2), Shape::chain(2));
    let looked_up = Shape::new(5, 4, 20).unwrap().without_rows();
    assert_eq!((looked_up.draft_rows(), looked_up.capped(2).draft_rows()), (0, 0));
    assert_eq!(Shape::PLAIN.without_rows(), Shape::PLAIN);
}

/// A tree grown from numbers: probabilities with many ties, zeros, ones and underflow.
fn grown(shape: Shape, numbers: &[u8]) -> Tree {
    let mut numbers = numbers.iter().copied().cycle();
    let mut next = move || numbers.next().unwrap_or(0);
    let mut proposed = move |count: usize| -> Vec<Candidate> {
        let mut list: Vec<Candidate> = (0..count)
            .map(|i| Candidate {
                token: u32::from(next()) % 7 + i as u32 * 7,
                probability: match next() % 6 {
                    0 => 0.0,
                    1 => 1.0,
                    2 => 1e-30,
                    3 => 1.000_000_2,
                    n => f32::from(n) / 8.0,
                },
            })
            .collect();
        list.sort_by(|a, b| b.probability.total_cmp(&a.probability));
        list
    };
    let mut builder = TreeBuilder::start(shape, &proposed(shape.topk()));
    while builder.goes_on() {
        let offers: Vec<Vec<Candidate>> =
            builder.beam().iter().map(|_| proposed(shape.topk())).collect();
        builder.grow(&offers);
    }
    builder.finish(0)
}

proptest! {
    #[test]
    fn a_node_is_never_kept_without_its_parent(
        steps in 1usize..6, topk in 1usize..5, cut in 0usize..100, numbers in prop::collection::vec(any::<u8>(), 1..80),
    ) {
        let most = Shape::most_nodes(steps, topk);
        let nodes = 2 + cut % (most - 1).max(1);
        let shape = Shape::new(steps, topk, nodes.min(most)).unwrap();
        let tree = grown(shape, &numbers);
        prop_assert!(tree.len() <= shape.nodes());
        for (at, node) in tree.nodes().iter().enumerate().skip(1) {
            prop_assert!(node.parent < at);
            let parent = tree.nodes()[node.parent];
            prop_assert_eq!(node.depth, parent.depth + 1);
            prop_assert!(node.score <= parent.score);
            prop_assert!(node.depth <= steps);
        }
        let widest = (0..tree.len()).map(|at| (1..tree.len()).filter(|&c| tree.nodes()[c].parent == at).count()).max();
        prop_assert!(widest.unwrap_or(0) <= topk);
    }

    #[test]
    fn the_accepted_path_is_where_the_targets_choices_lead(
        numbers in prop::collection::vec(any::<u8>(), 1..60), choices in prop::collection::vec(0u32..21, 64),
    ) {
        let tree = grown(Shape::new(4, 3, 20).unwrap(), &numbers);
        let chosen = &choices[..tree.len()];
        let accepted = accept(&tree, chosen);
        prop_assert_eq!(accepted.path[0], 0);
        prop_assert_eq!(accepted.tokens.len(), accepted.path.len());
        for (i, pair) in accepted.path.windows(2).enumerate() {
            prop_assert_eq!(tree.nodes()[pair[1]].parent, pair[0]);
            prop_assert_eq!(tree.nodes()[pair[1]].token, chosen[pair[0]]);
            prop_assert_eq!(accepted.tokens[i], chosen[pair[0]]);
        }
        let last = *accepted.path.last().unwrap();
        prop_assert!(tree.child(last, chosen[last]).is_none(), "it goes on as far as it can");
    }

    #[test]
    fn simulated_lengths_have_the_mean_asked_for(length in 1.0f64..4.0, multinomial: bool) {
        let method = if multinomial { SimulateMethod::Multinomial } else { SimulateMethod::MatchExpected };
        let simulate = Simulate::Length { mean: length, method };
        let mut builder = TreeBuilder::start(Shape::chain(3), &candidates(&[(1, 1.0)]));
        builder.grow(&[candidates(&[(2, 1.0)])]);
        builder.grow(&[candidates(&[(3, 1.0)])]);
        let tree = builder.finish(0);
        let rounds = 4000;
        let sum: usize = (0..rounds).map(|r| simulate.accept(&tree, &[9; 4], SimulatedRound { request: 5, verified: r, round: 0 }).tokens.len()).sum();
        let mean = sum as f64 / rounds as f64;
        prop_assert!((mean - length).abs() < 0.12, "{mean} for {length}");
    }
}

#[test]
fn simulated_rates_follow_their_schedule() {
    let mut tree = Tree::root(0);
    (0..7).fold(0, |at, _| tree.add(at, 1, 1.0));
    let simulate = Simulate::Rate(RateSchedule { rates: vec![(0.25, 300), (0.7, 200)] });
    let first_right = |rounds: std::ops::Range<u64>| {
        let correct = |round| {
            let at = SimulatedRound { request: 3, verified: round, round };
            simulate.accept(&tree, &[1; 8], at).correct()
        };
        let all = rounds.end - rounds.start;
        rounds.filter(|&round| correct(round) > 0).count() as f64 / all as f64
    };
    // Four standard deviations of a binomial share.
    for (rounds, rate) in [(0..300, 0.25), (300..500, 0.7), (500..800, 0.25), (800..1000, 0.7)] {
        let all = (rounds.end - rounds.start) as f64;
        let share: f64 = first_right(rounds);
        let spread: f64 = 4.0 * (rate * (1.0_f64 - rate) / all).sqrt();
        assert!((share - rate).abs() < spread, "{share} instead of {rate}");
    }
}
