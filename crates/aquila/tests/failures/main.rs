//! The commands over an engine that can serve no more, each in a process of its own: this binary is
//! Aquila with two more algorithms where [`CHILD`] is set, and else what starts it so. Hence no harness.

mod broken;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitCode, Output, Stdio};

use crate::broken::Broken;

/// Set where the process is to run a command.
const CHILD: &str = "AQUILA_FAILING_CHILD";
/// What the lost device says.
const REASON: &str = "the device is lost: it was told to be";

fn main() -> ExitCode {
    if std::env::var_os(CHILD).is_some() {
        let mut algorithms = aquila::Algorithms::built_in();
        for broken in [Broken::Loses, Broken::Hangs] {
            algorithms.register(Box::new(broken)).expect("the names are free");
        }
        return aquila::run(&algorithms);
    }
    let tests: [(&str, fn()); 5] = [
        ("a_server_that_lost_its_device_ends_with_the_reason", server_ends),
        ("a_round_that_hangs_ends_the_server", watchdog_ends_it),
        ("one_prompt_on_a_lost_device_is_exit_code_1", one_prompt),
        ("a_file_of_prompts_on_a_lost_device_is_exit_code_1", file_of_prompts),
        ("a_chat_on_a_lost_device_is_exit_code_1", chat),
    ];
    let filter = std::env::args().nth(1).filter(|arg| !arg.starts_with('-')).unwrap_or_default();
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(&filter)) {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

/// This binary as a command.
fn aquila(algorithm: &str, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a process knows its binary"));
    let cache = env!("CARGO_TARGET_TMPDIR");
    command.env(CHILD, "1").env("HF_HUB_OFFLINE", "1").env("CUDA_VISIBLE_DEVICES", "");
    command.env("XDG_CACHE_HOME", cache).env("XDG_STATE_HOME", cache).env("HF_HOME", cache);
    command.env_remove("AQUILA_LOG").args(args);
    command.args(["--speculative-algorithm", algorithm, "--speculative-num-steps", "2"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What it leaves after this input.
fn run(algorithm: &str, args: &[&str], input: &str) -> (Option<i32>, String) {
    let mut child = aquila(algorithm, args).spawn().unwrap();
    // One that has ended already reads nothing.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// A server, its address, and what it says from then on.
fn serve(algorithm: &str, flags: &[&str]) -> (Child, String, BufReader<std::process::ChildStderr>) {
    let mut child =
        aquila(algorithm, &[&["serve", "--port", "0"], flags].concat()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    let address = loop {
        let begun = said.len();
        if stderr.read_line(&mut said).unwrap() == 0 {
            panic!("{}: {said}", child.wait().unwrap());
        }
        if let Some((_, url)) = said[begun..].split_once("ready: http://") {
            break url.split('/').next().unwrap().trim().to_owned();
        }
    };
    (child, address, stderr)
}

/// Asks for an answer; what comes back, as far as it does.
fn ask(address: &str) -> String {
    let body = r#"{"prompt": "fn main", "max_tokens": 8}"#;
    let mut socket = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    write!(socket, "{head}Content-Length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    // A process that ends at once cuts it.
    let _ = socket.read_to_string(&mut answer);
    answer
}

fn server_ends() {
    for overlap in ["--enable-overlap-schedule", "--disable-overlap-schedule"] {
        let (mut child, address, mut stderr) = serve("LOSES", &[overlap]);
        let answer = ask(&address);
        assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains(REASON), "{answer}");
        let mut said = String::new();
        stderr.read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
        let logged = said.lines().find(|line| line.contains("ERROR") && line.contains(REASON));
        assert!(logged.is_some(), "{said}");
        assert!(said.contains(&format!("aquila: the engine has failed: {REASON}")), "{said}");
    }
}

fn watchdog_ends_it() {
    for overlap in ["--enable-overlap-schedule", "--disable-overlap-schedule"] {
        let (mut child, address, mut stderr) =
            serve("HANGS", &["--watchdog-timeout", "0.2", overlap]);
        assert_eq!(ask(&address), "", "a round that hangs answers nothing");
        let mut said = String::new();
        stderr.read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
        let logged = |line: &&str| line.contains("ERROR") && line.contains("--watchdog-timeout");
        assert!(said.lines().any(|line| logged(&line)), "{said}");
    }
}

fn is_lost((code, said): (Option<i32>, String)) {
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("aquila: the engine has failed: {REASON}")), "{said}");
}

fn one_prompt() {
    is_lost(run("LOSES", &["generate", "--prompt", "fn main"], ""));
}

fn file_of_prompts() {
    let lines = "{\"prompt\": \"fn main\"}\n".repeat(20);
    is_lost(run("LOSES", &["generate", "--input", "-"], &lines));
}

fn chat() {
    is_lost(run("LOSES", &["chat"], "What is a Pod?\nAnd what is a Node?\n"));
}
