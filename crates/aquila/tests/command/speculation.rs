//! The flags of speculation, and what lines of an input may say about it.

use serde_json::{Value, json};

use crate::run::{answers, ids, run};

fn requests(count: usize, speculative: Value) -> Vec<Value> {
    let sampling = json!({ "max_tokens": 61, "temperature": 0, "ignore_eos": true });
    let request = |id| {
        let prompt = format!("pub fn number_{id}() -> u32 {{");
        json!({ "id": id, "prompt": prompt, "sampling": sampling, "speculative": speculative })
    };
    (0..count).map(request).collect()
}

fn histogram(answer: &Value) -> Vec<u64> {
    let counts = answer["meta_info"]["spec_correct_drafts_histogram"].as_array();
    let counts = counts.unwrap_or_else(|| panic!("nothing was drafted: {answer}"));
    counts.iter().map(|count| count.as_u64().unwrap()).collect()
}

#[test]
fn pretended_lengths_have_the_mean_asked_for() {
    let steps = ["--speculative-num-steps", "4"];
    let exact =
        answers(&[&steps[..], &["--simulate-acc-len", "3"]].concat(), &requests(2, json!(null)));
    for answer in &exact {
        // Two drafts and the bonus in every round: 60 tokens in 20 rounds.
        assert_eq!(histogram(answer), [0, 0, 20], "{answer}");
        assert_eq!(answer["meta_info"]["spec_accept_length"], 3.0);
    }
    let varied = ["--simulate-acc-len", "2.5", "--simulate-acc-method", "multinomial"];
    let varied = answers(&[&steps[..], &varied].concat(), &requests(8, json!(null)));
    let mut rounds = [0; 5];
    for answer in &varied {
        for (sum, count) in rounds.iter_mut().zip(histogram(answer)) {
            *sum += count;
        }
    }
    assert!(rounds.iter().all(|&count| count > 0), "every length comes up: {rounds:?}");
    let correct: u64 = (0..).zip(rounds).map(|(i, count)| i * count).sum();
    let mean = 1.0 + correct as f64 / rounds.iter().sum::<u64>() as f64;
    assert!((2.2..2.8).contains(&mean), "{mean}");
}

#[test]
fn a_line_may_opt_out_or_cap_its_steps() {
    let args = ["--speculative-num-steps", "4"];
    let free = answers(&args, &requests(2, json!(true)));
    let plain = answers(&args, &requests(2, json!(false)));
    let capped = answers(&args, &requests(2, json!({ "num_steps": 1 })));
    for ((free, plain), capped) in free.iter().zip(&plain).zip(&capped) {
        assert_eq!(ids(free), ids(plain));
        assert_eq!(ids(free), ids(capped));
        assert!(plain["meta_info"].get("spec_verify_ct").is_none(), "{plain}");
        assert_eq!(histogram(capped).len(), 2, "{capped}");
        assert!(histogram(free).len() > 2, "{free}");
    }
}

#[test]
fn wrong_flags_of_speculation_are_refused_by_name() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--simulate-acc-len", "0.5"], &["--simulate-acc-len", "at least 1"]),
        (&["--simulate-acc-len", "nan"], &["--simulate-acc-len"]),
        (&["--simulate-acc-len", "2", "--simulate-acc-method", "guess"], &["multinomial"]),
        (
            &["--speculative-algorithm", "NONE", "--simulate-acc-len", "2"],
            &["--simulate-acc-len", "--speculative-algorithm"],
        ),
        (&["--speculative-num-steps", "-1"], &["--speculative-num-steps"]),
        (&["--speculative-eagle-topk", "0"], &["--speculative-eagle-topk"]),
        (
            &[
                "--speculative-num-steps",
                "2",
                "--speculative-eagle-topk",
                "2",
                "--speculative-num-draft-tokens",
                "8",
            ],
            &["--speculative-num-draft-tokens 8", "from 2 to 7"],
        ),
    ];
    for (args, words) in cases {
        let ran = run(&[&["generate", "--prompt", "x"], *args].concat());
        assert_eq!(ran.code, Some(2), "{args:?}: {}", ran.stderr);
        for word in *words {
            assert!(ran.stderr.contains(word), "{args:?}: {:?} lacks {word:?}", ran.stderr);
        }
    }
}

#[test]
fn drafting_flags_are_refused_by_algorithms_without_use_for_them() {
    let flags: [(&[&str], &[&str]); 5] = [
        (&["--speculative-token-map", "some.pt"], &["EAGLE", "MTP"]),
        (&["--speculative-aux-layer-convention", "output"], &["EAGLE3"]),
        (&["--speculative-draft-rope-theta", "10000"], &["EAGLE3"]),
        (&["--enable-multi-layer-eagle"], &["MTP"]),
        (&["--speculative-mtp-first-embedding", "keep"], &["MTP"]),
    ];
    for (flag, takers) in flags {
        for algorithm in ["EAGLE3", "EAGLE", "MTP", "STANDALONE", "NGRAM", "STANDALONE+NGRAM"] {
            if takers.contains(&algorithm) {
                continue;
            }
            let asked = ["generate", "--prompt", "x", "--speculative-algorithm", algorithm];
            let ran = run(&[&asked, flag].concat());
            assert_eq!(ran.code, Some(2), "{flag:?}, {algorithm}: {}", ran.stderr);
            let (flag, takers) = (flag[0], takers.join(" or "));
            let why =
                format!("{flag} is for --speculative-algorithm {takers}, not for {algorithm}");
            assert!(ran.stderr.contains(&why), "{}", ran.stderr);
        }
    }
    // Those that take one take it in a mix too.
    let mix = ["generate", "-q", "--prompt", "x", "--max-tokens", "4", "--speculative-algorithm"];
    for (algorithm, flag) in [
        ("EAGLE3+NGRAM", "--speculative-aux-layer-convention=output"),
        ("MTP+NGRAM", "--enable-multi-layer-eagle"),
    ] {
        let ran = run(&[&mix[..], &[algorithm, flag]].concat());
        assert_eq!(ran.code, Some(0), "{algorithm}: {}", ran.stderr);
    }
}
