//! The safetensors format: a length, a JSON header, then the bytes of all tensors.
//!
//! The invariant: what the header says is checked against the file before anything is believed.
//! Tensors must follow each other without gap or overlap and end where the file ends.

use std::collections::BTreeMap;
use std::path::Path;

use aquila_compute::{DType, HostTensor};
use bytes::Bytes;
use serde_json::{Map, Value};

use crate::source::{TensorInfo, TensorSource, read_shards};
use crate::{Error, Result, mapped};

/// The largest header that is read; the format's own limit.
const LARGEST_HEADER: u64 = 100_000_000;

/// The file of a checkpoint in one piece.
const SINGLE: &str = "model.safetensors";
/// The index of a checkpoint in several.
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of one file or of several.
pub struct Safetensors {
    origin: String,
    tensors: BTreeMap<String, Entry>,
}

struct Entry {
    info: TensorInfo,
    bytes: Bytes,
}

impl Safetensors {
    /// The tensors of one file.
    pub fn open_file(path: &Path) -> Result<Self> {
        let bytes = mapped::map(path)?;
        Ok(Self { origin: path.display().to_string(), tensors: read(path, &bytes)? })
    }

    /// Whether a folder holds weights in this format.
    pub(crate) fn are_in(folder: &Path) -> bool {
        folder.join(SINGLE).exists() || folder.join(INDEX).exists()
    }

    /// The tensors of a checkpoint folder: in one file, or in those that its index names.
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        if single.exists() {
            return Self::open_file(&single);
        }
        if !index.exists() {
            return Err(Error::file(folder, format!("holds neither {SINGLE} nor {INDEX}")));
        }
        let tensors = read_shards(&index, |path| read(path, &mapped::map(path)?))?;
        Ok(Self { origin: index.display().to_string(), tensors })
    }
}

impl TensorSource for Safetensors {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.get(name).map(|entry| entry.info.clone())
    }

    fn get(&self, name: &str) -> Result<HostTensor> {
        let Some(Entry { info, bytes }) = self.tensors.get(name) else {
            return Err(Error::tensor(&self.origin, name, "is missing"));
        };
        info.tensor(name, bytes.clone())
    }
}

fn read(path: &Path, file: &Bytes) -> Result<BTreeMap<String, Entry>> {
    let wrong = |problem: String| Error::file(path, problem);
    if file.starts_with(b"version https://git-lfs") {
        return Err(wrong("is a Git LFS pointer; fetch the file itself (git lfs pull)".into()));
    }
    let Some(length) = file.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(wrong(format!("is truncated: {} bytes, and a header needs 8", file.len())));
    };
    if length > LARGEST_HEADER {
        return Err(wrong(format!("is not safetensors: header of {length} bytes")));
    }
    let start = 8 + length as usize;
    let Some(header) = file.get(8..start) else {
        return Err(wrong(format!("is truncated: {} bytes, header ends at {start}", file.len())));
    };
    let header: Map<String, Value> = serde_json::from_slice(header)
        .map_err(|e| wrong(format!("header is not valid JSON: {e}")))?;
    let origin = path.display().to_string();
    let mut entries = header
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, value)| Header::read(&origin, name, value))
        .collect::<Result<Vec<_>>>()?;
    entries.sort_by_key(|h| (h.begin, h.end));

    let data = file.slice(start..);
    let mut tensors = BTreeMap::new();
    let mut next = 0;
    for h in entries {
        if h.begin != next {
            let what = if h.begin < next { "overlaps another tensor" } else { "leaves a gap" };
            let problem = format!("{what}: begins at byte {}, expected {next}", h.begin);
            return Err(Error::tensor(&origin, h.name, problem));
        }
        next = h.end;
        let range = usize::try_from(h.begin).ok().zip(usize::try_from(h.end).ok());
        let bytes = match range {
            Some((begin, end)) if end <= data.len() => data.slice(begin..end),
            _ => {
                let problem = format!(
                    "ends at byte {}, but the file has {}: it is truncated",
                    h.end,
                    data.len()
                );
                return Err(Error::tensor(&origin, h.name, problem));
            }
        };
        tensors.insert(h.name.to_owned(), Entry { info: h.info, bytes });
    }
    if next != data.len() as u64 {
        return Err(wrong(format!("has {} bytes that no tensor owns", data.len() as u64 - next)));
    }
    Ok(tensors)
}

/// One tensor as the header describes it.
struct Header<'a> {
    name: &'a str,
    info: TensorInfo,
    begin: u64,
    end: u64,
}

impl<'a> Header<'a> {
    fn read(origin: &str, name: &'a str, value: &Value) -> Result<Self> {
        let wrong = |problem: &str| Error::tensor(origin, name, problem);
        let numbers = |field: &str| -> Option<Vec<u64>> {
            value.get(field)?.as_array()?.iter().map(Value::as_u64).collect()
        };
        let stored_as = value.get("dtype").and_then(Value::as_str);
        let stored_as = stored_as.ok_or_else(|| wrong("header has no dtype"))?;
        let shape = numbers("shape").ok_or_else(|| wrong("header has no shape"))?;
        let offsets = numbers("data_offsets");
        let Some(&[begin, end]) = offsets.as_deref() else {
            return Err(wrong("header has no data_offsets"));
        };
        if end < begin {
            return Err(wrong("ends before it begins"));
        }
        let dtype = match stored_as {
            "BF16" => Some(DType::Bf16),
            "F16" => Some(DType::F16),
            "F32" => Some(DType::F32),
            "I64" => Some(DType::I64),
            "BOOL" => Some(DType::Bool),
            _ => None,
        };
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        if let Some(dtype) = dtype
            && elements.and_then(|n| n.checked_mul(dtype.size() as u64)) != Some(end - begin)
        {
            let problem =
                format!("shape {shape:?} of {stored_as} does not have {} bytes", end - begin);
            return Err(wrong(&problem));
        }
        let shape =
            shape.iter().map(|&d| usize::try_from(d)).collect::<std::result::Result<_, _>>();
        let info = TensorInfo {
            dtype,
            stored_as: stored_as.to_owned(),
            shape: shape.map_err(|_| wrong("has a shape that does not fit in memory"))?,
            bytes: end - begin,
            origin: origin.to_owned(),
        };
        Ok(Self { name, info, begin, end })
    }
}
