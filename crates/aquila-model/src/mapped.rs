//! Files mapped into memory: the one place in this crate with `unsafe`.

use std::fs::File;
use std::path::Path;

use bytes::Bytes;
use memmap2::Mmap;

use crate::{Error, Result};

/// The bytes of a file, read from disk when they are first touched.
#[allow(unsafe_code)]
pub(crate) fn map(path: &Path) -> Result<Bytes> {
    let file = File::open(path).map_err(|e| Error::file(path, e))?;
    let kind = file.metadata().map_err(|e| Error::file(path, e))?;
    if !kind.is_file() {
        return Err(Error::file(path, "is not a regular file"));
    }
    if kind.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the mapping is private and read-only, and lives as long as the `Bytes` that own it.
    // Its soundness rests on nobody rewriting or truncating the file in place while it is loaded;
    // backends copy what they keep, so that nothing reads the mapping afterwards. Tools replace
    // such files by renaming, which is harmless at any time.
    let mapping = unsafe { Mmap::map(&file) }.map_err(|e| Error::file(path, e))?;
    Ok(Bytes::from_owner(mapping))
}
