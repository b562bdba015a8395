//! `aquila serve`: the model over HTTP, for clients of OpenAI's API and of SGLang's.

mod announce;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use aquila_engine::available_memory;
use aquila_model::{Checkpoint, Location};
use aquila_server::{
    Address, CorpusFolder, Limits, ModelCard, RequestMemory, Settings, fitting_connections,
};
use clap::Args;
use serde_json::Value;

use self::announce::{Prompts, announce};
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, LogLevel, ModelFlags, SamplingFlags, whole};
use crate::notice::notice;
use crate::start::start_with_corpora;

/// Serve a model over HTTP: OpenAI's API and SGLang's.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
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
    /// The address to listen on; 0.0.0.0 is all of them, [::] those of IPv6 too
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

    /// How much is logged, whatever AQUILA_LOG says [default: as AQUILA_LOG says, or warning and
    /// what the engine does]
    #[arg(long, value_enum, value_name = "LEVEL")]
    log_level: Option<LogLevel>,

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
    /// How much is logged, where a flag says so.
    pub fn log_filter(&self) -> Option<&'static str> {
        self.server.log_level.map(LogLevel::filter)
    }

    /// Serves until a signal comes.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let failed = |error: aquila_server::Error| Error::Other(error.to_string());
        let limits = self.server.limits()?;
        if self.server.api_key.as_deref() == Some("") {
            return Err(Error::Usage("--api-key must not be empty".into()));
        }
        if self.server.served_model_name.as_deref().is_some_and(|name| name.trim().is_empty()) {
            return Err(Error::Usage("--served-model-name must not be empty".into()));
        }
        let mut defaults = self.sampling.params()?;
        // First of all that takes time: whoever finds the port taken need not wait for a model.
        let address = Address::take(&self.server.host, self.server.port).map_err(failed)?;
        let mut settings = Settings {
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
        let prompts = Prompts::of(generator.tokenizer());
        let ready = |address| announce(address, &name, key, prompts);
        aquila_server::run(address, generator, settings, ready).map_err(failed)?;
        Ok(ExitCode::SUCCESS)
    }

    fn card(&self) -> Result<ModelCard> {
        let name = self.model.name().to_owned();
        let location = self.model.find(false)?;
        let checkpoint = Checkpoint::open(&location, self.model.load_format())?;
        let config = checkpoint.config();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let architectures = config.get("architectures").and_then(Value::as_array);
        Ok(ModelCard {
            path: path(&name, &location),
            served_name: self.server.served_model_name.clone().unwrap_or(name),
            model_type: config.get("model_type").and_then(text).unwrap_or_default(),
            architectures: architectures
                .map(|names| names.iter().filter_map(text).collect())
                .unwrap_or_default(),
        })
    }
}

/// Where others find the model: its folder, unless it is on the hub or has no files.
fn path(name: &str, location: &Location) -> String {
    let on_the_hub = name.contains('/') && !Path::new(name).is_dir();
    match location {
        Location::Folder(folder) if !on_the_hub => {
            let whole = std::path::absolute(folder);
            whole.unwrap_or_else(|_| folder.clone()).display().to_string()
        }
        Location::Folder(_) | Location::Preset(_) => name.to_owned(),
    }
}
