//! Small heads in memory, to be changed and written in any layout.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use aquila_compute::{DType, HostTensor};
use aquila_model::{Checkpoint, HeadCheckpoint, LoadFormat, Location, ModelSpec};
use serde_json::{Value, json};

use crate::safetensors_writer::safetensors_file;
use crate::sequence::fixture;
use crate::torch_writer::torch_file;

/// A head in memory, to be spoiled and written.
pub struct Head {
    pub config: Value,
    pub tensors: BTreeMap<String, HostTensor>,
}

pub fn target() -> Checkpoint {
    Checkpoint::open(&Location::Folder(fixture("llama3-rope")), LoadFormat::Auto).unwrap()
}

/// A small head with random weights for the small target; every second token can be drafted.
pub fn head() -> Head {
    let target = target();
    let spec: &ModelSpec = target.spec();
    let mut config = target.config().clone();
    config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    config["num_hidden_layers"] = json!(1);
    config["draft_vocab_size"] = json!(spec.vocab_size / 2);
    config["target_hidden_size"] = json!(spec.hidden_size);
    config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [0, 2] });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let location = Location::Folder(folder.path().into());
    let random = HeadCheckpoint::open(&location, LoadFormat::Dummy { seed: 3 }, spec).unwrap();
    let source = random.tensors();
    let all = source.names().into_iter().map(|n| (n.to_owned(), source.get(n).unwrap()));
    Head { config, tensors: all.collect() }
}

impl Head {
    pub fn set(&mut self, name: &str, dtype: DType, shape: Vec<usize>, bytes: Vec<u8>) {
        let tensor = HostTensor::new(name, dtype, shape, bytes.into()).unwrap();
        self.tensors.insert(name.into(), tensor);
    }

    /// Renames tensors whose names begin with `from`.
    pub fn rename(&mut self, from: &str, to: &str) {
        for tensor in std::mem::take(&mut self.tensors).into_values() {
            let name = match tensor.name().strip_prefix(from) {
                Some(rest) => format!("{to}{rest}"),
                None => tensor.name().to_owned(),
            };
            self.set(&name, tensor.dtype(), tensor.shape().to_vec(), tensor.bytes().to_vec());
        }
    }

    pub fn offsets(&self) -> Vec<i64> {
        let bytes = self.tensors["d2t"].bytes();
        bytes.chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn set_offsets(&mut self, offsets: &[i64]) {
        let bytes = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
        self.set("d2t", DType::I64, vec![offsets.len()], bytes);
    }

    /// Writes the head as safetensors.
    pub fn write(&self, folder: &Path) -> Location {
        let tensors = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let file = safetensors_file(tensors);
        fs::write(folder.join("model.safetensors"), file).unwrap();
        self.write_config(folder)
    }

    /// Writes the head as a torch file.
    pub fn write_torch(&self, folder: &Path) -> Location {
        fs::write(folder.join("pytorch_model.bin"), torch_file(self.tensors.values())).unwrap();
        self.write_config(folder)
    }

    fn write_config(&self, folder: &Path) -> Location {
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        Location::Folder(folder.into())
    }
}
