//! Safetensors files from tensors in memory.

use aquila_compute::{DType, HostTensor};
use serde_json::{Map, Value, json};

/// A file of these tensors, each under the name that it comes with.
pub fn safetensors_file<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a HostTensor)>,
) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let dtype = match tensor.dtype() {
            DType::I64 => "I64",
            DType::Bool => "BOOL",
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
            DType::F32 => "F32",
        };
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes());
        let offsets = [begin, data.len()];
        let entry = json!({ "dtype": dtype, "shape": tensor.shape(), "data_offsets": offsets });
        header.insert(name.to_owned(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    file
}
