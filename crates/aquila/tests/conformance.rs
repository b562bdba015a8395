//! Every built-in algorithm holds to what every algorithm must hold to.

use aquila::{Algorithms, conformance};

fn conforms(name: &str, flags: &[&str]) -> conformance::Report {
    let report = conformance::check(&Algorithms::built_in(), name, flags).unwrap();
    assert_eq!(report.failures, [""; 0], "{name}");
    assert!(report.answers > 200, "{report:?}");
    report
}

#[test]
fn models_that_draft_conform_and_their_drafts_are_invariant() {
    for name in ["EAGLE3", "EAGLE", "MTP", "STANDALONE"] {
        let report = conforms(name, &[]);
        assert!(report.invariant, "{name}");
        assert!(report.accept_length > 1.2, "{name}: {report:?}");
    }
}

#[test]
fn mixes_of_a_model_and_n_grams_conform_and_those_of_a_request_are_invariant() {
    for name in ["EAGLE3+NGRAM", "STANDALONE+NGRAM"] {
        let report = conforms(name, &["--speculative-ngram-scope", "request"]);
        assert!(report.invariant, "{name}");
        assert!(report.accept_length > 1.2, "{name}: {report:?}");
    }
    conforms("mtp+ngram", &[]);
}

#[test]
fn n_grams_conform_and_those_of_a_request_are_invariant() {
    let report = conforms("NGRAM", &["--speculative-ngram-scope", "request"]);
    assert!(report.invariant && report.accept_length > 1.1, "{report:?}");
    // What all share depends on who comes when; the text does not.
    conforms("ngram", &["--speculative-ngram-match-type", "prob"]);
}
