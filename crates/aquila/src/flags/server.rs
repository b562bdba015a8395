//! Where a server listens, and how much clients may use up.

use std::path::PathBuf;
use std::time::Duration;

use aquila_engine::Returned;
use aquila_server::{CorpusFolder, Limits, TraceEndpoint, fitting_connections};
use aquila_text::{ReasoningFormat, ToolCallFormat};
use clap::Args;

use crate::error::{Error, Result};
use crate::flags::{Device, LogFormat, LogLevel, whole};
use crate::notice::notice;

/// How long a round may take on a GPU, as in SGLang.
const WATCHDOG_SECONDS: f64 = 300.0;

/// Where a server listens, and how much clients may use up.
#[derive(Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// The address to listen on; 0.0.0.0 is all of them, [::] those of IPv6 too
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub host: String,

    /// The port to listen on; 0 takes any
    #[arg(long, default_value_t = 30000)]
    pub port: u16,

    /// The model's name for clients [default: the MODEL as given]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Serve no web page at / to browsers
    #[arg(long)]
    pub disable_web_page: bool,

    /// How much is logged, whatever AQUILA_LOG says [default: as AQUILA_LOG says, or warnings,
    /// requests and what the engine does]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub log_level: Option<LogLevel>,

    /// What lines of the log look like
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,

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

    /// Seconds that a round may take; where one has not come back by then, as on a device that hangs,
    /// the process ends with exit code 1. 0 is no limit [default: 300 on a GPU, 0 on the CPU]
    #[arg(long, value_name = "SECONDS")]
    watchdog_timeout: Option<f64>,

    /// Seconds for a TLS handshake, for the headers of a request, and between two requests of a
    /// connection
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

    /// Let `return_hidden_states` of /generate return the hidden states of each token: what the
    /// language-model head reads
    #[arg(long)]
    enable_return_hidden_states: bool,

    /// Let `return_routed_experts` of /generate return the experts of each token in each layer
    #[arg(long)]
    enable_return_routed_experts: bool,

    /// Bytes that hidden states, routed experts and log-probabilities of all answers together may
    /// take until they are sent; a request that finds no room is refused with 503
    #[arg(long, default_value_t = Limits::default().returned_bytes, value_name = "BYTES")]
    max_returned_bytes: usize,

    /// Bytes that compiled grammars of all requests together may take, with those that are kept for
    /// later requests; a request whose grammar finds no room is refused with 503
    #[arg(long, default_value_t = Limits::default().grammar_bytes, value_name = "BYTES")]
    max_grammar_bytes: usize,

    /// Send a span of each request to this OpenTelemetry collector, as OTLP over plain HTTP in JSON:
    /// http://HOST:PORT, or with the path where it takes spans
    #[arg(long, value_name = "URL")]
    otlp_traces_endpoint: Option<String>,

    /// How the model writes calls of tools: qwen25, qwen, hermes, llama3 or mistral [default: as the
    /// chat template shows, else as its family does]
    #[arg(long, value_name = "NAME", value_parser = tool_call_format)]
    tool_call_parser: Option<ToolCallFormat>,

    /// How the model writes reasoning, to tell it from answers: deepseek-r1, qwen3 or
    /// qwen3-thinking [default: reasoning is part of the text]
    #[arg(long, value_name = "NAME", value_parser = reasoning_format)]
    reasoning_parser: Option<ReasoningFormat>,

    /// A folder whose files clients may add as corpora; without it, they can only send documents
    #[arg(long, value_name = "FOLDER")]
    external_corpus_folder: Option<PathBuf>,
}

impl ServerFlags {
    /// What clients may use up; says where the system allows less.
    pub fn limits(&self) -> Result<Limits> {
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
            returned_bytes: self.max_returned_bytes,
            grammar_bytes: self.max_grammar_bytes,
        })
    }

    /// How long a round may take, if that is bounded.
    pub fn watchdog(&self, device: Device) -> Result<Option<Duration>> {
        let by_default = match device {
            // Nothing hangs there, and a long chunk of a large model may take as long as it does.
            Device::Cpu => 0.0,
            Device::Cuda(_) => WATCHDOG_SECONDS,
        };
        let given = self.watchdog_timeout.unwrap_or(by_default);
        let time = seconds("--watchdog-timeout", given)?;
        Ok(Some(time).filter(|time| !time.is_zero()))
    }

    /// Where spans of requests are sent, if anywhere.
    pub fn traces(&self) -> Result<Option<TraceEndpoint>> {
        let endpoint = self.otlp_traces_endpoint.as_deref().map(|url| {
            TraceEndpoint::of_service(url)
                .map_err(|why| Error::Usage(format!("--otlp-traces-endpoint {url}: {why}")))
        });
        endpoint.transpose()
    }

    /// What requests may get beside tokens.
    pub fn returned(&self) -> Returned {
        Returned {
            hidden_states: self.enable_return_hidden_states,
            routed_experts: self.enable_return_routed_experts,
        }
    }

    /// How the model writes calls of tools, where the flag says so.
    pub fn tool_calls(&self) -> Option<ToolCallFormat> {
        self.tool_call_parser
    }

    /// How it writes reasoning, where the flag says so.
    pub fn reasoning(&self) -> Option<ReasoningFormat> {
        self.reasoning_parser
    }

    /// The folder that clients may add files from.
    pub fn corpus_folder(&self) -> Result<Option<CorpusFolder>> {
        let Some(path) = &self.external_corpus_folder else { return Ok(None) };
        let failed =
            |why| Error::Usage(format!("--external-corpus-folder {}: {why}", path.display()));
        CorpusFolder::open(path).map(Some).map_err(failed)
    }
}

fn tool_call_format(name: &str) -> std::result::Result<ToolCallFormat, String> {
    ToolCallFormat::named(name).ok_or_else(|| unknown(ToolCallFormat::NAMES.map(|(name, _)| name)))
}

fn reasoning_format(name: &str) -> std::result::Result<ReasoningFormat, String> {
    let names = ReasoningFormat::NAMES.map(|(name, _)| name);
    ReasoningFormat::named(name).ok_or_else(|| unknown(names))
}

fn unknown<const N: usize>(names: [&str; N]) -> String {
    format!("there are {}", names.join(", "))
}

fn seconds(flag: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|why| Error::Usage(format!("{flag}: {why}")))
}
