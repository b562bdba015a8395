//! Engines over the shipped models, with and without a draft.

use std::sync::Arc;

use aquila_compute::cpu::{CpuBackend, IsaChoice, Watch};
use aquila_compute::{Backend, KvDtype, WeightFormat};
use aquila_engine::executor::{GraphSettings, ModelExecutor};
use aquila_engine::{EngineConfig, Runner, Scheduler};
use aquila_model::{
    Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, LoadFormat, Location, resolve,
};
use aquila_spec::ngram::{Corpora, NgramScope, NgramSettings, NgramSources};
use aquila_spec::{
    DraftFor, Drafter, Eagle3, LoadOn, Opened, Opening, RecurrentDraft, Registry, Shape, Standalone,
};

/// Which draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    None,
    Eagle3,
    Standalone,
    /// The target as its own draft.
    Itself,
}

pub fn config(shape: Shape) -> EngineConfig {
    EngineConfig {
        page_size: 1,
        max_total_tokens: 20_000,
        max_running_requests: 8,
        max_queued_requests: 1000,
        chunked_prefill_size: 256,
        context_length: 2048,
        prefix_cache: true,
        kv_dtype: KvDtype::F32,
        random_seed: 7,
        shape,
        verify: Default::default(),
        parked_rows: 0,
        simulate: None,
        returned: Default::default(),
    }
}

pub fn decoder<B: Backend>(backend: &B, name: &str, positions: usize) -> Decoder<B> {
    let checkpoint = Checkpoint::open(&resolve(name).unwrap(), LoadFormat::Auto).unwrap();
    Decoder::load(backend, &checkpoint, WeightFormat::Bf16, positions, &mut |_| ()).unwrap()
}

pub fn engine(algorithm: Algorithm, config: EngineConfig) -> Scheduler {
    engine_with(algorithm, config, |drafter| drafter)
}

/// A draft of the CPU backend.
pub type Draft = Box<dyn Drafter<CpuBackend>>;

fn standalone_of(backend: &CpuBackend, name: &str, config: &EngineConfig) -> Draft {
    let draft = decoder(backend, name, config.context_length);
    Box::new(Standalone::new(backend, draft, config.draft_bounds()).unwrap())
}

/// The shipped standalone draft.
pub fn standalone(backend: &CpuBackend, config: &EngineConfig) -> Draft {
    standalone_of(backend, "draft", config)
}

/// An engine whose draft model is what `wrap` makes of it.
pub fn engine_with(
    algorithm: Algorithm,
    config: EngineConfig,
    wrap: impl FnOnce(Draft) -> Draft,
) -> Scheduler {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let runner = runner_of(backend, algorithm, &config, wrap);
    super::with_overlap(Scheduler::new(runner, config).unwrap())
}

/// An engine on a backend that is watched.
pub fn engine_watched(
    algorithm: Algorithm,
    config: EngineConfig,
    watch: Arc<dyn Watch>,
) -> Scheduler {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap().watched(watch);
    let runner = runner_of(backend, algorithm, &config, |draft| draft);
    super::with_overlap(Scheduler::new(runner, config).unwrap())
}

/// What runs the rounds of such an engine.
pub fn runner(algorithm: Algorithm, config: &EngineConfig) -> Runner<CpuBackend> {
    runner_of(CpuBackend::new(IsaChoice::Auto, 1).unwrap(), algorithm, config, |draft| draft)
}

fn runner_of(
    backend: CpuBackend,
    algorithm: Algorithm,
    config: &EngineConfig,
    wrap: impl FnOnce(Draft) -> Draft,
) -> Runner<CpuBackend> {
    let backend = Arc::new(backend);
    let positions = config.context_length;
    let target = decoder(&*backend, "tiny", positions);
    let bounds = config.draft_bounds();
    let drafter: Option<Draft> = match algorithm {
        Algorithm::None => None,
        Algorithm::Standalone => Some(standalone_of(&backend, "draft", config)),
        Algorithm::Itself => Some(standalone_of(&backend, "tiny", config)),
        Algorithm::Eagle3 => {
            let location = resolve("tiny-eagle3").unwrap();
            let head = HeadCheckpoint::open(&location, LoadFormat::Auto, target.spec()).unwrap();
            let head = Eagle3Head::load(
                &*backend,
                &head,
                WeightFormat::Bf16,
                positions,
                target.embedding(),
                &mut |_| (),
            )
            .unwrap();
            Some(Box::new(Eagle3::new(&*backend, head, bounds).unwrap()))
        }
    };
    let speculator = drafter.map(|drafter| {
        let (slots, dtype) = (config.slots(), config.kv_dtype);
        let draft = RecurrentDraft::new(&*backend, wrap(drafter), slots, dtype).unwrap();
        aquila_spec::Algorithm::on_device(draft)
    });
    Runner::new(backend, target, speculator, config).unwrap()
}

/// An engine whose algorithm is found by its name; n-grams are those of each request alone.
pub fn named(name: &str, config: EngineConfig) -> Scheduler {
    super::with_overlap(inline(name, config))
}

/// The same, without overlap whatever the environment says.
pub fn inline(name: &str, config: EngineConfig) -> Scheduler {
    named_on(
        Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap()),
        name,
        config,
        GraphSettings::default(),
    )
}

/// The same on any backend, with rounds of batches of these sizes captured; plain where the name is
/// NONE.
pub fn named_on<B: Backend>(
    backend: Arc<B>,
    name: &str,
    config: EngineConfig,
    graphs: GraphSettings,
) -> Scheduler
where
    dyn Opened: LoadOn<B>,
{
    let registry = Registry::built_in();
    let draft = match registry.find(name).unwrap().map(|entry| entry.draft_for("tiny")) {
        Some(DraftFor::Model(draft)) => Some((draft.clone(), resolve(&draft).unwrap())),
        _ => None,
    };
    model_on(backend, &resolve("tiny").unwrap(), draft, name, config, graphs)
}

/// The same over any model, with any draft where the algorithm needs one.
pub fn model_on<B: Backend>(
    backend: Arc<B>,
    location: &Location,
    draft: Option<(String, Location)>,
    name: &str,
    config: EngineConfig,
    graphs: GraphSettings,
) -> Scheduler
where
    dyn Opened: LoadOn<B>,
{
    let scheduler = |runner| {
        let executor = ModelExecutor::new(runner, config.clone()).with_graphs(graphs);
        Scheduler::over(executor, config.clone()).unwrap()
    };
    let target = Checkpoint::open(location, LoadFormat::Auto).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let decoder = Decoder::load(&*backend, &target, format, positions, &mut |_| ()).unwrap();
    let registry = Registry::built_in();
    let Some(entry) = registry.find(name).unwrap() else {
        return scheduler(Runner::new(backend, decoder, None, &config).unwrap());
    };
    let ngram = NgramSources {
        settings: NgramSettings { scope: NgramScope::Request, ..NgramSettings::default() },
        corpora: Corpora::new(Corpora::MOST_TOKENS, target.spec().vocab_size),
    };
    let opening = Opening {
        draft: draft.as_ref().map(|(name, location)| (name.as_str(), location)),
        ngram: Some(&ngram),
        ..Opening::new(&target)
    };
    let allowance = config.allowance(format);
    let algorithm = entry.open(&opening).unwrap().load(&*backend, &decoder, &allowance).unwrap();
    scheduler(Runner::new(backend, decoder, Some(algorithm), &config).unwrap())
}
