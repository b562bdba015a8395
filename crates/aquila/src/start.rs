//! From flags to a model that answers.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Instant;

use aquila_compute::cpu::CpuBackend;
use aquila_compute::cuda::CudaBackend;
use aquila_compute::{Backend, PlanBounds};
use aquila_engine::executor::{CapturedPart, GraphPart, ModelExecutor};
use aquila_engine::{
    AdmissionOrder, Budget, EngineConfig, EngineHandle, Priorities, Runner, Scheduler,
    available_memory,
};
use aquila_model::memory::ByteSize;
use aquila_model::{Checkpoint, Decoder, Needs, TokenMap, memory};
use aquila_spec::ngram::{Corpora, NgramSources};
use aquila_spec::policy::{Adaptive, Auto};
use aquila_spec::{LoadOn, Opened, Opening, Shape, Verify};
use aquila_text::{Generator, SamplingParams, Tokenizer};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::Algorithms;
use crate::costs::{self, Costs};
use crate::error::{Error, Result};
use crate::find::{find, find_file};
use crate::flags::{Device, EngineFlags, ModelFlags, PolicyPlan, SchedulePolicy, Speculative};
use crate::notice::notice;

/// Hidden rows that are kept for a request whose draft is paused: enough for the first probes of
/// whether drafting pays again.
const PARKED_ROWS: usize = 64;

/// Loads the model and starts its engine; says on standard error what was chosen.
pub fn start(
    model: &ModelFlags,
    flags: &EngineFlags,
    defaults: SamplingParams,
    algorithms: &Algorithms,
    quiet: bool,
) -> Result<Generator> {
    Ok(start_server(model, flags, defaults, algorithms, quiet)?.generator)
}

/// What a server starts with.
pub struct Started {
    /// The model.
    pub generator: Generator,
    /// The corpora that drafts come from, where they do.
    pub corpora: Option<Arc<Corpora>>,
    /// Which kernels it runs on.
    pub kernel_family: String,
    /// What it runs on, in words.
    pub device: String,
    /// The batch sizes that were captured as graphs.
    pub captured: Vec<usize>,
}

/// As [`start`], with what else a server needs.
pub fn start_server(
    model: &ModelFlags,
    flags: &EngineFlags,
    defaults: SamplingParams,
    algorithms: &Algorithms,
    quiet: bool,
) -> Result<Started> {
    let Built { engine, checkpoint, corpora, kernel_family, device, captured } =
        build(model, flags, algorithms, quiet)?;
    let tokenizer = checkpoint.folder().map(Tokenizer::load).transpose()?.flatten();
    let defaults = defaults.or(&model_defaults(&checkpoint)?);
    let handle = EngineHandle::start(engine)
        .map_err(|e| Error::Other(format!("cannot start the engine's thread: {e}")))?;
    let eos = checkpoint.eos_token_ids().to_vec();
    let generator = Generator::new(handle, tokenizer, eos, defaults);
    Ok(Started { generator, corpora, kernel_family, device, captured })
}

/// An engine, and what belongs to it.
pub struct Built {
    /// It runs when it is stepped.
    pub engine: Scheduler,
    /// The model that it runs.
    pub checkpoint: Checkpoint,
    /// The corpora that drafts come from, where they do.
    pub corpora: Option<Arc<Corpora>>,
    /// Which kernels it runs on.
    pub kernel_family: String,
    /// What it runs on, in words.
    pub device: String,
    /// The batch sizes that were captured as graphs.
    pub captured: Vec<usize>,
}

/// Loads the model into an engine that runs when it is stepped.
pub fn build(
    model: &ModelFlags,
    flags: &EngineFlags,
    algorithms: &Algorithms,
    quiet: bool,
) -> Result<Built> {
    model.check()?;
    match model.device()? {
        Device::Cpu => {
            let backend = Arc::new(CpuBackend::new(model.isa(), model.threads)?);
            let memory = DeviceMemory { free: &available_memory, bytes_per_value: 4 };
            build_on(backend, memory, model, flags, algorithms, quiet)
        }
        Device::Cuda(ordinal) => {
            let backend = CudaBackend::new(ordinal, model.arithmetic())
                .map_err(|error| unopened(ordinal, &error))?;
            let backend = Arc::new(backend);
            backend.free_and_total()?;
            let free = || backend.free_and_total().map_or(0, |(free, _)| free as u64);
            let bytes_per_value = backend.bytes_per_value() as u64;
            let (memory, backend) =
                (DeviceMemory { free: &free, bytes_per_value }, backend.clone());
            build_on(backend, memory, model, flags, algorithms, quiet).map_err(|error| {
                if model.chooses_device() { error.of_chosen_gpu(ordinal) } else { error }
            })
        }
    }
}

/// Why a GPU was not opened. The flag is wrong only where there is no such GPU, or none of its kind is
/// served: a driver may become ready, and memory be given back.
fn unopened(ordinal: usize, error: &aquila_compute::Error) -> Error {
    use aquila_compute::Error::{Capability, NoSuchDevice};
    let why = format!("--device cuda:{ordinal}: {error}; `aquila doctor` says what there is");
    match error {
        NoSuchDevice { .. } | Capability { .. } => Error::Usage(why),
        _ => Error::Other(why),
    }
}

/// The memory of where a model runs.
#[derive(Clone, Copy)]
struct DeviceMemory<'a> {
    /// Bytes that are free.
    free: &'a dyn Fn() -> u64,
    /// Bytes that one value of an activation takes.
    bytes_per_value: u64,
}

impl DeviceMemory<'_> {
    /// What a model needs here, whose activations were counted as 4 bytes a value.
    fn needs(self, needs: Needs) -> Needs {
        let of_values = |bytes: u64| bytes / 4 * self.bytes_per_value;
        Needs { scratch: of_values(needs.scratch), hidden: of_values(needs.hidden), ..needs }
    }
}

fn build_on<B: Backend>(
    backend: Arc<B>,
    device_memory: DeviceMemory<'_>,
    model: &ModelFlags,
    flags: &EngineFlags,
    algorithms: &Algorithms,
    quiet: bool,
) -> Result<Built>
where
    dyn Opened: LoadOn<B>,
{
    let fraction = flags.fraction()?;
    let format = model.weight_format()?;
    let checkpoint = Checkpoint::open(&model.find(quiet)?, model.load_format())?;
    let spec = checkpoint.spec().clone();
    let context = model.context_length.unwrap_or(spec.max_positions);
    if context > spec.max_positions {
        return Err(Error::Usage(format!(
            "--context-length {context} exceeds the {} positions that the model was made for",
            spec.max_positions
        )));
    }
    let mut speculative = flags.speculative.resolve(model.name(), model.revision(), algorithms)?;
    let ngram = match &speculative {
        Some(speculative) if speculative.entry.drafts_from_ngrams() => {
            let (sources, warning) = flags.speculative.ngram.sources(&checkpoint)?;
            if let Some(warning) = warning {
                notice(format_args!("warning: {warning}"));
            }
            Some(sources)
        }
        _ => None,
    };
    let opened = match &speculative {
        Some(speculative) => {
            Some(open_draft(model, speculative, &checkpoint, ngram.as_ref(), quiet)?)
        }
        None => None,
    };
    if let (Some(speculative), Some(opened)) = (&mut speculative, &opened) {
        speculative.fit(opened.most_steps())?;
    }
    let useful = flags.max_running_requests.saturating_mul(context).min(u32::MAX as usize / 2);
    let pauses = speculative.as_ref().is_some_and(|s| s.policy.pauses());
    let mut config = EngineConfig {
        page_size: flags.page_size,
        max_total_tokens: flags.max_total_tokens.unwrap_or(useful),
        max_running_requests: flags.max_running_requests,
        max_queued_requests: flags.max_queued_requests,
        chunked_prefill_size: flags.prefill_rows(context)?,
        context_length: context,
        prefix_cache: !flags.disable_radix_cache,
        kv_dtype: model.kv_dtype(),
        random_seed: model.random_seed,
        shape: speculative.as_ref().map_or(Shape::PLAIN, |s| s.policy.covering()),
        verify: speculative.as_ref().map_or(Verify::Match, |s| s.verify),
        parked_rows: if pauses { PARKED_ROWS } else { 0 },
        simulate: speculative.as_ref().and_then(|s| s.simulate.clone()),
        returned: flags.returned,
    };
    config.check()?;
    if config.returned.routed_experts && spec.experts_per_token().is_none() {
        return Err(aquila_engine::Error::NoExperts.into());
    }
    // The groups of a draft are not known before it is loaded, and are small beside the rest.
    let rounds = config.state_bounds(Vec::new(), spec.vocab_size);
    let heads = || spec.layers.iter().map(|layer| layer.attention().heads);
    let mut passes = vec![config.bounds()];
    passes.extend(opened.as_ref().map(|_| config.draft_bounds()));
    for heads in heads() {
        passes.iter().try_for_each(|&passes| backend.check_limits(passes, &rounds, heads))?;
    }
    let rounds = heads().map(|heads| backend.round_bytes(&rounds, heads)).max();
    let pass = PlanBounds { outputs: config.logit_rows(), ..config.bounds() };
    let needs = Needs {
        weights: memory::weight_bytes(&spec, format),
        scratch: memory::scratch_bytes(&spec, pass)
            + memory::rope_bytes(&spec, context)
            + config.returned_bytes(&spec),
        logits: memory::logit_bytes(&spec, config.logit_rows()),
        rounds: rounds.unwrap_or(0),
        kv_per_token: memory::kv_bytes_per_token(&spec, config.kv_dtype),
        ..Needs::default()
    };
    let free = (device_memory.free)();
    let budget = Budget::plan(
        device_memory.needs(needs),
        opened.as_ref().map(|opened| device_memory.needs(opened.needs(&config.allowance(format)))),
        free,
        fraction,
        flags.max_total_tokens,
        useful,
        config.page_size,
    )?;
    config.max_total_tokens = budget.tokens;

    if !quiet {
        announce(model, flags, &*backend, &spec.architecture, &config, speculative.as_ref())?;
        notice(format_args!("{budget}"));
    }
    if !config.verify.is_lossless() {
        notice(format_args!(
            "warning: accept thresholds below 1 change what the model writes, not only how fast"
        ));
    }
    for flag in flags.graphs.ignored(model.device()?) {
        notice(format_args!(
            "note: {flag} is ignored: graphs are captured on a GPU, and the model runs on the CPU"
        ));
    }
    if let Some(dropped) = flags.graphs.dropped(model.device()?, config.max_running_requests) {
        notice(format_args!("note: {dropped}"));
    }
    for warning in speculative.iter().flat_map(Speculative::warnings) {
        notice(format_args!("warning: {warning}"));
    }
    let bar = progress_bar(quiet, "loading");
    let decoder = Decoder::load(&*backend, &checkpoint, format, context, &mut |progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
    })?;
    bar.finish_and_clear();
    let algorithm = match &opened {
        Some(opened) => Some(opened.load(&*backend, &decoder, &config.allowance(format))?),
        None => None,
    };
    let (described, kernel_family) = (backend.describe(), backend.kernel_family());
    let graphs = flags.graphs.settings(model.device()?, config.max_running_requests);
    let runner = Runner::new(backend, decoder, algorithm, &config)?;
    let executor = ModelExecutor::new(runner, config.clone()).with_graphs(graphs.clone());
    let mut engine = Scheduler::over(executor, config)?;
    if let Some(speculative) = &speculative {
        let described = format!("{described}; {} as {}", model.name(), model.formats());
        let batches = &graphs.batches;
        set_policy(&mut engine, speculative, &described, batches, flags.prefills_only, quiet)?;
    }
    let captured = match !graphs.batches.is_empty() && !flags.prefills_only {
        true => capture_graphs(&mut engine, &graphs.batches, device_memory, quiet)?,
        false => Vec::new(),
    };
    if let (Device::Cuda(_), false) = (model.device()?, quiet) {
        let taken = ByteSize(free.saturating_sub((device_memory.free)()));
        let told = ByteSize(budget.total());
        notice(format_args!(
            "memory    {taken} taken by the driver's count, {told} without graphs above"
        ));
    }
    if flags.schedule_policy == SchedulePolicy::Lpm {
        engine.admit_by(AdmissionOrder::LongestPrefix);
    }
    engine.prioritize(flags.priorities());
    if flags.overlap(model.device()?).on {
        let failed = |e| Error::Other(format!("cannot start the executor's thread: {e}"));
        engine = engine.overlapped().map_err(failed)?;
    }
    let corpora = ngram.map(|sources| sources.corpora);
    Ok(Built { engine, checkpoint, corpora, kernel_family, device: described, captured })
}

/// Says on standard error what was chosen.
fn announce<B: Backend>(
    model: &ModelFlags,
    flags: &EngineFlags,
    backend: &B,
    architecture: &str,
    config: &EngineConfig,
    speculative: Option<&Speculative<'_>>,
) -> Result<()> {
    let overlap = flags.overlap(model.device()?);
    notice(format_args!("model     {} ({})", model.name(), architecture));
    notice(format_args!("kept as   {}", model.formats()));
    notice(format_args!("backend   {}", backend.describe()));
    notice(format_args!(
        "engine    page size {}, {} running, {} prompt tokens a round, context {}, prefix \
         cache {}, random seed {}",
        config.page_size,
        config.max_running_requests,
        config.chunked_prefill_size,
        config.context_length,
        if config.prefix_cache { "on" } else { "off" },
        config.random_seed,
    ));
    let state = if overlap.on { "on" } else { "off" };
    let order = match flags.schedule_policy {
        SchedulePolicy::Fcfs => "first come first",
        SchedulePolicy::Lpm => "longest cached prefix first",
    };
    let ranked = match flags.priorities() {
        Priorities::Ignored => String::new(),
        Priorities::Refused => ", priorities refused".into(),
        Priorities::Ranked { low_values_first, preemption_threshold } => format!(
            ", {} priority before that (a difference of {preemption_threshold} preempts)",
            if low_values_first { "lowest" } else { "highest" },
        ),
    };
    notice(format_args!("schedule  {order}{ranked}, overlap {state}: {}", overlap.why));
    match speculative {
        Some(s) => {
            if let Some(note) = &s.note {
                notice(format_args!("note: {note}"));
            }
            let with = s.draft.as_ref().map(|draft| format!(" with {draft}"));
            let with = with.unwrap_or_default();
            notice(format_args!(
                "drafts    {}{with}: {}, verified by {}",
                s.entry.name(),
                s.policy,
                s.verify
            ))
        }
        None => notice(format_args!("drafts    none")),
    }
    Ok(())
}

/// Gives the engine what decides how large trees are; one that only processes prompts needs no
/// table of costs. `described` names the backend and the model, for tables that are kept;
/// `captured` are the batch sizes of graphs.
fn set_policy(
    engine: &mut Scheduler,
    speculative: &Speculative<'_>,
    described: &str,
    captured: &[usize],
    prefills_only: bool,
    quiet: bool,
) -> Result<()> {
    match &speculative.policy {
        PolicyPlan::Adaptive { table, num_steps } => {
            let policy = Adaptive::new(table.clone(), *num_steps, captured.to_vec())?;
            engine.draft_by(Box::new(policy))?;
        }
        PolicyPlan::Auto { settings, costs, limit } if !prefills_only => {
            let config = engine.config();
            let key = format!(
                "{}; {described}; {} {}; {}; page size {}, {} running, KV pool of {}",
                costs::machine(),
                speculative.entry.name(),
                speculative.draft.as_deref().unwrap_or("alone"),
                config.shape,
                config.page_size,
                config.max_running_requests,
                config.max_total_tokens,
            );
            let found = Costs::find(engine, key, costs.as_deref(), *limit)?;
            let origin = found.as_ref().map(|costs| costs.origin.as_str());
            if !quiet {
                let unknown = "not known, so trees are as large as they may be: there is no room \
                               to measure them in";
                notice(format_args!("costs     {}", origin.unwrap_or(unknown)));
            }
            if let Some(Costs { table, .. }) = found {
                engine.draft_by(Box::new(Auto::new(settings.clone(), table)))?;
            }
        }
        PolicyPlan::Fixed(_) | PolicyPlan::Auto { .. } => {}
    }
    Ok(())
}

/// Captures the graphs of these batch sizes, and says which, how long that took and what they take;
/// answers the sizes that were captured.
fn capture_graphs(
    engine: &mut Scheduler,
    batches: &[usize],
    memory: DeviceMemory<'_>,
    quiet: bool,
) -> Result<Vec<usize>> {
    let (began, free) = (Instant::now(), (memory.free)());
    let bar = progress_bar(quiet, "graphs");
    bar.set_length(batches.len() as u64);
    let told = &mut |done| bar.set_position(done as u64);
    let (captured_batches, captured) = engine.capture_graphs(batches, told)?;
    bar.finish_and_clear();
    if quiet {
        return Ok(captured_batches);
    }
    let numbers = |numbers: &[usize]| match numbers.is_empty() {
        true => "no size".into(),
        false => numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    };
    let taken = ByteSize(free.saturating_sub((memory.free)()));
    let seconds = began.elapsed().as_secs_f64();
    notice(format_args!(
        "graphs    {} captured for batches of {} in {seconds:.1} s, {taken}",
        captured.len(),
        numbers(&captured_batches),
    ));
    let left: Vec<usize> =
        batches.iter().copied().filter(|batch| !captured_batches.contains(batch)).collect();
    if !left.is_empty() {
        notice(format_args!(
            "note: batches of {} are launched until they have been met: the KV pool has no room for \
             them at start, or the device refused their graphs",
            numbers(&left),
        ));
    }
    for (part, name) in
        [(GraphPart::Draft, "draft"), (GraphPart::Verify, "verify"), (GraphPart::Extend, "extend")]
    {
        let of_part = |captured: &&CapturedPart| captured.part == part;
        let parts: Vec<&CapturedPart> = captured.iter().filter(of_part).collect();
        let mut rows: Vec<usize> = parts.iter().map(|captured| captured.rows).collect();
        rows.sort_unstable();
        rows.dedup();
        let seconds: f64 = parts.iter().map(|captured| captured.time.as_secs_f64()).sum();
        if !parts.is_empty() {
            notice(format_args!(
                "  {name:<7} {:>3} graphs in {seconds:.2} s, of {} rows",
                parts.len(),
                numbers(&rows),
            ));
        }
    }
    Ok(captured_batches)
}

/// Opens what drafts for `target`.
pub fn open_draft(
    model: &ModelFlags,
    speculative: &Speculative<'_>,
    target: &Checkpoint,
    ngram: Option<&NgramSources>,
    quiet: bool,
) -> Result<Box<dyn Opened>> {
    let draft = &speculative.draft;
    let revision = speculative.draft_revision.as_deref();
    let location = draft.as_ref().map(|name| find(name, revision, quiet)).transpose()?;
    let map = speculative.token_map.as_deref().map(|file| find_file(file, quiet)).transpose()?;
    let map = map.map(|path| TokenMap::open(&path, target.spec().vocab_size)).transpose()?;
    Ok(speculative.entry.open(&Opening {
        target,
        draft: draft.as_deref().zip(location.as_ref()),
        load: model.load_format(),
        token_map: map.as_ref().map(TokenMap::ids),
        head: speculative.head,
        ngram,
        options: speculative.options.clone(),
    })?)
}

/// What the model's `generation_config.json` says about sampling.
fn model_defaults(checkpoint: &Checkpoint) -> Result<SamplingParams> {
    let (Some(config), Some(folder)) = (checkpoint.generation_config(), checkpoint.folder()) else {
        return Ok(SamplingParams::default());
    };
    SamplingParams::from_generation_config(config)
        .and_then(|params| params.check(&[]).map(|_| params))
        .map_err(|e| {
            Error::Other(format!("{}: {e}", folder.join("generation_config.json").display()))
        })
}

/// A bar on standard error, hidden where nobody would see it.
pub fn progress_bar(quiet: bool, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::no_length();
    if quiet || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let template = "{msg:<9} [{bar:32}] {percent:>3} % {elapsed} (eta {eta})";
    let style = ProgressStyle::with_template(template).expect("the template is well formed");
    bar.with_style(style.progress_chars("=> ")).with_message(what)
}
