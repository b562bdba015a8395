//! What tells one model's files from another's, without reading all of them.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256};

use crate::error::{Error, Result};
use crate::location::Location;

/// Bytes that are read at the beginning, in the middle and at the end of a file of weights.
const SAMPLE: u64 = 64 << 10;

impl Location {
    /// A short name for the model's content: of its config, and of samples of its weights. Weights
    /// of a preset are made from `seed`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn fingerprint(&self, seed: u64) -> Result<String> {
        let folder = match self {
            Self::Preset(name) => return Ok(format!("{name} of seed {seed}")),
            Self::Folder(folder) => folder,
        };
        let failed = |path: &Path, e: std::io::Error| Error::File {
            path: path.to_owned(),
            problem: e.to_string(),
        };
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
            .map_err(|e| failed(folder, e))?;
        let is_of_model = |path: &PathBuf| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            matches!(extension, Some("safetensors" | "bin" | "pt" | "pth"))
                || path.file_name().is_some_and(|name| name == "config.json")
        };
        files.retain(is_of_model);
        files.sort();
        let mut digest = Context::new(&SHA256);
        for path in files {
            sample(&path, &mut digest).map_err(|e| failed(&path, e))?;
        }
        let digest = digest.finish();
        Ok(digest.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

fn sample(path: &Path, digest: &mut Context) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    digest.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    digest.update(&length.to_le_bytes());
    let mut bytes = Vec::new();
    for from in [0, length / 2, length.saturating_sub(SAMPLE)] {
        bytes.clear();
        file.seek(SeekFrom::Start(from))?;
        (&mut file).take(SAMPLE).read_to_end(&mut bytes)?;
        digest.update(&bytes);
    }
    Ok(())
}
