//! What drafts, from its checkpoint to the backend.

use std::path::Path;

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{KvDtype, WeightFormat};
use aquila_engine::{EngineConfig, Needs};
use aquila_model::{Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, LoadFormat, memory};
use aquila_spec::{Algorithm as Drafting, Drafter, Eagle3, Speculator, Standalone};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::flags::{Algorithm, Speculative};
use crate::start::find;

/// A draft whose checkpoint fits its target.
pub enum Draft {
    /// An EAGLE-3 head.
    Eagle3(Box<HeadCheckpoint>),
    /// A model of its own.
    Standalone(Box<Checkpoint>),
}

impl Draft {
    /// Opens what the flags name; what does not fit the target is refused by name.
    pub fn open(
        flags: &Speculative,
        target: &Checkpoint,
        load: LoadFormat,
        quiet: bool,
    ) -> Result<Self> {
        let location = find(&flags.draft, quiet)?;
        if flags.algorithm == Algorithm::Eagle3 {
            let head = HeadCheckpoint::open(&location, load, target.spec())?;
            return Ok(Draft::Eagle3(Box::new(head)));
        }
        let draft = Checkpoint::open(&location, load)?;
        let (ours, theirs) = (target.spec().vocab_size, draft.spec().vocab_size);
        if ours != theirs {
            return Err(Error::Other(format!(
                "{} cannot draft for this model: it has {theirs} tokens, the model {ours}",
                flags.draft
            )));
        }
        if !same_tokens(target.folder(), draft.folder())? {
            return Err(Error::Other(format!(
                "{} cannot draft for this model: their tokenizer.json give tokens other ids",
                flags.draft
            )));
        }
        Ok(Draft::Standalone(Box::new(draft)))
    }

    /// What it takes, for the budget.
    pub fn needs(&self, format: WeightFormat, config: &EngineConfig, target: &Checkpoint) -> Needs {
        let (bounds, dtype): (_, KvDtype) = (config.draft_bounds(), config.kv_dtype);
        let context = config.context_length;
        match self {
            Draft::Eagle3(head) => {
                let layers = head.capture_layers().len();
                Needs {
                    weights: head.spec().weight_bytes(format),
                    scratch: head.spec().scratch_bytes(bounds)
                        + head.spec().rope_bytes(context)
                        + memory::capture_bytes(target.spec(), layers, config.max_rows()),
                    kv_per_token: head.spec().kv_bytes_per_token(dtype),
                }
            }
            Draft::Standalone(draft) => Needs {
                weights: memory::weight_bytes(draft.spec(), format),
                scratch: memory::scratch_bytes(draft.spec(), bounds)
                    + memory::rope_bytes(draft.spec(), context),
                kv_per_token: memory::kv_bytes_per_token(draft.spec(), dtype),
            },
        }
    }

    /// Puts it on the backend.
    pub fn load(
        &self,
        backend: &CpuBackend,
        target: &Decoder<CpuBackend>,
        format: WeightFormat,
        config: &EngineConfig,
    ) -> Result<Box<dyn Drafting<CpuBackend>>> {
        let (positions, bounds) = (config.context_length, config.draft_bounds());
        let drafter: Box<dyn Drafter<CpuBackend>> = match self {
            Draft::Eagle3(head) => {
                let table = target.embedding();
                let head = Eagle3Head::load(backend, head, format, positions, table, &mut |_| ())?;
                Box::new(Eagle3::new(backend, head, bounds)?)
            }
            Draft::Standalone(draft) => {
                let decoder = Decoder::load(backend, draft, format, positions, &mut |_| ())?;
                Box::new(Standalone::new(backend, decoder, bounds)?)
            }
        };
        let (slots, dtype) = (config.slots(), config.kv_dtype);
        Ok(Box::new(Speculator::new(backend, drafter, slots, dtype)?))
    }
}

/// Whether two folders' tokenizers give every token the same id; true where one has none.
fn same_tokens(target: Option<&Path>, draft: Option<&Path>) -> Result<bool> {
    let read = |folder: Option<&Path>| -> Result<Option<Value>> {
        let Some(path) = folder.map(|f| f.join("tokenizer.json")).filter(|p| p.exists()) else {
            return Ok(None);
        };
        let text = std::fs::read(&path).map_err(|e| Error::file(path.display(), e))?;
        let json = serde_json::from_slice(&text);
        json.map(Some).map_err(|e| Error::Other(format!("{}: {e}", path.display())))
    };
    let (Some(target), Some(draft)) = (read(target)?, read(draft)?) else { return Ok(true) };
    let tokens = |json: &Value| (json["model"]["vocab"].clone(), json["added_tokens"].clone());
    Ok(tokens(&target) == tokens(&draft))
}
