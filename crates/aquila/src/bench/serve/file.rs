//! A file that a run leaves, opened before anything is measured: a name that cannot be written is
//! refused then. It has its name only once it is complete.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file in the making.
pub struct ResultFile {
    target: PathBuf,
    partial: PathBuf,
    flag: &'static str,
}

impl ResultFile {
    /// Begins the file that a flag names.
    pub fn create(flag: &'static str, path: &Path) -> Result<Self> {
        let partial = PathBuf::from(format!("{}.partial", path.display()));
        let failed = |e| Error::file(format!("{flag} {}", path.display()), e);
        if path.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        fs::write(&partial, "").map_err(failed)?;
        Ok(Self { target: path.to_owned(), partial, flag })
    }

    /// Completes it with its content.
    pub fn finish(self, text: &str) -> Result<()> {
        let written = fs::write(&self.partial, text);
        written
            .and_then(|()| fs::rename(&self.partial, &self.target))
            .map_err(|e| Error::file(format!("{} {}", self.flag, self.target.display()), e))
    }
}

impl Drop for ResultFile {
    fn drop(&mut self) {
        // Gone already where the file is complete.
        let _ = fs::remove_file(&self.partial);
    }
}
