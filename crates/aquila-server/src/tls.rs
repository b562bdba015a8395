//! TLS: certificates, and connections that begin with a handshake.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::refusal::Refusal;
use crate::unstalled::Unstalled;

/// Bytes of a request without TLS that are read and dropped.
const MOST_UNREAD: u64 = 64 << 10;

/// Why a server cannot speak TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// What the system said.
        why: io::Error,
    },
    /// The file of certificates has none.
    #[error("{0}: there is no certificate in it: it must be PEM, `-----BEGIN CERTIFICATE-----`")]
    NoCertificate(String),
    /// The file of the key has none.
    #[error(
        "{0}: there is no private key in it: it must be PEM and not encrypted, `-----BEGIN PRIVATE \
         KEY-----`"
    )]
    NoKey(String),
    /// A file is damaged.
    #[error("{path}: this is no PEM: {why}")]
    Pem {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// Certificate and key do not go together, or are of a kind that is not supported.
    #[error("the certificate and the key cannot be used: {0}")]
    Pair(rustls::Error),
}

/// How a server speaks TLS.
#[derive(Clone)]
pub struct Tls(Arc<ServerConfig>);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads a chain of certificates, the server's first, and its private key, both PEM.
    pub fn load(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        let text = read(certificates)?;
        let chain = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|why| pem_error(certificates, &why))?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate(certificates.display().to_string()));
        }
        let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|why| match why {
            PemError::NoItemsFound => TlsError::NoKey(key.display().to_string()),
            why => pem_error(key, &why),
        })?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Pair)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(TlsError::Pair)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }

    /// Shakes hands with a client, which has `time` for it.
    pub(crate) async fn accept(
        &self,
        socket: Unstalled,
        time: Duration,
    ) -> io::Result<TlsStream<Unstalled>> {
        timeout(time, self.shake_hands(socket)).await?
    }

    async fn shake_hands(&self, socket: Unstalled) -> io::Result<TlsStream<Unstalled>> {
        // A handshake begins with another byte than any word of HTTP.
        if socket.first_byte().await?.is_some_and(|byte| byte.is_ascii_alphabetic()) {
            refuse(socket).await?;
            return Err(io::Error::other("the client spoke HTTP without TLS"));
        }
        TlsAcceptor::from(self.0.clone()).accept(socket).await
    }
}

/// Says, to a client that speaks HTTP, that this is TLS.
async fn refuse(mut socket: Unstalled) -> io::Result<()> {
    let refusal = Refusal::invalid("this port speaks TLS: ask for https://, not http://");
    socket.write_all(&refusal.whole_response()).await?;
    socket.shutdown().await?;
    // A socket that is closed with bytes unread takes back what was sent; a client that sends on
    // and on is cut.
    let mut rest = socket.take(MOST_UNREAD);
    tokio::io::copy(&mut rest, &mut tokio::io::sink()).await.map(drop)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |why| TlsError::File { path: path.display().to_string(), why };
    std::fs::read(path).map_err(failed)
}

fn pem_error(path: &Path, why: &PemError) -> TlsError {
    TlsError::Pem { path: path.display().to_string(), why: why.to_string() }
}
