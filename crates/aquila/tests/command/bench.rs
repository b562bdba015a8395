//! The benchmark of policies: what it compares, what it tells, what it refuses.

use std::path::Path;

use serde_json::Value;

use crate::run::{Ran, run, without_tokenizer};

const CONTENDERS: [&str; 7] = [
    "plain",
    "fixed, 1 step",
    "fixed, 3 steps",
    "fixed, 5 steps",
    "fixed, 7 steps",
    "SGLang's adaptive",
    "auto",
];

fn bench(folder: &Path, args: &[&str]) -> (Ran, Value, String) {
    let [json, svg] = ["figures.json", "chart.svg"].map(|name| folder.join(name));
    let files = ["--json", json.to_str().unwrap(), "--svg", svg.to_str().unwrap()];
    let ran = run(&[&["bench", "adaptive", "--repeat", "1"], &files[..], args].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let figures = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    (ran, figures, std::fs::read_to_string(svg).unwrap())
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn names(section: &Value) -> Vec<&str> {
    list(section, "contenders").iter().map(|c| c["name"].as_str().unwrap()).collect()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs())
}

/// Names of elements in order, having checked that they are nested as XML wants it.
fn elements(svg: &str) -> Vec<&str> {
    let (mut open, mut all) = (Vec::new(), Vec::new());
    for tag in svg.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.trim_start_matches('/').split([' ', '/', '\n']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "<{tag}>");
        } else {
            all.push(name);
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
    }
    assert!(open.is_empty(), "{open:?} are never closed");
    all
}

#[test]
fn policies_do_the_same_work_and_are_compared_by_phase_and_overall() {
    let folder = tempfile::tempdir().unwrap();
    let workload = ["--phases", "code:1,prose:3", "--phase-tokens", "30", "--answer-tokens", "12"];
    let (ran, figures, svg) = bench(folder.path(), &workload);
    let phases = list(&figures, "phases");
    assert_eq!(phases.len(), 2);
    for (phase, (title, batch)) in phases.iter().zip([("code, batch 1", 1), ("prose, batch 3", 3)])
    {
        assert_eq!(phase["name"], title);
        assert_eq!(phase["tokens"], 30 * batch);
        assert_eq!(names(phase), CONTENDERS);
        for (figures, course) in list(phase, "contenders").iter().zip(list(phase, "over_time")) {
            let (seconds, speed) =
                (number(figures, "seconds"), number(figures, "tokens_per_second"));
            assert!(close(seconds * speed, number(phase, "tokens")), "{figures}");
            // Equal shares of the tokens: the mean time of a token is the phase's.
            assert_eq!(course["name"], figures["name"]);
            let speeds = list(course, "tokens_per_second");
            let times: f64 = speeds.iter().map(|speed| 1.0 / speed.as_f64().unwrap()).sum();
            assert!(close(speeds.len() as f64 / times, speed), "{course} is not {speed}");
        }
        assert!(ran.stdout.contains(title), "{}", ran.stdout);
    }
    let overall = &figures["overall"];
    assert_eq!(overall["tokens"], 120);
    assert_eq!(names(overall), CONTENDERS);
    let plain = number(&overall["contenders"][0], "seconds");
    for (at, (name, figures)) in CONTENDERS.iter().zip(list(overall, "contenders")).enumerate() {
        let seconds = number(figures, "seconds");
        let parts = phases.iter().map(|phase| number(&phase["contenders"][at], "seconds"));
        assert!(close(seconds, parts.sum()), "{figures}");
        assert!(close(number(figures, "ratio"), plain / seconds), "{figures}");
        let rows = ran.stdout.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!(rows, 3, "{name} has a row for each phase and overall: {}", ran.stdout);
        let steps = number(figures, "mean_steps");
        assert!(close(number(figures, "mean_nodes"), steps + 1.0), "chains: {figures}");
        match name.strip_prefix("fixed, ").and_then(|name| name.split(' ').next()) {
            // Less than its steps only where an answer ends before.
            Some(most) => {
                let most: f64 = most.parse().unwrap();
                assert!(0.5 * most < steps && steps <= most, "{figures}");
            }
            None => assert!(steps <= if *name == "plain" { 0.0 } else { 7.0 }, "{figures}"),
        }
    }

    let all = elements(&svg);
    assert_eq!(all[0], "svg");
    let lines = all.iter().filter(|&&name| name == "polyline").count();
    assert_eq!(lines, 2 * 2 * CONTENDERS.len(), "in both panels one for each phase and contender");
    for what in
        CONTENDERS.iter().chain(&["code, batch 1", "prose, batch 3", "per second", "time (s)"])
    {
        assert!(svg.contains(what), "the picture lacks {what:?}");
    }
    for what in ["script", "href", "url(", "@font-face", "NaN", "inf"] {
        assert!(!svg.contains(what), "the picture has {what:?}");
    }
}

#[test]
fn pretended_acceptance_needs_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = without_tokenizer();
    let draft = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", &model];
    let workload = ["--phases", "random:2", "--phase-tokens", "26", "--answer-tokens", "13"];
    let pretended = ["--simulate-acc-len", "2", "-q"];
    let args = [&[&model[..]], &draft[..], &workload, &pretended].concat();
    let (ran, figures, _) = bench(folder.path(), &args);
    assert_eq!(ran.stderr, "");
    for contender in &list(&figures["overall"], "contenders")[1..5] {
        // Behind the first token, twelve in rounds of two.
        assert_eq!(contender["accept_length"], 2.0, "{contender}");
    }
}

#[test]
fn who_drafts_too_far_ahead_for_a_head_is_left_out_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let workload = ["--phases", "code:1", "--phase-tokens", "12", "--answer-tokens", "12"];
    let args = [&["--speculative-algorithm", "MTP"], &workload[..]].concat();
    let (ran, figures, _) = bench(folder.path(), &args);
    let overall = &figures["overall"];
    assert_eq!(names(overall), ["plain", "fixed, 1 step", "fixed, 3 steps", "auto"]);
    let told = "fixed, 5 steps, fixed, 7 steps, SGLang's adaptive";
    assert!(ran.stderr.contains(told), "{}", ran.stderr);
}

#[test]
fn a_workload_that_compares_nothing_is_refused_by_its_flag() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--phases", "code"], &["--phases", "KIND:BATCH"]),
        (&["--phases", "code:0"], &["--phases", "KIND:BATCH"]),
        (&["--phases", "verse:2"], &["--phases", "\"verse\""]),
        (&["--repeat", "0"], &["--repeat", "at least 1"]),
        (&["--answer-tokens", "1"], &["--answer-tokens", "at least 2"]),
        (&["--speculative-algorithm", "NONE"], &["--speculative-algorithm"]),
        (&["--speculative-num-steps", "3"], &["--speculative-policy", "its turn"]),
        (&["--speculative-policy", "adaptive"], &["--speculative-policy", "its turn"]),
    ];
    for (args, words) in cases {
        let ran = run(&[&["bench", "adaptive", "-q"], *args].concat());
        assert_eq!(ran.code, Some(2), "{args:?}: {}", ran.stderr);
        for word in *words {
            assert!(ran.stderr.contains(word), "{args:?}: {:?} lacks {word:?}", ran.stderr);
        }
    }
}
