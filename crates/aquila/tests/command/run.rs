//! Runs the binary.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// The binary with nothing of this machine in its environment; shipped models are unpacked among
/// the build outputs.
pub fn aquila(args: &[&str]) -> Command {
    isolated(Command::new(env!("CARGO_BIN_EXE_aquila")), args)
}

/// The binary, started by a shell after `before`.
pub fn aquila_after(before: &str, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("{before}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_aquila")]);
    isolated(command, args)
}

fn isolated(mut command: Command, args: &[&str]) -> Command {
    let machine = ["AQUILA_LOG", "AQUILA_MODELS", "XDG_DATA_HOME", "SSL_CERT_FILE"];
    let keys = ["AQUILA_ADMIN_API_KEY", "AQUILA_API_KEY", "OPENAI_API_KEY"];
    let hub = ["HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN"];
    let proxies = ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"];
    for variable in [&machine[..], &keys, &hub, &proxies].concat() {
        command.env_remove(variable);
    }
    // On the CPU wherever tests run, unless a test says otherwise.
    command.env("HF_HUB_OFFLINE", "1").env("CUDA_VISIBLE_DEVICES", "");
    let cache = env!("CARGO_TARGET_TMPDIR");
    command.env("XDG_CACHE_HOME", cache).env("HF_HOME", cache).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What a run left.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// The output as JSON, line by line.
    pub fn lines(&self) -> Vec<Value> {
        json_lines(&self.stdout)
    }
}

pub fn json_lines(text: &str) -> Vec<Value> {
    assert!(text.is_empty() || text.ends_with('\n'), "half a line: {text:?}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs the binary without input.
pub fn run(args: &[&str]) -> Ran {
    Ran::of(aquila(args).output().unwrap())
}

/// Runs `generate --input -` on this input.
pub fn generate_bytes(args: &[&str], input: &[u8]) -> Ran {
    let args = [&["generate", "-q", "--input", "-"], args].concat();
    let mut child = aquila(&args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // From another thread, since the answers may fill their pipe before all prompts are written.
    let writer = std::thread::spawn(move || {
        // A process that has refused its flags reads nothing.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Ran::of(output)
}

/// Runs `generate --input -` on these requests.
pub fn generate(args: &[&str], requests: &[Value]) -> Ran {
    generate_bytes(args, jsonl(requests).as_bytes())
}

/// The answers to these requests, all of which must succeed.
pub fn answers(args: &[&str], requests: &[Value]) -> Vec<Value> {
    let ran = generate(args, requests);
    assert_eq!(ran.code, Some(0), "{}\n{}", ran.stderr, ran.stdout);
    assert_eq!(ran.stderr, "");
    let lines = ran.lines();
    assert_eq!(lines.len(), requests.len());
    lines
}

/// The answer to one prompt with these settings.
pub fn answer(prompt: &Value, sampling: Value) -> Value {
    answers(&[], &[request(prompt, sampling)]).remove(0)
}

/// A request for a text or for token ids.
pub fn request(prompt: &Value, sampling: Value) -> Value {
    let key = if prompt.is_string() { "prompt" } else { "prompt_ids" };
    json!({ "id": 0, key: prompt, "sampling": sampling })
}

pub fn jsonl(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

/// The token ids of an answer.
pub fn ids(answer: &Value) -> Vec<u64> {
    let ids = answer["token_ids"].as_array().unwrap_or_else(|| panic!("no ids in {answer}"));
    ids.iter().map(|id| id.as_u64().unwrap()).collect()
}

/// A file or checkpoint of the model crate's tests.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../aquila-model/tests/fixtures").join(name)
}

/// A small checkpoint without a tokenizer.
pub fn without_tokenizer() -> String {
    fixture("qwen3").to_str().unwrap().to_owned()
}

/// What transformers answers to twelve prompts with the shipped model.
pub fn goldens() -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(fixture("tiny-golden.json")).unwrap()).unwrap()
}
