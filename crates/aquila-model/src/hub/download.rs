//! Files of the hub into blobs of the cache: resumed where an earlier attempt ended, checked, and
//! renamed only once they are whole.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use ring::digest::{Context, SHA256};

use super::HubEvent;
use super::cache::Repository;
use super::client::{Client, Failure, Remote};

/// Attempts in a row that may fail without a byte, and how long the first two are apart; the pause
/// doubles from one to the next.
const ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(250);

const BUFFER_BYTES: usize = 1 << 20;

/// Downloads files of a commit and links them, in this order.
pub(super) fn files(
    client: &Client<'_>,
    repository: &Repository,
    commit: &str,
    files: &[String],
    on_event: &mut dyn FnMut(HubEvent<'_>),
) -> Result<(), Failure> {
    if files.is_empty() {
        return Ok(());
    }
    let remotes = files.iter().map(|file| again(|| client.stat(commit, file)));
    let remotes = remotes.collect::<Result<Vec<Remote>, Failure>>()?;
    on_event(HubEvent::Begun {
        files: files.len(),
        total_bytes: remotes.iter().map(|remote| remote.size).sum(),
        into: &repository.snapshot(commit),
    });
    let mut before = 0;
    for (file, remote) in files.iter().zip(&remotes) {
        let blob = Blob { client, repository, commit, file, remote, before };
        blob.fetch(on_event)?;
        repository.link(commit, file, &remote.etag)?;
        before += remote.size;
    }
    Ok(())
}

/// Calls until it succeeds, or fails for good, or too often.
fn again<T>(mut call: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let mut failed = 0;
    loop {
        match call() {
            Err(Failure::Lost(_)) if failed + 1 < ATTEMPTS => {
                std::thread::sleep(FIRST_PAUSE * (1 << failed));
                failed += 1;
            }
            done => return done,
        }
    }
}

/// A file to download.
struct Blob<'a> {
    client: &'a Client<'a>,
    repository: &'a Repository,
    commit: &'a str,
    file: &'a str,
    remote: &'a Remote,
    /// Bytes of the files before this one.
    before: u64,
}

impl Blob<'_> {
    /// Downloads the blob, unless it is there by now.
    fn fetch(&self, on_event: &mut dyn FnMut(HubEvent<'_>)) -> Result<(), Failure> {
        let Self { remote, repository, .. } = self;
        let mut waiting = || on_event(HubEvent::Waiting { file: self.file });
        let _lock = repository.lock(&remote.etag, &mut waiting)?;
        let whole = repository.blob(&remote.etag);
        if fs::metadata(&whole).is_ok_and(|found| found.len() == remote.size) {
            return Ok(());
        }
        let mut partial = Partial::open(repository.incomplete(&remote.etag), remote.size)?;
        let resumed = partial.length > 0;
        self.receive(&mut partial, on_event)?;
        if !partial.is_what(&remote.etag) && resumed {
            // What was left here was no part of it.
            partial.empty()?;
            self.receive(&mut partial, on_event)?;
        }
        if !partial.is_what(&remote.etag) {
            partial.empty()?;
            return Err(Failure::Refused(format!(
                "{}: what arrived has another SHA-256 than the hub says",
                self.file
            )));
        }
        let Partial { file, path, .. } = partial;
        let named = file.sync_all().and_then(|()| fs::rename(&path, &whole));
        named.map_err(|e| Failure::local("cannot write", &whole, e))
    }

    /// Receives all bytes that are missing, over as many connections as it takes.
    fn receive(
        &self,
        partial: &mut Partial,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<(), Failure> {
        let mut most = partial.length;
        while partial.length < self.remote.size {
            again(|| match self.receive_some(partial, on_event) {
                // A connection that brought something new is no failed attempt.
                Err(Failure::Lost(_)) if partial.length > most => Ok(()),
                done => done,
            })?;
            most = partial.length.max(most);
        }
        Ok(())
    }

    /// Receives what one connection brings.
    fn receive_some(
        &self,
        partial: &mut Partial,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<(), Failure> {
        let (begins, mut body) = self.client.open(self.commit, self.file, partial.length)?;
        if begins != partial.length {
            partial.empty()?;
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            on_event(HubEvent::Arrived {
                file: self.file,
                done_bytes: self.before + partial.length,
            });
            let read = match body.read(&mut buffer) {
                Ok(0) if partial.length == self.remote.size => return Ok(()),
                Ok(0) => return Err(self.client.lost(&format_args!("{} is cut", self.file))),
                Ok(read) => read,
                Err(e) => return Err(self.client.lost(&format_args!("{}: {e}", self.file))),
            };
            if partial.length + read as u64 > self.remote.size {
                return Err(Failure::Refused(format!(
                    "{}: more arrives than the {} bytes that the hub says it has",
                    self.file, self.remote.size
                )));
            }
            partial.append(&buffer[..read])?;
        }
    }
}

/// A file that is not whole yet, and the digest of what it has.
struct Partial {
    file: File,
    path: PathBuf,
    length: u64,
    digest: Context,
}

impl Partial {
    /// What an earlier attempt left of a file of `size` bytes, or nothing.
    fn open(path: PathBuf, size: u64) -> Result<Self, Failure> {
        let cannot = |e| Failure::local("cannot open", &path, e);
        let mut options = File::options();
        let mut file = options.read(true).append(true).create(true).open(&path).map_err(cannot)?;
        let mut digest = Context::new(&SHA256);
        let (mut length, mut buffer) = (0, vec![0; BUFFER_BYTES]);
        loop {
            match file.read(&mut buffer).map_err(cannot)? {
                0 => break,
                read => {
                    digest.update(&buffer[..read]);
                    length += read as u64;
                }
            }
        }
        let mut partial = Self { file, path, length, digest };
        if length > size {
            partial.empty()?;
        }
        Ok(partial)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let mut left = bytes;
        // What was written before an error counts, since the next attempt goes on behind it.
        while !left.is_empty() {
            match self.file.write(left) {
                Ok(0) => return Err(self.full(ErrorKind::WriteZero.into())),
                Ok(written) => {
                    self.digest.update(&left[..written]);
                    self.length += written as u64;
                    left = &left[written..];
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.full(e)),
            }
        }
        Ok(())
    }

    fn full(&self, error: io::Error) -> Failure {
        let why =
            format!("{error} (its {} bytes are kept, and the next start goes on)", self.length);
        Failure::local("cannot write", &self.path, io::Error::other(why))
    }

    fn empty(&mut self) -> Result<(), Failure> {
        let emptied = self.file.set_len(0);
        emptied.map_err(|e| Failure::local("cannot write", &self.path, e))?;
        (self.length, self.digest) = (0, Context::new(&SHA256));
        Ok(())
    }

    /// Whether the bytes are those that the etag names; one that is no SHA-256 says nothing.
    fn is_what(&self, etag: &str) -> bool {
        let is_sha256 = etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_hexdigit());
        let digest = self.digest.clone().finish();
        let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        !is_sha256 || hex.eq_ignore_ascii_case(etag)
    }
}
