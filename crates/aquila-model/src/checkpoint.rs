//! A checkpoint: a config that was understood, and tensors that fit it.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::Settings;
use crate::dummy::Dummy;
use crate::location::Location;
use crate::source::{TensorSource, open_folder, read_json};
use crate::{ModelSpec, Result, arch, layout, preset};

/// Where the weights of a checkpoint come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadFormat {
    /// The checkpoint's files; random numbers for a preset, which has none.
    #[default]
    Auto,
    /// Random numbers, made from the config alone.
    Dummy {
        /// What they are drawn from.
        seed: u64,
    },
}

/// A model on disk, or a preset: everything but its weights has been read and checked.
pub struct Checkpoint {
    spec: ModelSpec,
    config: Value,
    generation_config: Option<Value>,
    eos_token_ids: Vec<u32>,
    folder: Option<PathBuf>,
    tensors: Box<dyn TensorSource>,
    tensor_bytes: u64,
}

impl Checkpoint {
    /// Opens what stands at `location`; refuses what cannot be served, by name.
    pub fn open(location: &Location, load: LoadFormat) -> Result<Self> {
        let Configs { origin, config, generation_config, folder } = Configs::read(location)?;
        let spec = arch::read(&origin, &config)?;
        let eos_token_ids = eos(&origin, &config, folder.as_deref(), generation_config.as_ref())?;
        let tensors: Box<dyn TensorSource> = match (&folder, load) {
            (Some(folder), LoadFormat::Auto) => open_folder(folder)?,
            (_, LoadFormat::Dummy { seed }) => Box::new(Dummy::new(&spec, seed)),
            (None, LoadFormat::Auto) => Box::new(Dummy::new(&spec, 0)),
        };
        let tensor_bytes = layout::check(spec.tensors(), &*tensors)?;
        Ok(Self { spec, config, generation_config, eos_token_ids, folder, tensors, tensor_bytes })
    }

    /// The description that drives the decoder.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// `config.json` as it stands.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json` as it stands, if there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// The tokens that end a text: those of both configs, ascending.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// The folder; a preset has none.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The tensors.
    pub fn tensors(&self) -> &dyn TensorSource {
        &*self.tensors
    }

    /// Bytes of the model's tensors as they are stored.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }
}

/// The JSON files of a location, before anything is made of them.
pub(crate) struct Configs {
    pub origin: String,
    pub config: Value,
    pub generation_config: Option<Value>,
    pub folder: Option<PathBuf>,
}

impl Configs {
    pub fn read(location: &Location) -> Result<Self> {
        match location {
            Location::Preset(name) => {
                let config = preset::config(name).ok_or_else(|| preset::unknown(name))?;
                let origin = format!("{}{name}", preset::PREFIX);
                Ok(Self { origin, config, generation_config: None, folder: None })
            }
            Location::Folder(folder) => {
                let path = folder.join("config.json");
                let generation = folder.join("generation_config.json");
                Ok(Self {
                    origin: path.display().to_string(),
                    config: read_json(&path)?,
                    generation_config: generation
                        .exists()
                        .then(|| read_json(&generation))
                        .transpose()?,
                    folder: Some(folder.clone()),
                })
            }
        }
    }
}

pub(crate) fn eos(
    origin: &str,
    config: &Value,
    folder: Option<&Path>,
    generation: Option<&Value>,
) -> Result<Vec<u32>> {
    let mut ids = Settings::new(origin, config)?.token_ids("eos_token_id")?;
    if let (Some(generation), Some(folder)) = (generation, folder) {
        let origin = folder.join("generation_config.json").display().to_string();
        ids.extend(Settings::new(&origin, generation)?.token_ids("eos_token_id")?);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
