//! A server that speaks the hub's routes over real sockets, and misbehaves where a test says so.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Long enough that only what hangs for ever takes it.
const HANG: Duration = Duration::from_secs(600);

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A repository: its id, its commit and its files.
pub struct Repository {
    pub id: &'static str,
    pub commit: &'static str,
    pub files: Vec<(String, Vec<u8>)>,
}

impl Repository {
    /// The etag of a file: of large ones the SHA-256, as on the hub.
    pub fn etag(name: &str, content: &[u8]) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, content);
        let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        if is_large(name) { hex } else { hex[..40].into() }
    }
}

/// Whether a file is not kept by the hub itself.
pub fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".bin") || name.ends_with(".pt")
}

/// What the server does otherwise than a good one.
#[derive(Default)]
pub struct Conduct {
    /// Every request is answered with this status and error code.
    pub refuse: Option<(u16, &'static str)>,
    /// After how many bytes the next connections that send large files are cut.
    pub cuts: VecDeque<usize>,
    /// All bytes are sent, whatever range is asked for.
    pub ignores_ranges: bool,
    /// Large files are redirected to the server of this address.
    pub large_at: Option<String>,
    /// The id has changed: requests for it are redirected to this one.
    pub moved_from: Option<&'static str>,
    /// The last byte of large files is wrong.
    pub damages: bool,
    /// How many lists of files must have been asked for before a large file is sent.
    pub lists_first: usize,
    /// After how many bytes of a large file nothing more comes, until the client leaves.
    pub stalls_after: Option<usize>,
    /// The answer to what files there are, in place of the true one.
    pub list: Option<String>,
    /// The etag of every file, in place of the true one.
    pub etag: Option<&'static str>,
}

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

struct State {
    repositories: Vec<Repository>,
    conduct: Mutex<Conduct>,
    seen: Mutex<Vec<Seen>>,
    came: Condvar,
}

/// The server; it ends with the process.
pub struct HubServer {
    pub url: String,
    state: Arc<State>,
}

impl HubServer {
    pub fn start(repositories: Vec<Repository>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State {
            repositories,
            conduct: Mutex::default(),
            seen: Mutex::default(),
            came: Condvar::new(),
        });
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = shared.clone();
                std::thread::spawn(move || while state.answer(&stream).is_some() {});
            }
        });
        Self { url, state }
    }

    pub fn conduct(&self) -> MutexGuard<'_, Conduct> {
        self.state.conduct.lock().unwrap()
    }

    /// The requests so far, which are forgotten.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.seen.lock().unwrap())
    }

    /// Waits until a request has come for which this holds.
    #[allow(dead_code, reason = "other tests include this file")]
    pub fn wait_for(&self, holds: impl Fn(&Seen) -> bool) {
        self.state.wait(|seen| seen.iter().any(&holds));
    }
}

impl State {
    fn wait(&self, enough: impl Fn(&[Seen]) -> bool) {
        let seen = self.seen.lock().unwrap();
        let (_seen, waited) =
            self.came.wait_timeout_while(seen, HANG, |seen| !enough(seen)).unwrap();
        assert!(!waited.timed_out(), "the request never came");
    }

    /// Answers one request; nothing once the connection is over.
    fn answer(&self, stream: &TcpStream) -> Option<()> {
        let seen = request(stream)?;
        self.seen.lock().unwrap().push(seen.clone());
        self.came.notify_all();
        let conduct = self.conduct.lock().unwrap();
        if let Some((status, code)) = conduct.refuse {
            return reply(stream, status, &[("x-error-code", code)], Some(b"no"));
        }
        if let Some(old) = conduct.moved_from.filter(|old| seen.path.contains(old)) {
            let location = seen.path.replace(old, self.repositories[0].id);
            return reply(stream, 307, &[("location", &location)], Some(b""));
        }
        for Repository { id, commit, files } in &self.repositories {
            let revision = |revision: &str| [*commit, "main", "refs%2Fpr%2F1"].contains(&revision);
            if let Some(asked) = seen.path.strip_prefix(&format!("/api/models/{id}/revision/")) {
                if !revision(asked) {
                    return reply(stream, 404, &[("x-error-code", "RevisionNotFound")], Some(b""));
                }
                let names = files.iter().map(|(name, _)| format!("{{\"rfilename\": {name:?}}}"));
                let names = names.collect::<Vec<_>>().join(", ");
                let list = format!("{{\"sha\": \"{commit}\", \"siblings\": [{names}]}}");
                let list = conduct.list.clone().unwrap_or(list);
                return reply(stream, 200, &[], Some(list.as_bytes()));
            }
            for (name, content) in files {
                if seen.path == format!("/{id}/resolve/{commit}/{name}") {
                    return self.send(stream, &seen, name, content, conduct);
                }
            }
        }
        reply(stream, 404, &[("x-error-code", "RepoNotFound")], Some(b""))
    }

    fn send(
        &self,
        stream: &TcpStream,
        seen: &Seen,
        name: &str,
        content: &[u8],
        mut conduct: MutexGuard<'_, Conduct>,
    ) -> Option<()> {
        let etag = conduct.etag.map_or_else(|| Repository::etag(name, content), str::to_owned);
        let (etag, size) = (format!("\"{etag}\""), content.len().to_string());
        if let Some(other) = conduct.large_at.as_ref().filter(|_| is_large(name)) {
            let location = format!("{other}{}?signature=1", seen.path);
            let linked = [("x-linked-etag", &*etag), ("x-linked-size", &size)];
            let headers = [&linked[..], &[("location", &location)]].concat();
            return reply(stream, 302, &headers, Some(b""));
        }
        let headers = [("etag", &*etag), ("content-length", &size)];
        if seen.method == "HEAD" {
            return reply(stream, 200, &headers, None);
        }
        let range = seen.range.as_ref().filter(|_| !conduct.ignores_ranges);
        let from = range.map_or(0, |range| {
            range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse().unwrap()
        });
        let mut content = content.to_vec();
        if conduct.damages && is_large(name) {
            *content.last_mut().unwrap() ^= 1;
        }
        let rest = &content[from..];
        let cut = conduct.cuts.front().copied().filter(|_| is_large(name));
        if cut.is_some() {
            conduct.cuts.pop_front();
        }
        let stall = conduct.stalls_after.filter(|_| is_large(name));
        let lists = conduct.lists_first;
        drop(conduct);
        if is_large(name) {
            let is_list = |seen: &&Seen| seen.path.starts_with("/api/");
            self.wait(|seen| seen.iter().filter(is_list).count() >= lists);
        }
        let length = rest.len().to_string();
        let content_range = format!("bytes {from}-{}/{size}", content.len() - 1);
        let status = if from > 0 { 206 } else { 200 };
        let headers = [("etag", &*etag), ("content-length", &length)];
        let ranged = [("content-range", &*content_range)];
        let headers = [&headers[..], if from > 0 { &ranged } else { &[] }].concat();
        reply(stream, status, &headers, None)?;
        let mut stream = stream;
        match (cut, stall) {
            (Some(cut), _) => {
                stream.write_all(&rest[..cut.min(rest.len())]).ok()?;
                stream.shutdown(Shutdown::Both).ok()?;
                None
            }
            (None, Some(stall)) => {
                stream.write_all(&rest[..stall]).ok()?;
                let _ = stream.read(&mut [0]);
                None
            }
            (None, None) => stream.write_all(rest).ok(),
        }
    }
}

fn request(stream: &TcpStream) -> Option<Seen> {
    let mut lines = BufReader::with_capacity(1, stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let path = path.split('?').next()?.to_owned();
    let mut seen = Seen { method, path, range: None, authorization: None };
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ")?;
        match name.to_ascii_lowercase().as_str() {
            "range" => seen.range = Some(value.into()),
            "authorization" => seen.authorization = Some(value.into()),
            _ => {}
        }
    }
    Some(seen)
}

/// Sends a response; without a body, the caller says its length and sends it.
fn reply(
    mut stream: &TcpStream,
    status: u16,
    headers: &[(&str, &str)],
    body: Option<&[u8]>,
) -> Option<()> {
    let mut text = format!("HTTP/1.1 {status} Whatever\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if let Some(body) = body {
        text += &format!("content-length: {}\r\n", body.len());
    }
    text += "\r\n";
    stream.write_all(text.as_bytes()).ok()?;
    stream.write_all(body.unwrap_or_default()).ok()
}
