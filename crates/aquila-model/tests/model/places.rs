//! Names into places: presets, folders, shipped models, the hub's cache.

use std::fs;
use std::path::{Path, PathBuf};

use aquila_model::{Error, Hub, Location, Places, shipped_models};

use crate::sequence::fixture;

fn archives() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models").into()
}

fn find(places: &Places, name: &str) -> Result<Location, Error> {
    places.resolve(name, None, &mut |_| {})
}

fn folder(location: Location) -> PathBuf {
    match location {
        Location::Folder(folder) => folder,
        other => panic!("{other:?}"),
    }
}

fn offline(cache: &Path) -> Hub {
    Hub { offline: true, ..Hub::at(cache) }
}

fn list(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_preset_is_found_by_its_prefix() {
    let places = Places::default();
    assert_eq!(find(&places, "preset:bench").unwrap(), Location::Preset("bench".into()));
    let text = find(&places, "preset:giant").unwrap_err().to_string();
    assert!(text.contains("preset:giant") && text.contains("preset:llama-3.1-8b"), "{text}");
}

#[test]
fn a_folder_is_itself() {
    let path = fixture("qwen2");
    assert_eq!(find(&Places::default(), path.to_str().unwrap()).unwrap(), Location::Folder(path));
}

#[test]
fn every_shipped_model_unpacks_once_into_a_complete_folder() {
    let cache = tempfile::tempdir().unwrap();
    let places = Places {
        shipped: vec!["/nowhere".into(), archives()],
        unpacked: Some(cache.path().join("deep/er")),
        hub: None,
    };
    for name in shipped_models() {
        let first = folder(find(&places, name).unwrap());
        assert!(first.starts_with(cache.path()));
        let files = list(&first);
        assert!(files.contains(&"config.json".into()), "{name}: {files:?}");
        assert!(files.contains(&"model.safetensors".into()), "{name}: {files:?}");
        let written = fs::metadata(first.join("model.safetensors")).unwrap().modified().unwrap();
        let again = folder(find(&places, name).unwrap());
        assert_eq!(again, first);
        let later = fs::metadata(again.join("model.safetensors")).unwrap().modified().unwrap();
        assert_eq!(later, written, "{name} was unpacked twice");
    }
    assert_eq!(list(&cache.path().join("deep/er")).len(), 5, "nothing partial stays behind");
}

#[test]
fn many_at_once_unpack_one_model_without_a_collision() {
    let cache = tempfile::tempdir().unwrap();
    let places =
        Places { shipped: vec![archives()], unpacked: Some(cache.path().to_owned()), hub: None };
    let found: Vec<PathBuf> = std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..6).map(|_| scope.spawn(|| folder(find(&places, "draft").unwrap()))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(found.iter().all(|f| *f == found[0]));
    assert_eq!(list(cache.path()).len(), 1);
    assert_eq!(list(&found[0]).len(), 5);
}

#[test]
fn an_unwritable_cache_and_a_damaged_archive_are_named() {
    let here = tempfile::tempdir().unwrap();
    let file = here.path().join("file");
    fs::write(&file, "").unwrap();
    let places =
        Places { shipped: vec![archives()], unpacked: Some(file.join("cache")), hub: None };
    let text = find(&places, "draft").unwrap_err().to_string();
    assert!(text.contains("cannot unpack") && text.contains("XDG_CACHE_HOME"), "{text}");
    let places = Places { shipped: vec![archives()], ..Places::default() };
    let text = find(&places, "draft").unwrap_err().to_string();
    assert!(text.contains("neither XDG_CACHE_HOME nor HOME is set"), "{text}");

    let cache = here.path().join("cache");
    let places =
        Places { shipped: vec![here.path().into()], unpacked: Some(cache.clone()), hub: None };
    let good = fs::read(archives().join("draft.tar.zst")).unwrap();
    for bad in [&b"no archive"[..], &good[..good.len() / 2], &good[..100]] {
        fs::write(here.path().join("draft.tar.zst"), bad).unwrap();
        let text = find(&places, "draft").unwrap_err().to_string();
        assert!(text.contains("draft.tar.zst: is damaged"), "{text}");
        assert_eq!(list(&cache), Vec::<String>::new(), "nothing half-written stays");
    }
}

#[test]
fn an_unpacked_model_beside_the_binary_is_used() {
    let here = tempfile::tempdir().unwrap();
    let own = here.path().join("tiny");
    fs::create_dir(&own).unwrap();
    fs::copy(fixture("qwen2").join("config.json"), own.join("config.json")).unwrap();
    let places = Places { shipped: vec![here.path().into()], ..Places::default() };
    assert_eq!(find(&places, "tiny").unwrap(), Location::Folder(own));
}

#[test]
fn a_hub_id_is_found_in_the_local_cache() {
    let hub = tempfile::tempdir().unwrap();
    let places = Places { hub: Some(offline(hub.path())), ..Places::default() };
    let repository = hub.path().join("models--some-org--Some.Model");
    let snapshot = repository.join("snapshots/0123abcd");
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(repository.join("refs/main"), "0123abcd\n").unwrap();
    let config = snapshot.join("config.json");
    fs::write(&config, "{}").unwrap();
    assert_eq!(find(&places, "some-org/Some.Model").unwrap(), Location::Folder(snapshot.clone()));
}

#[test]
fn a_missing_model_is_refused_with_all_places_tried() {
    let hub = tempfile::tempdir().unwrap();
    let places =
        Places { shipped: vec!["/nowhere".into()], unpacked: None, hub: Some(offline(hub.path())) };
    let tried = |name: &str| find(&places, name).unwrap_err().to_string();
    let text = tried("some-org/model");
    for part in [
        "no model \"some-org/model\"",
        "no such folder",
        "tiny-eagle3",
        "models--some-org--model",
        "HF_HUB_OFFLINE",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(tried("tiny").contains("/nowhere/tiny.tar.zst"));
    assert!(tried("../../etc").contains("no hub id"));
    assert!(tried("").contains("no such folder"));

    let repository = hub.path().join("models--some-org--model");
    fs::create_dir_all(repository.join("refs")).unwrap();
    assert!(tried("some-org/model").contains("refs/main"));
    fs::write(repository.join("refs/main"), "../../secret").unwrap();
    assert!(tried("some-org/model").contains("is no commit"));
    fs::write(repository.join("refs/main"), "0123").unwrap();
    assert!(tried("some-org/model").contains("incomplete"));
}
