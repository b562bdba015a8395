//! Who may ask: API keys, how much each may have under way, and the key of administrators.
//!
//! Of a key, only its SHA-256 is kept. What a client shows is hashed and compared with all of them
//! in constant time, so that neither the time nor a copy of the memory tells a key.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use axum::http::{HeaderMap, header};
use ring::digest::{SHA256, digest};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::refusal::Refusal;

/// Where Anthropic's clients, and some of OpenAI's, put a key.
const X_API_KEY: &str = "x-api-key";
/// Bytes of the longest name of a key, which every line of the access log has.
const LONGEST_NAME: usize = 64;

/// Why a key was not taken.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// There is nothing in it.
    #[error("the key is empty")]
    Empty,
    /// It has characters that no header can have.
    #[error("a key must be visible ASCII characters without spaces")]
    Characters,
    /// Its name is no name.
    #[error("a key's name must be at most {LONGEST_NAME} letters, digits, `-`, `_` and `.`")]
    Name,
    /// The file could not be read.
    #[error("{0}")]
    File(std::io::Error),
    /// A line of the file is no key.
    #[error("line {line}: {why}; a line is KEY, KEY NAME, or # and a comment")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        why: Box<KeyError>,
    },
    /// Something stands behind a name.
    #[error("there is a third word")]
    ThirdWord,
    /// Two lines have the same key.
    #[error("it has the key of line {0} again")]
    Repeated(usize),
    /// The file has no keys, and would leave the server open.
    #[error("there is no key in it; a line is KEY, KEY NAME, or # and a comment")]
    NoKeys,
}

/// The SHA-256 of a key.
#[derive(Clone, PartialEq, Eq)]
struct Digest([u8; 32]);

impl Digest {
    fn of(key: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, key).as_ref());
        Self(bytes)
    }

    fn checked(key: &str) -> Result<Self, KeyError> {
        match key {
            "" => Err(KeyError::Empty),
            key if key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(Self::of(key.as_bytes())),
            _ => Err(KeyError::Characters),
        }
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(a key)")
    }
}

/// A key that clients may show.
#[derive(Debug, Clone)]
pub struct ApiKey {
    name: Arc<str>,
    digest: Digest,
}

impl ApiKey {
    /// A key, with the name that the log has for it.
    pub fn new(name: &str, key: &str) -> Result<Self, KeyError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(plain) {
            return Err(KeyError::Name);
        }
        Ok(Self { name: name.into(), digest: Digest::checked(key)? })
    }

    /// The keys of a file, one on each line, with a name behind it or without; `#` begins a
    /// comment.
    pub fn read_file(path: &Path) -> Result<Vec<Self>, KeyError> {
        let text = std::fs::read_to_string(path).map_err(KeyError::File)?;
        let mut keys: Vec<(usize, Self)> = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            if text.trim_start().starts_with('#') || text.trim().is_empty() {
                continue;
            }
            let failed = |why| KeyError::Line { line, why: Box::new(why) };
            let mut words = text.split_whitespace().take_while(|word| !word.starts_with('#'));
            let (key, name) = (words.next().unwrap_or_default(), words.next());
            if words.next().is_some() {
                return Err(failed(KeyError::ThirdWord));
            }
            let name = name.map_or_else(|| format!("line-{line}"), str::to_owned);
            let key = Self::new(&name, key).map_err(failed)?;
            if let Some((first, _)) = keys.iter().find(|(_, other)| other.digest == key.digest) {
                return Err(failed(KeyError::Repeated(*first)));
            }
            keys.push((line, key));
        }
        if keys.is_empty() {
            return Err(KeyError::NoKeys);
        }
        Ok(keys.into_iter().map(|(_, key)| key).collect())
    }
}

/// All keys of a server.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    keys: Vec<Arc<Holder>>,
    admin: Option<Digest>,
    /// Requests that one key may have under way.
    most_requests: Option<usize>,
}

/// A key, and what its holder has under way.
#[derive(Debug)]
pub(crate) struct Holder {
    key: ApiKey,
    requests: Arc<Semaphore>,
}

impl Holder {
    /// The name of the key, for the log.
    pub fn name(&self) -> &str {
        &self.key.name
    }
}

/// Which keys a route asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// The route asks for no key: probes of health have none.
    Open,
    /// The route takes any of the keys.
    Normal,
    /// The route asks for the key of administrators where there is one, else for any of the keys.
    Admin,
}

impl Keys {
    /// Asks every client for one of `keys`, where there are any; a key may have `most_requests`
    /// under way. A key that comes twice counts once.
    pub fn new(keys: Vec<ApiKey>, most_requests: Option<usize>) -> Self {
        let requests = most_requests.unwrap_or(Semaphore::MAX_PERMITS);
        let requests = requests.min(Semaphore::MAX_PERMITS);
        let mut holders: Vec<Arc<Holder>> = Vec::new();
        for key in keys {
            if !holders.iter().any(|holder| holder.key.digest == key.digest) {
                let requests = Arc::new(Semaphore::new(requests));
                holders.push(Arc::new(Holder { key, requests }));
            }
        }
        Self { keys: holders, admin: None, most_requests }
    }

    /// Asks for this key, and no other, on routes that change the server.
    pub fn with_admin(mut self, key: &str) -> Result<Self, KeyError> {
        self.admin = Some(Digest::checked(key)?);
        Ok(self)
    }

    /// Whether clients need a key.
    pub fn are_asked_for(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Lets a request with these headers pass; says whose it is, where a key tells.
    pub(crate) fn check(
        &self,
        level: Level,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<Holder>>, Refusal> {
        match (level, &self.admin) {
            (Level::Open, _) => Ok(None),
            (Level::Admin, Some(_)) if shown(headers).any(|shown| self.is_admin(shown)) => Ok(None),
            (Level::Admin, Some(_)) => Err(Refusal::no_admin()),
            _ if self.keys.is_empty() => Ok(None),
            // A router may add its own key to the client's; one that fits is enough.
            _ => match shown(headers).find_map(|shown| self.find(shown)) {
                Some(holder) => Ok(Some(holder)),
                None => Err(Refusal::unauthorized()),
            },
        }
    }

    /// Whether a key of the server is shown, of whichever level.
    pub(crate) fn any_is_shown(&self, headers: &HeaderMap) -> bool {
        shown(headers).any(|shown| self.is_admin(shown) || self.find(shown).is_some())
    }

    fn is_admin(&self, shown: &[u8]) -> bool {
        let admin = self.admin.as_ref();
        admin.is_some_and(|admin| bool::from(Digest::of(shown).0.ct_eq(&admin.0)))
    }

    /// The key that is shown; all are compared, whichever it is.
    fn find(&self, shown: &[u8]) -> Option<Arc<Holder>> {
        let shown = Digest::of(shown);
        let mut found = u64::MAX;
        for (index, holder) in (0..).zip(&self.keys) {
            found.conditional_assign(&index, holder.key.digest.0.ct_eq(&shown.0));
        }
        usize::try_from(found).ok().and_then(|index| self.keys.get(index)).cloned()
    }

    /// A place among the requests of a key.
    pub(crate) fn begin(&self, holder: &Holder) -> Result<OwnedSemaphorePermit, Refusal> {
        let full = |_| Refusal::too_many(self.most_requests.unwrap_or(usize::MAX));
        holder.requests.clone().try_acquire_owned().map_err(full)
    }
}

/// What a client shows as keys.
fn shown(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (word, key) = value.as_bytes().split_at_checked(7)?;
        word.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    let plain = headers.get_all(X_API_KEY).iter().map(|value| value.as_bytes().trim_ascii());
    bearer.chain(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Vec<ApiKey>, KeyError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        ApiKey::read_file(file.path())
    }

    #[test]
    fn files_of_keys_have_names_and_comments() {
        let keys = read(b"# ours\r\n\nsk-1 alice\n  sk-2\nsk-3 bob # since May\n").unwrap();
        let names: Vec<&str> = keys.iter().map(|key| &*key.name).collect();
        assert_eq!(names, ["alice", "line-4", "bob"]);
        let keys = Keys::new(keys, None);
        let name = |key: &[u8]| keys.find(key).map(|holder| holder.name().to_owned());
        assert_eq!(name(b"sk-3").as_deref(), Some("bob"));
        for wrong in ["", "sk-", "sk-11", "SK-1", "alice", "# ours"] {
            assert_eq!(name(wrong.as_bytes()), None, "{wrong}");
        }
        assert!(!format!("{keys:?}").contains("sk-"));
    }

    #[test]
    fn files_without_sense_are_refused_by_their_line() {
        for (text, why) in [
            (&b""[..], "no key in it"),
            (b"# none\n", "no key in it"),
            (b"sk-1 alice bob\n", "line 1: there is a third word"),
            (b"sk-1\n\nsk-1 bob\n", "line 3: it has the key of line 1 again"),
            ("sk-1\nschlüssel\n".as_bytes(), "line 2: a key must be visible ASCII"),
            (b"sk-1 al\"ice\n", "line 1: a key's name must"),
            (b"sk-\xff\n", "UTF-8"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(ApiKey::read_file(Path::new("/no/such/file")).is_err());
    }
}
