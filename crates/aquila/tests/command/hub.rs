//! Models by their names on the hub, from a server that speaks its routes: the whole command.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquila_model::{Location, resolve};

use crate::hub_server::{COMMIT, HubServer, Repository, Seen, is_large};
use crate::run::{Ran, aquila, aquila_after, run};

const MODEL: &str = "some-org/tiny";
const HEAD: &str = "some-org/tiny-head";
const PROMPT: [&str; 4] = ["--prompt", "A Pod is", "--max-tokens", "12"];

/// A shipped model as a repository.
fn repository(id: &'static str, shipped: &str) -> Repository {
    let Location::Folder(folder) = resolve(shipped).unwrap() else { unreachable!() };
    let files = fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
    });
    Repository { id, commit: COMMIT, files: files.collect() }
}

fn server() -> HubServer {
    HubServer::start(vec![repository(MODEL, "tiny"), repository(HEAD, "tiny-eagle3")])
}

/// The command, online, with a home of its own.
fn online(mut command: Command, server: &HubServer, home: &Path) -> Command {
    command.env("HF_ENDPOINT", &server.url).env("HF_HOME", home).env_remove("HF_HUB_OFFLINE");
    command
}

fn generate(server: &HubServer, home: &Path) -> Command {
    online(aquila(&[&["generate", "-q", MODEL], &PROMPT[..]].concat()), server, home)
}

/// Bytes of files that are not whole, in all repositories of a cache.
fn incomplete(cache: &Path) -> Vec<PathBuf> {
    let blobs = cache.join("models--some-org--tiny/blobs");
    let paths = fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "incomplete")).collect()
}

fn downloads(seen: &[Seen]) -> Vec<&Seen> {
    seen.iter().filter(|seen| seen.method == "GET" && is_large(&seen.path)).collect()
}

/// The answer that the model gives from its own folder.
fn expected() -> String {
    let ran = run(&[&["generate", "-q", "tiny"], &PROMPT[..]].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran.stdout
}

#[test]
fn a_model_and_its_head_run_by_their_hub_names() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    fs::write(home.path().join("token"), "hf_of_the_file\n").unwrap();
    let draft = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", HEAD];
    let args = [&["generate", MODEL], &PROMPT[..], &draft, &["--revision", COMMIT]].concat();
    let ran = Ran::of(online(aquila(&args), &server, home.path()).output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stdout, expected());
    assert!(ran.stderr.contains("download  some-org/tiny: "), "{}", ran.stderr);
    let seen = server.take_seen();
    let lists = seen.iter().filter(|seen| seen.path.starts_with("/api/")).collect::<Vec<_>>();
    assert_eq!(lists.len(), 2, "each repository is asked about once: {lists:?}");
    assert_eq!(downloads(&seen).len(), 2, "{seen:?}");
    let token = |seen: &Seen| seen.authorization.as_deref() == Some("Bearer hf_of_the_file");
    assert!(seen.iter().all(token), "{seen:?}");

    // Offline, the same; and the environment's token and cache come first.
    let mut again = online(aquila(&args), &server, home.path());
    let ran = Ran::of(again.env("HF_HUB_OFFLINE", "1").output().unwrap());
    assert_eq!((ran.code, ran.stdout), (Some(0), expected()));
    assert!(server.take_seen().is_empty());
    let mut other = online(aquila(&["inspect", HEAD]), &server, home.path());
    let cache = home.path().join("elsewhere");
    other.env("HF_HUB_CACHE", &cache).env("HF_TOKEN", "hf_of_the_environment");
    let ran = Ran::of(other.output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(cache.join("models--some-org--tiny-head/refs/main").is_file());
    let token = |seen: &Seen| seen.authorization.as_deref() == Some("Bearer hf_of_the_environment");
    assert!(server.take_seen().iter().all(token));
}

#[test]
fn two_processes_download_a_model_once() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    // The weights come only when both processes are there.
    server.conduct().lists_first = 2;
    let both = [(); 2].map(|()| generate(&server, home.path()).spawn().unwrap());
    for child in both {
        let ran = Ran::of(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert_eq!(ran.stdout, expected());
    }
    let seen = server.take_seen();
    assert_eq!(downloads(&seen).len(), 1, "{seen:?}");
}

#[test]
fn a_full_disk_loses_nothing_that_has_arrived() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    // A write past 1 MB fails, as on a full disk: the shell's unit is 512 bytes or 1024.
    let args = [&["generate", "-q", MODEL], &PROMPT[..]].concat();
    let limited = aquila_after("trap '' XFSZ; ulimit -f 1024", &args);
    let ran = Ran::of(online(limited, &server, home.path()).output().unwrap());
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{}", ran.stderr);
    for part in ["cannot write", ".incomplete", "bytes are kept", "HF_HUB_CACHE"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    let left = incomplete(&home.path().join("hub"));
    let kept = fs::metadata(&left[0]).unwrap().len();
    assert!(left.len() == 1 && [1024 * 512, 1024 * 1024].contains(&kept), "{left:?}: {kept}");
    server.take_seen();

    let ran = Ran::of(generate(&server, home.path()).output().unwrap());
    assert_eq!((ran.code, ran.stdout), (Some(0), expected()), "{}", ran.stderr);
    let ranges = server.take_seen().into_iter().filter_map(|seen| seen.range);
    assert_eq!(ranges.collect::<Vec<_>>(), [format!("bytes={kept}-")]);
}

#[test]
fn a_killed_download_is_resumed_by_the_next_process() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    server.conduct().stalls_after = Some(1_000_000);
    let mut killed = generate(&server, home.path()).spawn().unwrap();
    server.wait_for(|seen| seen.method == "GET" && is_large(&seen.path));
    killed.kill().unwrap();
    killed.wait().unwrap();
    server.conduct().stalls_after = None;
    let left = incomplete(&home.path().join("hub"));
    let kept = left.first().map_or(0, |left| fs::metadata(left).unwrap().len());
    server.take_seen();

    let ran = Ran::of(generate(&server, home.path()).output().unwrap());
    assert_eq!((ran.code, ran.stdout), (Some(0), expected()), "{}", ran.stderr);
    let seen = server.take_seen();
    let range = (kept > 0).then(|| format!("bytes={kept}-"));
    assert_eq!(downloads(&seen)[0].range, range);
}

#[test]
fn a_gated_model_and_an_absent_hub_are_told() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    server.conduct().refuse = Some((401, "GatedRepo"));
    let ran = Ran::of(generate(&server, home.path()).output().unwrap());
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("gated") && ran.stderr.contains("HF_TOKEN"), "{}", ran.stderr);
    server.conduct().refuse = None;
    let ran = Ran::of(generate(&server, home.path()).output().unwrap());
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    server.conduct().refuse = Some((503, ""));
    let ran = Ran::of(generate(&server, home.path()).output().unwrap());
    assert_eq!((ran.code, ran.stdout), (Some(0), expected()));
    assert!(ran.stderr.contains("is taken from the cache"), "{}", ran.stderr);
}
