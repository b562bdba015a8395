//! `aquila bench serve`: how a server with OpenAI's API answers under load.
//!
//! - [`flags`]: what is asked for
//! - [`prompts`], [`arrivals`]: what is sent, and when
//! - [`api`], [`client`], [`sse`], [`answer`]: one request and its answer
//! - [`load`]: all of them
//! - [`acceptance`], [`metrics`]: what they came to
//! - [`report`], [`svg`], [`file`]: what is shown and written

mod acceptance;
mod answer;
mod api;
mod arrivals;
mod client;
mod file;
mod flags;
mod load;
mod metrics;
mod prompts;
mod report;
mod sse;
mod svg;

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::sync::Arc;

use hyper::Method;
use serde_json::Value;

use self::acceptance::SpecCounts;
use self::api::RequestSettings;
use self::client::Client;
use self::file::ResultFile;
pub use self::flags::Serve;
use self::load::Load;
use self::metrics::Figures;
use self::report::Header;
use crate::error::{Error, Result, SOME_FAILED};
use crate::notice::notice;
use crate::start::progress_bar;

/// Threads that send and read, at most: enough for any server, and few beside one that shares
/// this machine.
const MOST_THREADS: usize = 4;

impl Serve {
    /// Runs the command.
    pub fn run(&self) -> Result<ExitCode> {
        self.check()?;
        let results = ("--output-file", &self.output_file);
        let [json_file, svg_file] = [results, ("--svg", &self.svg)].map(|(flag, path)| {
            path.as_deref().map(|path| ResultFile::create(flag, path)).transpose()
        });
        let (json_file, svg_file) = (json_file?, svg_file?);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads.min(MOST_THREADS))
            .enable_all()
            .build()
            .map_err(|e| Error::Other(format!("cannot start threads: {e}")))?;
        let (header, measured) = runtime.block_on(self.measure())?;
        // Requests that were given up end with it, without being waited for.
        runtime.shutdown_background();

        let figures = Figures::of(&measured, &header.goodput);
        let records = &measured.records;
        let object = report::json(&header, &figures, records, self.output_details);
        if let Some(file) = json_file {
            file.finish(&format!("{object}\n"))?;
        }
        if let Some(file) = svg_file {
            file.finish(&svg::draw(&header, &figures, records))?;
        }
        let text = match self.json {
            true => format!("{object}\n"),
            false => report::table(&header, &figures),
        };
        let mut out = stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|e| Error::output("standard output", e))?;
        Ok(match (figures.interrupted, figures.failed()) {
            (Some(_), _) => ExitCode::FAILURE,
            (None, 0) => ExitCode::SUCCESS,
            (None, _) => ExitCode::from(SOME_FAILED),
        })
    }

    async fn measure(&self) -> Result<(Header, load::Measured)> {
        let client = Client::new(&self.base_url(), self.headers()?).await?;
        let model = match &self.model {
            Some(model) => model.clone(),
            None => first_model(&client).await?,
        };
        let prompts = self.prompts()?;
        let num_prompts = self.num_prompts(prompts.len());
        if num_prompts > prompts.len() && !self.quiet {
            notice(format_args!(
                "note: there are {} prompts for {num_prompts} requests: they are sent again",
                prompts.len()
            ));
        }
        self.warn_of_few_files(self.max_concurrency.unwrap_or(num_prompts).min(num_prompts));
        let settings = RequestSettings {
            model: model.clone(),
            temperature: self.temperature,
            ignore_eos: self.ignore_eos,
            extra: self.extra_body()?,
        };
        let load = Arc::new(Load {
            client,
            backend: self.backend,
            settings,
            prompts,
            output_len: self.output_len,
            timeout: self.request_timeout(),
        });
        let url = load.client.url(self.backend.path());
        for _ in 0..self.warmup_requests {
            let failed = |why| Error::Other(format!("{url}: the warm-up request failed: {why}"));
            load.one(0).await.map_err(failed)?;
        }
        if self.flush_cache {
            let failed = |why| Error::Other(format!("--flush-cache: {why}"));
            load.client.text(Method::POST, "/flush_cache").await.map_err(failed)?;
        }
        let spec_before = spec_counters(&load.client).await;
        let rate = self.request_rate;
        let arrivals = arrivals::times(num_prompts, rate, self.arrival_pattern, self.seed);
        let bar = progress_bar(self.quiet, "requests");
        bar.set_length(num_prompts as u64);
        let measured = load.run(&arrivals, self.max_concurrency, &bar).await;
        bar.finish_and_clear();
        let answers_say = |record: &load::Record| {
            record.outcome.as_ref().is_ok_and(|answer| answer.spec.is_some())
        };
        let server_spec = match measured.records.iter().any(answers_say) {
            true => None,
            false => server_spec(&load.client, spec_before).await,
        };
        Ok((self.header(url, model, num_prompts, server_spec), measured))
    }
}

/// The first model that the server lists.
async fn first_model(client: &Client) -> Result<String> {
    let path = "/v1/models";
    let wrong = |why: String| {
        Error::Other(format!(
            "{}: {why} (asked for the model, which --model names)",
            client.url(path)
        ))
    };
    let text = client.text(Method::GET, path).await.map_err(wrong)?;
    let list: Value = serde_json::from_str(&text).map_err(|e| wrong(format!("not JSON: {e}")))?;
    let model = list["data"][0]["id"].as_str();
    Ok(model.ok_or_else(|| wrong("the server lists no model".into()))?.to_owned())
}

/// What the server's counters say about speculation, if it has such counters.
async fn spec_counters(client: &Client) -> Option<SpecCounts> {
    SpecCounts::in_metrics(&client.text(Method::GET, "/metrics").await.ok()?)
}

/// What the server says about speculation, and where: in its counters since `before`, or as an
/// average.
async fn server_spec(
    client: &Client,
    before: Option<SpecCounts>,
) -> Option<(SpecCounts, &'static str)> {
    if let Some((before, after)) = before.zip(spec_counters(client).await) {
        return Some((after.since(&before), "the server's counters"));
    }
    let info = client.text(Method::GET, "/server_info").await.ok()?;
    let spec = SpecCounts::in_server_info(&serde_json::from_str(&info).ok()?)?;
    Some((spec, "the server's average since it started"))
}
