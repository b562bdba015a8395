//! `aquila bench serve`: what its figures are of, and what it says of servers in trouble.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};

use serde_json::{Value, json};

use crate::run::{Ran, aquila, jsonl, run};
use crate::scripted_server::{self as scripted, ANSWER};
use crate::server::Served;

const PLAIN: [&str; 2] = ["--speculative-algorithm", "NONE"];

/// Six questions in the form of Spec-Bench.
fn questions() -> Vec<Value> {
    let texts = ["fn main() {", "A Pod is", "Tom has 3 apples", "use std::", "pub struct", "Why?"];
    let question = |(id, text): (usize, &&str)| {
        let category = if id % 2 == 0 { "code" } else { "qa" };
        json!({ "question_id": id, "category": category, "turns": [text, "And then?"] })
    };
    texts.iter().enumerate().map(question).collect()
}

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Runs the command against the server at this address.
fn bench(address: SocketAddr, flags: &[&str]) -> Ran {
    let url = format!("http://{address}");
    run(&[&["bench", "serve", "--base-url", &url, "--request-timeout", "300"], flags].concat())
}

/// The figures of a run that succeeded.
fn figures(address: SocketAddr, flags: &[&str]) -> Value {
    let ran = bench(address, &[flags, &["--json", "-q"]].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{}", ran.stdout);
    serde_json::from_str(&ran.stdout).unwrap()
}

/// The same against a scripted server, whose requests all have one prompt.
fn scripted_bench(address: SocketAddr, flags: &[&str]) -> Ran {
    let short = ["--model", "m", "--warmup-requests", "0", "--random-input-len", "4"];
    bench(address, &[&short[..], flags].concat())
}

#[test]
fn counts_are_those_that_the_server_reports() {
    let served = Served::start_with(&PLAIN).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "questions.jsonl", &jsonl(&questions()));
    let (mut prompt_tokens, mut completion_tokens) = (0, 0);
    for question in questions() {
        let body = json!({ "prompt": question["turns"][0], "max_tokens": 12, "temperature": 0 });
        let (status, answer) = served.post("/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        prompt_tokens += answer["usage"]["prompt_tokens"].as_u64().unwrap();
        completion_tokens += answer["usage"]["completion_tokens"].as_u64().unwrap();
    }
    let (out, svg) = (folder.path().join("out.json"), folder.path().join("out.svg"));
    let (out, svg) = (out.to_str().unwrap(), svg.to_str().unwrap());
    let load = ["--request-rate", "40", "--arrival-pattern", "constant", "--output-len", "12"];
    let files = ["--dataset-path", &path, "--output-file", out, "--svg", svg, "--output-details"];
    let goals = ["--goodput", "ttft:1000000", "e2el:1000000"];
    let ran = bench(served.address, &[&load[..], &files, &goals].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    let wanted =
        ["model tiny", "6 requests: 40 requests/s, constant", "p99", "category", "requests/s (6)"];
    for word in wanted {
        assert!(ran.stdout.contains(word), "{word}: {}", ran.stdout);
    }
    let result: Value = serde_json::from_str(&std::fs::read_to_string(out).unwrap()).unwrap();
    assert_eq!((&result["completed"], &result["failed"]), (&json!(6), &json!(0)));
    assert_eq!(result["total_input_tokens"], prompt_tokens);
    assert_eq!(result["total_output_tokens"], completion_tokens);
    assert_eq!(result["categories"]["code"]["completed"], 3);
    assert_eq!(result["request_goodput"], result["request_throughput"]);
    // Figures follow from the requests that are listed.
    let requests = result["requests"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let mean = requests.iter().map(|r| number(&r["e2el_ms"])).sum::<f64>() / 6.0;
    assert!((mean - number(&result["mean_e2el_ms"])).abs() < 1e-6);
    for (index, request) in requests.iter().enumerate() {
        assert!((number(&request["due_s"]) - index as f64 / 40.0).abs() < 1e-9);
        assert!(number(&request["sent_s"]) >= number(&request["due_s"]));
        let (ttft, e2el) = (number(&request["ttft_ms"]), number(&request["e2el_ms"]));
        let gaps = request["itl_ms"].as_array().unwrap();
        let sum: f64 = gaps.iter().map(number).sum();
        assert!(ttft + sum <= e2el + 1e-6, "{request}");
        if let Some(tpot) = request["tpot_ms"].as_f64() {
            let tokens = number(&request["output_tokens"]);
            assert!((tpot - (e2el - ttft) / (tokens - 1.0)).abs() < 1e-5, "{request}");
        }
    }
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 3, "a partial file was left: {left:?}");
}

#[test]
fn every_api_gives_the_same_counts() {
    let served = Served::start_with(&PLAIN).unwrap();
    let lengths = ["--random-input-len", "24", "--random-output-len", "9", "--num-prompts", "5"];
    let exact = ["--tokenizer", "tiny", "--ignore-eos", "--max-concurrency", "2"];
    let of = |backend| {
        figures(served.address, &[&lengths[..], &exact, &["--backend", backend]].concat())
    };
    for backend in ["openai", "vllm", "sglang", "openai-chat"] {
        let figures = of(backend);
        assert_eq!(figures["completed"], 5, "{backend}");
        assert_eq!(figures["total_output_tokens"], 45, "{backend}");
        if backend != "openai-chat" {
            // A chat template adds tokens of its own.
            assert_eq!(figures["total_input_tokens"], 120, "{backend}");
        }
        assert_eq!(figures["answers_without_usage"], 0, "{backend}");
    }
}

#[test]
fn acceptance_is_that_of_the_answers() {
    let tree = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"];
    let flags = [&["--speculative-algorithm", "EAGLE3"], &tree[..]].concat();
    let served = Served::start_with(&flags).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let text = "pub fn add(a: i32, b: i32)";
    let path = file(folder.path(), "one.jsonl", &jsonl(&[json!({ "prompt": text })]));
    let body = json!({ "prompt": text, "max_tokens": 32, "temperature": 0, "ignore_eos": true });
    let (_, answer) = served.post("/v1/completions", &body.to_string());
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let said = &answer["usage"]["speculative"];
    assert!(said["spec_accept_length"].as_f64().unwrap() > 1.0, "{answer}");
    for backend in ["openai", "sglang"] {
        let flags = ["--dataset-path", &path, "--output-len", "32", "--ignore-eos"];
        let figures = figures(served.address, &[&flags[..], &["--backend", backend]].concat());
        assert_eq!(figures["accept_length"], said["spec_accept_length"], "{backend}");
        assert_eq!(figures["accept_rate"], said["spec_accept_rate"], "{backend}");
        assert_eq!(figures["accept_source"], "the answers");
    }
}

#[test]
fn keys_and_certificates_are_taken() {
    let served = Served::start_with(&[&PLAIN[..], &["--api-key", "sk-1"]].concat()).unwrap();
    let short = ["--num-prompts", "1", "--random-input-len", "4", "--random-output-len", "2"];
    let refused = bench(served.address, &short);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("/v1/models: 401 Unauthorized"), "{}", refused.stderr);
    figures(served.address, &[&short[..], &["--api-key", "sk-1"]].concat());
    figures(served.address, &[&short[..], &["--header", "x-api-key=sk-1"]].concat());
    let url = format!("http://{}/v1", served.address);
    let args = [&["bench", "serve", "--base-url", &url], &short[..]].concat();
    let ran = Ran::of(aquila(&args).env("OPENAI_API_KEY", "sk-1").output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);

    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = file(folder.path(), "cert.pem", &made.cert.pem());
    let key = file(folder.path(), "key.pem", &made.signing_key.serialize_pem());
    let flags = ["--ssl-certfile", &certificate, "--ssl-keyfile", &key];
    let served = Served::start_with(&[&PLAIN[..], &flags].concat()).unwrap();
    let url = format!("https://{}", served.address);
    let args = [&["bench", "serve", "--base-url", &url], &short[..]].concat();
    let stranger = run(&args);
    assert_eq!(stranger.code, Some(1));
    assert!(stranger.stderr.contains("SSL_CERT_FILE"), "{}", stranger.stderr);
    let ran = Ran::of(aquila(&args).env("SSL_CERT_FILE", &certificate).output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
}

#[test]
fn arrivals_wait_for_no_answer() {
    // No request is answered before all have come.
    let all = Barrier::new(12);
    let address = scripted::start(move |_, socket| {
        all.wait();
        scripted::stream(socket, ANSWER);
    });
    let load = ["--num-prompts", "12", "--request-rate", "400", "--seed", "3"];
    let ran = scripted_bench(address, &load);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("answered    12 in"), "{}", ran.stdout);
}

#[test]
fn concurrency_is_neither_less_nor_more_than_asked_for() {
    let (pairs, now, most) = (Barrier::new(2), AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let seen = most.clone();
    let address = scripted::start(move |_, socket| {
        seen.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        // No request is answered alone.
        pairs.wait();
        now.fetch_sub(1, Ordering::SeqCst);
        scripted::stream(socket, ANSWER);
    });
    let ran = scripted_bench(address, &["--num-prompts", "10", "--max-concurrency", "2"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(most.load(Ordering::SeqCst), 2);
}

#[test]
fn failures_are_counted_by_their_reasons() {
    let address = scripted::start(|request, socket| match request {
        0 | 1 => {
            let error = r#"{"error": {"message": "the queue is full"}}"#;
            scripted::whole(socket, "503 Service Unavailable", "application/json", error);
        }
        2 => scripted::whole(socket, "429 Too Many Requests", "text/plain", "slow down\nplease"),
        3 => scripted::stream(socket, "data: {\"choices\": [{\"te\n\n"),
        4 => scripted::begin(socket, &ANSWER[..80]),
        5 => scripted::stream(socket, &ANSWER[..60]),
        6 => scripted::whole(socket, "200 OK", "application/json", "{}"),
        7 => scripted::stream(socket, "data: {\"error\": {\"message\": \"the round failed\"}}\n\n"),
        8 => (),
        _ => scripted::stream(socket, ANSWER),
    });
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.json");
    let load = ["--num-prompts", "10", "--max-concurrency", "1"];
    let ran =
        scripted_bench(address, &[&load[..], &["--output-file", out.to_str().unwrap()]].concat());
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    for reason in [
        "answered    1 in",
        "; 9 failed",
        "2 × 503 Service Unavailable: the queue is full",
        "1 × 429 Too Many Requests: slow down",
        "1 × an event is not JSON",
        "1 × the stream ended before the answer did",
        "1 × the answer is no stream of events but \"application/json\"",
        "1 × the round failed",
        "the connection broke: ",
    ] {
        assert!(ran.stdout.contains(reason), "{reason}: {}", ran.stdout);
    }
    let result: Value = serde_json::from_str(&std::fs::read_to_string(out).unwrap()).unwrap();
    assert_eq!((&result["completed"], &result["failed"]), (&json!(1), &json!(9)));
    assert_eq!(
        result["failures"][0],
        json!({
            "reason": "503 Service Unavailable: the queue is full", "count": 2
        })
    );
    assert_eq!(
        (&result["total_output_tokens"], &result["total_input_tokens"]),
        (&json!(3), &json!(5))
    );
}

#[test]
fn a_server_that_ends_fails_the_requests_that_are_left() {
    let mut served = Served::start_with(&PLAIN).unwrap();
    let url = format!("http://{}", served.address);
    let lengths = ["--random-input-len", "8", "--random-output-len", "256", "--ignore-eos"];
    let args = ["bench", "serve", "--base-url", &url, "--num-prompts", "64"];
    let load = ["--max-concurrency", "2", "--warmup-requests", "0"];
    let child = aquila(&[&args[..], &lengths, &load].concat()).spawn().unwrap();
    // The server logs an answer before its last bytes have left. The third request begins after
    // the client has read one of the first two to its end.
    for _ in 0..3 {
        served.logged("path=/v1/completions");
    }
    drop(served);
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(3), "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.contains("cannot connect to http://127.0.0.1:"), "{}", ran.stdout);
    assert!(!ran.stdout.contains("answered    0 in"), "{}", ran.stdout);
}

#[test]
fn answers_without_usage_are_counted_by_pieces() {
    let plain = "data: {\"choices\": [{\"text\": \"a\"}]}\n\ndata: {\"choices\": [{\"text\": \"b\"}]}\n\n\
                 data: [DONE]\n\n";
    let address = scripted::start(move |_, socket| scripted::stream(socket, plain));
    let ran = scripted_bench(address, &["--num-prompts", "2"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("tokens      0 of prompts, 4 of answers"), "{}", ran.stdout);
    assert!(ran.stdout.contains("2 answers came without usage"), "{}", ran.stdout);
}

#[cfg(unix)]
#[test]
fn ctrl_c_prints_what_was_measured() {
    let (came, requests) = channel();
    let came = Mutex::new(came);
    // The first three are answered, the next never.
    let address = scripted::start(move |request, socket| {
        if request < 3 {
            scripted::stream(socket, ANSWER);
        }
        came.lock().unwrap().send(()).unwrap();
        if request >= 3 {
            loop {
                std::thread::park();
            }
        }
    });
    let url = format!("http://{address}");
    let args = ["bench", "serve", "--base-url", &url, "--model", "m", "--warmup-requests", "0"];
    let load = ["--num-prompts", "9", "--max-concurrency", "1", "--random-input-len", "4"];
    let child = aquila(&[&args[..], &load].concat()).spawn().unwrap();
    (0..4).for_each(|_| requests.recv().unwrap());
    // SAFETY: a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    // The third may have been read and not yet counted.
    let said = |answered: &str, given_up: &str| {
        ran.stdout.contains(&format!("answered    {answered} in"))
            && ran.stdout.contains(&format!("interrupted: {given_up} given up, 0 not sent"))
    };
    assert!(said("3", "6") || said("2", "7"), "{}", ran.stdout);
    assert!(ran.stdout.contains("TTFT"), "{}", ran.stdout);
}

#[test]
fn a_run_that_cannot_begin_says_why() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let empty = file(folder.path(), "empty.jsonl", "\n");
    let broken = file(folder.path(), "broken.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": \n");
    let given = ["--model", "m"];
    for (flags, code, why) in [
        (&[][..], 1, "/v1/models: cannot connect to http://127.0.0.1:"),
        (&given, 1, "the warm-up request failed: cannot connect to"),
        (&["--model", "m", "--dataset-path", &empty], 1, "empty.jsonl: there is no prompt in it"),
        (&["--model", "m", "--dataset-path", &broken], 1, "broken.jsonl: line 2: not JSON"),
        (&["--model", "m", "--dataset-path", "/no/such"], 1, "/no/such: No such file"),
        (&["--dataset-name", "sharegpt"], 2, "use --dataset-path"),
        (&["--request-rate", "0"], 2, "--request-rate"),
        (&["--goodput", "itl:5"], 2, "expected ttft:MS, tpot:MS or e2el:MS"),
        (&["--extra-body", "[1]"], 2, "--extra-body: not a JSON object"),
        (&["--header", "nonsense"], 2, "--header nonsense: expected NAME=VALUE"),
        (&["--temperature=-1"], 2, "--temperature"),
        (&["--random-range-ratio", "1"], 2, "--random-range-ratio"),
        (&["--metric-percentiles", "101"], 2, "--metric-percentiles"),
        (&["--output-file", "/no/such/file"], 1, "--output-file /no/such/file"),
        (&["--base-url", "ftp://x"], 2, "expected http://HOST:PORT"),
    ] {
        let url = format!("http://{free}");
        let address: &[&str] =
            if flags.contains(&"--base-url") { &[] } else { &["--base-url", &url] };
        let ran = run(&[&["bench", "serve"], address, flags].concat());
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), ""), "{flags:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(why), "{flags:?}: {}", ran.stderr);
    }
    let served = Served::start_with(&PLAIN).unwrap();
    let ran = bench(served.address, &["--model", "nobody"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("404 Not Found: the model `nobody`"), "{}", ran.stderr);
}
