//! What the command tells shells and scripts: completions, its version.

use std::process::Command;

use crate::run::{Ran, run};

/// What bash offers for a line that ends in `words`.
fn offered(script: &str, words: &[&str]) -> Vec<String> {
    let complete = r#"
        eval "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        _aquila aquila "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", complete, "bash", script, "aquila"]).args(words);
    let ran = Ran::of(bash.output().unwrap());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    ran.stdout.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let ran = run(&["completions", "bash"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    let offered = |words: &[&str]| offered(&ran.stdout, words);
    assert_eq!(offered(&["se"]), ["serve"]);
    assert_eq!(offered(&["serve", "--speculative-alg"]), ["--speculative-algorithm"]);
    assert_eq!(offered(&["bench", "sp"]), ["spec"]);
    assert_eq!(offered(&["generate", "--kv-cache-dtype", "b"]), ["bfloat16"]);
    assert_eq!(offered(&["completions", "z"]), ["zsh"]);
}

#[test]
fn zsh_and_fish_have_scripts_with_all_commands() {
    for shell in ["zsh", "fish"] {
        let ran = run(&["completions", shell]);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
        for word in ["generate", "bench", "chat", "serve", "inspect", "speculative-algorithm"] {
            assert!(ran.stdout.contains(word), "{shell} does not know {word}");
        }
    }
    let ran = run(&["completions", "tcsh"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("tcsh") && ran.stderr.contains("zsh"), "{}", ran.stderr);
}

#[test]
fn the_version_names_the_commit() {
    let ran = run(&["--version"]);
    let line = ran.stdout.strip_suffix('\n').unwrap();
    let rest = line.strip_prefix(concat!("aquila ", env!("CARGO_PKG_VERSION"), " (commit "));
    let commit = rest.and_then(|rest| rest.strip_suffix(')')).expect(line);
    assert!(!commit.is_empty() && !commit.contains(char::is_whitespace), "{line}");
}
