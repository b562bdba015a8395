//! Files that `torch.save` writes: a zip of a pickle, which says what there is, and of storages,
//! which hold the bytes.
//!
//! The invariant: every tensor lies within a storage that lies within the file, and is no larger
//! than that storage, before anything is believed of it. Nothing of the pickle is executed.

mod names;
mod pickle;
mod value;
mod zip;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aquila_compute::{DType, HostTensor};
use bytes::Bytes;

use crate::source::{TensorInfo, TensorSource, read_shards};
use crate::{Error, Result, mapped};
use names::Element;
use pickle::Pickle;
use value::{Object, Strided, Value};

/// The file of a checkpoint in one piece.
const SINGLE: &str = "pytorch_model.bin";
/// The index of a checkpoint in several.
const INDEX: &str = "pytorch_model.bin.index.json";
/// How the names of torch files end.
const ENDINGS: &[&str] = &["bin", "pt", "pth"];
/// How the names of files begin that training leaves beside the weights.
const OF_TRAINING: &[&str] = &["training", "optimizer", "scheduler", "rng_state", "scaler"];
/// Where a file may keep its tensors, if not at the top.
const WITHIN: &[&str] = &["state_dict", "model_state_dict", "model", "module"];

/// The tensors of one torch file or of several.
pub struct TorchTensors {
    origin: String,
    tensors: BTreeMap<String, Entry>,
}

struct Entry {
    info: TensorInfo,
    storage: Bytes,
    view: View,
}

/// Where a tensor lies in its storage, in elements.
#[derive(Debug, Clone)]
struct View {
    element: usize,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl TorchTensors {
    /// The tensors of one file.
    pub fn open_file(path: &Path) -> Result<Self> {
        Ok(Self { origin: path.display().to_string(), tensors: read(path)? })
    }

    /// The tensors of a checkpoint folder: in one file, or in those that its index names; none
    /// where it holds no torch file. What training leaves there is passed over.
    pub fn open_folder(folder: &Path) -> Result<Option<Self>> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        if single.exists() {
            return Self::open_file(&single).map(Some);
        }
        if index.exists() {
            let tensors = read_shards(&index, read)?;
            return Ok(Some(Self { origin: index.display().to_string(), tensors }));
        }
        match other_files(folder).as_slice() {
            [] => Ok(None),
            [one] => Self::open_file(one).map(Some),
            several => {
                let names: Vec<_> =
                    several.iter().filter_map(|p| p.file_name()?.to_str()).collect();
                let names = names.join(", ");
                Err(Error::file(folder, format!("holds {names}; call the one to load {SINGLE}")))
            }
        }
    }
}

/// Whether a file, by its name, may be weights in this format.
pub(crate) fn is_weight_file(name: &str) -> bool {
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    ending.is_some_and(|ending| ENDINGS.contains(&ending))
        && !OF_TRAINING.iter().any(|start| name.starts_with(start))
}

/// The torch files of a folder that may be weights, sorted.
fn other_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let weights = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(|n| n.to_str());
        name.is_some_and(is_weight_file) && path.is_file()
    });
    let mut weights: Vec<_> = weights.collect();
    weights.sort();
    weights
}

impl TensorSource for TorchTensors {
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
        let Some(Entry { info, storage, view }) = self.tensors.get(name) else {
            return Err(Error::tensor(&self.origin, name, "is missing"));
        };
        info.tensor(name, view.bytes(storage))
    }
}

/// The whole numbers of a file that holds one list or one tensor of them.
pub(crate) fn read_numbers(path: &Path, file: &Bytes) -> Result<Vec<i64>> {
    let wrong = |problem: String| Error::file(path, problem);
    let archive = Archive::open(file).map_err(wrong)?;
    let pickle = Pickle::read(archive.pickle()).map_err(wrong)?;
    match pickle.object(pickle.top) {
        Some(Object::List(parts) | Object::Tuple(parts)) => {
            let number = |value: &Value<'_>| match value {
                Value::Int(n) => Some(*n),
                _ => None,
            };
            let numbers = parts.iter().map(number).collect::<Option<Vec<_>>>();
            numbers.ok_or_else(|| wrong("holds a list of other things than whole numbers".into()))
        }
        Some(Object::Tensor(tensor)) => {
            let (storage, view) = archive.view(tensor).map_err(wrong)?;
            let bytes = view.bytes(&storage);
            match tensor.storage.element {
                _ if view.shape.len() != 1 => {
                    Err(wrong(format!("holds a tensor of shape {:?}, not a list", view.shape)))
                }
                Element::Long => {
                    Ok(bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
                }
                Element::Int => {
                    let numbers = bytes.as_chunks::<4>().0.iter();
                    Ok(numbers.map(|b| i64::from(i32::from_le_bytes(*b))).collect())
                }
                other => Err(wrong(format!("holds a tensor of {}, not of ids", other.name()))),
            }
        }
        _ => Err(wrong("holds neither a list nor a tensor".into())),
    }
}

fn read(path: &Path) -> Result<BTreeMap<String, Entry>> {
    let file = mapped::map(path)?;
    let wrong = |problem: String| Error::file(path, problem);
    let archive = Archive::open(&file).map_err(wrong)?;
    let pickle = Pickle::read(archive.pickle()).map_err(wrong)?;
    let named = tensors(&pickle).ok_or_else(|| wrong("holds no dictionary of tensors".into()))?;
    let origin = path.display().to_string();
    let mut entries = BTreeMap::new();
    for (name, tensor) in named {
        let found = archive.view(tensor);
        let (storage, view) = found.map_err(|problem| Error::tensor(&origin, name, problem))?;
        let element = tensor.storage.element;
        let info = TensorInfo {
            dtype: match element {
                Element::Half => Some(DType::F16),
                Element::BFloat16 => Some(DType::Bf16),
                Element::Float => Some(DType::F32),
                Element::Long => Some(DType::I64),
                Element::Bool => Some(DType::Bool),
                _ => None,
            },
            stored_as: element.name().to_owned(),
            shape: view.shape.clone(),
            bytes: (view.elements() * view.element) as u64,
            origin: origin.clone(),
        };
        entries.insert(name.to_owned(), Entry { info, storage, view });
    }
    Ok(entries)
}

/// The named tensors of a pickle: at its top or, where there is none, one dictionary down.
fn tensors<'p, 'a>(pickle: &'p Pickle<'a>) -> Option<Vec<(&'a str, &'p Strided<'a>)>> {
    let Some(Object::Dict(top)) = pickle.object(pickle.top) else { return None };
    let named = |dict: &'p [(Value<'a>, Value<'a>)]| -> Vec<_> {
        let pairs = dict.iter().filter_map(|&(key, value)| match (key, pickle.object(value)) {
            (Value::Text(name), Some(Object::Tensor(tensor))) => Some((name, tensor)),
            _ => None,
        });
        pairs.collect()
    };
    let found = named(top);
    if !found.is_empty() {
        return Some(found);
    }
    let within = top.iter().find_map(|&(key, value)| match (key, pickle.object(value)) {
        (Value::Text(name), Some(Object::Dict(dict))) if WITHIN.contains(&name) => Some(dict),
        _ => None,
    });
    Some(within.map(|dict| named(dict)).unwrap_or_default())
}

/// A torch file and where its parts are.
struct Archive<'f> {
    file: &'f Bytes,
    members: BTreeMap<String, std::ops::Range<usize>>,
    /// What the names of all members begin with.
    root: String,
    pickle: std::ops::Range<usize>,
}

impl<'f> Archive<'f> {
    fn open(file: &'f Bytes) -> std::result::Result<Self, String> {
        if file.starts_with(b"version https://git-lfs") {
            return Err("is a Git LFS pointer; fetch the file itself (git lfs pull)".into());
        }
        if file.starts_with(&[0x80]) {
            return Err(
                "is a torch file of the form before torch 1.6, which is not read; load it \
                        with torch and save it again, as safetensors if you can"
                    .into(),
            );
        }
        if !file.starts_with(b"PK") {
            return Err(format!("is no torch file ({} bytes that are no zip)", file.len()));
        }
        let members = zip::members(file)?;
        let mut pickles = members.iter().filter_map(|(name, range)| {
            let root = name.strip_suffix("data.pkl")?;
            let one_folder = root.is_empty() || root.find('/') == Some(root.len() - 1);
            one_folder.then(|| (root.to_owned(), range.clone()))
        });
        let found = pickles.next().ok_or("is a zip file, but not one of torch: no data.pkl")?;
        if pickles.next().is_some() {
            return Err("has more than one data.pkl".into());
        }
        let (root, pickle) = found;
        let order = members.get(&format!("{root}byteorder")).map(|range| &file[range.clone()]);
        if order.is_some_and(|order| order != b"little") {
            return Err("was written on a big-endian machine, which is not read".into());
        }
        Ok(Self { file, members, root, pickle })
    }

    fn pickle(&self) -> &'f [u8] {
        &self.file[self.pickle.clone()]
    }

    /// The bytes of a tensor's storage and where it lies in them, all of it checked.
    fn view(&self, tensor: &Strided<'_>) -> std::result::Result<(Bytes, View), String> {
        let storage = tensor.storage;
        let (name, element) =
            (format!("{}data/{}", self.root, storage.key), storage.element.size());
        let member = self.members.get(&name);
        let range = member.ok_or_else(|| format!("its bytes are missing: no member {name}"))?;
        let room = range.len() / element;
        if storage.elements > room as u64 {
            return Err(format!(
                "its storage is said to have {} elements, and member {name} has {room}",
                storage.elements
            ));
        }
        let outside = || {
            format!(
                "shape {:?} with strides {:?} from element {} leaves a storage of {room}",
                tensor.shape, tensor.strides, tensor.offset
            )
        };
        let elements = tensor.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let elements = elements.ok_or_else(outside)?;
        // A view that repeats elements could be of any size, whatever the file has.
        if elements > room as u64 {
            return Err(outside());
        }
        if elements > 0 {
            let last =
                tensor.shape.iter().zip(&tensor.strides).try_fold(tensor.offset, |at, (&d, &s)| {
                    at.checked_add((d - 1).checked_mul(s)?)
                });
            last.filter(|&last| last < room as u64).ok_or_else(outside)?;
        }
        // The shape of an empty tensor, and strides that are never walked, may still be wild.
        let narrow = |list: &[u64]| -> Option<Vec<usize>> {
            list.iter().map(|&n| usize::try_from(n).ok()).collect()
        };
        let view = View {
            element,
            offset: if elements > 0 { tensor.offset as usize } else { 0 },
            shape: narrow(&tensor.shape).ok_or_else(outside)?,
            strides: narrow(&tensor.strides).ok_or_else(outside)?,
        };
        Ok((self.file.slice(range.clone()), view))
    }
}

impl View {
    fn elements(&self) -> usize {
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    fn is_row_major(&self) -> bool {
        let mut next = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&d, &s)| {
            let fits = d == 1 || s == next;
            next *= d;
            fits
        })
    }

    /// The elements in row-major order; those that are so already are not copied.
    fn bytes(&self, storage: &Bytes) -> Bytes {
        let size = self.element;
        let elements = self.elements();
        if elements == 0 || self.is_row_major() {
            return storage.slice(self.offset * size..(self.offset + elements) * size);
        }
        let mut bytes = Vec::with_capacity(elements * size);
        let mut index = vec![0; self.shape.len()];
        for _ in 0..elements {
            let steps = index.iter().zip(&self.strides);
            let at = self.offset + steps.map(|(i, s)| i * s).sum::<usize>();
            bytes.extend_from_slice(&storage[at * size..][..size]);
            for (i, &d) in index.iter_mut().zip(&self.shape).rev() {
                *i += 1;
                if *i < d {
                    break;
                }
                *i = 0;
            }
        }
        bytes.into()
    }
}
