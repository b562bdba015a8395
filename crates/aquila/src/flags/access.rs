//! Who may ask, from where, and unheard by others: keys, origins and certificates.

use std::path::PathBuf;

use aquila_server::{AllowedOrigins, ApiKey, Keys, Tls};
use clap::Args;

use crate::error::{Error, Result};
use crate::flags::whole;

/// A key, where `ps` does not show it.
const API_KEY: &str = "AQUILA_API_KEY";
/// The key of administrators, where `ps` does not show it.
const ADMIN_API_KEY: &str = "AQUILA_ADMIN_API_KEY";

/// Who may ask, and how.
#[derive(Args)]
#[command(next_help_heading = "Access")]
pub struct AccessFlags {
    /// A key that clients may send, as `Authorization: Bearer KEY` or `x-api-key: KEY`. `ps` shows
    /// it to all users of the machine: better AQUILA_API_KEY, or --api-key-file
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,

    /// A file of keys that clients may send: on each line KEY or KEY NAME, the name for the log;
    /// # begins a comment
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// The key for routes that change the server: /flush_cache, /abort_request and those of
    /// corpora, which take no other then; AQUILA_ADMIN_API_KEY is better
    #[arg(long, value_name = "KEY")]
    admin_api_key: Option<String>,

    /// Requests that one key may have under way; for one more, it gets 429 [default: any number]
    #[arg(long, value_name = "N", value_parser = whole(1, 1 << 20), allow_negative_numbers = true)]
    max_requests_per_key: Option<usize>,

    /// A PEM file with the server's certificate, and those between it and its authority: clients
    /// speak TLS
    #[arg(long, value_name = "FILE")]
    ssl_certfile: Option<PathBuf>,

    /// A PEM file with the certificate's private key [default: it is in --ssl-certfile]
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    ssl_keyfile: Option<PathBuf>,

    /// Origins whose pages may ask from within a browser, such as https://chat.example.com, with
    /// commas between them; * is all [default: none]
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    allowed_origins: Vec<String>,
}

impl AccessFlags {
    /// The keys of all sources together.
    pub fn keys(&self) -> Result<Keys> {
        let wrong =
            |from: &str, why: &dyn std::fmt::Display| Error::Usage(format!("{from}: {why}"));
        let mut keys = Vec::new();
        if let Some(key) = &self.api_key {
            keys.push(ApiKey::new("flag", key).map_err(|why| wrong("--api-key", &why))?);
        }
        if let Some(key) = variable(API_KEY)? {
            keys.push(ApiKey::new("environment", &key).map_err(|why| wrong(API_KEY, &why))?);
        }
        if let Some(path) = &self.api_key_file {
            let from = format!("--api-key-file {}", path.display());
            keys.extend(ApiKey::read_file(path).map_err(|why| wrong(&from, &why))?);
        }
        if keys.is_empty() && self.max_requests_per_key.is_some() {
            let why = "there are no keys: --api-key-file gives some";
            return Err(wrong("--max-requests-per-key", &why));
        }
        let keys = Keys::new(keys, self.max_requests_per_key);
        match (&self.admin_api_key, variable(ADMIN_API_KEY)?) {
            (Some(key), _) => keys.with_admin(key).map_err(|why| wrong("--admin-api-key", &why)),
            (None, Some(key)) => keys.with_admin(&key).map_err(|why| wrong(ADMIN_API_KEY, &why)),
            (None, None) => Ok(keys),
        }
    }

    /// The certificate, where there is one.
    pub fn tls(&self) -> Result<Option<Tls>> {
        let Some(certificate) = &self.ssl_certfile else { return Ok(None) };
        let key = self.ssl_keyfile.as_ref().unwrap_or(certificate);
        let failed = |why| Error::Usage(format!("--ssl-certfile, --ssl-keyfile: {why}"));
        Tls::load(certificate, key).map(Some).map_err(failed)
    }

    /// Whose pages may ask.
    pub fn allowed_origins(&self) -> Result<AllowedOrigins> {
        let wrong = |why| Error::Usage(format!("--allowed-origins: {why}"));
        AllowedOrigins::parse(&self.allowed_origins).map_err(wrong)
    }
}

/// A variable of the environment. One that is set and empty is a mistake: it would leave open what
/// its owner wanted closed.
pub(super) fn variable(name: &str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) if value.is_empty() => {
            Err(Error::Usage(format!("{name} is set and empty: give it a key, or unset it")))
        }
        Ok(value) => Ok(Some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(Error::Usage(format!("{name}: {error}"))),
    }
}
