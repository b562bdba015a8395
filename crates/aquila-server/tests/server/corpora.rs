//! Corpora that are added, listed and removed while the server serves.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_engine::{EngineConfig, EngineHandle, Runner, Scheduler};
use aquila_model::{Checkpoint, Decoder, LoadFormat, resolve};
use aquila_server::{CorpusFolder, Settings};
use aquila_spec::ngram::{Corpora, Ngram, NgramScope, NgramSettings};
use aquila_text::{Generator, SamplingParams, Tokenizer};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, settings};

/// A server that drafts from n-grams, with room for `tokens` in corpora.
fn drafting(tokens: usize) -> Running {
    drafting_from(tokens, None)
}

/// As [`drafting`], where clients may add the files of a folder.
pub fn drafting_from(tokens: usize, folder: Option<&Path>) -> Running {
    let ngram = NgramSettings { scope: NgramScope::Request, ..NgramSettings::default() };
    let shape = ngram.shape(NgramSettings::NODES).unwrap();
    let config = EngineConfig { shape, ..engine_config() };
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 2).unwrap());
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let decoder = Decoder::load(&*backend, &checkpoint, format, positions, &mut |_| ()).unwrap();
    let corpora = Corpora::new(tokens, decoder.spec().vocab_size);
    let ngram = Ngram::new(ngram, corpora.clone()).unwrap();
    let algorithm = aquila_spec::Algorithm::on_host("NGRAM", ngram);
    let runner = Runner::new(backend, decoder, Some(algorithm), &config).unwrap();
    let engine = EngineHandle::start(Scheduler::new(runner, config).unwrap()).unwrap();
    let tokenizer = Tokenizer::load(checkpoint.folder().unwrap()).unwrap();
    let eos = checkpoint.eos_token_ids().to_vec();
    let generator = Generator::new(engine, tokenizer, eos, SamplingParams::default());
    let corpus_folder = folder.map(|folder| CorpusFolder::open(folder).unwrap());
    Running::start(generator, Settings { corpora: Some(corpora), corpus_folder, ..settings() })
}

fn counts(server: &Running) -> Value {
    let list = server.get("/list_external_corpora").ok();
    assert_eq!(list["success"], true);
    list["corpus_token_counts"].clone()
}

fn add(server: &Running, body: Value) -> Value {
    server.post("/add_external_corpus", &body.to_string()).ok()
}

fn refused(server: &Running, path: &str, body: Value) -> String {
    let reply = server.post(path, &body.to_string());
    assert_eq!(reply.status, 400, "{}", reply.body);
    reply.body
}

#[test]
fn a_corpus_saves_rounds_and_changes_no_text() {
    let server = drafting(10_000);
    let generate = || {
        let params = json!({ "max_new_tokens": 64, "temperature": 0 });
        let body = json!({ "text": "pub struct Ignored", "sampling_params": params });
        let answer = server.post("/generate", &body.to_string()).ok();
        let rounds = answer["meta_info"]["spec_verify_ct"].as_u64().unwrap();
        (answer["text"].as_str().unwrap().to_owned(), rounds)
    };
    let (text, alone) = generate();
    assert_eq!(counts(&server), json!({}));
    let added = add(&server, json!({ "corpus_id": "answers", "documents": [text, "other"] }));
    assert_eq!((&added["success"], &added["corpus_id"]), (&json!(true), &json!("answers")));
    assert_eq!(counts(&server), json!({ "answers": added["loaded_token_count"] }));
    let (again, helped) = generate();
    assert_eq!(again, text);
    assert!(helped * 2 <= alone, "{helped} rounds with the corpus, {alone} without");
    let remove = json!({ "corpus_id": "answers" }).to_string();
    assert_eq!(server.post("/remove_external_corpus", &remove).ok()["success"], true);
    assert_eq!(counts(&server), json!({}));
    assert_eq!(generate(), (text, alone));
}

#[test]
fn corpora_come_from_files_of_documents_and_of_plain_text() {
    let folder = tempfile::tempdir().unwrap();
    let server = drafting_from(10_000, Some(folder.path()));
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
        path
    };
    let lines = file("lines", "{\"text\": \"fn main\", \"id\": 1}\n\n\"use std\"\n");
    let plain = file("plain", "fn main() {\n    println!();\n}\n");
    let tokens = |text: &str| {
        let body = json!({ "prompt": text, "add_special_tokens": false }).to_string();
        server.post("/tokenize", &body).ok()["count"].as_u64().unwrap()
    };
    let added = add(&server, json!({ "corpus_id": "lines", "file_path": lines }));
    assert_eq!(added["loaded_token_count"], tokens("fn main") + tokens("use std"));
    let added = add(&server, json!({ "file_path": plain }));
    assert_eq!(added["loaded_token_count"], tokens("fn main() {\n    println!();\n}\n"));
    let name = added["corpus_id"].as_str().unwrap();
    assert_eq!(counts(&server)[name], added["loaded_token_count"]);

    let path = "/add_external_corpus";
    let broken = file("broken", "{\"text\": \"a\"}\n{\"text\": 5}\n");
    assert!(refused(&server, path, json!({ "file_path": broken })).contains("line 2"));
    assert!(refused(&server, path, json!({ "file_path": "/nowhere" })).contains("/nowhere"));
    let no_file = refused(&server, path, json!({ "file_path": folder.path() }));
    assert!(no_file.contains("no regular file"), "{no_file}");
    assert_eq!(counts(&server).as_object().unwrap().len(), 2);
}

#[test]
fn without_a_folder_no_file_is_read_for_clients() {
    let server = drafting(10_000);
    let file = tempfile::NamedTempFile::new().unwrap();
    let refusal = refused(&server, "/add_external_corpus", json!({ "file_path": file.path() }));
    assert!(refusal.contains("a folder of corpora"), "{refusal}");
    add(&server, json!({ "documents": ["fn main"] }));
}

#[test]
fn clients_name_regular_files_below_the_folder_alone() {
    let above = tempfile::tempdir().unwrap();
    let folder = above.path().join("corpora");
    let inside = folder.join("deep");
    std::fs::create_dir_all(&inside).unwrap();
    std::fs::create_dir(above.path().join("corpora-beside")).unwrap();
    let beside = above.path().join("corpora-beside/text");
    for path in [&above.path().join("secret"), &inside.join("text"), &beside] {
        std::fs::write(path, "fn main() {}").unwrap();
    }
    let link = |to: &str, name: &str| {
        std::os::unix::fs::symlink(to, folder.join(name)).unwrap();
    };
    link("deep/text", "within");
    link("../secret", "out");
    link("..", "up");
    link("/dev/zero", "device");
    let fifo = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());

    let server = drafting_from(10_000, Some(&folder));
    let whole = inside.join("text");
    for path in ["deep/text", "within", "deep/../deep/text", whole.to_str().unwrap()] {
        assert_eq!(add(&server, json!({ "file_path": path }))["success"], true, "{path}");
    }
    let secret = above.path().join("secret");
    let mut refused_paths = vec!["out", "up/secret", "../secret", "device", "fifo", "deep", ""];
    refused_paths.extend(["/dev/zero", "/etc/passwd", "/nowhere", "deep/../../secret", "absent"]);
    refused_paths.extend([secret.to_str().unwrap(), beside.to_str().unwrap()]);
    for path in refused_paths {
        let refusal = refused(&server, "/add_external_corpus", json!({ "file_path": path }));
        assert!(refusal.contains("no regular file below the folder"), "{path}: {refusal}");
    }
    assert_eq!(counts(&server).as_object().unwrap().len(), 4);
}

#[test]
fn a_pipe_that_the_operator_names_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let tokenizer = Tokenizer::load(checkpoint.folder().unwrap()).unwrap().unwrap();
    let corpora = Corpora::new(100, tokenizer.vocab_size());
    let refusal = aquila_server::add_file(&corpora, &tokenizer, "fifo", &fifo).unwrap_err();
    assert!(refusal.to_string().contains("no regular file"), "{refusal}");
}

#[test]
fn impossible_requests_about_corpora_are_refused_with_a_reason() {
    let server = drafting(8);
    let (path, remove) = ("/add_external_corpus", "/remove_external_corpus");
    assert!(refused(&server, path, json!({})).contains("documents"));
    let both = json!({ "documents": ["a"], "file_path": "b" });
    assert!(refused(&server, path, both).contains("either"));
    assert!(refused(&server, path, json!({ "documents": "a" })).contains("documents"));
    assert!(refused(&server, path, json!({ "documents": [] })).contains("no tokens"));
    let cut = add(
        &server,
        json!({ "corpus_id": "a", "documents": ["one two three four five six seven eight nine ten"] }),
    );
    assert_eq!(cut["loaded_token_count"], 8);
    assert!(cut["message"].as_str().unwrap().contains("cut"));
    let same = refused(&server, path, json!({ "corpus_id": "a", "documents": ["b"] }));
    assert!(same.contains("already"), "{same}");
    let full = refused(&server, path, json!({ "corpus_id": "b", "documents": ["b"] }));
    assert!(full.contains("may have 8 tokens; remove one, or allow more"), "{full}");
    assert!(refused(&server, remove, json!({})).contains("corpus_id"));
    assert!(refused(&server, remove, json!({ "corpus_id": "b" })).contains("no corpus"));
}

#[test]
fn a_server_without_n_grams_says_how_to_get_them() {
    let server = Running::usual();
    let replies = [
        server.get("/list_external_corpora"),
        server.post("/add_external_corpus", r#"{"documents": ["a"]}"#),
        server.post("/remove_external_corpus", r#"{"corpus_id": "a"}"#),
    ];
    for reply in replies {
        assert_eq!(reply.status, 400, "{}", reply.body);
        assert_eq!(reply.json()["success"], false);
        assert!(reply.body.contains("the algorithm NGRAM"), "{}", reply.body);
    }
}
