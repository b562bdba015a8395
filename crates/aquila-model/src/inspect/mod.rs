//! What a checkpoint is, what it will take, and whether Aquila can serve it.
//!
//! Nothing but an unreadable location is an error here: what is wrong with a model is part of the
//! report on it.

mod display;
mod head;

use aquila_compute::{KvDtype, WeightFormat};
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::{Configs, eos};
use crate::config::Settings;
use crate::draft_head::{self, HeadKind};
use crate::source::{TensorSource, open_folder};
use crate::{
    AttentionSpec, Eagle3Spec, EagleSpec, FeedForward, HeadOptions, Location, Mixer, ModelSpec,
    MtpNaming, MtpSpec, Result, Setting, arch, layout, memory,
};

pub use self::head::DraftHead;

/// A report on a checkpoint. What could not be read is left out.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// The folder or preset.
    pub location: String,
    /// The architecture that the config names.
    pub architecture: Option<String>,
    /// Parameters, tied ones once: of the spec, or of the files where there is no spec.
    pub parameters: Option<u64>,
    /// The element type that the config declares.
    pub dtype: Option<String>,
    /// Rows of the embedding table.
    pub vocab_size: Option<u64>,
    /// Width of the residual stream.
    pub hidden_size: Option<u64>,
    /// Width inside the feed-forward part.
    pub intermediate_size: Option<u64>,
    /// Decoder layers.
    pub layers: Option<u64>,
    /// Query heads.
    pub heads: Option<u64>,
    /// Key and value heads.
    pub kv_heads: Option<u64>,
    /// Width of one head.
    pub head_dim: Option<u64>,
    /// Rotary embedding, in words.
    pub rope: Option<String>,
    /// Positions that layers with a window see.
    pub window: Option<usize>,
    /// Experts, in words.
    pub experts: Option<String>,
    /// The longest context the model was made for.
    pub context_length: Option<u64>,
    /// Whether the head is the embedding table.
    pub tied_embeddings: Option<bool>,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Whether there is a tokenizer; without one, prompts are ids.
    pub tokenizer: bool,
    /// The files of the folder.
    pub files: Vec<FileSize>,
    /// What serving the model takes.
    pub memory: Option<MemoryEstimate>,
    /// What it drafts, where it is a head that drafts for a model.
    pub draft_head: Option<DraftHead>,
    /// Whether it can draft for a model, alone or beside one.
    pub can_draft: bool,
    /// Whether Aquila can serve it.
    pub servable: bool,
    /// Why not.
    pub reason: Option<String>,
    /// The setting by which it can be used, where that is known.
    #[serde(skip)]
    pub setting: Option<Setting>,
}

/// A file and its size.
#[derive(Debug, Clone, Serialize)]
pub struct FileSize {
    /// Its name in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// Bytes that a model takes, from its spec alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryEstimate {
    /// Weights kept as bfloat16.
    pub weights_bf16: u64,
    /// Weights kept as 8-bit integers.
    pub weights_int8: u64,
    /// Keys and values of one token, as float32.
    pub kv_per_token_f32: u64,
    /// Keys and values of one token, as bfloat16.
    pub kv_per_token_bf16: u64,
    /// Keys and values of one full context, as float32.
    pub kv_of_a_context_f32: u64,
}

impl MemoryEstimate {
    /// The estimate for a spec.
    pub fn of(spec: &ModelSpec) -> Self {
        let kv_per_token_f32 = memory::kv_bytes_per_token(spec, KvDtype::F32);
        Self {
            weights_bf16: memory::weight_bytes(spec, WeightFormat::Bf16),
            weights_int8: memory::weight_bytes(spec, WeightFormat::Int8),
            kv_per_token_f32,
            kv_per_token_bf16: memory::kv_bytes_per_token(spec, KvDtype::Bf16),
            kv_of_a_context_f32: kv_per_token_f32.saturating_mul(spec.max_positions as u64),
        }
    }

    /// The estimate for a head, the table that it shares with its model left out.
    fn of_head(spec: &Eagle3Spec) -> Self {
        Self {
            weights_bf16: spec.weight_bytes(WeightFormat::Bf16),
            weights_int8: spec.weight_bytes(WeightFormat::Int8),
            ..Self::of(&spec.layer)
        }
    }
}

impl Inspection {
    /// Looks at what stands at `location`.
    pub fn of(location: &Location) -> Result<Self> {
        let Configs { origin, config, generation_config, folder } = Configs::read(location)?;
        let spec = arch::read(&origin, &config);
        let eos = eos(&origin, &config, folder.as_deref(), generation_config.as_ref());
        let tensors = folder.as_deref().map(open_folder).transpose();
        let fits = match (&spec, &tensors) {
            (Ok(spec), Ok(Some(tensors))) => layout::check(spec.tensors(), &**tensors).map(|_| ()),
            _ => Ok(()),
        };
        let stored = tensors.as_ref().ok().and_then(Option::as_deref).map(elements);
        let number = |field: &str| config.get(field).and_then(Value::as_u64);
        let text = |field: &str| config.get(field).and_then(Value::as_str).map(str::to_owned);
        let known = spec.as_ref().ok();
        let heads = known.map(|spec| spec.first_attention().heads);
        let mut report = Self {
            location: match &folder {
                Some(folder) => folder.display().to_string(),
                None => origin,
            },
            architecture: arch::named(&config).map(str::to_owned),
            parameters: known.map(ModelSpec::parameters).or(stored),
            dtype: text("dtype").or_else(|| text("torch_dtype")),
            vocab_size: number("vocab_size"),
            hidden_size: number("hidden_size"),
            intermediate_size: number("intermediate_size"),
            layers: number("num_hidden_layers"),
            heads: number("num_attention_heads"),
            kv_heads: heads.map(|h| h.kv_heads as u64).or(number("num_key_value_heads")),
            head_dim: heads.map(|h| h.head_dim as u64).or(number("head_dim")),
            rope: known.map(ropes),
            window: known.and_then(|s| s.layers.iter().find_map(|l| l.attention().window)),
            experts: known.and_then(experts),
            context_length: number("max_position_embeddings"),
            tied_embeddings: known.map(|s| s.tied_embeddings),
            eos_token_ids: Vec::new(),
            tokenizer: folder.as_ref().is_some_and(|f| f.join("tokenizer.json").exists()),
            files: folder.as_deref().map(files).unwrap_or_default(),
            memory: known.map(MemoryEstimate::of),
            draft_head: None,
            can_draft: false,
            servable: true,
            reason: None,
            setting: None,
        };
        let stored = tensors.as_ref().ok().and_then(Option::as_deref);
        let kind = stored.map(HeadKind::of);
        if draft_head::is_eagle3(&config) || kind == Some(HeadKind::Eagle3) {
            report.describe_head(&config, stored, kind);
            return Ok(report);
        }
        let head = match (kind, stored) {
            (Some(HeadKind::Mtp(naming)), Some(tensors)) => {
                report.describe_mtp(&config, tensors, naming)
            }
            (Some(HeadKind::Eagle), Some(tensors)) => report.describe_eagle(&config, tensors),
            _ => Ok(()),
        };
        let mut wrong = [spec.err(), tensors.err(), fits.err()].into_iter().flatten();
        let mut reason = wrong.next();
        match eos {
            Ok(ids) => report.eos_token_ids = ids,
            Err(e) => reason = reason.or(Some(e)),
        }
        report.servable = reason.is_none();
        if let Some(error) = reason {
            let (reason, setting) = match (kind, head) {
                (_, Err(wrong)) => (wrong.to_string(), wrong.setting()),
                (Some(kind @ HeadKind::Eagle), Ok(())) => drafts_only("EAGLE", kind),
                (Some(kind @ HeadKind::Mtp(_)), Ok(())) => drafts_only("MTP", kind),
                _ => (error.to_string(), error.setting()),
            };
            (report.reason, report.setting) = (Some(reason), setting);
        }
        Ok(report)
    }

    /// Fills in what MTP layers do; what is wrong with them is the error.
    fn describe_mtp(
        &mut self,
        config: &Value,
        tensors: &dyn TensorSource,
        naming: MtpNaming,
    ) -> Result<()> {
        let architecture = self.architecture.clone().unwrap_or_default();
        let origin = self.location.clone();
        let asked = HeadOptions::default().first_embedding;
        let settings = Settings::new(&origin, config)?;
        let spec = MtpSpec::read(&settings, &architecture, Some((tensors, naming)), asked)?;
        self.draft_head = Some(DraftHead::of_mtp(&spec));
        layout::check(spec.tensors(), tensors)?;
        self.can_draft = true;
        Ok(())
    }

    /// Fills in what an EAGLE head does; what is wrong with it is the error.
    fn describe_eagle(&mut self, config: &Value, tensors: &dyn TensorSource) -> Result<()> {
        let architecture = self.architecture.clone().unwrap_or_default();
        let origin = self.location.clone();
        let spec = EagleSpec::of(&Settings::new(&origin, config)?, &architecture, tensors)?;
        self.draft_head = Some(DraftHead::of_eagle(&spec));
        self.can_draft = true;
        Ok(())
    }

    /// Fills in what only heads have; what is wrong with the head is the reason, if anything is.
    fn describe_head(
        &mut self,
        config: &Value,
        tensors: Option<&dyn TensorSource>,
        kind: Option<HeadKind>,
    ) {
        let architecture = self.architecture.clone().unwrap_or_default();
        let origin = self.location.clone();
        let read = Settings::new(&origin, config)
            .and_then(|s| Eagle3Spec::read(&s, &architecture, tensors, &HeadOptions::default()));
        self.servable = false;
        let spec = match read {
            Ok(spec) => spec,
            Err(e) => {
                self.reason = Some(e.to_string());
                return;
            }
        };
        self.parameters = Some(spec.parameters());
        let layer = &spec.layer;
        self.vocab_size = Some(layer.vocab_size as u64);
        self.hidden_size = Some(layer.hidden_size as u64);
        self.intermediate_size = match &layer.layers[0].ffn {
            FeedForward::Dense(dense) => Some(dense.width as u64),
            FeedForward::Experts(experts) => Some(experts.width as u64),
        };
        self.layers = Some(layer.layers.len() as u64);
        let AttentionSpec { heads, rope, .. } = layer.first_attention();
        self.heads = Some(heads.heads as u64);
        self.context_length = Some(layer.max_positions as u64);
        self.kv_heads = Some(heads.kv_heads as u64);
        self.head_dim = Some(heads.head_dim as u64);
        self.rope = Some(rope.to_string());
        self.memory = Some(MemoryEstimate::of_head(&spec));
        self.draft_head = Some(DraftHead::of_eagle3(&spec, kind));
        let fits = tensors.map(|t| layout::check(spec.tensors(), t)).transpose();
        self.can_draft = fits.is_ok();
        let (reason, setting) = match fits {
            Ok(_) => {
                let reason = "it is an EAGLE-3 head and drafts for a model".to_owned();
                (reason, Some(Setting::Draft(Some("EAGLE3"))))
            }
            Err(e) => (e.to_string(), e.setting()),
        };
        (self.reason, self.setting) = (Some(reason), setting);
    }
}

/// Why a head is not served, and how it is used.
fn drafts_only(algorithm: &'static str, kind: HeadKind) -> (String, Option<Setting>) {
    let by = kind.known_by();
    let reason = format!("it is a draft head ({algorithm}, known by {by}) and drafts for a model");
    (reason, Some(Setting::Draft(Some(algorithm))))
}

/// The rotary embeddings of all kinds of layers.
fn ropes(spec: &ModelSpec) -> String {
    let rope = |group: memory::KvGroup| {
        let Mixer::Attention(AttentionSpec { rope, window, .. }) = group.mixer;
        match window {
            Some(_) => format!("{rope} in {} layers with a window", group.layers),
            None => rope.to_string(),
        }
    };
    spec.kv_groups().into_iter().map(rope).collect::<Vec<_>>().join("; ")
}

/// The experts of a model and in how many layers it has them.
fn experts(spec: &ModelSpec) -> Option<String> {
    let mut sparse = spec.layers.iter().filter_map(|layer| layer.ffn.experts());
    let first = sparse.next()?;
    Some(format!(
        "{} of width {}, {} for each token, in {} of {} layers",
        first.experts,
        first.width,
        first.per_token,
        1 + sparse.count(),
        spec.layers.len()
    ))
}

fn elements(tensors: &dyn TensorSource) -> u64 {
    let infos = tensors.names().into_iter().filter_map(|name| tensors.info(name));
    // Types that are not read have shapes that were not checked: a lie saturates.
    let counts = infos.map(|info| info.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64)));
    counts.fold(0, u64::saturating_add)
}

fn files(folder: &std::path::Path) -> Vec<FileSize> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<FileSize> = entries
        .filter_map(|entry| {
            // Hub snapshots are links: follow them.
            let kind = std::fs::metadata(entry.path()).ok().filter(|m| m.is_file())?;
            Some(FileSize { name: entry.file_name().to_string_lossy().into(), bytes: kind.len() })
        })
        .collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}
