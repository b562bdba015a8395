//! Models of the hub, from a server that speaks its routes: what is downloaded, resumed, refused.

use std::fs;
use std::path::{Path, PathBuf};

use aquila_model::{Hub, HubEvent, Location, Places};

use crate::hub_server::{COMMIT, HubServer, Repository, Seen};

const ID: &str = "some-org/Some.Model";
const NEXT_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
const WEIGHTS: &str = "model.safetensors";

/// Bytes that differ from place to place, more than one buffer of them.
fn weights() -> Vec<u8> {
    (0..3_000_000u32).flat_map(|i| (i / 3).wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

fn files() -> Vec<(String, Vec<u8>)> {
    let named = |name: &str, content: &[u8]| (name.to_owned(), content.to_vec());
    vec![
        named("config.json", b"{}"),
        named("README.md", b"read me"),
        named("chat_template.jinja", b"{{ messages }}"),
        named("consolidated.safetensors", b"again"),
        named("onnx/model.safetensors", b"again"),
        named("pytorch_model.bin", b"again"),
        named("tokenizer.json", b"{\"model\": 1}"),
        named(WEIGHTS, &weights()),
        named("../../../evil.json", b"{}"),
    ]
}

fn server() -> HubServer {
    server_at(COMMIT)
}

fn server_at(commit: &'static str) -> HubServer {
    HubServer::start(vec![Repository { id: ID, commit, files: files() }])
}

fn hub(server: &HubServer, cache: &Path) -> Hub {
    Hub { endpoint: server.url.clone(), ..Hub::at(cache) }
}

fn fetch_at(hub: &Hub, id: &str, revision: Option<&str>) -> Result<PathBuf, String> {
    let places = Places { hub: Some(hub.clone()), ..Places::default() };
    match places.resolve(id, revision, &mut |_| {}) {
        Ok(Location::Folder(folder)) => Ok(folder),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

fn fetch(hub: &Hub) -> Result<PathBuf, String> {
    fetch_at(hub, ID, None)
}

fn snapshot(cache: &Path, commit: &str) -> PathBuf {
    cache.join("models--some-org--Some.Model/snapshots").join(commit)
}

fn blobs(cache: &Path) -> PathBuf {
    cache.join("models--some-org--Some.Model/blobs")
}

fn incomplete(cache: &Path) -> PathBuf {
    blobs(cache).join(format!("{}.incomplete", Repository::etag(WEIGHTS, &weights())))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Where the downloads of the weights began, request by request.
fn ranges(seen: &[Seen]) -> Vec<Option<String>> {
    let of_weights = |seen: &&Seen| seen.method == "GET" && seen.path.ends_with(WEIGHTS);
    seen.iter().filter(of_weights).map(|seen| seen.range.clone()).collect()
}

#[test]
fn a_model_is_downloaded_into_the_layout_that_tools_share() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let hub = hub(&server, cache.path());
    let folder = fetch(&hub).unwrap();
    assert_eq!(folder, snapshot(cache.path(), COMMIT));
    let wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(names(&folder), wanted);
    let mut etags = Vec::new();
    for (name, content) in files().iter().filter(|(name, _)| wanted.contains(&name.as_str())) {
        assert!(fs::read(folder.join(name)).unwrap() == *content, "{name}");
        let etag = Repository::etag(name, content);
        let link = fs::read_link(folder.join(name)).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(&etag), "{name}");
        etags.push(etag);
    }
    etags.sort();
    assert_eq!(names(&blobs(cache.path())), etags, "nothing else and nothing partial");
    let reference = cache.path().join("models--some-org--Some.Model/refs/main");
    assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);
    let locks = etags.iter().map(|etag| format!("{etag}.lock")).collect::<Vec<_>>();
    assert_eq!(names(&cache.path().join(".locks/models--some-org--Some.Model")), locks);

    // What is there is not asked for again.
    server.take_seen();
    assert_eq!(fetch(&hub).unwrap(), folder);
    let seen = server.take_seen();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(seen[0].path, format!("/api/models/{ID}/revision/main"));
}

#[test]
fn a_cut_connection_is_resumed_at_the_right_byte() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    server.conduct().cuts = [1_500_000, 0, 7, 4_000_000].into();
    let folder = fetch(&hub(&server, cache.path())).unwrap();
    assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights());
    let from = |byte: u64| Some(format!("bytes={byte}-"));
    let right = [None, from(1_500_000), from(1_500_000), from(1_500_007), from(5_500_007)];
    assert_eq!(ranges(&server.take_seen()), right);
}

#[test]
fn what_an_earlier_process_left_is_resumed() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    fs::create_dir_all(blobs(cache.path())).unwrap();
    fs::write(incomplete(cache.path()), &weights()[..2_000_000]).unwrap();
    let folder = fetch(&hub(&server, cache.path())).unwrap();
    assert_eq!(ranges(&server.take_seen()), [Some("bytes=2000000-".to_owned())]);
    assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights());
    assert!(!incomplete(cache.path()).exists());
}

#[test]
fn a_leftover_that_is_wrong_is_downloaded_again() {
    for length in [2_000_000, 12_000_000, 12_000_001] {
        let (server, cache) = (server(), tempfile::tempdir().unwrap());
        fs::create_dir_all(blobs(cache.path())).unwrap();
        fs::write(incomplete(cache.path()), vec![7; length]).unwrap();
        let folder = fetch(&hub(&server, cache.path())).unwrap();
        assert_eq!(ranges(&server.take_seen()).last(), Some(&None), "{length}");
        assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights(), "{length}");
    }
}

#[test]
fn a_server_that_ignores_ranges_sends_all_again() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    server.conduct().ignores_ranges = true;
    fs::create_dir_all(blobs(cache.path())).unwrap();
    fs::write(incomplete(cache.path()), &weights()[..2_000_000]).unwrap();
    let folder = fetch(&hub(&server, cache.path())).unwrap();
    assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights());
}

#[test]
fn the_token_stays_with_the_hub_where_files_are_elsewhere() {
    let (server, store, cache) = (server(), server(), tempfile::tempdir().unwrap());
    server.conduct().large_at = Some(store.url.clone());
    store.conduct().cuts = [1_000_000].into();
    let hub = Hub { token: Some("hf_secret".into()), ..hub(&server, cache.path()) };
    let folder = fetch(&hub).unwrap();
    assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights());
    let asked = server.take_seen();
    let with_token = |seen: &Seen| seen.authorization.as_deref() == Some("Bearer hf_secret");
    assert!(asked.iter().all(with_token), "{asked:?}");
    let elsewhere = store.take_seen();
    assert_eq!(elsewhere.len(), 2, "{elsewhere:?}");
    assert!(elsewhere.iter().all(|seen| seen.authorization.is_none()), "{elsewhere:?}");
}

#[test]
fn a_model_that_has_moved_is_followed_with_the_token() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    server.conduct().moved_from = Some("old-org/model");
    let hub = Hub { token: Some("hf_secret".into()), ..hub(&server, cache.path()) };
    let folder = fetch_at(&hub, "old-org/model", None).unwrap();
    assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights());
    assert!(server.take_seen().iter().all(|seen| seen.authorization.is_some()));
}

#[test]
fn refusals_of_the_hub_say_what_to_do() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let without = hub(&server, cache.path());
    let with = Hub { token: Some("hf_secret".into()), ..without.clone() };
    let check = |hub: &Hub, refuse, parts: &[&str]| {
        server.conduct().refuse = refuse;
        let text = fetch(hub).unwrap_err();
        for part in parts {
            assert!(text.contains(part), "{refuse:?}: {part}: {text}");
        }
        assert!(!text.contains("hf_secret"), "{text}");
    };
    let page = format!("{}/{ID}", server.url);
    let gated = "Some.Model is gated";
    check(&without, Some((401, "GatedRepo")), &[gated, "accept its conditions", &page, "HF_TOKEN"]);
    check(&with, Some((403, "GatedRepo")), &[gated, "the token has no access", &page]);
    check(&without, Some((401, "RepoNotFound")), &["has no model", "private", "HF_TOKEN"]);
    check(&with, Some((404, "RepoNotFound")), &["has no model", "may not see it"]);
    check(&without, Some((404, "RevisionNotFound")), &["has no revision main", "/tree/main"]);
    check(&with, Some((401, "")), &["does not take the token", "HF_TOKEN"]);
    check(&without, Some((503, "")), &[&server.url, "503"]);
    check(&without, Some((418, "")), &[&server.url, "418"]);
    assert_eq!(names(cache.path()), Vec::<String>::new(), "nothing is left behind");

    server.conduct().refuse = None;
    let text = fetch_at(&without, "nobody/nothing", None).unwrap_err();
    assert!(text.contains("no such folder") && text.contains("has no model nobody/nothing"));
    let text = fetch_at(&without, ID, Some("v9")).unwrap_err();
    assert!(text.contains("has no revision v9"), "{text}");
    let text = fetch_at(&without, ID, Some("../main")).unwrap_err();
    assert!(text.contains("no revision: expected"), "{text}");
    let wrong = Hub { token: Some("two\nlines".into()), ..without.clone() };
    let text = fetch(&wrong).unwrap_err();
    assert!(text.contains("is HF_TOKEN a token?"), "{text}");
    for endpoint in ["huggingface.co", "ftp://host", ""] {
        let wrong = Hub { endpoint: endpoint.into(), ..without.clone() };
        assert!(fetch(&wrong).unwrap_err().contains("HF_ENDPOINT"), "{endpoint}");
    }
}

#[test]
fn revisions_are_kept_by_name_and_by_commit() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let hub = hub(&server, cache.path());
    let folder = fetch_at(&hub, ID, Some(COMMIT)).unwrap();
    let references = cache.path().join("models--some-org--Some.Model/refs");
    assert!(!references.exists(), "a commit needs no reference");
    assert_eq!(fetch_at(&hub, ID, Some("refs/pr/1")).unwrap(), folder);
    assert_eq!(fs::read_to_string(references.join("refs/pr/1")).unwrap(), COMMIT);
    let offline = Hub { offline: true, ..hub };
    for revision in [COMMIT, "refs/pr/1"] {
        assert_eq!(fetch_at(&offline, ID, Some(revision)).unwrap(), folder, "{revision}");
    }
    let text = fetch_at(&offline, ID, None).unwrap_err();
    assert!(text.contains("refs/main") && text.contains("HF_HUB_OFFLINE"), "{text}");
    let text = fetch_at(&offline, folder.to_str().unwrap(), Some("v1")).unwrap_err();
    assert!(text.contains("revision v1") && text.contains("is a folder"), "{text}");
}

#[test]
fn a_new_commit_shares_the_blobs_of_the_old_one() {
    let (old, new, cache) = (server(), server_at(NEXT_COMMIT), tempfile::tempdir().unwrap());
    fetch(&hub(&old, cache.path())).unwrap();
    let folder = fetch(&hub(&new, cache.path())).unwrap();
    assert_eq!(folder, snapshot(cache.path(), NEXT_COMMIT));
    assert!(fs::read(folder.join(WEIGHTS)).unwrap() == weights());
    assert!(new.take_seen().iter().all(|s| s.method == "HEAD" || s.path.starts_with("/api/")));
}

#[test]
fn nothing_is_asked_when_offline() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let online = hub(&server, cache.path());
    let offline = Hub { offline: true, ..online.clone() };
    let text = fetch(&offline).unwrap_err();
    assert!(text.contains("the hub cache has no") && text.contains("HF_HUB_OFFLINE"), "{text}");
    assert!(server.take_seen().is_empty());
    let folder = fetch(&online).unwrap();
    server.take_seen();
    assert_eq!(fetch(&offline).unwrap(), folder);
    assert!(server.take_seen().is_empty());
}

#[test]
fn a_hub_that_does_not_give_leaves_the_cached_snapshot() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let good = hub(&server, cache.path());
    let folder = fetch(&good).unwrap();
    let fetch = |hub: &Hub| {
        let (mut said, places) =
            (Vec::new(), Places { hub: Some(hub.clone()), ..Places::default() });
        let found = places.resolve(ID, None, &mut |event| match event {
            HubEvent::CacheOnly { why } => said.push(why.to_owned()),
            other => panic!("{other:?}"),
        });
        assert_eq!(found.unwrap(), Location::Folder(folder.clone()));
        said.concat()
    };
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gone = Hub { endpoint: format!("http://{free}"), ..good.clone() };
    assert!(fetch(&gone).contains(&gone.endpoint));
    server.conduct().refuse = Some((503, ""));
    assert!(fetch(&good).contains("503"));
    server.conduct().refuse = Some((403, "GatedRepo"));
    assert!(fetch(&good).contains("gated"));
}

#[test]
fn what_is_not_what_the_hub_says_is_refused() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let hub = hub(&server, cache.path());
    server.conduct().damages = true;
    let text = fetch(&hub).unwrap_err();
    assert!(text.contains("SHA-256"), "{text}");
    assert!(!snapshot(cache.path(), COMMIT).join("config.json").exists());
    assert!(!names(&blobs(cache.path())).contains(&Repository::etag(WEIGHTS, &weights())));
    server.conduct().damages = false;
    assert!(fs::read(fetch(&hub).unwrap().join(WEIGHTS)).unwrap() == weights());
}

#[test]
fn a_hub_cannot_lead_out_of_the_cache() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let hub = hub(&server, &cache.path().join("hub"));
    server.conduct().etag = Some("../../../evil");
    assert!(fetch(&hub).unwrap_err().contains("usable etag"));
    server.conduct().etag = None;
    for list in [r#"{"sha": "../../evil", "siblings": []}"#, "<html>", "{}", "", "[1, 2"] {
        server.conduct().list = Some(list.into());
        let text = fetch(&hub).unwrap_err();
        assert!(text.contains("a commit") || text.contains("does not answer as a hub"), "{text}");
    }
    server.conduct().list = Some(format!(r#"{{"sha": "{COMMIT}", "siblings": []}}"#));
    let text = fetch(&hub).unwrap_err();
    assert!(text.contains("has no config.json at revision main"), "{text}");
    assert_eq!(names(cache.path()), Vec::<String>::new());
}

#[test]
fn one_file_of_a_repository_is_downloaded_alone() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let places = Places { hub: Some(hub(&server, cache.path())), ..Places::default() };
    let find = |name: &str| places.resolve_file(Path::new(name), &mut |_| {});
    let path = find(&format!("{ID}/tokenizer.json")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"{\"model\": 1}");
    assert_eq!(names(&snapshot(cache.path(), COMMIT)), ["tokenizer.json"]);
    let text = find(&format!("{ID}/map.pt")).unwrap_err().to_string();
    assert!(text.contains("has no map.pt"), "{text}");
    assert_eq!(find("map.pt").unwrap(), Path::new("map.pt"), "whoever opens it says more");
}

#[test]
fn a_file_of_certificates_that_holds_none_is_refused() {
    let (server, cache) = (server(), tempfile::tempdir().unwrap());
    let file = cache.path().join("roots.pem");
    let hub = Hub { certificates: Some(file.clone()), ..hub(&server, &cache.path().join("hub")) };
    assert!(fetch(&hub).unwrap_err().contains("roots.pem: No such file"));
    fs::write(&file, "no certificate").unwrap();
    let text = fetch(&hub).unwrap_err();
    assert!(text.contains("SSL_CERT_FILE") && text.contains("holds no certificate"), "{text}");
}
