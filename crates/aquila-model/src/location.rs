//! From the name of a model to the place where it is.

use std::env;
use std::path::{Path, PathBuf};

use crate::{Error, Result, hub, preset, shipped};

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A config that ships with the code, without weights.
    Preset(String),
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// How far the download of one file has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Download {
    /// The file.
    pub file: String,
    /// Bytes that have arrived.
    pub done_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
}

/// Finds the model that `name` means, in the places of this machine: a preset (`preset:NAME`), a
/// folder, a shipped model, a hub id in the local cache or, where the feature `hub` is on, on the
/// hub. Refused with all that was tried.
pub fn resolve(name: &str) -> Result<Location> {
    resolve_with_progress(name, &mut |_| {})
}

/// [`resolve`], told how a download comes along.
pub fn resolve_with_progress(name: &str, progress: &mut dyn FnMut(Download)) -> Result<Location> {
    Places::of_this_machine().resolve(name, progress)
}

/// The folders in which models are looked for.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// Folders that may hold shipped models, as archives or unpacked.
    pub shipped: Vec<PathBuf>,
    /// The folder that archives are unpacked into.
    pub unpacked: Option<PathBuf>,
    /// The cache of the Hugging Face hub.
    pub hub: Option<PathBuf>,
}

impl Places {
    /// The places that the environment, the binary and the source tree name.
    pub fn of_this_machine() -> Self {
        let folder =
            |variable: &str| env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = folder("HOME").or_else(|| folder("USERPROFILE"));
        let under_home = |path: &str| home.as_ref().map(|h| h.join(path));
        let cache = folder("XDG_CACHE_HOME").or_else(|| under_home(".cache"));
        let data = folder("XDG_DATA_HOME").or_else(|| under_home(".local/share"));

        let mut shipped: Vec<PathBuf> = folder("AQUILA_MODELS").into_iter().collect();
        if let Some(beside) = env::current_exe().ok().as_deref().and_then(Path::parent) {
            shipped.extend([beside.to_owned(), beside.join("models")]);
            shipped.extend(beside.parent().map(|p| p.join("share/aquila/models")));
        }
        shipped.extend(data.map(|d| d.join("aquila/models")));
        shipped.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models"));

        let hub = folder("HF_HUB_CACHE")
            .or_else(|| folder("HF_HOME").map(|h| h.join("hub")))
            .or_else(|| cache.as_ref().map(|c| c.join("huggingface/hub")));
        Self { shipped, unpacked: cache.map(|c| c.join("aquila/models")), hub }
    }

    /// Finds the model that `name` means in these places.
    pub fn resolve(&self, name: &str, progress: &mut dyn FnMut(Download)) -> Result<Location> {
        if let Some(preset) = name.strip_prefix(preset::PREFIX) {
            return match preset::config(preset) {
                Some(_) => Ok(Location::Preset(preset.to_owned())),
                None => Err(preset::unknown(preset)),
            };
        }
        let mut tried = Vec::new();
        let path = Path::new(name);
        if path.is_dir() {
            return Ok(Location::Folder(path.to_owned()));
        }
        tried.push(if path.exists() {
            "it is a file, and a model is a folder".to_owned()
        } else {
            "there is no such folder".to_owned()
        });
        if shipped::is_shipped(name) {
            match shipped::find(self, name)? {
                Ok(folder) => return Ok(Location::Folder(folder)),
                Err(reasons) => tried.extend(reasons),
            }
        } else {
            let names = shipped::shipped_models().collect::<Vec<_>>().join(", ");
            tried.push(format!("shipped models are {names}"));
        }
        match hub::HubId::parse(name) {
            None => tried.push("it is no hub id of the form org/name".into()),
            Some(id) => {
                match &self.hub {
                    None => tried.push("no hub cache: neither HF_HOME nor HOME is set".into()),
                    Some(cache) => match id.find(cache) {
                        Ok(folder) => return Ok(Location::Folder(folder)),
                        Err(reason) => tried.push(reason),
                    },
                }
                match id.download(self.hub.as_deref(), progress) {
                    Ok(folder) => return Ok(Location::Folder(folder)),
                    Err(reason) => tried.push(reason),
                }
            }
        }
        Err(Error::NotFound { name: name.into(), tried })
    }
}
