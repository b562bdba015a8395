//! HTTP to one server, by the library that the server side of this workspace uses too: no other
//! dependency would give the time of each piece of a body so directly.
//!
//! A connection whose response was read to its end is kept for the next request; as many are opened
//! as requests run at once. Nothing is retried but a request that was never sent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::api::message;
use crate::error::{Error, Result};

/// The most bytes of an answer that is no stream.
const MOST_BYTES: usize = 4 << 20;

type Sender = SendRequest<Full<Bytes>>;

/// A server, and connections to it.
pub struct Client {
    /// Scheme, host and port, for people.
    origin: String,
    /// What stands before the path of every route.
    prefix: String,
    host: HeaderValue,
    addresses: Vec<SocketAddr>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    headers: HeaderMap,
    idle: Mutex<Vec<Sender>>,
}

/// A response, and the connection that it comes over.
pub struct Exchange {
    /// Status and headers, and the body as it comes.
    pub response: Response<Incoming>,
    sender: Sender,
}

impl Client {
    /// A client of the server at this address, whose name is looked up once.
    pub async fn new(base_url: &str, headers: HeaderMap) -> Result<Self> {
        let wrong = |why: &str| Error::Usage(format!("--base-url {base_url}: {why}"));
        let uri: Uri = base_url.parse().map_err(|e| wrong(&format!("{e}")))?;
        let https = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("expected http://HOST:PORT or https://HOST:PORT")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("it names no host"))?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = authority.port_u16().unwrap_or(if https { 443 } else { 80 });
        if uri.query().is_some() {
            return Err(wrong("it must have no query"));
        }
        // OpenAI's clients write the version into the address, SGLang's and vLLM's do not.
        let prefix = uri.path().trim_end_matches('/');
        let prefix = prefix.strip_suffix("/v1").unwrap_or(prefix).to_owned();
        let unknown = |e| Error::Other(format!("{base_url}: cannot look up {host}: {e}"));
        let addresses = tokio::net::lookup_host((host.as_str(), port)).await.map_err(unknown)?;
        let tls = match https {
            true => {
                let name = ServerName::try_from(host.clone()).map_err(|e| wrong(&e.to_string()))?;
                Some((TlsConnector::from(Arc::new(tls()?)), name))
            }
            false => None,
        };
        Ok(Self {
            origin: format!("{}://{authority}", if https { "https" } else { "http" }),
            prefix,
            host: HeaderValue::from_str(authority.as_str()).map_err(|e| wrong(&e.to_string()))?,
            addresses: addresses.collect(),
            tls,
            headers,
            idle: Mutex::default(),
        })
    }

    /// Where a route is, for people.
    pub fn url(&self, path: &str) -> String {
        format!("{}{}{path}", self.origin, self.prefix)
    }

    /// Sends a request and waits for the head of its response; why there is none, otherwise.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> std::result::Result<Exchange, String> {
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method;
        let target = format!("{}{path}", self.prefix);
        *request.uri_mut() = target.parse().map_err(|e| format!("{target}: {e}"))?;
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(HOST, self.host.clone());
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let (mut sender, fresh) = match idle {
                Some(mut sender) => {
                    if sender.ready().await.is_err() {
                        continue;
                    }
                    (sender, false)
                }
                None => (self.connect().await?, true),
            };
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(Exchange { response, sender }),
                Err(mut error) => match error.take_message() {
                    // The server closed the connection while it was idle.
                    Some(unsent) if !fresh => request = unsent,
                    _ => return Err(broken(error.error())),
                },
            }
        }
    }

    /// Keeps the connection of a response that was read to its end.
    pub fn keep(&self, exchange: Exchange) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(exchange.sender);
    }

    /// The whole answer to a request, which must have succeeded.
    pub async fn text(&self, method: Method, path: &str) -> std::result::Result<String, String> {
        let mut exchange = self.send(method, path, Vec::new()).await?;
        if !exchange.response.status().is_success() {
            return Err(self.refusal(exchange).await);
        }
        let text = read(exchange.response.body_mut()).await?;
        self.keep(exchange);
        Ok(text)
    }

    /// Why a response is none that was wanted.
    pub async fn refusal(&self, mut exchange: Exchange) -> String {
        let status = exchange.response.status();
        let text = read(exchange.response.body_mut()).await.unwrap_or_default();
        let said = match serde_json::from_str::<Value>(&text) {
            Ok(value) => message(&value),
            Err(_) => text.lines().next().unwrap_or_default().to_owned(),
        };
        self.keep(exchange);
        let said: String = said.chars().take(200).collect();
        if said.is_empty() { status.to_string() } else { format!("{status}: {said}") }
    }

    async fn connect(&self) -> std::result::Result<Sender, String> {
        let failed = |e: std::io::Error| format!("cannot connect to {}: {e}", self.origin);
        let socket = TcpStream::connect(&self.addresses[..]).await.map_err(failed)?;
        socket.set_nodelay(true).map_err(failed)?;
        match &self.tls {
            None => speak(socket).await,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), socket).await;
                let why = |e| format!("{}; SSL_CERT_FILE may name what to trust", failed(e));
                speak(stream.map_err(why)?).await
            }
        }
    }
}

/// Begins to speak HTTP over a connection, which a task of its own drives from then on.
async fn speak(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> std::result::Result<Sender, String> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| broken(&e))?;
    // How it ends is told to the request that runs over it.
    tokio::spawn(connection);
    Ok(sender)
}

/// What went wrong with a connection.
pub fn broken(error: &hyper::Error) -> String {
    let cause = std::error::Error::source(error);
    match cause {
        Some(cause) => format!("the connection broke: {error}: {cause}"),
        None => format!("the connection broke: {error}"),
    }
}

async fn read(body: &mut Incoming) -> std::result::Result<String, String> {
    let whole = Limited::new(body, MOST_BYTES).collect().await.map_err(|e| e.to_string())?;
    Ok(String::from_utf8_lossy(&whole.to_bytes()).into_owned())
}

/// Whom to trust: Mozilla's certificates, or those of `SSL_CERT_FILE`.
fn tls() -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            let wrong =
                |why: String| Error::Other(format!("SSL_CERT_FILE {}: {why}", path.display()));
            let read = CertificateDer::pem_file_iter(&path).map_err(|e| wrong(e.to_string()))?;
            for certificate in read {
                let certificate = certificate.map_err(|e| wrong(e.to_string()))?;
                roots.add(certificate).map_err(|e| wrong(e.to_string()))?;
            }
            if roots.is_empty() {
                return Err(wrong("holds no certificate".into()));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|e| Error::Other(format!("cannot speak TLS: {e}")))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// The headers of every request: the key, and those given as NAME=VALUE.
pub fn headers(api_key: Option<&str>, given: &[String]) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(key) = api_key {
        let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
            .map_err(|_| Error::Usage("--api-key: a key must be visible ASCII".into()))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for header in given {
        let wrong = |why: &str| Error::Usage(format!("--header {header}: {why}"));
        let (name, value) = header.split_once('=').ok_or_else(|| wrong("expected NAME=VALUE"))?;
        let name: HeaderName = name.trim().parse().map_err(|_| wrong("no name of a header"))?;
        let value = HeaderValue::from_str(value.trim()).map_err(|_| wrong("no value of one"))?;
        headers.insert(name, value);
    }
    Ok(headers)
}
