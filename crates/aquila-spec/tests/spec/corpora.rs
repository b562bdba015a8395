//! Corpora that come and go.

use aquila_spec::Shape;
use aquila_spec::ngram::{Corpora, CorpusError, Ngram, NgramScope, NgramSettings};

fn names(corpora: &Corpora) -> Vec<(String, usize)> {
    corpora.snapshot().iter().map(|c| (c.name().to_owned(), c.tokens())).collect()
}

#[test]
fn a_corpus_reserves_its_name_and_appears_once_finished() {
    let corpora = Corpora::new(100, 1000);
    let mut load = corpora.load("b").unwrap();
    load.push(&[1, 2, 3]);
    assert_eq!(names(&corpora), []);
    assert_eq!(corpora.load("b").unwrap_err(), CorpusError::Exists("b".into()));
    let corpus = load.finish().unwrap();
    assert!(corpus.bytes() > 0);
    assert_eq!(corpora.bytes(), corpus.bytes());
    assert_eq!(corpora.load("b").unwrap_err(), CorpusError::Exists("b".into()));
    let mut load = corpora.load("a").unwrap();
    load.push(&[1]);
    load.finish().unwrap();
    assert_eq!(names(&corpora), [("a".into(), 1), ("b".into(), 3)]);
}

#[test]
fn a_corpus_removed_while_it_is_loaded_never_appears() {
    let corpora = Corpora::new(100, 1000);
    let mut load = corpora.load("a").unwrap();
    assert!(load.push(&[1, 2, 3]));
    corpora.remove("a").unwrap();
    assert!(!load.push(&[4]), "no more is wanted");
    // Its name is free at once, and the later corpus is not the earlier one's to finish or drop.
    let mut later = corpora.load("a").unwrap();
    assert!(later.push(&[7]));
    assert_eq!(load.finish().unwrap_err(), CorpusError::Removed("a".into()));
    later.finish().unwrap();
    assert_eq!(names(&corpora), [("a".into(), 1)]);
    assert_eq!(corpora.remove("b"), Err(CorpusError::Unknown("b".into())));
}

#[test]
fn a_load_that_is_dropped_leaves_nothing_behind() {
    let corpora = Corpora::new(4, 1000);
    let mut load = corpora.load("a").unwrap();
    load.push(&[1, 2, 3, 4]);
    drop(load);
    let mut load = corpora.load("a").unwrap();
    assert!(load.push(&[1, 2, 3, 4]));
    load.finish().unwrap();
    assert_eq!(names(&corpora), [("a".into(), 4)]);
}

#[test]
fn all_corpora_share_the_room_and_the_last_is_cut() {
    let corpora = Corpora::new(5, 1000);
    let mut first = corpora.load("a").unwrap();
    assert!(first.push(&[1, 2, 3]));
    let mut second = corpora.load("b").unwrap();
    assert!(!second.push(&[4, 5, 6]));
    assert!(second.truncated() && second.tokens() == 2);
    assert!(matches!(corpora.load("c").unwrap_err(), CorpusError::Full { most: 5, .. }));
    first.finish().unwrap();
    second.finish().unwrap();
    assert_eq!(names(&corpora), [("a".into(), 3), ("b".into(), 2)]);
    corpora.remove("a").unwrap();
    let empty = corpora.load("c").unwrap();
    assert_eq!(empty.finish().unwrap_err(), CorpusError::Empty("c".into()));
}

#[test]
fn rounds_draft_from_whole_corpora_while_others_change_them() {
    let corpora = Corpora::new(100_000, 1000);
    let settings = NgramSettings { scope: NgramScope::Request, ..NgramSettings::default() };
    let mut ngram = Ngram::new(settings, corpora.clone()).unwrap();
    let changes = std::thread::spawn(move || {
        for turn in 0..200 {
            let mut load = corpora.load("text").unwrap();
            for start in 0..10 {
                load.push(&(start * 50..start * 50 + 50).collect::<Vec<u32>>());
            }
            if turn % 3 == 0 {
                corpora.remove("text").unwrap();
                assert!(load.finish().is_err());
            } else {
                load.finish().unwrap();
                corpora.remove("text").unwrap();
            }
        }
    });
    while !changes.is_finished() {
        let tree = ngram.tree(1, &[100], Shape::chain(11));
        // All of the continuation, or nothing.
        assert!(matches!(tree.len(), 1 | 12), "{}", tree.len());
        ngram.forget(1);
    }
    changes.join().unwrap();
}
