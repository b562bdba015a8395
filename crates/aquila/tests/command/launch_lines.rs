//! The launch lines of SGLang's documentation on speculation, with our models' names: each starts
//! the real server, which answers, or is refused by a sentence.

use aquila_model::{Location, resolve};
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::run::run;
use crate::server::Served;

fn folder_of(name: &str) -> std::path::PathBuf {
    match resolve(name).unwrap() {
        Location::Folder(folder) => folder,
        Location::Preset(_) => unreachable!("{name} is shipped"),
    }
}

/// The shipped model with its MTP layers in its own checkpoint, as MiMo has them.
fn with_mtp_layers() -> TempDir {
    let made = tempfile::tempdir().unwrap();
    let model = folder_of("tiny");
    for file in std::fs::read_dir(&model).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), made.path().join(file.file_name())).unwrap();
    }
    let [model, layers] =
        [model, folder_of("tiny-mtp")].map(|f| std::fs::read(f.join("model.safetensors")).unwrap());
    let [model, layers] = [&model, &layers].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let mut tensors = model.tensors();
    let own = |(name, _): &(String, _)| name.contains("mtp_layers");
    tensors.extend(layers.tensors().into_iter().filter(own));
    let file = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(made.path().join("model.safetensors"), file).unwrap();
    made
}

/// A list of the tokens that may be drafted.
fn token_map() -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("map.json");
    std::fs::write(&path, serde_json::json!((0..4096).collect::<Vec<u32>>()).to_string()).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

const EAGLE: &str = "--model tiny --speculative-algorithm EAGLE --speculative-draft-model-path \
    tiny-eagle --speculative-num-steps 3 --speculative-eagle-topk 4 \
    --speculative-num-draft-tokens 16 --mem-fraction-static 0.7 --log-level warning";
const GRAPH: &str = "--cuda-graph-max-bs-decode 8";
const STANDALONE: &str = "--model tiny --speculative-algorithm STANDALONE \
    --speculative-draft-model-path draft --speculative-num-steps 4 --mem-fraction-static 0.7 \
    --cuda-graph-max-bs-decode 8 --log-level warning";

/// Starts a line, and has the server answer.
fn starts(line: &str, says: &[&str]) {
    let served = Served::start(line).unwrap_or_else(|ran| panic!("{line}: {}", ran.stderr));
    for word in says {
        assert!(served.said.contains(word), "{line}: {:?} lacks {word:?}", served.said);
    }
    assert_eq!(served.get("/health").0, 200, "{line}");
    let asked = r#"{"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4}"#;
    let (status, answer) = served.post("/v1/chat/completions", asked);
    assert_eq!(status, 200, "{line}: {answer}");
}

/// A line is refused with a sentence that has these words.
fn is_refused(line: &str, words: &[&str]) {
    let Err(ran) = Served::start(line) else { panic!("{line} started") };
    assert_eq!(ran.code, Some(2), "{line}: {}", ran.stderr);
    for word in words {
        assert!(ran.stderr.contains(word), "{line}: {:?} lacks {word:?}", ran.stderr);
    }
}

#[test]
fn line_1_eagle_with_a_tree() {
    let ignored = "--cuda-graph-max-bs is ignored: ";
    starts(&format!("{EAGLE} {GRAPH}"), &[ignored, "EAGLE with tiny-eagle", "topk 4, 16 nodes"]);
}

#[test]
fn line_2_eagle_with_torch_compile() {
    let compile = "--enable-torch-compile --torch-compile-max-bs 8";
    let ignored = ["--enable-torch-compile is ignored: ", "--torch-compile-max-bs is ignored: "];
    starts(&format!("{EAGLE} {compile}"), &ignored);
}

#[test]
fn line_3_eagle_with_a_token_map() {
    let (_folder, map) = token_map();
    let line = format!("{EAGLE} {GRAPH} --speculative-token-map {map} --dtype float16");
    starts(&line, &["--dtype float16 means bfloat16 here: ", "weights bfloat16"]);
}

#[test]
fn line_4_eagle3_in_half_precision() {
    let line = EAGLE.replace("EAGLE", "EAGLE3").replace("tiny-eagle", "tiny-eagle3");
    starts(&format!("{line} {GRAPH} --dtype float16"), &["EAGLE3 with tiny-eagle3"]);
}

#[test]
fn line_5_mtp_layers_under_the_name_eagle() {
    let model = with_mtp_layers();
    let model = model.path().to_str().unwrap();
    let line = format!(
        "--model {model} --host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE \
         --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 \
         --mem-fraction-static 0.7 {GRAPH} --log-level warning"
    );
    let means = format!("EAGLE means MTP here, since {model} holds MTP layers");
    starts(&line, &[&means, "a chain of 1", "--trust-remote-code is ignored: no code"]);
}

#[test]
fn line_6_dflash_is_refused_by_name() {
    let line = "--model tiny --speculative-algorithm DFLASH --speculative-draft-model-path HEAD";
    is_refused(line, &["--speculative-algorithm DFLASH", "not yet"]);
}

#[test]
fn line_7_standalone_with_a_tree() {
    let tree = "--speculative-eagle-topk 2 --speculative-num-draft-tokens 7";
    starts(&format!("{STANDALONE} {tree}"), &["STANDALONE with draft", "topk 2, 7 nodes"]);
}

#[test]
fn line_8_standalone_with_a_chain() {
    let chain = "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5";
    starts(&format!("{STANDALONE} {chain}"), &["STANDALONE with draft: a chain of 4"]);
}

#[test]
fn line_9_ngram() {
    let line = "--model tiny --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 \
                --speculative-ngram-max-bfs-breadth 10 --mem-fraction-static 0.7 \
                --cuda-graph-max-bs-decode 8 --log-level warning";
    starts(line, &["drafts    NGRAM", "16 nodes"]);
}

#[test]
fn line_10_eagle_with_a_chain() {
    let line = "--model tiny --speculative-algorithm EAGLE --speculative-draft-model-path \
                tiny-eagle --speculative-num-steps 3 --speculative-eagle-topk 1 \
                --speculative-num-draft-tokens 4 --cuda-graph-max-bs-decode 2 \
                --mem-fraction-static 0.5 --max-running-requests 4 --log-level warning";
    starts(line, &["a chain of 3", "4 running"]);
}

#[test]
fn line_11_eagle_with_sglangs_adaptive_steps() {
    let line = "--model tiny --speculative-algorithm EAGLE --speculative-draft-model-path \
                tiny-eagle --speculative-eagle-topk 1 --speculative-num-steps 3 \
                --speculative-num-draft-tokens 4 --speculative-adaptive";
    starts(line, &["EAGLE with tiny-eagle", "adaptive"]);
}

#[test]
fn flags_that_say_what_is_so_are_taken_silently() {
    let line = "--model-path tiny --tp 1 --dp-size=1 --pp-size 1 --nnodes 1 --node-rank 0 \
                --disaggregation-mode null --device cpu --revision main --tokenizer-path tiny";
    let served = Served::start(line).unwrap_or_else(|ran| panic!("{}", ran.stderr));
    assert!(!served.said.contains("note:"), "{}", served.said);
}

#[test]
fn every_ignored_flag_gets_one_line_with_a_reason() {
    let flags = [
        ("--attention-backend", "triton"),
        ("--enable-metrics", ""),
        ("--stream-interval", "8"),
        ("--soft-watchdog-timeout", "600"),
        ("--log-requests", ""),
        ("--enable-cache-report", ""),
        ("--skip-server-warmup", ""),
        ("--decode-log-interval", "1"),
        ("--max-prefill-tokens", "4096"),
        ("--speculative-attention-mode", "decode"),
        ("--speculative-draft-model-quantization", "fp8"),
        ("--cuda-graph-bs", "1 2 4 8"),
    ];
    let line = flags.map(|(flag, value)| format!("{flag} {value}")).join(" ");
    let served = Served::start(&format!("{line} --model tiny"))
        .unwrap_or_else(|ran| panic!("{}", ran.stderr));
    for (flag, _) in flags {
        let says = format!("note: {flag} is ignored: ");
        let lines = served.said.lines().filter(|line| line.starts_with(&says));
        assert_eq!(lines.count(), 1, "{flag}: {}", served.said);
    }
}

#[test]
fn eagle_with_a_path_to_mtp_layers_means_mtp() {
    let line = "tiny --speculative-algo EAGLE --speculative-draft tiny-mtp \
                --enable-multi-layer-eagle --load-format safetensors";
    let says =
        ["EAGLE means MTP here, since tiny-mtp holds MTP layers", "drafts    MTP with tiny-mtp"];
    starts(line, &says);
}

#[test]
fn eagle_without_anything_that_drafts_is_refused() {
    let line = "--model draft --speculative-algorithm EAGLE --speculative-num-steps 1";
    is_refused(line, &["--speculative-draft-model-path", "nor in its checkpoint"]);
}

#[test]
fn more_than_one_device_is_refused() {
    for flag in ["--tp 2", "--tp-size=8", "--dp-size 2", "--pp-size 2", "--ep 2"] {
        is_refused(
            &format!("--model tiny {flag}"),
            &[flag.split([' ', '=']).next().unwrap(), "one device"],
        );
    }
    is_refused("tiny --nnodes 2", &["--nnodes 2", "one machine"]);
    is_refused("tiny --enable-dp-attention", &["--enable-dp-attention", "one device"]);
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let ran = run(&["serve", "--port", "0", "--device", "cuda:4000"]);
    // A wrong flag where there are GPUs; where there are none, a driver may come.
    let code = if ran.stderr.contains("there is no CUDA device 4000") { 2 } else { 1 };
    assert_eq!(ran.code, Some(code), "{}", ran.stderr);
    for words in ["--device cuda:4000: ", "CUDA device", "aquila doctor"] {
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
    for device in ["abacus", "cuda:", "cuda:x", "cuda0"] {
        let line = format!("--device {device}");
        is_refused(&line, &[&line, "expected auto, cpu, cuda or cuda:INDEX"]);
    }
}

#[test]
fn formats_that_cuda_lacks_are_refused() {
    is_refused("--device cuda --quantization int8", &["--device cuda", "--quantization"]);
    is_refused("--device cuda --kv-cache-dtype float32", &["bfloat16", "--dtype float32"]);
}

#[test]
fn what_would_change_answers_is_refused_with_its_reason() {
    for (line, words) in [
        ("--quantization fp8", ["--quantization fp8", "int8"]),
        ("--kv-cache-dtype fp8_e4m3", ["fp8_e4m3", "bfloat16"]),
        ("--schedule-policy dfs-weight", ["dfs-weight", "lpm"]),
        ("--load-format gguf", ["gguf", "safetensors"]),
        ("--chat-template x.jinja", ["--chat-template", "chat_template.jinja"]),
        ("--tokenizer-path x", ["--tokenizer-path", "tokenizer.json"]),
        ("--tool-call-parser pythonic", ["--tool-call-parser", "hermes"]),
        ("--reasoning-parser kimi", ["--reasoning-parser", "deepseek-r1"]),
        ("--revision v2", ["revision v2", "only models of the hub"]),
        ("--config x.yaml", ["--config", "flags themselves"]),
        ("--lora-paths a b", ["--lora-paths", "LoRA"]),
        ("--ssl-ca-certs a.pem", ["--ssl-ca-certs", "clients show keys"]),
        ("--tp", ["--tp", "needs a value"]),
    ] {
        is_refused(line, &words);
    }
}

#[test]
fn all_unknown_and_refused_flags_are_named_at_once() {
    let line = "--model tiny --frobnicate 3 --hovercraft --tp 2 --max-token 4 --chat-template x";
    is_refused(
        line,
        &["--frobnicate", "--hovercraft", "--tp 2", "--chat-template", "is --max-tokens meant?"],
    );
    // A flag of another meaning is not proposed.
    let Err(ran) = Served::start("--tap 2 --model-pth-x tiny") else { panic!("it started") };
    assert!(!ran.stderr.contains("meant") && !ran.stderr.contains("tip"), "{}", ran.stderr);
}

#[test]
fn other_commands_take_the_same_flags() {
    let prompt = ["generate", "--prompt", "x", "--max-tokens", "1", "--model", "tiny"];
    let ran = crate::run::run(&[&prompt[..], &["--tp", "1", "--trust-remote-code"]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("--trust-remote-code is ignored"), "{}", ran.stderr);
    let ran = crate::run::run(&[&prompt[..], &["--host", "::1"]].concat());
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("no such flag: --host"), "{}", ran.stderr);
}
