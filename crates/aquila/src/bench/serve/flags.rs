//! What is asked for, under the names that SGLang's and vLLM's clients have.

use std::path::PathBuf;
use std::time::Duration;

use aquila_model::Location;
use aquila_text::Tokenizer;
use clap::{Args, ValueEnum};
use hyper::HeaderMap;
use serde_json::{Map, Value};

use super::acceptance::SpecCounts;
use super::api::Backend;
use super::arrivals::{Pattern, rate};
use super::client;
use super::metrics::{Objective, objective};
use super::prompts::{self, Dataset, Lengths, Prompt};
use super::report::Header;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::find::find;
use crate::flags::whole;
use crate::notice::notice;

/// Requests where neither a flag nor a file says how many.
const NUM_PROMPTS: usize = 100;

/// Send requests to a server with OpenAI's API, ours or another, and measure how it answers.
///
/// Requests are sent at their times whatever became of those before, and latencies begin when they
/// are sent. TTFT is the time to the first text, E2EL to the last; TPOT is (E2EL - TTFT) / (output
/// tokens - 1); ITL is between pieces of text, which hold several tokens under speculation.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Serve {
    /// The server [default: http:// with --host and --port]
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port"])]
    base_url: Option<String>,

    /// The server's address
    #[arg(long, default_value = "127.0.0.1", value_name = "HOST")]
    host: String,

    /// The server's port
    #[arg(long, default_value_t = 30000, value_name = "PORT")]
    port: u16,

    /// The API to speak
    #[arg(long, value_enum, default_value = "openai", value_name = "API")]
    pub(super) backend: Backend,

    /// The model to ask [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub(super) model: Option<String>,

    /// The key to send [default: $OPENAI_API_KEY]
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,

    /// A header of every request; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    header: Vec<String>,

    /// Requests to send [default: as many as --dataset-path has, or 100]
    #[arg(long, value_parser = whole(1, 10_000_000), value_name = "N")]
    num_prompts: Option<usize>,

    /// Requests per second; inf sends all of them at once
    #[arg(long, value_parser = rate, default_value = "inf", value_name = "R")]
    pub(super) request_rate: f64,

    /// How arrivals are spread around their rate
    #[arg(long, value_enum, default_value = "poisson", value_name = "PATTERN")]
    pub(super) arrival_pattern: Pattern,

    /// The most requests at once: with a rate, those that are due wait for their turn
    #[arg(long, value_parser = whole(1, 1_000_000), value_name = "N")]
    pub(super) max_concurrency: Option<usize>,

    /// The seed of arrivals and of random prompts
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub(super) seed: u64,

    /// Where prompts come from [default: random, or the form that --dataset-path has]
    #[arg(long, value_enum, value_name = "DATASET")]
    dataset_name: Option<Dataset>,

    /// A file of prompts, JSON lines or a list: {"prompt"}, {"question_id", "category", "turns"} or
    /// ShareGPT's {"conversations"}; sent in their order, the first turn of each
    #[arg(long, value_name = "FILE")]
    dataset_path: Option<PathBuf>,

    /// The most tokens of an answer to a prompt of a file that does not say
    #[arg(
        long,
        alias = "sharegpt-output-len",
        alias = "spec-bench-output-len",
        alias = "custom-output-len",
        value_parser = whole(1, u32::MAX as usize),
        default_value = "256",
        value_name = "N"
    )]
    pub(super) output_len: usize,

    /// Tokens of a random prompt, or its words where there is no --tokenizer
    #[arg(long, value_parser = whole(1, 10_000_000), default_value = "1024", value_name = "N")]
    random_input_len: usize,

    /// The most tokens of an answer to a random prompt
    #[arg(long, value_parser = whole(1, 10_000_000), default_value = "128", value_name = "N")]
    random_output_len: usize,

    /// How far random lengths lie apart: from 1 - R to 1 + R times those above
    #[arg(long, default_value_t = 0.0, value_name = "R")]
    random_range_ratio: f64,

    /// A model whose tokenizer counts tokens of random prompts, and of the answers in ShareGPT's
    /// files, to ask for as many
    #[arg(long, value_name = "MODEL")]
    tokenizer: Option<String>,

    /// 0 is greedy
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub(super) temperature: f64,

    /// End-of-text does not end an answer
    #[arg(long)]
    pub(super) ignore_eos: bool,

    /// What else request bodies say: a JSON object, whose keys replace what is there
    #[arg(long, alias = "extra-request-body", value_name = "JSON")]
    extra_body: Option<String>,

    /// Requests before the measured ones, of the first prompt and one after the other
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(super) warmup_requests: usize,

    /// Have the server drop its prefix cache after the warm-up: POST /flush_cache
    #[arg(long)]
    pub(super) flush_cache: bool,

    /// Seconds after which a request is given up [default: none]
    #[arg(long, value_name = "S")]
    request_timeout: Option<f64>,

    /// Objectives in milliseconds, ttft:MS tpot:MS e2el:MS: how many requests meet all of them
    #[arg(long, value_parser = objective, num_args = 1.., value_name = "NAME:MS")]
    goodput: Vec<Objective>,

    /// Percentiles to show
    #[arg(long, value_delimiter = ',', default_value = "90,99", value_name = "P,…")]
    metric_percentiles: Vec<f64>,

    /// Write figures and requests to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) output_file: Option<PathBuf>,

    /// List the gaps between pieces of each answer in the JSON, too
    #[arg(long)]
    pub(super) output_details: bool,

    /// Draw latencies over time and their distributions into this file
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,

    /// Print JSON instead of a table
    #[arg(long)]
    pub(super) json: bool,

    /// Print figures and errors only
    #[arg(long, short)]
    pub(super) quiet: bool,
}

impl Serve {
    /// Refuses flags without sense.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |flag: &str, why: &str| Err(Error::Usage(format!("--{flag}: {why}")));
        match (self.dataset_name, &self.dataset_path) {
            (Some(Dataset::Random), Some(_)) => {
                return wrong("dataset-path", "random prompts come from no file");
            }
            (Some(Dataset::Sharegpt | Dataset::SpecBench | Dataset::Custom), None) => {
                return wrong("dataset-name", "its prompts come from a file: use --dataset-path");
            }
            _ => (),
        }
        if !(0.0..1.0).contains(&self.random_range_ratio) {
            return wrong("random-range-ratio", "must be from 0 to below 1");
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return wrong("temperature", "must be a number from 0 up");
        }
        if self.metric_percentiles.iter().any(|percent| !(0.0..=100.0).contains(percent)) {
            return wrong("metric-percentiles", "must be from 0 to 100");
        }
        if self.request_timeout.is_some_and(|limit| !(limit > 0.0 && limit < 1e9)) {
            return wrong("request-timeout", "must be seconds, above 0");
        }
        self.extra_body()?;
        self.headers()?;
        Ok(())
    }

    /// The address of the server.
    pub(super) fn base_url(&self) -> String {
        let in_brackets = self.host.contains(':') && !self.host.starts_with('[');
        match &self.base_url {
            Some(url) if url.contains("://") => url.clone(),
            Some(url) => format!("http://{url}"),
            None if in_brackets => format!("http://[{}]:{}", self.host, self.port),
            None => format!("http://{}:{}", self.host, self.port),
        }
    }

    /// The headers of every request.
    pub(super) fn headers(&self) -> Result<HeaderMap> {
        let variable = || std::env::var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty());
        let key = self.api_key.clone().or_else(variable);
        client::headers(key.as_deref(), &self.header)
    }

    /// What else bodies say.
    pub(super) fn extra_body(&self) -> Result<Map<String, Value>> {
        let Some(text) = &self.extra_body else { return Ok(Map::new()) };
        serde_json::from_str(text)
            .map_err(|e| Error::Usage(format!("--extra-body: not a JSON object: {e}")))
    }

    /// After how long a request is given up.
    pub(super) fn request_timeout(&self) -> Option<Duration> {
        self.request_timeout.map(Duration::from_secs_f64)
    }

    /// How many requests are sent, with so many prompts.
    pub(super) fn num_prompts(&self, prompts: usize) -> usize {
        self.num_prompts.unwrap_or(prompts)
    }

    /// The prompts.
    pub(super) fn prompts(&self) -> Result<Vec<Prompt>> {
        let tokenizer = self.tokenizer()?;
        let Some(path) = &self.dataset_path else {
            let lengths = Lengths {
                input: self.random_input_len,
                output: self.random_output_len,
                ratio: self.random_range_ratio,
            };
            let count = self.num_prompts(NUM_PROMPTS);
            return prompts::random(count, lengths, self.seed, tokenizer.as_ref());
        };
        let text = std::fs::read_to_string(path).map_err(|e| Error::file(path.display(), e))?;
        let file = prompts::read(&text, self.dataset_name, tokenizer.as_ref())
            .map_err(|e| Error::Other(format!("--dataset-path {}: {e}", path.display())))?;
        if file.skipped > 0 && !self.quiet {
            let skipped = file.skipped;
            notice(format_args!("note: {skipped} conversations lack a question or an answer"));
        }
        Ok(file.prompts)
    }

    fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let Some(name) = &self.tokenizer else { return Ok(None) };
        let none = || Error::Other(format!("--tokenizer {name}: there is no tokenizer in it"));
        match find(name, None, self.quiet)? {
            Location::Folder(folder) => Tokenizer::load(&folder)?.ok_or_else(none).map(Some),
            Location::Preset(_) => Err(none()),
        }
    }

    /// Says so where the system has fewer files than requests that may run at once.
    pub(super) fn warn_of_few_files(&self, at_once: usize) {
        let fitting = aquila_server::fitting_connections(at_once);
        if fitting < at_once && !self.quiet {
            notice(format_args!(
                "note: the system lets this process have {fitting} connections for up to {at_once} \
                 requests at once: raise `ulimit -n`, or give --max-concurrency"
            ));
        }
    }

    /// What reports say about the load.
    pub(super) fn header(
        &self,
        url: String,
        model: String,
        num_prompts: usize,
        server_spec: Option<(SpecCounts, &'static str)>,
    ) -> Header {
        Header {
            url,
            model,
            backend: name(self.backend),
            num_prompts,
            request_rate: self.request_rate,
            pattern: name(self.arrival_pattern),
            max_concurrency: self.max_concurrency,
            seed: self.seed,
            goodput: self.goodput.clone(),
            percentiles: self.metric_percentiles.clone(),
            server_spec,
        }
    }
}

/// The name of a flag's value.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
