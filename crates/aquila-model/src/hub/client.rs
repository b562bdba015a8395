//! Requests to the hub: addresses, redirects, the token, and what refusals mean.
//!
//! The invariant: the token is sent to the origin of the endpoint and to no other, wherever
//! redirects lead.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::Hub;

const MOST_REDIRECTS: usize = 10;
/// How long the hub may take to take a connection, and to begin an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a download may stand still before its connection is given up.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Why something of the hub is not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The connection or the server failed: another attempt may succeed.
    #[error("{0}")]
    Lost(String),
    /// The hub said no, or what it gave is wrong.
    #[error("{0}")]
    Refused(String),
    /// A file operation on this machine failed.
    #[error("{what} {path}: {source}; HF_HUB_CACHE may name another folder")]
    Local {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Failure {
    pub fn local(what: &'static str, path: &Path, source: io::Error) -> Self {
        Failure::Local { what, path: path.display().to_string(), source }
    }
}

/// What is asked of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    /// The headers, of the hub itself.
    Head,
    /// The bytes from this one on.
    From(u64),
}

/// What the hub says of a file before it is downloaded.
#[derive(Debug)]
pub(super) struct Remote {
    /// The name of its blob.
    pub etag: String,
    /// Its bytes.
    pub size: u64,
}

/// A client for one revision of one repository.
pub(super) struct Client<'a> {
    agent: Agent,
    endpoint: &'a str,
    token: Option<&'a str>,
    id: &'a str,
    revision: &'a str,
}

impl<'a> Client<'a> {
    pub fn new(hub: &'a Hub, id: &'a str, revision: &'a str) -> Result<Self, Failure> {
        let endpoint = hub.endpoint.trim_end_matches('/');
        if !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            let why = format!("HF_ENDPOINT {endpoint:?} is no address: expected https://HOST");
            return Err(Failure::Refused(why));
        }
        let roots = match &hub.certificates {
            Some(path) => roots_of(path)?,
            None => RootCerts::WebPki,
        };
        let config = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .http_status_as_error(false)
            // Redirects are followed here, where it is known whose they are.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("aquila/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(ANSWER_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .build();
        Ok(Self { agent: config.new_agent(), endpoint, token: hub.token.as_deref(), id, revision })
    }

    /// The hub's answer to what the revision is, as JSON of at most `most` bytes.
    pub fn list(&self, most: u64) -> Result<Vec<u8>, Failure> {
        // A branch such as refs/pr/1 is one component of the address.
        let revision = self.revision.replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}", self.endpoint, self.id);
        let (_, response) = self.send(&url, Ask::From(0))?;
        let mut text = Vec::new();
        let mut body = response.into_body().into_with_config().limit(most).reader();
        body.read_to_end(&mut text).map_err(|e| self.lost(&e))?;
        Ok(text)
    }

    /// What the hub says of a file of a commit.
    pub fn stat(&self, commit: &str, file: &str) -> Result<Remote, Failure> {
        let (url, response) = self.send(&self.address(commit, file), Ask::Head)?;
        let headers = response.headers();
        let says = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let etag = says("x-linked-etag").or_else(|| says("etag")).unwrap_or_default();
        let etag = etag.trim_start_matches("W/").trim_matches('"');
        let size = says("x-linked-size").or_else(|| says("content-length"));
        match size.and_then(|size| size.parse().ok()) {
            Some(size) if super::is_plain(etag) => Ok(Remote { etag: etag.to_owned(), size }),
            _ => Err(Failure::Refused(format!(
                "{url} does not say its size and a usable etag ({etag:?}): is HF_ENDPOINT a hub?"
            ))),
        }
    }

    /// The bytes of a file of a commit from `from` on; answers where they begin.
    pub fn open(&self, commit: &str, file: &str, from: u64) -> Result<(u64, impl Read), Failure> {
        let (url, response) = self.send(&self.address(commit, file), Ask::From(from))?;
        let begins = match response.status() {
            StatusCode::PARTIAL_CONTENT => range_start(response.headers()),
            _ => Some(0),
        };
        match begins {
            Some(begins) if begins == from || begins == 0 => {
                Ok((begins, response.into_body().into_reader()))
            }
            _ => Err(Failure::Refused(format!(
                "{url} answers with another range than was asked for"
            ))),
        }
    }

    /// An error of a connection to the hub.
    pub fn lost(&self, error: &dyn std::fmt::Display) -> Failure {
        Failure::Lost(format!("{}: {error}", self.endpoint))
    }

    fn address(&self, commit: &str, file: &str) -> String {
        format!("{}/{}/resolve/{commit}/{file}", self.endpoint, self.id)
    }

    /// Sends a request and follows redirects; answers where the response came from.
    fn send(&self, url: &str, ask: Ask) -> Result<(String, Response<Body>), Failure> {
        let mut url = url.to_owned();
        for _ in 0..MOST_REDIRECTS {
            let own = origin(&url) == origin(self.endpoint);
            let mut request = match ask {
                Ask::Head => self.agent.head(&url),
                Ask::From(_) => self.agent.get(&url),
            };
            if let Ask::From(from @ 1..) = ask {
                request = request.header("range", format!("bytes={from}-"));
            }
            if let Some(token) = self.token.filter(|_| own) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| match e {
                ureq::Error::Http(e) => {
                    Failure::Refused(format!("{url}: {e}: is HF_TOKEN a token?"))
                }
                e if e.to_string().contains("certificate") => Failure::Refused(format!(
                    "{}: {e}; SSL_CERT_FILE may name the certificates to trust",
                    origin(&url)
                )),
                e => Failure::Lost(format!("{}: {e}", origin(&url))),
            })?;
            let status = response.status();
            if !status.is_redirection() {
                return if status.is_success() {
                    Ok((url, response))
                } else {
                    Err(self.refusal(&url, own, status, response.headers()))
                };
            }
            // A large file is elsewhere, and the hub says here what it is.
            let says = |name: &str| response.headers().contains_key(name);
            if ask == Ask::Head && says("x-linked-etag") && says("x-linked-size") {
                return Ok((url, response));
            }
            let location = response.headers().get("location").and_then(|l| l.to_str().ok());
            let next = location.map(|location| joined(&url, location));
            url = match next {
                Some(next) if next.starts_with("https://") || url.starts_with("http://") => next,
                _ => return Err(Failure::Refused(format!("{url} redirects to {location:?}"))),
            };
        }
        Err(Failure::Refused(format!("{url}: more than {MOST_REDIRECTS} redirects")))
    }

    /// What a status means, and what the user can do about it.
    fn refusal(&self, url: &str, own: bool, status: StatusCode, headers: &HeaderMap) -> Failure {
        let Self { id, revision, endpoint, token, .. } = self;
        let code = headers.get("x-error-code").and_then(|code| code.to_str().ok());
        Failure::Refused(match (code, status.as_u16()) {
            (Some("GatedRepo"), _) if token.is_none() => format!(
                "{id} is gated: accept its conditions at {endpoint}/{id}, and give a token of that \
                 account in HF_TOKEN or in the file $HF_HOME/token"
            ),
            (Some("GatedRepo"), _) => format!(
                "{id} is gated, and the account of the token has no access to it: ask for it at \
                 {endpoint}/{id}"
            ),
            (Some("RepoNotFound"), _) => {
                let else_private = match token {
                    Some(_) => "or the account of the token may not see it",
                    None => "or it is private and needs a token (HF_TOKEN)",
                };
                format!("{endpoint} has no model {id}, {else_private}")
            }
            (Some("RevisionNotFound"), _) => format!(
                "{id} has no revision {revision}: {endpoint}/{id}/tree/main lists its branches and \
                 tags"
            ),
            (Some("EntryNotFound"), _) => format!("{url}: there is no such file"),
            (_, 401) if own && token.is_some() => format!(
                "{endpoint} does not take the token: HF_TOKEN or $HF_HOME/token is wrong or expired"
            ),
            (_, 416) => format!("{url} has fewer bytes than the hub says"),
            (_, 408 | 429 | 500..) => return Failure::Lost(format!("{}: {status}", origin(url))),
            _ => format!("{}: {status}", url.split('?').next().unwrap_or(url)),
        })
    }
}

/// The certificates of a PEM file.
fn roots_of(path: &Path) -> Result<RootCerts, Failure> {
    let failed = |e: io::Error| Failure::Refused(format!("SSL_CERT_FILE {}: {e}", path.display()));
    let pem = fs::read(path).map_err(failed)?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| failed(e.into_io()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(failed(io::Error::other("holds no certificate")));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

/// The scheme, host and port of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    let end = url[host..].find(['/', '?', '#']).map_or(url.len(), |at| host + at);
    &url[..end]
}

/// The address that a redirect from `url` leads to.
fn joined(url: &str, location: &str) -> String {
    let scheme = url.split_once("//").map_or("", |(scheme, _)| scheme);
    match location {
        _ if location.contains("://") => location.to_owned(),
        _ if location.starts_with("//") => format!("{scheme}{location}"),
        _ if location.starts_with('/') => format!("{}{location}", origin(url)),
        _ => {
            let path = url.split(['?', '#']).next().unwrap_or(url);
            let folder = path.rfind('/').map_or(path, |at| &path[..at]);
            format!("{folder}/{location}")
        }
    }
}

/// Where the bytes of a partial answer begin.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get("content-range")?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}
