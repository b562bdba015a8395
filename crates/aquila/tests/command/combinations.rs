//! Every combination of algorithm, tree or policy, page size, schedule, verification and prefix
//! cache is
//! served, or refused with a sentence before anything is loaded.

use std::process::{Command, Output};

const ALGORITHMS: [&str; 6] = ["NONE", "EAGLE3", "EAGLE", "MTP", "STANDALONE", "NGRAM"];
const TREES: [&[&str]; 5] = [
    &[],
    &["--speculative-adaptive"],
    &["--speculative-policy", "auto", "--speculative-num-steps", "3"],
    &["--speculative-num-steps", "2", "--speculative-eagle-topk", "1"],
    &[
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "4",
        "--speculative-num-draft-tokens",
        "12",
    ],
];
const PAGES: [&str; 3] = ["1", "16", "64"];
const SCHEDULES: [&str; 2] = ["--enable-overlap-schedule", "--disable-overlap-schedule"];
const VERIFY: [&[&str]; 4] = [
    &[],
    &["--speculative-verify", "match"],
    &["--speculative-verify", "target-only", "--speculative-accept-threshold-single", "0.9"],
    &["--speculative-use-rejection-sampling"],
];
const CACHES: [&[&str]; 2] = [&[], &["--disable-radix-cache"]];

fn generate(flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquila"));
    command.args(["generate", "--prompt", "fn main() {", "--max-tokens", "10", "--seed", "3"]);
    command.args([
        "--temperature",
        "0.8",
        "--context-length",
        "128",
        "--max-running-requests",
        "2",
    ]);
    command.args(flags).output().expect("the command runs")
}

/// Why a combination is refused, if it is to be.
fn refusal(algorithm: &str, tree: &[&str], verify: &[&str]) -> Option<&'static str> {
    let asks = !tree.is_empty() || !verify.is_empty();
    (algorithm == "NONE" && asks).then_some("needs --speculative-algorithm")
}

#[test]
fn every_combination_is_served_or_refused_with_a_sentence() {
    let plain = generate(&["--speculative-algorithm", "NONE"]).stdout;
    assert!(!plain.is_empty());
    let (mut served, mut refused) = (0, 0);
    for (a, algorithm) in ALGORITHMS.into_iter().enumerate() {
        for (t, tree) in TREES.into_iter().enumerate() {
            for (v, verify) in VERIFY.into_iter().enumerate() {
                // Page size, schedule and cache take turns, so that every pair of them, and each
                // of them with every algorithm, tree and verification, comes to run.
                let turn = a + 2 * t + 3 * v;
                let (pages, schedule) = (PAGES[turn % 3], SCHEDULES[(turn / 3 + t) % 2]);
                let cache = CACHES[(turn / 2 + v) % 2];
                let flags = [
                    &["--speculative-algorithm", algorithm, "--page-size", pages, schedule],
                    tree,
                    verify,
                    cache,
                ]
                .concat();
                let output = generate(&flags);
                let said = String::from_utf8_lossy(&output.stderr);
                if let Some(why) = refusal(algorithm, tree, verify) {
                    refused += 1;
                    assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
                    assert!(said.contains(why), "{flags:?}: {said}");
                    continue;
                }
                served += 1;
                assert!(output.status.success(), "{flags:?}: {said}");
                assert!(!output.stdout.is_empty(), "{flags:?}: {said}");
                let matches = v < 2;
                if matches {
                    assert_eq!(output.stdout, plain, "{flags:?}: the text is plain decoding's");
                }
                assert!(said.contains("schedule"), "{flags:?}: the mode is said at start: {said}");
            }
        }
    }
    assert_eq!((served, refused), (101, 19));
}
