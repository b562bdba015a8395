//! The cache of one repository, in the layout that the hub's tools share.
//!
//! `models--ORG--NAME/{refs/REVISION, blobs/ETAG, snapshots/COMMIT/FILE}`: a reference is a text
//! with a commit, a file of a snapshot is a relative link to a blob. The invariant: a blob has its
//! name only once it is whole (`ETAG.incomplete` until then), a link is made only to such a blob,
//! and a reference only to a snapshot whose files are all linked.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::HubId;
use super::client::Failure;

/// Whether a text is one component of a path that hides nothing and leads nowhere else.
pub(super) fn is_plain(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('.')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c))
}

/// The part of a cache that one repository has.
pub(super) struct Repository {
    id: String,
    folder: PathBuf,
    locks: PathBuf,
}

impl Repository {
    pub fn new(cache: &Path, HubId { organization, name }: HubId<'_>) -> Self {
        let own = format!("models--{organization}--{name}");
        Self {
            id: format!("{organization}/{name}"),
            folder: cache.join(&own),
            locks: cache.join(".locks").join(own),
        }
    }

    /// The repository's `org/name`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The snapshot of a revision that has the file `needed`, or why there is none.
    pub fn find(&self, revision: &str, needed: &str) -> Result<PathBuf, String> {
        if !self.folder.is_dir() {
            return Err(format!("the hub cache has no {}", self.folder.display()));
        }
        let reference = self.reference(revision);
        let commit = match fs::read_to_string(&reference) {
            Ok(commit) => commit.trim().to_owned(),
            // A commit is its own name.
            Err(_) if self.snapshot(revision).is_dir() => revision.to_owned(),
            Err(e) => return Err(format!("{}: {e}", reference.display())),
        };
        if !is_plain(&commit) {
            return Err(format!("{}: {commit:?} is no commit", reference.display()));
        }
        if !self.has(&commit, needed) {
            return Err(format!(
                "{} has no {needed}: incomplete",
                self.snapshot(&commit).display()
            ));
        }
        Ok(self.snapshot(&commit))
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Whether a file of a commit is there.
    pub fn has(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    /// Where the whole blob of this name belongs.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Where its bytes are until it is whole.
    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.blob(&format!("{etag}.incomplete"))
    }

    /// Makes a whole blob a file of a commit.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), Failure> {
        let path = self.snapshot(commit).join(file);
        self.create_parent(&path)?;
        let blob = Path::new("../../blobs").join(etag);
        let linked = match symlink(&blob, &path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                if path.is_file() {
                    // Another process was faster.
                    return Ok(());
                }
                fs::remove_file(&path).and_then(|()| symlink(&blob, &path))
            }
            done => done,
        };
        linked.map_err(|e| Failure::local("cannot link", &path, e))
    }

    /// Says that a revision is this commit.
    pub fn set_reference(&self, revision: &str, commit: &str) -> Result<(), Failure> {
        let path = self.reference(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|old| old.trim() == commit) {
            return Ok(());
        }
        self.create_parent(&path)?;
        // Under another name first: nobody ever reads half a commit.
        let own = path.with_added_extension(format!("{}.incomplete", std::process::id()));
        let written = fs::write(&own, commit).and_then(|()| fs::rename(&own, &path));
        written.map_err(|e| Failure::local("cannot write", &path, e))
    }

    /// Waits until no other process downloads this blob, and keeps others from it until the file
    /// is dropped; `waiting` is called if that takes waiting.
    pub fn lock(&self, etag: &str, waiting: &mut dyn FnMut()) -> Result<File, Failure> {
        let path = self.locks.join(format!("{etag}.lock"));
        self.create_parent(&path)?;
        self.create_parent(&self.blob(etag))?;
        let failed = |e| Failure::local("cannot lock", &path, e);
        let options = File::options().create(true).truncate(false).write(true).open(&path);
        let file = options.map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                waiting();
                file.lock().map_err(failed)?;
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        Ok(file)
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }

    fn create_parent(&self, path: &Path) -> Result<(), Failure> {
        let parent = path.parent().unwrap_or(path);
        fs::create_dir_all(parent).map_err(|e| Failure::local("cannot create", parent, e))
    }
}
