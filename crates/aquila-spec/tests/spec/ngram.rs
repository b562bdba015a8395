//! What is drafted from n-grams, against plain searches of the same texts.

use std::collections::{HashMap, HashSet};

use aquila_spec::ngram::{Corpora, MatchType, Ngram, NgramError, NgramScope, NgramSettings};
use aquila_spec::{Shape, Tree};
use proptest::prelude::*;

const VOCABULARY: usize = 1 << 16;

fn settings(scope: NgramScope) -> NgramSettings {
    NgramSettings { scope, ..NgramSettings::default() }
}

fn ngram(settings: NgramSettings) -> Ngram {
    Ngram::new(settings, Corpora::new(1 << 20, VOCABULARY)).unwrap()
}

fn add(ngram: &Ngram, name: &str, documents: &[Vec<u32>]) {
    let mut load = ngram.corpora().load(name).unwrap();
    for document in documents {
        assert!(load.push(document));
        load.end_document();
    }
    load.finish().unwrap();
}

/// The tokens below the root on the way to a node.
fn path(tree: &Tree, node: usize) -> Vec<u32> {
    tree.path(node)[1..].iter().map(|&at| tree.nodes()[at].token).collect()
}

fn paths(tree: &Tree) -> Vec<Vec<u32>> {
    (1..tree.len()).map(|node| path(tree, node)).collect()
}

fn occurs(text: &[u32], piece: &[u32]) -> bool {
    text.windows(piece.len()).any(|window| window == piece)
}

/// What followed a context in a text: how often, and where it did last.
fn followers(text: &[u32], context: &[u32]) -> HashMap<u32, (usize, usize)> {
    let mut followers = HashMap::new();
    for at in context.len()..text.len() {
        if text[..at].ends_with(context) {
            let entry = followers.entry(text[at]).or_insert((0, 0));
            *entry = (entry.0 + 1, at);
        }
    }
    followers
}

fn check_form(tree: &Tree, shape: Shape, bonus: u32) -> Result<(), TestCaseError> {
    prop_assert_eq!(tree.nodes()[0].token, bonus);
    prop_assert!(tree.len() <= shape.nodes());
    let mut seen = HashSet::new();
    for (at, node) in tree.nodes().iter().enumerate().skip(1) {
        prop_assert!(node.parent < at);
        let parent = tree.nodes()[node.parent];
        prop_assert_eq!(node.depth, parent.depth + 1);
        prop_assert!(node.depth <= shape.steps());
        prop_assert!(node.score <= parent.score);
        prop_assert!(seen.insert((node.parent, node.token)), "siblings differ");
    }
    Ok(())
}

/// A text with repetitions: pieces over few tokens, some of them again.
fn text(longest: usize) -> impl Strategy<Value = Vec<u32>> {
    let piece = prop::collection::vec(0u32..6, 1..8);
    prop::collection::vec((piece, 1usize..4), 1..longest / 8).prop_map(|pieces| {
        pieces.into_iter().flat_map(|(piece, times)| piece.repeat(times)).collect()
    })
}

fn shapes() -> impl Strategy<Value = Shape> {
    (1usize..12, 1usize..11, 2usize..40).prop_map(|(steps, topk, nodes)| {
        Shape::new(steps, topk, nodes.min(Shape::most_nodes(steps, topk))).unwrap()
    })
}

fn match_types() -> impl Strategy<Value = MatchType> {
    prop_oneof![Just(MatchType::Bfs), Just(MatchType::Prob)]
}

proptest! {
    #[test]
    fn trees_keep_their_shape_and_hold_paths_seen_before(
        text in text(160), documents in prop::collection::vec(text(60), 0..3),
        shape in shapes(), match_type in match_types(), depth in 2usize..19,
    ) {
        let settings = NgramSettings {
            match_type,
            max_trie_depth: depth,
            ..settings(NgramScope::Request)
        };
        let mut ngram = ngram(settings);
        add(&ngram, "documents", &[vec![9], documents.concat()]);
        let tree = ngram.tree(1, &text, shape);
        let bonus = *text.last().unwrap();
        check_form(&tree, shape, bonus)?;
        let corpus = documents.concat();
        for path in paths(&tree) {
            let whole = [vec![bonus], path].concat();
            // A trie knows n-grams up to its depth, and goes on from the last of them.
            let trie = whole.windows(depth.min(whole.len())).all(|piece| occurs(&text, piece));
            prop_assert!(trie || occurs(&corpus, &whole), "{whole:?}");
        }
    }

    #[test]
    fn drafts_are_a_function_of_the_requests_own_tokens(
        text in text(160), others in prop::collection::vec(text(60), 1..4),
        cuts in prop::collection::vec(1usize..20, 1..8), shape in shapes(),
        match_type in match_types(), retracted in any::<bool>(),
    ) {
        let settings = NgramSettings { match_type, ..settings(NgramScope::Request) };
        let alone = ngram(settings.clone()).tree(1, &text, shape);
        let mut ngram = ngram(settings);
        let mut known = 0;
        for (turn, cut) in cuts.iter().enumerate() {
            known = (known + cut).min(text.len());
            ngram.read(1, &text[..known]);
            ngram.read(2 + turn as u64 % 2, &others[turn % others.len()]);
            if retracted && turn == 2 {
                ngram.forget(1);
            }
            ngram.tree(1, &text[..known], shape);
        }
        prop_assert_eq!(ngram.tree(1, &text, shape), alone);
    }

    #[test]
    fn the_first_level_follows_the_longest_matches_recent_first(
        text in text(160), depth in 2usize..10,
    ) {
        let settings = NgramSettings {
            min_bfs_breadth: 32,
            max_bfs_breadth: 32,
            max_trie_depth: depth,
            ..settings(NgramScope::Request)
        };
        let tree = ngram(settings).tree(1, &text, Shape::new(1, 32, 33).unwrap());
        let mut want: Vec<u32> = Vec::new();
        for length in (1..depth.min(text.len() + 1)).rev() {
            let context = &text[text.len() - length..];
            let mut followers: Vec<_> = followers(&text, context).into_iter().collect();
            followers.sort_by_key(|(_, (_, last))| std::cmp::Reverse(*last));
            want.extend(followers.into_iter().map(|(token, _)| token));
        }
        let mut once = HashSet::new();
        want.retain(|token| once.insert(*token));
        let have: Vec<u32> = tree.nodes()[1..].iter().map(|node| node.token).collect();
        prop_assert_eq!(have, want);
    }

    #[test]
    fn a_corpus_answers_as_a_search_of_its_documents_would(
        documents in prop::collection::vec(text(200), 1..4),
        context in Just((0u32..6).collect::<Vec<_>>()).prop_shuffle(), length in 1usize..7,
    ) {
        // Tokens that do not repeat: nothing comes from the request's own text.
        let context = &context[..length];
        let settings = NgramSettings {
            match_type: MatchType::Prob,
            max_bfs_breadth: 32,
            ..settings(NgramScope::Request)
        };
        let mut ngram = ngram(settings);
        add(&ngram, "documents", &documents);
        let tree = ngram.tree(1, context, Shape::new(1, 32, 33).unwrap());
        let mut have = tree.nodes()[1..].iter().map(|node| node.token);
        let mut known: HashSet<u32> = HashSet::new();
        for length in (1..=context.len()).rev() {
            let context = &context[context.len() - length..];
            let mut counts: HashMap<u32, usize> = HashMap::new();
            for document in &documents {
                for (token, (count, _)) in followers(document, context) {
                    *counts.entry(token).or_default() += count;
                }
            }
            let all: usize = counts.values().sum();
            if known.is_empty() && all > 0 {
                for node in &tree.nodes()[1..=counts.len()] {
                    prop_assert_eq!(node.score, counts[&node.token] as f32 / all as f32);
                }
            }
            let mut new: Vec<u32> =
                counts.keys().copied().filter(|token| !known.contains(token)).collect();
            let mut found: Vec<u32> = have.by_ref().take(new.len()).collect();
            prop_assert!(found.is_sorted_by(|a, b| counts.get(a) >= counts.get(b)), "{found:?}");
            known.extend(&new);
            new.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, new);
        }
        prop_assert_eq!(have.next(), None);
    }

    #[test]
    fn a_full_trie_keeps_its_capacity_and_the_latest_tokens(
        seed in any::<u32>(), depth in 2usize..19, scope in prop_oneof![Just(NgramScope::Server), Just(NgramScope::Request)],
    ) {
        let settings =
            NgramSettings { capacity: 1024, max_trie_depth: depth, ..settings(scope) };
        let mut ngram = ngram(settings);
        let mut random = seed;
        let mut texts = vec![Vec::new(); 3];
        for turn in 0..1500 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let text = &mut texts[turn % 3];
            text.push((random >> 16) % 300);
            ngram.read(turn as u64 % 3, text);
            let each = if scope == NgramScope::Server { 1 } else { 3 };
            prop_assert!(ngram.kept() <= 1024 * each);
        }
        texts[0].extend([1000, 1001, 1002, 1000]);
        let tree = ngram.tree(0, &texts[0], Shape::chain(2));
        prop_assert_eq!(paths(&tree), [vec![1001], vec![1001, 1002]]);
    }
}

#[test]
fn breadth_narrows_with_longer_matches_and_with_depth() {
    let breadth = |min_bfs_breadth, max_bfs_breadth| NgramSettings {
        min_bfs_breadth,
        max_bfs_breadth,
        max_trie_depth: 4,
        ..settings(NgramScope::Request)
    };
    // After 7: 1, 2 and 3, in this order; after 5 7: 2 and 3.
    let text = [7, 1, 5, 7, 2, 5, 7, 3, 5, 7];
    // The longest matches have three tokens. Two were matched (5 7), so one step of (4 - 1) / 3
    // above the least: two branches at first and one below. Then 7 alone has three.
    let tree = ngram(breadth(1, 4)).tree(1, &text, Shape::new(2, 8, 30).unwrap());
    let first: Vec<u32> =
        tree.nodes()[1..].iter().filter(|n| n.depth == 1).map(|n| n.token).collect();
    assert_eq!(first, [3, 2, 1]);
    let tree = ngram(breadth(1, 1)).tree(1, &text, Shape::new(2, 8, 30).unwrap());
    assert_eq!(paths(&tree), [vec![3], vec![3, 5]]);
}

#[test]
fn levels_prefer_the_recent_and_probability_prefers_the_frequent() {
    let text = [7, 1, 7, 1, 7, 1, 7, 2, 7];
    let first = |match_type| {
        let settings = NgramSettings { match_type, ..settings(NgramScope::Request) };
        path(&ngram(settings).tree(1, &text, Shape::chain(1)), 1)
    };
    assert_eq!(first(MatchType::Bfs), [2]);
    assert_eq!(first(MatchType::Prob), [1]);
}

#[test]
fn a_draft_goes_on_where_n_grams_end() {
    let settings = NgramSettings { max_trie_depth: 4, ..settings(NgramScope::Request) };
    let text: Vec<u32> = (0..30).chain(0..8).collect();
    let tree = ngram(settings).tree(1, &text, Shape::chain(20));
    assert_eq!(path(&tree, 20), (8..28).collect::<Vec<_>>());
}

#[test]
fn requests_draft_from_each_other_in_server_scope_alone() {
    for (scope, want) in [(NgramScope::Server, 3), (NgramScope::Request, 1)] {
        let mut ngram = ngram(settings(scope));
        ngram.read(1, &[1, 2, 3, 4]);
        ngram.forget(1);
        assert_eq!(ngram.tree(2, &[9, 1, 2], Shape::chain(2)).len(), want, "{scope:?}");
    }
}

#[test]
fn a_corpus_is_drafted_from_but_never_across_documents() {
    let mut ngram = ngram(settings(NgramScope::Request));
    let documents = [vec![1, 2, 3], vec![4, 5, 6]];
    add(&ngram, "documents", &documents);
    assert_eq!(paths(&ngram.tree(1, &[1], Shape::chain(5))), [vec![2], vec![2, 3]]);
    assert_eq!(ngram.tree(2, &[3], Shape::chain(5)).len(), 1);
    assert!(ngram.bytes() >= ngram.corpora().bytes() && ngram.corpora().bytes() > 0);
    ngram.corpora().remove("documents").unwrap();
    assert_eq!(ngram.tree(1, &[1], Shape::chain(5)).len(), 1);
}

#[test]
fn tokens_that_the_model_does_not_know_are_not_drafted() {
    let corpora = Corpora::new(100, 10);
    let mut load = corpora.load("foreign").unwrap();
    assert!(load.push(&[1, 2, 10, 3, u32::MAX, 4, 5]));
    load.finish().unwrap();
    let mut ngram = Ngram::new(settings(NgramScope::Request), corpora).unwrap();
    assert_eq!(paths(&ngram.tree(1, &[1], Shape::chain(5))), [vec![2]]);
    assert_eq!(ngram.tree(2, &[3], Shape::chain(5)).len(), 1);
    assert_eq!(paths(&ngram.tree(3, &[4], Shape::chain(5))), [vec![5]]);
}

#[test]
fn settings_that_cannot_be_are_refused_with_their_bounds() {
    let refused = |change: fn(&mut NgramSettings)| {
        let mut settings = NgramSettings::default();
        change(&mut settings);
        settings.check().unwrap_err()
    };
    assert_eq!(NgramSettings::default().check(), Ok(()));
    let breadth = |least, most| NgramError::Breadth { least, most };
    assert_eq!(refused(|s| s.min_bfs_breadth = 0), breadth(0, 10));
    assert_eq!(refused(|s| s.min_bfs_breadth = 11), breadth(11, 10));
    assert_eq!(refused(|s| s.max_bfs_breadth = 65), breadth(1, 65));
    assert!(breadth(1, 65).to_string().contains("from 1 to 64"));
    assert_eq!(refused(|s| s.max_trie_depth = 1), NgramError::TrieDepth(1));
    assert_eq!(refused(|s| s.capacity = 10), NgramError::Capacity(10));
    assert_eq!("prob".parse(), Ok(MatchType::Prob));
    assert_eq!("Server".parse(), Ok(NgramScope::Server));
    assert_eq!("DFS".parse::<MatchType>(), Err(NgramError::MatchType("DFS".into())));
    assert!("all".parse::<NgramScope>().is_err());
    let shape = NgramSettings::default().shape(NgramSettings::NODES).unwrap();
    assert_eq!((shape.steps(), shape.topk(), shape.nodes()), (11, 10, 12));
}
