//! Keys, certificates and origins, as flags and the environment give them.

use std::path::Path;

use crate::run::run;
use crate::server::Served;

const PLAIN: [&str; 2] = ["--speculative-algorithm", "NONE"];

fn refused(flags: &[&str], variables: &[(&str, &str)], why: &str) {
    let ran = Served::start_in(variables, flags).err().expect("a refusal");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains(why), "{flags:?}: {}", ran.stderr);
    assert!(!ran.stderr.contains("model     "), "refused after loading: {}", ran.stderr);
}

fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn keys_come_from_flag_file_and_environment() {
    let folder = tempfile::tempdir().unwrap();
    let keys = file(folder.path(), "keys", "# of May\nsk-1 alice\nsk-2\n");
    let flags = [&PLAIN[..], &["--api-key", "sk-3", "--api-key-file", &keys]].concat();
    let variables = [("AQUILA_API_KEY", "sk-4"), ("AQUILA_ADMIN_API_KEY", "root")];
    let mut served = Served::start_in(&variables, &flags).unwrap();
    let ask = |path: &str, key: &str| {
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
        served.ask(&format!("{head}x-api-key: {key}\r\n\r\n")).0
    };
    for key in ["sk-1", "sk-2", "sk-3", "sk-4"] {
        assert_eq!(ask("/v1/models", key), 200, "{key}");
        assert_eq!(ask("/flush_cache", key), 401, "{key}");
    }
    assert_eq!(ask("/flush_cache", "root"), 200);
    assert_eq!(ask("/v1/models", "sk-5"), 401);
    assert_eq!(served.get("/health").0, 200);
    assert!(served.said.contains("ready: http"), "{}", served.said);
    // The log has names in place of keys.
    assert!(served.logged("/v1/models").contains("key=alice"));
    for key in ["sk-1", "sk-3", "sk-4", "root"] {
        assert!(!served.said.contains(key), "{}", served.said);
    }
}

#[test]
fn keys_without_sense_are_refused_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let empty = file(folder.path(), "empty", "# none yet\n");
    refused(&["--api-key-file", &empty], &[], "there is no key in it");
    refused(&["--api-key-file", "/no/such/file"], &[], "--api-key-file /no/such/file: ");
    refused(&["--api-key", ""], &[], "--api-key: the key is empty");
    refused(&["--api-key", "a b"], &[], "--api-key: a key must be visible ASCII");
    refused(&[], &[("AQUILA_API_KEY", "")], "AQUILA_API_KEY is set and empty");
    refused(&["--admin-api-key", ""], &[], "--admin-api-key: the key is empty");
    refused(&["--max-requests-per-key", "4"], &[], "there are no keys");
    refused(&["--api-key", "a", "--max-requests-per-key", "0"], &[], "--max-requests-per-key");
}

#[test]
fn certificates_and_origins_without_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = file(folder.path(), "text", "no certificate\n");
    refused(&["--ssl-certfile", &text], &[], "there is no certificate in it");
    refused(&["--ssl-certfile", "/no/such/file"], &[], "/no/such/file");
    refused(&["--ssl-keyfile", &text], &[], "--ssl-certfile");
    refused(&["--allowed-origins", "chat.example.com"], &[], "is no origin");
}

#[test]
fn a_server_without_keys_says_who_may_ask() {
    let served =
        |flags: &[&str]| Served::start_with(&[&PLAIN[..], flags].concat()).unwrap().said.clone();
    let open = "note: no key is asked for";
    assert!(served(&["--host", "0.0.0.0"]).contains(open));
    assert!(!served(&["--host", "0.0.0.0", "--api-key", "sk-1"]).contains(open));
    assert!(!served(&[]).contains(open));
    let ran = run(&["serve", "--help"]);
    assert!(ran.stdout.contains("--allowed-origins"), "{}", ran.stdout);
}
