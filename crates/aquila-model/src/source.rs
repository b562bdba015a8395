//! Where the tensors of a checkpoint come from.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use aquila_compute::{DType, HostTensor};
use bytes::Bytes;
use serde_json::Value;

use crate::config::shown;
use crate::safetensors::Safetensors;
use crate::torch_file::TorchTensors;
use crate::{Error, Result};

/// What is known of a tensor before its bytes are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type, where it is one that Aquila reads.
    pub dtype: Option<DType>,
    /// The element type as the file names it.
    pub stored_as: String,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// How many bytes it has.
    pub bytes: u64,
    /// The file it is in.
    pub origin: String,
}

impl TensorInfo {
    /// Whether the tensor can be weights.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Some(DType::Bf16 | DType::F16 | DType::F32))
    }

    /// The tensor of this name, with its bytes; refused where its type is not one that is read.
    pub(crate) fn tensor(&self, name: &str, bytes: Bytes) -> Result<HostTensor> {
        let dtype = self.dtype.ok_or_else(|| {
            Error::tensor(&self.origin, name, format!("type {} is not read", self.stored_as))
        })?;
        Ok(HostTensor::new(name, dtype, self.shape.clone(), bytes)?)
    }
}

/// Named tensors: a file, several, or random numbers.
pub trait TensorSource: Send + Sync {
    /// Where the tensors come from, for error texts.
    fn origin(&self) -> &str;

    /// All names, sorted.
    fn names(&self) -> Vec<&str>;

    /// What is known of a tensor, if it exists.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// A tensor; refused by name if it does not exist or cannot be read.
    fn get(&self, name: &str) -> Result<HostTensor>;

    /// Whether a tensor exists.
    fn contains(&self, name: &str) -> bool {
        self.info(name).is_some()
    }
}

/// The tensors of a checkpoint folder: safetensors or, where there are none, torch files.
pub(crate) fn open_folder(folder: &Path) -> Result<Box<dyn TensorSource>> {
    if Safetensors::are_in(folder) {
        return Ok(Box::new(Safetensors::open_folder(folder)?));
    }
    if let Some(tensors) = TorchTensors::open_folder(folder)? {
        return Ok(Box::new(tensors));
    }
    let problem = "holds neither model.safetensors nor model.safetensors.index.json, and no torch \
                   file (pytorch_model.bin) either";
    Err(Error::file(folder, problem))
}

/// A JSON file.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).map_err(|e| Error::file(path, e))?;
    serde_json::from_slice(&text).map_err(|e| Error::file(path, format!("not valid JSON: {e}")))
}

/// The tensors of a checkpoint in several files beside its index, each file read once.
pub(crate) fn read_shards<T>(
    index: &Path,
    read: impl Fn(&Path) -> Result<BTreeMap<String, T>>,
) -> Result<BTreeMap<String, T>> {
    let mut shards = BTreeMap::new();
    let mut tensors = BTreeMap::new();
    for (tensor, shard) in read_weight_map(index)? {
        let path = index.with_file_name(&shard);
        let shard = match shards.entry(shard) {
            Entry::Vacant(place) => place.insert(read(&path)?),
            Entry::Occupied(place) => place.into_mut(),
        };
        let found = shard.remove(&tensor).ok_or_else(|| {
            let index = index.file_name().unwrap_or_default().display();
            let problem = format!("is missing, though {index} says that it is here");
            Error::tensor(&path.display().to_string(), &tensor, problem)
        })?;
        tensors.insert(tensor, found);
    }
    Ok(tensors)
}

/// The index of a checkpoint in several files: each tensor and the file that it is in.
fn read_weight_map(index: &Path) -> Result<Vec<(String, String)>> {
    let value = read_json(index)?;
    let Some(map) = value.get("weight_map").and_then(Value::as_object) else {
        return Err(Error::file(index, "has no weight_map"));
    };
    let place = |(tensor, shard): (&String, &Value)| {
        let name = shard.as_str().filter(|name| is_plain_name(name)).ok_or_else(|| {
            Error::file(index, format!("weight_map.{tensor}: {} names no file", shown(shard)))
        })?;
        Ok((tensor.clone(), name.to_owned()))
    };
    map.iter().map(place).collect()
}

/// Whether a name is that of a file right in the folder.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\', '\0']) && name != "." && name != ".."
}
