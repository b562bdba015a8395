//! TLS: requests over it, clients that do not speak it, and files that are no certificates.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquila_server::{Limits, Settings, Tls};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tempfile::TempDir;

use crate::support::{PATIENCE, Running, engine_config, generator, settings};

/// A certificate of `localhost`, and its key.
struct Certificate {
    folder: TempDir,
}

impl Certificate {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(folder.path().join("cert.pem"), made.cert.pem()).unwrap();
        std::fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        Self { folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("cert.pem")
    }

    fn key(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    fn serve(&self, limits: Limits) -> Running {
        let tls = Some(Tls::load(&self.file(), &self.key()).unwrap());
        Running::start(generator(), Settings { tls, limits, ..settings() })
    }

    /// A client that trusts this certificate and no other.
    fn connect(&self, server: &Running) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.file()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let client = ClientConnection::new(Arc::new(config), name).unwrap();
        let socket = TcpStream::connect(server.address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        StreamOwned::new(client, socket)
    }

    fn ask(&self, server: &Running, request: &str) -> String {
        let mut stream = self.connect(server);
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

const HEALTH: &str = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

#[test]
fn requests_and_streams_are_answered_over_tls() {
    let certificate = Certificate::new();
    let server = certificate.serve(Limits::default());
    assert!(certificate.ask(&server, HEALTH).starts_with("HTTP/1.1 200 "));
    let body = r#"{"prompt": "fn main", "max_tokens": 300, "ignore_eos": true, "stream": true}"#;
    let answer = certificate.ask(
        &server,
        &format!(
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: \
             {}\r\n\r\n{body}",
            body.len()
        ),
    );
    assert!(answer.contains("data: [DONE]"), "{answer}");
    // Who does not trust the certificate hears no answer, and costs the server nothing.
    let other = Certificate::new();
    let mut stream = other.connect(&server);
    assert!(stream.write_all(HEALTH.as_bytes()).and_then(|()| stream.read(&mut [0])).is_err());
    assert!(certificate.ask(&server, HEALTH).starts_with("HTTP/1.1 200 "));
}

#[test]
fn http_without_tls_is_told_so() {
    let certificate = Certificate::new();
    let server = certificate.serve(Limits::default());
    let reply = server.get("/v1/models");
    assert_eq!(reply.status, 400);
    assert!(reply.body.contains("https://"), "{}", reply.body);
    // What is neither is closed.
    drop(server.connect().send("\0\x01\x02"));
    let page = HEALTH.replace("/health", "/metrics");
    let failed =
        |page: &str| page.contains("aquila:failed_tls_handshakes_total{model_name=\"tiny\"} 2");
    assert!(std::iter::repeat_with(|| certificate.ask(&server, &page)).any(|page| failed(&page)));
}

#[test]
fn slow_handshakes_keep_nobody_waiting() {
    let certificate = Certificate::new();
    let server = certificate.serve(Limits { connections: 64, ..Limits::default() });
    // The beginning of a handshake, and then nothing.
    let hello = b"\x16\x03\x01\x02\x00\x01\x00";
    let mut slow: Vec<_> = (0..200).map(|_| server.connect().send_bytes(hello)).collect();
    assert!(certificate.ask(&server, HEALTH).starts_with("HTTP/1.1 200 "));
    // They count as connections, and those that have waited longest make place.
    assert!(slow[0].is_closed());
    drop(server);

    let header_time = Duration::from_millis(100);
    let server = certificate.serve(Limits { header_time, ..Limits::default() });
    assert!(server.connect().send_bytes(hello).is_closed());
    assert!(server.connect().is_closed());
}

#[test]
fn files_that_are_no_certificates_are_refused() {
    let (one, two) = (Certificate::new(), Certificate::new());
    let refused = |certificate: &Path, key: &Path, why: &str| {
        let error = Tls::load(certificate, key).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(Path::new("/no/such/file"), &one.key(), "/no/such/file");
    refused(&one.file(), Path::new("/no/such/key"), "/no/such/key");
    refused(&one.key(), &one.key(), "there is no certificate in it");
    refused(&one.file(), &one.file(), "there is no private key in it");
    refused(&one.file(), &two.key(), "cannot be used");
    let damaged = one.folder.path().join("damaged.pem");
    std::fs::write(&damaged, "-----BEGIN CERTIFICATE-----\n!!!!\n").unwrap();
    refused(&damaged, &one.key(), "no PEM");
    std::fs::write(&damaged, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        .unwrap();
    refused(&damaged, &one.key(), "cannot be used");
}

#[test]
fn clients_that_leave_bytes_behind_hold_no_slot_over_tls() {
    let certificate = Certificate::new();
    let tls = Some(Tls::load(&certificate.file(), &certificate.key()).unwrap());
    let server = Running::held(engine_config(), Settings { tls, ..settings() });
    let mut client = certificate.connect(&server);
    let body = r#"{"prompt": "fn main", "max_tokens": 400, "ignore_eos": true}"#;
    let length = body.len();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}");
    client.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
    server.wait_until("it runs", |s| s.running == 1);
    client.write_all(b"GET /health HTTP/1.1\r\n").unwrap();
    // What the server sent is unread, so that a closed socket would be reset.
    client.sock.shutdown(Shutdown::Write).unwrap();
    server.wait_until_idle();
    assert!(server.stats().completion_tokens < 400);
}
