//! Models of the Hugging Face hub: downloaded into the local cache, or found there.
//!
//! The hub is asked at every start which commit a revision is, as its other clients do, and what
//! the cache lacks of it is downloaded. Whenever that fails, the snapshot that the cache has of the
//! revision is used and the caller is told why.

mod cache;
mod client;
mod download;

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use cache::{Repository, is_plain};
use client::{Client, Failure};

/// The revision that a model is taken at where none is named.
pub(crate) const MAIN: &str = "main";

/// The hub's answers to what files a revision has are far below this.
const LIST_BYTES: u64 = 32 << 20;

/// Where models of the hub come from and are kept.
#[derive(Clone)]
pub struct Hub {
    /// The cache, in the layout that the hub's tools share.
    pub cache: PathBuf,
    /// The hub's address.
    pub endpoint: String,
    /// What it is told about who asks.
    pub token: Option<String>,
    /// Whether only the cache is used.
    pub offline: bool,
    /// A PEM file with the certificates to trust in place of Mozilla's.
    pub certificates: Option<PathBuf>,
}

impl fmt::Debug for Hub {
    // Without the token, which is nobody's to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cache, endpoint, offline, certificates, token: _ } = self;
        let mut shown = f.debug_struct("Hub");
        shown.field("cache", cache).field("endpoint", endpoint).field("offline", offline);
        shown.field("certificates", certificates).finish_non_exhaustive()
    }
}

impl Hub {
    /// The hub with this cache and nothing else set.
    pub fn at(cache: impl Into<PathBuf>) -> Self {
        Self {
            cache: cache.into(),
            endpoint: "https://huggingface.co".into(),
            token: None,
            offline: false,
            certificates: None,
        }
    }

    /// What the environment says; `home` is where HF_HOME is by default.
    pub(crate) fn of_environment(home: Option<PathBuf>) -> Option<Self> {
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let home = set("HF_HOME").map(PathBuf::from).or(home);
        let cache = set("HF_HUB_CACHE").map(PathBuf::from);
        let mut hub = Self::at(cache.or_else(|| Some(home.as_ref()?.join("hub")))?);
        if let Some(endpoint) = set("HF_ENDPOINT") {
            hub.endpoint = endpoint.to_string_lossy().into_owned();
        }
        let token = set("HF_TOKEN").map(|token| token.to_string_lossy().into_owned());
        let token = token.or_else(|| std::fs::read_to_string(home?.join("token")).ok());
        hub.token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        hub.offline = set("HF_HUB_OFFLINE").is_some_and(|value| {
            let value = value.to_string_lossy().to_ascii_lowercase();
            ["1", "on", "yes", "true"].contains(&value.as_str())
        });
        hub.certificates = set("SSL_CERT_FILE").map(PathBuf::from);
        Some(hub)
    }

    /// The folder of a model's snapshot, downloaded as far as it is not there; or all that was
    /// tried.
    pub(crate) fn model(
        &self,
        id: HubId<'_>,
        revision: &str,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<PathBuf, Vec<String>> {
        self.snapshot(id, revision, &of_a_model, "config.json", on_event)
    }

    /// One file of a repository, downloaded if it is not there; or all that was tried.
    pub(crate) fn file(
        &self,
        id: HubId<'_>,
        file: &str,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<PathBuf, Vec<String>> {
        let only = |files: &[String]| files.iter().filter(|f| *f == file).cloned().collect();
        Ok(self.snapshot(id, MAIN, &only, file, on_event)?.join(file))
    }

    /// The snapshot with the files that `choose` takes; `last` is the one that it needs in any case.
    fn snapshot(
        &self,
        id: HubId<'_>,
        revision: &str,
        choose: &dyn Fn(&[String]) -> Vec<String>,
        last: &str,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<PathBuf, Vec<String>> {
        if !is_revision(revision) {
            return Err(vec![format!(
                "{revision:?} is no revision: expected a branch, a tag or a commit"
            )]);
        }
        let repository = Repository::new(&self.cache, id);
        let cached = repository.find(revision, last);
        if self.offline {
            return cached.map_err(|why| {
                vec![why, "HF_HUB_OFFLINE is set, so that nothing is downloaded".into()]
            });
        }
        let why = match self.update(&repository, revision, choose, last, on_event) {
            Ok(folder) => return Ok(folder),
            Err(failure) => failure.to_string(),
        };
        match cached {
            Ok(folder) => {
                on_event(HubEvent::CacheOnly { why: &why });
                Ok(folder)
            }
            Err(missing) => Err(vec![missing, why]),
        }
    }

    /// Downloads what the cache lacks of a revision.
    fn update(
        &self,
        repository: &Repository,
        revision: &str,
        choose: &dyn Fn(&[String]) -> Vec<String>,
        last: &str,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<PathBuf, Failure> {
        #[derive(Deserialize)]
        struct Listing {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }

        let client = Client::new(self, repository.id(), revision)?;
        let listing = client.list(LIST_BYTES)?;
        let listing: Listing = serde_json::from_slice(&listing).map_err(|e| {
            Failure::Refused(format!("{} does not answer as a hub: {e}", self.endpoint))
        })?;
        let commit = listing.sha;
        if !is_plain(&commit) {
            return Err(Failure::Refused(format!("the hub calls {commit:?} a commit")));
        }
        let files: Vec<String> =
            listing.siblings.into_iter().map(|s| s.rfilename).filter(|f| is_plain(f)).collect();
        let mut files = choose(&files);
        if !files.iter().any(|file| file == last) {
            let why = format!("{} has no {last} at revision {revision}", repository.id());
            return Err(Failure::Refused(why));
        }
        // Whoever reads the cache alone takes a snapshot for complete by this file.
        files.sort_by_key(|file| file == last);
        files.retain(|file| !repository.has(&commit, file));
        download::files(&client, repository, &commit, &files, on_event)?;
        repository.set_reference(revision, &commit)?;
        Ok(repository.snapshot(&commit))
    }
}

/// What the caller is told while a model is looked for on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HubEvent<'a> {
    /// A download begins, or goes on where an earlier one ended.
    Begun {
        /// Its files.
        files: usize,
        /// Bytes of all these files.
        total_bytes: u64,
        /// The folder that they go to.
        into: &'a Path,
    },
    /// Bytes have arrived.
    Arrived {
        /// The file that they belong to.
        file: &'a str,
        /// Bytes of all files that are there.
        done_bytes: u64,
    },
    /// Another process downloads a file; its end is waited for.
    Waiting {
        /// The file.
        file: &'a str,
    },
    /// The hub could not be asked or did not give; what the cache has is used.
    CacheOnly {
        /// Why.
        why: &'a str,
    },
}

/// A checked `org/name`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HubId<'a> {
    organization: &'a str,
    name: &'a str,
}

impl<'a> HubId<'a> {
    /// The id, if `text` has the form of one.
    pub fn parse(text: &'a str) -> Option<Self> {
        let (organization, name) = text.split_once('/')?;
        (is_plain(organization) && is_plain(name)).then_some(Self { organization, name })
    }

    /// The id and the file that `org/name/file` means, if `text` has that form.
    pub fn parse_file(text: &'a str) -> Option<(Self, &'a str)> {
        let (id, file) = text.rsplit_once('/')?;
        is_plain(file).then_some(())?;
        Some((Self::parse(id)?, file))
    }
}

/// The files of a model that Aquila reads.
fn of_a_model(files: &[String]) -> Vec<String> {
    // `consolidated*` holds the same weights once more, in another layout.
    let ours = |file: &&String| !file.starts_with("consolidated");
    let has_safetensors = files.iter().any(|file| file.ends_with(".safetensors"));
    let wanted = |file: &&String| {
        [".safetensors", ".json", ".jinja"].iter().any(|end| file.ends_with(end))
            || !has_safetensors && crate::torch_file::is_weight_file(file)
    };
    files.iter().filter(ours).filter(wanted).cloned().collect()
}

/// Whether a text may be a branch, a tag or a commit, and is safe in a path and in an address.
fn is_revision(text: &str) -> bool {
    text.split('/').all(is_plain)
}
