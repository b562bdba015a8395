//! `aquila serve`: the model over HTTP, for clients of OpenAI's API and of SGLang's.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use aquila_engine::available_memory;
use aquila_model::{Checkpoint, resolve};
use aquila_server::{
    CorpusFolder, Limits, ModelCard, RequestMemory, Settings, fitting_connections,
};
use clap::Args;
use serde_json::Value;

use crate::Algorithms;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags, SamplingFlags, whole};
use crate::notice::notice;
use crate::start::start_with_corpora;

/// Serve a model over HTTP: OpenAI's API and SGLang's.
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    model: ModelFlags,

    #[command(flatten)]
    server: ServerFlags,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

/// Who may ask, where, and how much.
#[derive(Args)]
#[command(next_help_heading = "Server")]
struct ServerFlags {
    /// The address to listen on; 0.0.0.0 is all of them
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,

    /// The port to listen on; 0 takes any
    #[arg(long, default_value_t = 30000)]
    port: u16,

    /// What clients must send as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,

    /// The model's name for clients [default: the MODEL as given]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,

    /// Connections at a time; for one more, the one that has waited longest for its client is
    /// closed
    #[arg(
        long,
        default_value_t = Limits::default().connections,
        value_name = "N",
        value_parser = whole(1, 1 << 20),
        allow_negative_numbers = true,
    )]
    max_connections: usize,

    /// Bytes of the largest body
    #[arg(long, default_value_t = Limits::default().body_bytes, value_name = "BYTES")]
    max_body_bytes: usize,

    /// Bytes of all long bodies together that have arrived but are not tokenized yet; a body that
    /// finds no room is refused with 503. At least --max-body-bytes
    #[arg(long, default_value_t = Limits::default().bodies_bytes, value_name = "BYTES")]
    max_bodies_bytes: usize,

    /// Tokens of the longest prompt [default: the context]
    #[arg(long, value_name = "TOKENS")]
    max_prompt_tokens: Option<usize>,

    /// Seconds from a request's arrival to its last token; 0 is no limit
    #[arg(long, default_value_t = 3600.0, value_name = "SECONDS")]
    request_timeout: f64,

    /// Seconds for the headers of a request, and between two requests of a connection
    #[arg(long, default_value_t = 75.0, value_name = "SECONDS")]
    header_timeout: f64,

    /// Seconds for the body of a request
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS")]
    body_timeout: f64,

    /// Seconds that a client may take nothing of what is sent to it
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS")]
    stall_timeout: f64,

    /// Pieces of a streamed answer that may wait for a slow client; one more gives it up
    #[arg(long, default_value_t = Limits::default().unread_pieces, value_name = "N")]
    max_unread_pieces: usize,

    /// A folder whose files clients may add as corpora; without it, they can only send documents
    #[arg(long, value_name = "FOLDER")]
    external_corpus_folder: Option<PathBuf>,
}

impl ServerFlags {
    fn limits(&self) -> Result<Limits> {
        let request_time = seconds("--request-timeout", self.request_timeout)?;
        let connections = fitting_connections(self.max_connections);
        if connections < self.max_connections {
            notice(format_args!(
                "warning: the system has files for {connections} connections, not for the {} of \
                 --max-connections: raise `ulimit -n`",
                self.max_connections
            ));
        }
        Ok(Limits {
            connections,
            body_bytes: self.max_body_bytes,
            bodies_bytes: self.max_bodies_bytes.max(self.max_body_bytes),
            prompt_tokens: self.max_prompt_tokens,
            request_time: Some(request_time).filter(|time| !time.is_zero()),
            header_time: seconds("--header-timeout", self.header_timeout)?,
            body_time: seconds("--body-timeout", self.body_timeout)?,
            stall_time: seconds("--stall-timeout", self.stall_timeout)?,
            unread_pieces: self.max_unread_pieces,
        })
    }
}

impl ServerFlags {
    fn corpus_folder(&self) -> Result<Option<CorpusFolder>> {
        let Some(path) = &self.external_corpus_folder else { return Ok(None) };
        let failed =
            |why| Error::Usage(format!("--external-corpus-folder {}: {why}", path.display()));
        CorpusFolder::open(path).map(Some).map_err(failed)
    }
}

fn seconds(flag: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|why| Error::Usage(format!("{flag}: {why}")))
}

impl Serve {
    /// Serves until a signal comes.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let limits = self.server.limits()?;
        if self.server.api_key.as_deref() == Some("") {
            return Err(Error::Usage("--api-key must not be empty".into()));
        }
        let mut defaults = self.sampling.params()?;
        let mut settings = Settings {
            host: self.server.host.clone(),
            port: self.server.port,
            api_key: self.server.api_key.clone(),
            model: self.card()?,
            default_max_tokens: defaults.max_tokens.take(),
            limits,
            overlap_reason: self.engine.overlap().why.into(),
            corpora: None,
            corpus_folder: self.server.corpus_folder()?,
        };
        let name = settings.model.served_name.clone();
        let key = settings.api_key.is_some();
        let (generator, corpora) =
            start_with_corpora(&self.model, &self.engine, defaults, algorithms, false)?;
        settings.corpora = corpora;
        let memory = RequestMemory::of(&generator, &settings.limits);
        notice(format_args!("requests  {memory}"));
        if memory.total() > available_memory() {
            notice(format_args!("warning: requests may take more memory than there is left"));
        }
        aquila_server::run(generator, settings, |address| announce(address, &name, key))
            .map_err(|error| Error::Other(error.to_string()))?;
        Ok(ExitCode::SUCCESS)
    }

    fn card(&self) -> Result<ModelCard> {
        let path = self.model.name().to_owned();
        let checkpoint = Checkpoint::open(&resolve(&path)?, self.model.load_format())?;
        let config = checkpoint.config();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let architectures = config.get("architectures").and_then(Value::as_array);
        Ok(ModelCard {
            served_name: self.server.served_model_name.clone().unwrap_or_else(|| path.clone()),
            path,
            model_type: config.get("model_type").and_then(text).unwrap_or_default(),
            architectures: architectures
                .map(|names| names.iter().filter_map(text).collect())
                .unwrap_or_default(),
        })
    }
}

/// Says where the server is, and how to try it.
fn announce(address: SocketAddr, model: &str, key: bool) {
    // An address that means all of them is none that a client can use.
    let host = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
        IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
    };
    let url = format!("http://{}/v1", SocketAddr::new(host, address.port()));
    let header = if key { " -H 'Authorization: Bearer KEY'" } else { "" };
    let body = serde_json::json!({
        "model": model,
        "messages": [{ "role": "user", "content": "Tom has 3 apples and buys 4 more. How many?" }],
    });
    let body = body.to_string().replace('\'', "'\\''");
    eprintln!("ready: {url} ({model}), for any OpenAI client; Ctrl-C ends. Try:");
    eprintln!(
        "  curl {url}/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'"
    );
}
