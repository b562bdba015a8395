//! Two real servers, one that processes prompts and one that decodes.

use crate::run::run;
use crate::server::Served;

fn started(line: &str) -> Served {
    Served::start(line).unwrap_or_else(|ran| panic!("{}", ran.stderr))
}

/// A prefill worker with these flags, and its bootstrap port.
fn prefill(flags: &str) -> (Served, u16) {
    let role = "--disaggregation-mode prefill --disaggregation-bootstrap-port 0";
    let served = started(&format!("{role} {flags}"));
    let (_, address) = served.said.split_once("decode workers connect to 127.0.0.1:").unwrap();
    let port = address.split(',').next().unwrap().parse().unwrap();
    (served, port)
}

fn decode(flags: &str) -> Served {
    started(&format!("--disaggregation-mode decode {flags}"))
}

/// The body of a request whose prompt the worker at this port processes.
fn body(port: u16, room: u64) -> String {
    format!(
        r#"{{"prompt": "fn main", "max_tokens": 12, "temperature": 0, "bootstrap_host":
            "127.0.0.1", "bootstrap_port": {port}, "bootstrap_room": {room}}}"#
    )
}

#[test]
fn workers_that_run_other_numbers_of_mtp_layers_refuse_each_other() {
    let mtp = |steps: usize| {
        format!(
            "--speculative-algorithm MTP --speculative-num-steps {steps} --max-total-tokens 512"
        )
    };
    let (prefill, port) = prefill(&mtp(2));
    let (status, answer) = decode(&mtp(3)).post("/v1/completions", &body(port, 1));
    assert_eq!(status, 500, "{answer}");
    let why = "the number of draft layers is 3 here and 2 there";
    assert!(answer.contains(why), "{answer}");
    // One that runs as many goes on with the prompts of the same worker.
    let decode = decode(&mtp(2));
    let (prompt, answer) = std::thread::scope(|scope| {
        let prompt = scope.spawn(|| prefill.post("/v1/completions", &body(port, 2)));
        let answer = decode.post("/v1/completions", &body(port, 2));
        (prompt.join().unwrap(), answer)
    });
    assert_eq!((prompt.0, answer.0), (200, 200), "{prompt:?} {answer:?}");
    assert!(answer.1.contains("\"completion_tokens\":12"), "{}", answer.1);
}

#[test]
fn transfer_backends_that_cannot_be_had_are_refused_at_start() {
    let decode = ["serve", "tiny", "--disaggregation-mode", "decode"];
    let nixl = ["--disaggregation-transfer-backend", "nixl"];
    let library = |path| ["--disaggregation-nixl-library", path];
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (flags, why) in [
        ([&decode[..], &nixl, &library("/nowhere.so")].concat(), "/nowhere.so cannot be loaded"),
        ([&decode[..], &nixl, &library(text)].concat(), "Cargo.toml cannot be loaded"),
        ([&decode[..], &library(text)].concat(), "--disaggregation-transfer-backend nixl"),
        ([&["serve", "tiny"][..], &nixl].concat(), "--disaggregation-mode prefill or decode"),
        ([&decode[..], &[nixl[0], "mooncake"]].concat(), "tcp and nixl are"),
    ] {
        let ran = run(&flags);
        assert_eq!(ran.code, Some(2), "{flags:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(why), "{flags:?}: {}", ran.stderr);
    }
}
