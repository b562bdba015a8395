//! N-grams and a model together: who drafts, who is told, and what may decide it.

use std::sync::{Arc, Mutex};

use aquila_compute::choose::{History, Sampling};
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_spec::ngram::{Corpora, Ngram, NgramScope, NgramSettings};
use aquila_spec::{
    Algorithm, Asking, Candidate, Declaration, DraftGroup, Drafted, Drafting, Error, Extending,
    HiddenStates, Mixed, Offer, Registry, Seed, Shape, TargetRows, Travels, Tree, TreeRows,
};
use proptest::prelude::*;

const VOCABULARY: usize = 1 << 12;
/// What the model drafts, which no text here has.
const MODEL: u32 = 4000;

/// What a model was asked.
#[derive(Debug, Clone, Default, PartialEq)]
struct Asked {
    /// The requests of each call for trees.
    trees: Vec<Vec<u64>>,
    /// The requests that were extended, their tokens and how many candidates they wanted.
    extended: Vec<(u64, usize, Option<usize>)>,
    left: Vec<u64>,
}

/// A model that notes what it is asked, and always drafts the same.
struct Noting {
    declaration: Declaration,
    asked: Arc<Mutex<Asked>>,
}

impl Algorithm<CpuBackend> for Noting {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn draft(
        &mut self,
        _: &CpuBackend,
        requests: &[Drafting<'_>],
    ) -> aquila_model::Result<Vec<Tree>> {
        let numbers = requests.iter().map(|request| request.request).collect();
        self.asked.lock().unwrap().trees.push(numbers);
        let tree = |request: &Drafting<'_>| {
            let mut tree = Tree::root(request.bonus());
            (0..request.shape.steps()).fold(0, |at, _| tree.add(at, MODEL, 0.9));
            tree
        };
        Ok(requests.iter().map(tree).collect())
    }

    fn extend(
        &mut self,
        _: &CpuBackend,
        requests: &[Extending<'_>],
        _: Option<&<CpuBackend as aquila_compute::Backend>::Rows>,
    ) -> aquila_model::Result<Vec<Option<Seed>>> {
        let mut asked = self.asked.lock().unwrap();
        for request in requests {
            let candidates = request.seed.as_ref().map(|(_, count)| *count);
            asked.extended.push((request.request, request.tokens.len(), candidates));
        }
        Ok(requests.iter().map(|request| request.seed.as_ref().map(|_| Seed::default())).collect())
    }

    fn leave(&mut self, request: u64, _: &[u32]) {
        self.asked.lock().unwrap().left.push(request);
    }
}

/// A mix in some scope, and what its model is asked.
struct Mix {
    mixed: Mixed<CpuBackend>,
    backend: CpuBackend,
    asked: Arc<Mutex<Asked>>,
    /// The token that seeds offer.
    offered: u32,
}

/// A request: its number, its text, and how sure the model's seed is.
type Asks<'a> = (u64, &'a [u32], f32);

impl Mix {
    fn new(scope: NgramScope) -> Self {
        let asked = Arc::new(Mutex::new(Asked::default()));
        let groups = vec![DraftGroup { lookahead: 0, tree: TreeRows::EveryLevel }];
        let declaration = Declaration {
            name: "MODEL",
            hidden: HiddenStates::Final,
            groups,
            travels: Travels::with_hidden(1, 1),
        };
        let model = Box::new(Noting { declaration, asked: asked.clone() });
        let settings = NgramSettings { scope, ..NgramSettings::default() };
        let ngram = Ngram::new(settings, Corpora::new(1 << 20, VOCABULARY)).unwrap();
        let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        let mixed = Mixed::new("MODEL+NGRAM", model, ngram);
        Self { mixed, backend, asked, offered: MODEL }
    }

    fn asked(&self) -> Asked {
        self.asked.lock().unwrap().clone()
    }

    fn draft(&mut self, requests: &[Asks<'_>], shape: Shape, temperature: f32) -> Vec<Tree> {
        let sampling = Sampling { temperature, ..Sampling::default() };
        let history = History::default();
        let seeds: Vec<Seed> = requests
            .iter()
            .map(|&(_, _, probability)| {
                let candidates = vec![Candidate { token: self.offered, probability }];
                Seed { row: 0, offer: Offer { candidates, drawn_from: None } }
            })
            .collect();
        let drafting: Vec<Drafting<'_>> = requests
            .iter()
            .zip(&seeds)
            .map(|(&(request, tokens, _), seed)| {
                let asking = asking(&sampling, &history, tokens);
                Drafting { request, tokens, shape, seed, groups: &[], asking }
            })
            .collect();
        let trees = self.mixed.draft(&self.backend, &drafting).unwrap();
        for (drafting, tree) in drafting.iter().zip(&trees) {
            assert!(drafting.admits(tree, VOCABULARY), "{tree:?}");
        }
        trees
    }

    fn extend(&mut self, request: u64, tokens: &[u32]) {
        let (sampling, history) = (Sampling::default(), History::default());
        let seed = Some((asking(&sampling, &history, tokens), 1));
        let (since, target) = (0, TargetRows::default());
        let extending =
            Extending { request, tokens, since, groups: &[], target, previous: None, seed };
        let seeds = self.mixed.extend(&self.backend, &[extending], None).unwrap();
        assert!(seeds.len() == 1 && seeds[0].is_some());
    }

    fn leave(&mut self, request: u64, tokens: &[u32]) {
        self.mixed.leave(request, tokens);
    }

    /// Whether n-grams draft for a request.
    fn ngrams_draft(&mut self, (request, tokens, sure): Asks<'_>) -> bool {
        let tree = self.draft(&[(request, tokens, sure)], Shape::chain(3), 0.0).remove(0);
        tree.nodes().get(1).is_some_and(|node| node.token != MODEL)
    }
}

fn asking<'a>(sampling: &'a Sampling, history: &'a History, tokens: &[u32]) -> Asking<'a> {
    let (choice, banned, banned_depths, drawn) = (0, &[][..], 0, false);
    Asking { sampling, history, choice, tokens: tokens.len(), banned, banned_depths, drawn }
}

fn repeated(piece: &[u32], length: usize) -> Vec<u32> {
    piece.iter().copied().cycle().take(length).collect()
}

fn fresh(length: u32) -> Vec<u32> {
    (0..length).map(|at| 100 + at).collect()
}

#[test]
fn the_model_drafts_in_one_call_where_n_grams_are_not_trusted() {
    let mut mix = Mix::new(NgramScope::Request);
    let (known, new) = (repeated(&[1, 2, 3, 4, 5], 40), fresh(40));
    let requests =
        [(1, &new[..], 0.3), (2, &known[..], 0.6), (3, &new[..30], 0.01), (4, &known[..33], 0.5)];
    let trees = mix.draft(&requests, Shape::chain(3), 0.0);
    assert_eq!(mix.asked().trees, [[1, 3]]);
    let tokens = |tree: &Tree| tree.nodes().iter().map(|node| node.token).collect::<Vec<_>>();
    let drafted: Vec<Vec<u32>> = trees.iter().map(tokens).collect();
    let model = |bonus| vec![bonus, MODEL, MODEL, MODEL];
    assert_eq!(drafted, [model(139), vec![5, 1, 2, 3], model(129), vec![3, 4, 5, 1]]);
    assert_eq!(mix.mixed.drafted(), Drafted { ngram: 2, model: 2 });
}

#[test]
fn where_n_grams_draft_for_all_the_model_is_not_asked() {
    let mut mix = Mix::new(NgramScope::Request);
    let known = repeated(&[1, 2, 3], 40);
    for length in 30..40 {
        assert!(mix.ngrams_draft((1, &known[..length], 0.5)));
    }
    assert_eq!(mix.asked().trees.len(), 0);
    assert!(mix.draft(&[], Shape::chain(3), 0.0).is_empty());
}

#[test]
fn a_short_match_leaves_drafting_to_the_model() {
    let mut mix = Mix::new(NgramScope::Request);
    // Only the last token was seen before, and something else followed it each time.
    let text: Vec<u32> = (0..20).flat_map(|at| [7, 100 + at]).chain([7]).collect();
    assert!(!mix.ngrams_draft((1, &text, 0.9)));
    assert!(!mix.ngrams_draft((2, &text, 0.2)));
}

#[test]
fn both_sides_hear_of_every_token_and_of_every_leave() {
    let mut mix = Mix::new(NgramScope::Request);
    let known = repeated(&[1, 2, 3, 4], 40);
    mix.extend(1, &known[..20]);
    mix.extend(1, &known[..24]);
    assert_eq!(mix.asked().extended, [(1, 20, Some(1)), (1, 24, Some(1))]);
    assert!(mix.ngrams_draft((1, &known[..24], 0.5)));
    mix.leave(1, &known);
    assert_eq!(mix.asked().left, [1]);
    assert!(!mix.ngrams_draft((1, &[1], 0.5)), "what a request read leaves with it");
}

#[test]
fn guesses_that_were_wrong_are_not_trusted_again() {
    let mut mix = Mix::new(NgramScope::Request);
    // The same five tokens come back, each time with another one behind them.
    let mut text = fresh(5);
    for end in 0..12 {
        text.push(1000 + end);
        text.extend(fresh(5));
    }
    assert!(mix.ngrams_draft((1, &text[..11], 0.5)), "a long match is trusted at first");
    assert!(!mix.ngrams_draft((1, &text, 0.5)));
}

fn text() -> impl Strategy<Value = Vec<u32>> {
    let piece = prop::collection::vec(0u32..6, 1..8);
    prop::collection::vec((piece, 1usize..4), 2..10).prop_map(|pieces| {
        pieces.into_iter().flat_map(|(piece, times)| piece.repeat(times)).collect()
    })
}

proptest! {
    #[test]
    fn in_the_scope_of_a_request_its_text_alone_decides(
        text in text(),
        others in prop::collection::vec(text(), 0..4),
        cuts in prop::collection::vec(1usize..200, 0..5),
        sure in 0.0f32..1.0,
        returns in any::<bool>(),
    ) {
        let want = Mix::new(NgramScope::Request).ngrams_draft((1, &text, sure));
        let mut mix = Mix::new(NgramScope::Request);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
        cuts.sort_unstable();
        for cut in cuts {
            mix.extend(1, &text[..cut]);
            mix.ngrams_draft((1, &text[..cut], 1.0 - sure));
            for (number, other) in (2..).zip(&others) {
                mix.ngrams_draft((number, other, 0.5));
            }
            if returns {
                mix.leave(1, &text[..cut]);
            }
        }
        prop_assert_eq!(mix.ngrams_draft((1, &text, sure)), want);
    }

    /// Else drafts that are verified by rejection would not be distributed as they say.
    #[test]
    fn the_tokens_that_a_model_drew_do_not_decide(
        text in text(),
        sure in 0.0f32..1.0,
        temperature in 0.0f32..1.5,
        server in any::<bool>(),
    ) {
        let scope = if server { NgramScope::Server } else { NgramScope::Request };
        let drafted = |offered| {
            let mut mix = Mix { offered, ..Mix::new(scope) };
            mix.draft(&[(1, &text, sure)], Shape::chain(3), temperature);
            mix.mixed.drafted()
        };
        let any = drafted(MODEL);
        for token in 0..6 {
            prop_assert_eq!(drafted(token), any);
        }
    }

    #[test]
    fn in_any_scope_trees_are_those_of_one_side(
        texts in prop::collection::vec(text(), 1..4),
        steps in 1usize..6,
        topk in 1usize..5,
        sure in 0.0f32..1.0,
        server in any::<bool>(),
    ) {
        let shape = Shape::new(steps, topk, 12.min(Shape::most_nodes(steps, topk))).unwrap();
        let scope = if server { NgramScope::Server } else { NgramScope::Request };
        let mut mix = Mix::new(scope);
        let requests: Vec<Asks<'_>> =
            (1..).zip(&texts).map(|(number, text)| (number, &text[..], sure)).collect();
        for tree in mix.draft(&requests, shape, 0.0) {
            let of_model = tree.nodes()[1..].iter().filter(|node| node.token == MODEL).count();
            prop_assert!(of_model == 0 || of_model == tree.len() - 1);
        }
        let Drafted { ngram, model } = mix.mixed.drafted();
        prop_assert_eq!((ngram + model) as usize, requests.len());
    }
}

#[test]
fn a_mix_is_found_by_its_names_in_any_case_or_refused_with_a_sentence() {
    let registry = Registry::built_in();
    for (called, name) in [
        ("EAGLE3+NGRAM", "EAGLE3+NGRAM"),
        ("standalone+ngram", "STANDALONE+NGRAM"),
        ("Nextn+Ngram", "MTP+NGRAM"),
    ] {
        let entry = registry.find(called).unwrap().unwrap();
        assert_eq!(entry.name(), name);
        assert!(entry.drafts_from_ngrams());
        let model = registry.find(name.split('+').next().unwrap()).unwrap().unwrap();
        assert!(!model.drafts_from_ngrams());
        assert_eq!(entry.draft_for("tiny"), model.draft_for("tiny"));
        let asked = Default::default();
        assert_eq!(entry.shape(asked).unwrap(), model.shape(asked).unwrap());
    }
    let refused = |name: &str| registry.find(name).err().unwrap();
    for (name, why) in [
        ("NGRAM+NGRAM", "NGRAM has no model"),
        ("none+ngram", "NONE has no model"),
        ("EAGLE3+STANDALONE", "\"STANDALONE\" cannot be mixed"),
        ("NGRAM+EAGLE3", "\"EAGLE3\" cannot be mixed"),
        ("EAGLE3+", "\"\" cannot be mixed"),
        ("EAGLE3+NGRAM+NGRAM", "\"NGRAM+NGRAM\" cannot be mixed"),
    ] {
        let error = refused(name);
        assert!(matches!(error, Error::NoMix { .. }) && error.is_usage(), "{name}: {error}");
        let text = error.to_string();
        assert!(text.contains(why) && text.contains("EAGLE3, EAGLE, MTP, STANDALONE"), "{text}");
    }
    assert!(matches!(refused("HAWK+NGRAM"), Error::Unknown { .. }));
}
