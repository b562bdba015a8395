//! From the name of a model to the place where it is.

use std::env;
use std::path::{Path, PathBuf};

use crate::hub::{self, Hub, HubEvent};
use crate::{Error, Result, preset, shipped};

const NO_CACHE: &str = "no hub cache: neither HF_HOME nor HOME is set";

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A config that ships with the code, without weights.
    Preset(String),
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// Finds the model that `name` means, in the places of this machine: a preset (`preset:NAME`), a
/// folder, a shipped model, or a model of the hub. Refused with all that was tried.
pub fn resolve(name: &str) -> Result<Location> {
    Places::of_this_machine().resolve(name, None, &mut |_| {})
}

/// The folders in which models are looked for.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// Folders that may hold shipped models, as archives or unpacked.
    pub shipped: Vec<PathBuf>,
    /// The folder that archives are unpacked into.
    pub unpacked: Option<PathBuf>,
    /// The Hugging Face hub and its cache.
    pub hub: Option<Hub>,
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

        let hub = Hub::of_environment(cache.as_ref().map(|c| c.join("huggingface")));
        Self { shipped, unpacked: cache.map(|c| c.join("aquila/models")), hub }
    }

    /// Finds the model that `name` means in these places, at a revision where it is one of the hub.
    pub fn resolve(
        &self,
        name: &str,
        revision: Option<&str>,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<Location> {
        // A launch line may say main of any model.
        let revision = revision.filter(|revision| *revision != hub::MAIN);
        let without = |location: Location, what: &'static str| match revision {
            None => Ok(location),
            Some(revision) => {
                Err(Error::Revision { name: name.into(), revision: revision.into(), what })
            }
        };
        if let Some(preset) = name.strip_prefix(preset::PREFIX) {
            return match preset::config(preset) {
                Some(_) => without(Location::Preset(preset.to_owned()), "a preset"),
                None => Err(preset::unknown(preset)),
            };
        }
        let mut tried = Vec::new();
        let path = Path::new(name);
        if path.is_dir() {
            return without(Location::Folder(path.to_owned()), "a folder");
        }
        tried.push(if path.exists() {
            "it is a file, and a model is a folder".to_owned()
        } else {
            "there is no such folder".to_owned()
        });
        if shipped::is_shipped(name) {
            match shipped::find(self, name)? {
                Ok(folder) => return without(Location::Folder(folder), "a shipped model"),
                Err(reasons) => tried.extend(reasons),
            }
        } else {
            let names = shipped::shipped_models().collect::<Vec<_>>().join(", ");
            tried.push(format!("shipped models are {names}"));
        }
        match (hub::HubId::parse(name), &self.hub) {
            (None, _) => tried.push("it is no hub id of the form org/name".into()),
            (Some(_), None) => tried.push(NO_CACHE.into()),
            (Some(id), Some(hub)) => match hub.model(id, revision.unwrap_or(hub::MAIN), on_event) {
                Ok(folder) => return Ok(Location::Folder(folder)),
                Err(reasons) => tried.extend(reasons),
            },
        }
        Err(Error::NotFound { name: name.into(), tried })
    }

    /// Finds the file that `name` means: a path, or `org/name/file` of the hub.
    pub fn resolve_file(
        &self,
        name: &Path,
        on_event: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<PathBuf> {
        let of_hub = name.to_str().filter(|_| !name.exists()).and_then(hub::HubId::parse_file);
        let (Some((id, file)), Some(hub)) = (of_hub, &self.hub) else {
            // Whoever opens it says what is wrong with it.
            return Ok(name.to_owned());
        };
        hub.file(id, file, on_event).map_err(|reasons| {
            Error::file(name, format!("there is no such file; {}", reasons.join("; ")))
        })
    }
}
