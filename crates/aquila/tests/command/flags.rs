//! Wrong flags are refused by name, before a model is loaded.

use crate::run::run;

#[test]
fn a_wrong_flag_is_named_with_exit_code_2() {
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["--prompt", "--input"]),
        (&["--prompt", "x", "--temperature", "-1"], &["--temperature", "-1"]),
        (&["--prompt", "x", "--temperature", "nan"], &["--temperature", "NaN"]),
        (&["--prompt", "x", "--temperature", "hot"], &["--temperature", "hot"]),
        (&["--prompt", "x", "--top-p", "0"], &["--top-p"]),
        (&["--prompt", "x", "--top-k", "-2"], &["--top-k"]),
        (&["--prompt", "x", "--min-p", "1.5"], &["--min-p"]),
        (&["--prompt", "x", "--max-tokens", "-1"], &["--max-tokens", "whole number"]),
        (&["--prompt", "x", "--seed", "1.5"], &["--seed", "whole number"]),
        (&["--prompt", "x", "--stop", ""], &["--stop", "empty"]),
        (&["--prompt", "x", "--repetition-penalty", "0"], &["--repetition-penalty"]),
        (&["--prompt", "x", "--presence-penalty", "-3"], &["--presence-penalty"]),
        (&["--prompt", "x", "--logit-bias", "{"], &["--logit-bias", "JSON"]),
        (&["--prompt", "x", "--logit-bias", "[1]"], &["--logit-bias", "object"]),
        (&["--prompt", "x", "--n", "2"], &["--n", "--input"]),
        (&["--input", "-", "--n", "0"], &["--n", "from 1"]),
        (&["--prompt", "x", "--logprobs"], &["--logprobs", "--input"]),
        (
            &["--prompt", "x", "--min-tokens", "5", "--max-tokens", "4"],
            &["--min-tokens", "--max-tokens (4)"],
        ),
        (&["--prompt", "x", "--min-tokens", "500"], &["--min-tokens", "--max-tokens (128)"]),
        (&["--prompt", "x", "--input", "-"], &["--prompt", "--input"]),
        (&["--prompt", "x", "--output", "y"], &["--prompt", "--output"]),
        (&["--prompt", "x", "--page-size", "0"], &["--page-size", "from 1"]),
        (&["--prompt", "x", "--max-running-requests", "0"], &["--max-running-requests"]),
        (&["--prompt", "x", "--chunked-prefill-size", "0"], &["--chunked-prefill-size", "-1"]),
        (&["--prompt", "x", "--mem-fraction-static", "1.5"], &["--mem-fraction-static"]),
        (&["--prompt", "x", "--max-total-tokens", "0"], &["--max-total-tokens"]),
        (
            &["--prompt", "x", "--max-total-tokens", "3", "--page-size", "4"],
            &["--max-total-tokens 3", "--page-size 4"],
        ),
        (&["--prompt", "x", "--context-length", "0"], &["--context-length"]),
        (&["--prompt", "x", "--context-length", "9999"], &["--context-length 9999", "2048"]),
        (&["--prompt", "x", "--threads", "-1"], &["--threads"]),
        (&["--prompt", "x", "--threads", "100000"], &["--threads", "cores"]),
        (&["--prompt", "x", "--dtype", "int3"], &["--dtype", "bfloat16"]),
        (
            &["--prompt", "x", "--dtype", "float32", "--quantization", "int8"],
            &["--dtype", "--quantization"],
        ),
        (&["--prompt", "x", "--speculative-algorithm", "HAWK"], &["HAWK", "NONE", "STANDALONE"]),
        (&["--prompt", "x", "--speculative-algorithm", "dflash"], &["DFLASH", "not yet"]),
        (
            &["--prompt", "x", "--speculative-aux-layer-convention", "sideways"],
            &["--speculative-aux-layer-convention", "output", "boundary"],
        ),
        (
            &["--prompt", "x", "--speculative-draft-rope-theta", "0"],
            &["--speculative-draft-rope-theta", "at least 1"],
        ),
        (&["tiny", "--model-path", "tiny", "--prompt", "x"], &["--model-path"]),
        (&["--promt", "x"], &["--promt", "--prompt"]),
    ];
    for (args, words) in cases {
        let ran = run(&[&["generate"], *args].concat());
        assert_eq!(ran.code, Some(2), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{args:?}");
        for word in *words {
            assert!(ran.stderr.contains(word), "{args:?}: {:?} lacks {word:?}", ran.stderr);
        }
    }
}

#[test]
fn what_exceeds_memory_is_refused_with_the_flag_to_change() {
    let ran = run(&["generate", "--prompt", "x", "--max-total-tokens", "2000000000"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("--max-total-tokens 2000000000"), "{}", ran.stderr);
    let ran = run(&["generate", "--prompt", "x", "--mem-fraction-static", "0.000001"]);
    assert_eq!(ran.code, Some(1));
    let flag = "--mem-fraction-static 0.000001: weights (";
    assert!(ran.stderr.contains(flag), "{}", ran.stderr);
    let many = ["--max-running-requests", "60000", "--chunked-prefill-size", "-1"];
    let ran = run(&[&["generate", "--prompt", "x"][..], &many].concat());
    let flags = ", --chunked-prefill-size, --max-running-requests: weights (";
    assert!(ran.code == Some(1) && ran.stderr.contains(flags), "{}", ran.stderr);
}

#[test]
fn settings_are_told_at_start_unless_asked_to_be_quiet() {
    let args = ["generate", "--prompt", "x", "--max-tokens", "1", "--page-size", "4"];
    let ran = run(&[&args[..], &["--kv-cache-dtype", "bfloat16", "--threads", "1"]].concat());
    assert_eq!(ran.code, Some(0));
    for word in ["tiny", "KV bfloat16", "page size 4", "1 thread", "weights", "total"] {
        assert!(ran.stderr.contains(word), "{:?} lacks {word:?}", ran.stderr);
    }
    // Bars are for terminals.
    assert!(!ran.stderr.contains('\r') && !ran.stderr.contains('\x1b'), "{:?}", ran.stderr);
    let ran = run(&[&args[..], &["-q"]].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
}

#[test]
fn the_help_lists_exit_codes_and_environment_variables() {
    let variables = [
        "AQUILA_ADMIN_API_KEY",
        "AQUILA_API_KEY",
        "AQUILA_LOG",
        "AQUILA_MODELS",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "SSL_CERT_FILE",
        "NO_COLOR",
        "OPENAI_API_KEY",
        "SGLANG_ENABLE_SPEC_V2",
        "XDG_CACHE_HOME",
    ];
    for command in [
        "",
        "generate",
        "serve",
        "chat",
        "inspect",
        "doctor",
        "conformance",
        "bench spec",
        "bench decode",
        "bench serve",
    ] {
        let ran = run(&command.split_whitespace().chain(["--help"]).collect::<Vec<_>>());
        assert_eq!(ran.code, Some(0));
        assert!(ran.stdout.contains("Exit codes: 0 all went well"), "{}", ran.stdout);
        for variable in variables {
            assert!(ran.stdout.contains(variable), "{command}: {} lacks {variable}", ran.stdout);
        }
    }
}

#[test]
fn the_help_of_serve_says_how_long_answers_are() {
    let ran = run(&["serve", "--help"]);
    let text = ran.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let after = text.split("--max-tokens <N>").nth(1).unwrap();
    let says = "[default: 128; what the context leaves for /v1/chat/completions and aquila chat, \
                16 for /v1/completions, as OpenAI has it]";
    assert!(after.trim_start().starts_with(&format!("Tokens of an answer {says}")), "{after}");
}

#[test]
fn the_doctor_says_what_the_machine_has() {
    let ran = run(&["doctor"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    for name in ["aquila    ", "CPU       ", "memory    ", "CUDA      "] {
        assert!(ran.stdout.contains(name), "{} lacks {name:?}", ran.stdout);
    }
}

#[test]
fn an_algorithm_that_there_is_not_is_not_checked() {
    let ran = run(&["conformance", "nothing"]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("nothing") && ran.stderr.contains("EAGLE3"), "{}", ran.stderr);
}
