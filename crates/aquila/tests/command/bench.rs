//! The benchmark of speculation: what its figures are of.

use serde_json::Value;

use crate::run::run;

#[test]
fn n_grams_find_nothing_of_passes_before() {
    let accepted = |scope: &[&str]| {
        let args = ["bench", "spec", "--speculative-algorithm", "NGRAM", "--shapes", "3/1/4"];
        let short = ["--repeat", "2", "--max-tokens", "24", "--json"];
        let ran = run(&[&args[..], &short, scope].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let figures: Value = serde_json::from_str(&ran.stdout).unwrap();
        (figures["contenders"][1]["accept_length"].as_f64().unwrap(), ran.stderr)
    };
    let (usual, said) = accepted(&[]);
    assert!(said.contains("of each request's own text"), "{said}");
    let (request, said) = accepted(&["--speculative-ngram-scope", "request"]);
    assert!(said.contains("of each request's own text"), "{said}");
    let (server, said) = accepted(&["--speculative-ngram-scope", "server"]);
    assert!(said.contains("flatters"), "{said}");
    assert_eq!(usual, request);
    assert!(server > usual, "{server} and {usual}");
}
