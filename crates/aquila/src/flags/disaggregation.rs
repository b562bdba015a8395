//! Prefill and decode on different machines.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquila_disagg::{
    DecodeSettings, DecodeWorker, Identity, Nixl, PrefillSettings, PrefillWorker, Secret, Tcp,
    Transport,
};
use aquila_engine::EngineHandle;
use aquila_server::Role;
use clap::{Args, ValueEnum};

use super::access::variable;
use crate::error::{Error, Result};
use crate::flags::whole;
use crate::notice::notice;

/// The secret that workers share, where `ps` does not show it.
const SECRET: &str = "AQUILA_DISAGGREGATION_SECRET";
/// Bytes of rows that may wait to be sent before the next prompt begins.
const MOST_UNSENT: usize = 1 << 30;

/// The parts that a worker may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// All of a request.
    Null,
    /// The prompt, and the first token.
    Prefill,
    /// What comes after it.
    Decode,
}

/// Which part of a request is served here, and how workers find each other.
#[derive(Args)]
#[command(next_help_heading = "Disaggregation")]
pub struct DisaggregationFlags {
    /// Which part of each request is served here; a router sends every request to a prefill and to
    /// a decode worker
    #[arg(long, value_enum, default_value = "null", value_name = "MODE")]
    disaggregation_mode: Mode,

    /// The port on which a prefill worker waits for decode workers; on a decode worker, the port of
    /// prefill workers where a request says none
    #[arg(long, default_value_t = 8998, value_name = "PORT")]
    disaggregation_bootstrap_port: u16,

    /// The address on which a prefill worker waits for decode workers; whoever reaches it may take
    /// what prompts leave, unless there is a secret
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    disaggregation_bootstrap_host: String,

    /// How rows get from one worker to the other: `tcp`, or `nixl`, which needs NIXL's library
    #[arg(long, default_value = "tcp", value_name = "NAME", value_parser = transfer_backend)]
    disaggregation_transfer_backend: TransferBackend,

    /// NIXL's library, libnixl_capi.so, as its Python wheel has it [default: as the system finds it]
    #[arg(long, value_name = "FILE")]
    disaggregation_nixl_library: Option<PathBuf>,

    /// A file whose first line is the secret that prefill and decode workers share; or
    /// AQUILA_DISAGGREGATION_SECRET
    #[arg(long, value_name = "FILE")]
    disaggregation_secret_file: Option<PathBuf>,

    /// Hosts of prefill workers that a decode worker may connect to, with commas between them, as
    /// requests say them in bootstrap_host [default: this machine's loopback; any with a secret]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    disaggregation_prefill_hosts: Vec<String>,

    /// Seconds for which one worker waits for the other to take up a request
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = whole(1, 86_400), allow_negative_numbers = true)]
    disaggregation_timeout: usize,
}

/// What carries rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TransferBackend {
    Tcp,
    Nixl,
}

/// The transfer backends that there are, and why others are not.
fn transfer_backend(name: &str) -> std::result::Result<TransferBackend, String> {
    match name {
        "tcp" => Ok(TransferBackend::Tcp),
        "nixl" => Ok(TransferBackend::Nixl),
        "mooncake" | "mori" | "ascend" | "fake" => Err(format!(
            "{name} is a backend of SGLang's that is not served here: tcp and nixl are"
        )),
        _ => Err("must be tcp or nixl".into()),
    }
}

impl DisaggregationFlags {
    /// Whether prompts are processed for other workers.
    pub fn is_prefill(&self) -> bool {
        self.disaggregation_mode == Mode::Prefill
    }

    /// Refuses flags that have no use.
    pub fn check(&self) -> Result<()> {
        let hosts = !self.disaggregation_prefill_hosts.is_empty();
        if hosts && self.disaggregation_mode != Mode::Decode {
            return Err(Error::Usage(
                "--disaggregation-prefill-hosts is for --disaggregation-mode decode".into(),
            ));
        }
        if self.disaggregation_secret_file.is_some() && self.disaggregation_mode == Mode::Null {
            return Err(Error::Usage(
                "--disaggregation-secret-file is for --disaggregation-mode prefill or decode"
                    .into(),
            ));
        }
        let uses_nixl = self.disaggregation_transfer_backend == TransferBackend::Nixl;
        if uses_nixl && self.disaggregation_mode == Mode::Null {
            return Err(Error::Usage(
                "--disaggregation-transfer-backend nixl is for --disaggregation-mode prefill or \
                 decode"
                    .into(),
            ));
        }
        if self.disaggregation_nixl_library.is_some() && !uses_nixl {
            return Err(Error::Usage(
                "--disaggregation-nixl-library is for --disaggregation-transfer-backend nixl"
                    .into(),
            ));
        }
        self.secret().map(drop)
    }

    /// What carries rows, ready.
    ///
    /// # Errors
    /// If its library is not there.
    pub fn transport(&self) -> Result<Box<dyn Transport>> {
        if self.disaggregation_transfer_backend == TransferBackend::Tcp {
            return Ok(Box::new(Tcp));
        }
        let library = self.disaggregation_nixl_library.as_deref();
        let hint = match library {
            Some(_) => "",
            None => {
                "; `pip install --no-deps nixl-cu13` puts .nixl_cu13.mesonpy.libs/libnixl_capi.so \
                 into its site-packages, which --disaggregation-nixl-library takes"
            }
        };
        let nixl = Nixl::start(library).map_err(|why| {
            Error::Usage(format!("--disaggregation-transfer-backend nixl: {why}{hint}"))
        })?;
        Ok(Box::new(nixl))
    }

    fn secret(&self) -> Result<Secret> {
        if self.disaggregation_mode == Mode::Null {
            return Ok(Secret::default());
        }
        let Some(path) = &self.disaggregation_secret_file else {
            let secret = variable(SECRET)?;
            return Ok(secret.map(|secret| Secret::new(secret.as_bytes())).unwrap_or_default());
        };
        let text = std::fs::read_to_string(path).map_err(|e| Error::file(path.display(), e))?;
        match text.lines().next().map(str::trim) {
            Some(secret) if !secret.is_empty() => Ok(Secret::new(secret.as_bytes())),
            _ => Err(Error::Usage(format!(
                "--disaggregation-secret-file {}: its first line is empty",
                path.display()
            ))),
        }
    }

    /// This server's part, begun; `identity` is asked for what it is where it has one.
    pub fn role(
        &self,
        transport: Box<dyn Transport>,
        identity: impl FnOnce() -> Result<Identity>,
        engine: &EngineHandle,
    ) -> Result<Option<Role>> {
        let (secret, port) = (self.secret()?, self.disaggregation_bootstrap_port);
        let proven = if secret.is_set() { "with" } else { "without" };
        // Trees may differ, but not in how many layers of a draft run.
        let layers = engine.draft_groups();
        let backend = match self.disaggregation_transfer_backend {
            TransferBackend::Tcp => "tcp",
            TransferBackend::Nixl => "nixl",
        };
        let identity = || -> Result<Identity> {
            let identity = identity()?.with("number of draft layers", layers);
            Ok(identity.with("transfer backend", backend))
        };
        match self.disaggregation_mode {
            Mode::Null => Ok(None),
            Mode::Prefill => {
                let host = &self.disaggregation_bootstrap_host;
                let address = match host.contains(':') && !host.starts_with('[') {
                    true => format!("[{host}]:{port}"),
                    false => format!("{host}:{port}"),
                };
                let settings = PrefillSettings {
                    address,
                    identity: identity()?,
                    secret,
                    patience: Duration::from_secs(self.disaggregation_timeout as u64),
                    most_unsent: MOST_UNSENT,
                };
                let worker = PrefillWorker::start(&*transport, settings, engine.clone())
                    .map_err(|e| Error::Other(e.to_string()))?;
                notice(format_args!(
                    "role      prefill: decode workers connect to {host}:{}, {proven} a secret, and rows \
                     go by {backend}",
                    worker.port()
                ));
                Ok(Some(Role::Prefill(Arc::new(worker))))
            }
            Mode::Decode => {
                let hosts = self.disaggregation_prefill_hosts.clone();
                let settings = DecodeSettings { identity: identity()?, secret, hosts, port };
                notice(format_args!("role      decode, {proven} a secret; rows come by {backend}"));
                let worker = DecodeWorker::new(transport, settings, engine.clone());
                Ok(Some(Role::Decode(worker)))
            }
        }
    }
}
