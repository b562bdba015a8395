//! From the name of a model to the place where it is.

use std::path::{Path, PathBuf};

use crate::{Error, Result, preset};

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A config that ships with the code, without weights.
    Preset(String),
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// Finds the model that `name` means.
pub fn resolve(name: &str) -> Result<Location> {
    if let Some(preset) = name.strip_prefix(preset::PREFIX) {
        return Ok(Location::Preset(preset.to_owned()));
    }
    if Path::new(name).is_dir() {
        return Ok(Location::Folder(name.into()));
    }
    Err(Error::NotFound { name: name.into(), tried: vec!["a folder of that name".into()] })
}
