//! N-grams beside a model: which requests they draft for, and what may decide it.

use aquila_spec::ngram::{Corpora, Ngram, NgramScope, NgramSettings};
use aquila_spec::{
    DraftRequest, Drafted, Error, HostProposer, Registry, Shape, Tree, TrustedNgrams,
};
use proptest::prelude::*;

const VOCABULARY: usize = 1 << 12;

/// N-grams in some scope.
struct Mix(TrustedNgrams);

/// A request: its number and its text.
type Asks<'a> = (u64, &'a [u32]);

impl Mix {
    fn new(scope: NgramScope) -> Self {
        let settings = NgramSettings { scope, ..NgramSettings::default() };
        let ngram = Ngram::new(settings, Corpora::new(1 << 20, VOCABULARY)).unwrap();
        Self(TrustedNgrams::new(ngram))
    }

    /// The trees of requests; none where the model drafts.
    fn draft(&mut self, requests: &[Asks<'_>], shape: Shape) -> Vec<Option<Tree>> {
        let draft = |&(request, tokens): &Asks<'_>| {
            let request = DraftRequest { request, tokens, shape };
            let tree = self.0.draft(&request);
            assert!(tree.iter().all(|tree| request.admits(tree, VOCABULARY)), "{tree:?}");
            tree
        };
        requests.iter().map(draft).collect()
    }

    /// Whether n-grams draft for a request.
    fn ngrams_draft(&mut self, request: Asks<'_>) -> bool {
        self.draft(&[request], Shape::chain(3)).remove(0).is_some()
    }
}

fn repeated(piece: &[u32], length: usize) -> Vec<u32> {
    piece.iter().copied().cycle().take(length).collect()
}

fn fresh(length: u32) -> Vec<u32> {
    (0..length).map(|at| 100 + at).collect()
}

#[test]
fn the_model_drafts_where_n_grams_are_not_trusted() {
    let mut mix = Mix::new(NgramScope::Request);
    let (known, new) = (repeated(&[1, 2, 3, 4, 5], 40), fresh(40));
    let requests = [(1, &new[..]), (2, &known[..]), (3, &new[..30]), (4, &known[..33])];
    let trees = mix.draft(&requests, Shape::chain(3));
    let tokens = |tree: &Option<Tree>| -> Option<Vec<u32>> {
        Some(tree.as_ref()?.nodes().iter().map(|node| node.token).collect())
    };
    let drafted: Vec<_> = trees.iter().map(tokens).collect();
    assert_eq!(drafted, [None, Some(vec![5, 1, 2, 3]), None, Some(vec![3, 4, 5, 1])]);
    assert_eq!(mix.0.drafted(), Drafted { ngram: 2, model: 2 });
}

#[test]
fn a_short_match_leaves_drafting_to_the_model() {
    let mut mix = Mix::new(NgramScope::Request);
    // Only the last token was seen before, and something else followed it each time.
    let text: Vec<u32> = (0..20).flat_map(|at| [7, 100 + at]).chain([7]).collect();
    assert!(!mix.ngrams_draft((1, &text)));
    assert!(!mix.ngrams_draft((2, &text)));
}

#[test]
fn what_a_request_read_leaves_with_it() {
    let mut mix = Mix::new(NgramScope::Request);
    let known = repeated(&[1, 2, 3, 4], 40);
    mix.0.read(1, &known[..20]);
    mix.0.read(1, &known[..24]);
    assert!(mix.ngrams_draft((1, &known[..24])));
    mix.0.leave(1, &known);
    assert!(!mix.ngrams_draft((1, &[1])));
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
    assert!(mix.ngrams_draft((1, &text[..11])), "a long match is trusted at first");
    assert!(!mix.ngrams_draft((1, &text)));
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
        returns in any::<bool>(),
    ) {
        let want = Mix::new(NgramScope::Request).ngrams_draft((1, &text));
        let mut mix = Mix::new(NgramScope::Request);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
        cuts.sort_unstable();
        for cut in cuts {
            mix.0.read(1, &text[..cut]);
            mix.ngrams_draft((1, &text[..cut]));
            for (number, other) in (2..).zip(&others) {
                mix.ngrams_draft((number, other));
            }
            if returns {
                mix.0.leave(1, &text[..cut]);
            }
        }
        prop_assert_eq!(mix.ngrams_draft((1, &text)), want);
    }
}

#[test]
fn a_mix_is_found_by_its_names_or_refused() {
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
