//! `aquila serve`: the model over HTTP, for clients of OpenAI's API and of SGLang's.

mod announce;
mod watchdog;

use std::path::Path;
use std::process::ExitCode;

use aquila_disagg::Identity;
use aquila_engine::available_memory;
use aquila_model::{Checkpoint, Location};
use aquila_server::{Address, ModelCard, RequestMemory, Role, Settings, ToolCalls};
use clap::Args;
use serde_json::Value;

use self::announce::{Open, Prompts, announce};
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::find::find;
use crate::flags::{
    AccessFlags, Device, DisaggregationFlags, EngineFlags, LogFormat, LogLevel, ModelFlags,
    SamplingFlags, ServerFlags, named,
};
use crate::notice::notice;
use crate::start::{Started, start_server};

/// Serve a model over HTTP: OpenAI's API and SGLang's.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Serve {
    #[command(flatten)]
    model: ModelFlags,

    #[command(flatten)]
    server: ServerFlags,

    #[command(flatten)]
    access: AccessFlags,

    #[command(flatten)]
    disaggregation: DisaggregationFlags,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

impl Serve {
    /// How much is logged, where a flag says so.
    pub fn log_filter(&self) -> Option<&'static str> {
        self.server.log_level.map(LogLevel::filter)
    }

    /// What lines of the log look like.
    pub fn log_format(&self) -> LogFormat {
        self.server.log_format
    }

    /// Serves until a signal comes, or the engine fails.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let limits = self.server.limits()?;
        self.server.watchdog(Device::Cpu)?;
        if self.server.served_model_name.as_deref().is_some_and(|name| name.trim().is_empty()) {
            return Err(Error::Usage("--served-model-name must not be empty".into()));
        }
        let mut defaults = self.sampling.params()?;
        self.disaggregation.check()?;
        // First of all that takes time: whoever finds the port taken need not wait for a model.
        let address = Address::take(&self.server.host, self.server.port)?;
        let transport = self.disaggregation.transport()?;
        let mut settings = Settings {
            keys: self.access.keys()?,
            tls: self.access.tls()?,
            allowed_origins: self.access.allowed_origins()?,
            traces: self.server.traces()?,
            web_page: !self.server.disable_web_page,
            model: self.card()?,
            default_max_tokens: defaults.max_tokens.take(),
            limits,
            overlap_reason: self.engine.overlap(self.model.device()?).why.into(),
            device: String::new(),
            captured_batches: Vec::new(),
            role: None,
            corpora: None,
            corpus_folder: self.server.corpus_folder()?,
            tool_calls: self.server.tool_calls(),
            reasoning: self.server.reasoning(),
        };
        let name = settings.model.served_name.clone();
        let open = Open {
            tls: settings.tls.is_some(),
            key: settings.keys.are_asked_for(),
            web_page: settings.web_page,
        };
        if !open.key && !address.is_loopback() {
            notice(format_args!(
                "note: no key is asked for: whoever reaches {} may use the model; --api-key-file \
                 asks for keys",
                self.server.host
            ));
        }
        let mut engine = self.engine.clone();
        engine.returned = self.server.returned();
        engine.prefills_only = self.disaggregation.is_prefill();
        let Started { generator, corpora, kernel_family, device, captured } =
            start_server(&self.model, &engine, defaults, algorithms, false)?;
        (settings.corpora, settings.device, settings.captured_batches) =
            (corpora, device, captured);
        let identity = || self.identity(kernel_family, algorithms);
        settings.role = self.disaggregation.role(transport, identity, generator.engine())?;
        let role = settings.role.clone();
        let memory = RequestMemory::of(&generator, &settings);
        notice(format_args!("requests  {}", named::request_memory(&memory)));
        if memory.total() > available_memory() {
            notice(format_args!("warning: requests may take more memory than there is left"));
        }
        let prompts = Prompts::of(generator.tokenizer());
        if prompts == Prompts::Chat {
            let calls = ToolCalls::of(&generator, &settings);
            let (name, why) = (calls.format.name(), calls.reason);
            notice(format_args!("tools     calls are read in the format {name}, {why}"));
        }
        if let Some(limit) = self.server.watchdog(self.model.device()?)? {
            notice(format_args!(
                "watchdog  a round that has not come back after {} s ends the process",
                limit.as_secs_f64()
            ));
            watchdog::start(generator.engine().clone(), limit)
                .map_err(|e| Error::Other(format!("cannot start the watchdog's thread: {e}")))?;
        }
        let ready = |address| announce(address, open, &name, prompts);
        aquila_server::run(address, generator, settings, ready, notice)?;
        if let Some(Role::Prefill(worker)) = role {
            worker.wait_for_transfers();
        }
        Ok(ExitCode::SUCCESS)
    }

    /// What another worker must be to have a part in the same requests.
    fn identity(&self, kernel_family: String, algorithms: &Algorithms) -> Result<Identity> {
        let (model, flags) = (&self.model, &self.engine.speculative);
        let speculative = flags.resolve(model.name(), model.revision(), algorithms)?;
        let algorithm = speculative.as_ref().map_or("none", |s| s.entry.name());
        let draft = match speculative.as_ref().and_then(|s| Some((s.draft.as_deref()?, s))) {
            Some((name, s)) => find(name, s.draft_revision.as_deref(), true)?,
            None => Location::Preset("none".into()),
        };
        Ok(Identity::default()
            .with("model", model.find(true)?.fingerprint(model.random_seed)?)
            .with("dtype", model.formats())
            .with("algorithm", algorithm)
            .with("draft", draft.fingerprint(model.random_seed)?)
            .with("kernel family", kernel_family))
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
