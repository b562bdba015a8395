//! How likely drafts are to be right, by what was accepted.

use aquila_spec::Shape;
use aquila_spec::policy::{RequestOutcome, Survival};

#[test]
fn what_is_not_known_is_as_what_is_nearest() {
    let mut survival = Survival::new(0.6);
    assert_eq!([survival.rate(1), survival.rate(7), survival.factor(3)], [0.6, 0.6, 1.0]);
    let chain = Shape::chain(2);
    for n in 0..400 {
        let correct = [2, 2, 1, 0, 2][n % 5];
        survival.learn(&[RequestOutcome::chain(1, chain, correct)], false);
    }
    // By hand: 4 of 5 first drafts are right, and 3 of 4 second ones.
    assert!((survival.rate(1) - 0.8).abs() < 0.03, "{}", survival.rate(1));
    assert!((survival.rate(2) - 0.75).abs() < 0.04, "{}", survival.rate(2));
    assert!((survival.rate(3) - survival.rate(2)).abs() < 1e-9);
    assert!((survival.factor(1) - 1.0).abs() < 0.15);
    assert_eq!(survival.factor(2), 1.0);
}

#[test]
fn branch_ranks_are_learned_apart() {
    let mut survival = Survival::new(0.6);
    let shape = Shape::new(1, 3, 4).unwrap();
    let outcome = |ranks: &'static [u8]| RequestOutcome {
        correct: ranks.len(),
        ranks,
        refused: if ranks.is_empty() { 3 } else { 0 },
        ..RequestOutcome::chain(1, shape, 0)
    };
    for n in 0..1200 {
        let ranks: &[u8] = [&[0][..], &[1], &[], &[0]][n % 4];
        survival.learn(&[outcome(ranks)], false);
    }
    // Half of the first are right; of the misses, every second is the second candidate's.
    assert!((survival.rate(1) - 0.5).abs() < 0.05);
    assert!((survival.rate_of_rank(1, 1) - 0.25).abs() < 0.04, "{}", survival.rate_of_rank(1, 1));
    assert!(survival.rate_of_rank(1, 2) < 0.03);
}
