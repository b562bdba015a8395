//! What libraries say, with the flags that it is about: they know settings, and flags are known
//! here alone.

use aquila_compute::Limit;
use aquila_engine::{BudgetError, ConfigError, PromptBound, ReturnedKind, SubmitError};
use aquila_model::Setting;
use aquila_server::RequestMemory;
use aquila_spec::ngram::{CorpusError, NgramError};
use aquila_spec::policy::PolicyError;
use aquila_spec::{DraftFlag, ShapeError};
use aquila_text::GenerateError;

/// An error of the model.
pub fn model(error: &aquila_model::Error) -> String {
    match error {
        aquila_model::Error::Setting { setting: flag, .. } => {
            format!("{error}; use {}", setting(*flag))
        }
        aquila_model::Error::Compute(error) => compute(error),
        _ => error.to_string(),
    }
}

/// The flags of a setting.
pub fn setting(setting: Setting) -> String {
    match setting {
        Setting::Draft(None) => "--speculative-draft-model-path".into(),
        Setting::Draft(Some(algorithm)) => {
            format!("--speculative-algorithm {algorithm} with --speculative-draft-model-path")
        }
        Setting::Algorithm(algorithm) => format!("--speculative-algorithm {algorithm}"),
        Setting::AuxLayerConvention => "--speculative-aux-layer-convention".into(),
        Setting::Int8 => "--quantization int8".into(),
        Setting::Steps(most) => format!("--speculative-num-steps {most}"),
    }
}

/// The flag about what drafts.
pub fn draft_flag(flag: DraftFlag) -> &'static str {
    match flag {
        DraftFlag::TokenMap => "--speculative-token-map",
        DraftFlag::AuxLayerConvention => "--speculative-aux-layer-convention",
        DraftFlag::RopeTheta => "--speculative-draft-rope-theta",
        DraftFlag::MultiLayer => "--enable-multi-layer-eagle",
        DraftFlag::FirstEmbedding => "--speculative-mtp-first-embedding",
    }
}

/// An error of the backend.
pub fn compute(error: &aquila_compute::Error) -> String {
    match error {
        aquila_compute::Error::NoSuchIsa(isa) => format!("--cpu-isa {isa}: {error}"),
        aquila_compute::Error::Limit { what, .. } => format!("{}: {error}", limit(*what)),
        aquila_compute::Error::OutOfMemory { .. } => {
            format!("{error}: lower --mem-fraction-static or --max-total-tokens")
        }
        _ => error.to_string(),
    }
}

/// The flags that what a backend takes only so much of follows from.
fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::PassRows => {
            "--chunked-prefill-size, --max-running-requests, --speculative-num-draft-tokens"
        }
        Limit::Topk => "--speculative-eagle-topk",
        Limit::Outputs => "--max-running-requests, --speculative-eagle-topk",
        Limit::HeadWidth => "--device",
    }
}

/// An error of what drafts.
pub fn spec(error: &aquila_spec::Error) -> String {
    use aquila_spec::Error;
    match error {
        Error::Option { .. } => format!("--speculative-option {error}"),
        Error::Unknown { .. } | Error::NotYet { .. } | Error::NoMix { .. } => {
            format!("--speculative-algorithm {error}")
        }
        Error::NoDraft => format!("{error}; use --speculative-draft-model-path"),
        Error::OneLayer(_) => format!("{}: {error}", draft_flag(DraftFlag::MultiLayer)),
        Error::Ngram(error) => ngram(error),
        Error::Shape(ShapeError::NoWidth) => format!("--speculative-eagle-topk: {error}"),
        Error::Shape(ShapeError::Nodes { nodes, steps, topk, most }) => format!(
            "--speculative-num-draft-tokens {nodes} does not suit {steps} steps of topk {topk}: \
             it must be from 2 to {most}"
        ),
        Error::Model(error) => model(error),
        _ => error.to_string(),
    }
}

/// An error of the settings of n-grams.
pub fn ngram(error: &NgramError) -> String {
    let flags = match error {
        NgramError::Breadth { .. } => "min-bfs-breadth, --speculative-ngram-max-bfs-breadth",
        NgramError::TrieDepth(_) => "max-trie-depth",
        NgramError::Capacity(_) => "capacity",
        NgramError::MatchType(_) => "match-type",
        NgramError::Scope(_) => "scope",
    };
    format!("--speculative-ngram-{flags}: {error}")
}

/// An error of the corpora that n-grams are drafted from.
pub fn corpus(error: &aquila_server::CorpusTextError) -> String {
    match error {
        aquila_server::CorpusTextError::Corpus(CorpusError::Full { .. }) => {
            format!("{error} (--speculative-ngram-external-corpus-max-tokens)")
        }
        _ => error.to_string(),
    }
}

/// An error of a policy, whose file is named by whoever read it.
pub fn policy(error: &PolicyError) -> String {
    match error {
        PolicyError::LaunchSteps { steps, .. } => {
            format!("--speculative-num-steps {steps}: {error} (--speculative-adaptive-config)")
        }
        _ => error.to_string(),
    }
}

/// An error of the engine.
pub fn engine(error: &aquila_engine::Error) -> String {
    use aquila_engine::Error;
    match error {
        Error::Config(error) => config(error),
        Error::NoExperts => format!("--{}: {error}", ReturnedKind::RoutedExperts.setting()),
        Error::Model(error) => model(error),
        Error::Executor(error) => compute(error),
        _ => error.to_string(),
    }
}

/// An error of the engine's settings, whose names are those of the flags.
pub fn config(error: &ConfigError) -> String {
    match error {
        ConfigError::Zero(name) => format!("--{}: {error}", name.replace('_', "-")),
        ConfigError::NoPage { tokens, page_size } => {
            format!("--max-total-tokens {tokens}, --page-size {page_size}: {error}")
        }
        ConfigError::Pool(tokens) => format!("--max-total-tokens {tokens}: {error}"),
        ConfigError::Trees { .. } => error.to_string(),
    }
}

/// What does not fit into memory.
pub fn budget(error: &BudgetError) -> String {
    match error {
        BudgetError::Weights { fraction, .. } => {
            format!("--mem-fraction-static {fraction}: {error}")
        }
        BudgetError::Fixed { fraction, .. } => format!(
            "--mem-fraction-static {fraction}, --chunked-prefill-size, --max-running-requests: {error}"
        ),
        BudgetError::Pool { tokens, .. } => format!("--max-total-tokens {tokens}: {error}"),
        BudgetError::NoPage { page_size, .. } => {
            format!("--page-size {page_size}, --mem-fraction-static, --max-total-tokens: {error}")
        }
    }
}

/// Why a prompt was not taken.
pub fn generate(error: &GenerateError) -> String {
    let flag = match error {
        GenerateError::Submit(SubmitError::NoPriorities) => "--enable-priority-scheduling",
        GenerateError::Submit(SubmitError::PromptTooLong { bound, .. }) => match bound {
            PromptBound::Context => "--context-length",
            PromptBound::Pool => "--max-total-tokens",
        },
        _ => return error.to_string(),
    };
    format!("{error}: {flag}")
}

/// Why a server did not start.
pub fn server(error: &aquila_server::Error) -> String {
    match error {
        aquila_server::Error::Listen { .. } => {
            format!("{error}; --host and --port choose another address")
        }
        _ => error.to_string(),
    }
}

/// What requests may take beside the engine.
pub fn request_memory(memory: &RequestMemory) -> String {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    format!(
        "{:.1} MiB at most: connections {:.1} MiB (--max-connections), bodies {:.1} MiB \
         (--max-bodies-bytes), tokenizing {:.1} MiB (--max-body-bytes, --max-prompt-tokens), \
         returned rows and log-probabilities {:.1} MiB (--max-returned-bytes), compiled grammars \
         {:.1} MiB (--max-grammar-bytes)",
        mib(memory.total()),
        mib(memory.connections),
        mib(memory.bodies),
        mib(memory.tokenizing),
        mib(memory.returned),
        mib(memory.grammars),
    )
}
