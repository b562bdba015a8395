//! The models that ship with Aquila, as archives that are unpacked on first use.
//!
//! The invariant: a folder in the cache is complete. It is filled under another name and renamed,
//! so a crash, a full disk or a second process never leaves half a model where one is looked for.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::location::Places;
use crate::{Error, Result};

const SHIPPED: [&str; 5] = ["tiny", "draft", "tiny-eagle3", "tiny-eagle", "tiny-mtp"];

/// The names of the models that ship with Aquila, the default first.
pub fn shipped_models() -> impl Iterator<Item = &'static str> {
    SHIPPED.into_iter()
}

pub(crate) fn is_shipped(name: &str) -> bool {
    SHIPPED.contains(&name)
}

/// The folder of a shipped model, unpacked now if need be; or where it was looked for in vain.
pub(crate) fn find(
    places: &Places,
    name: &str,
) -> Result<std::result::Result<PathBuf, Vec<String>>> {
    let mut tried = Vec::new();
    for place in &places.shipped {
        let folder = place.join(name);
        if folder.join("config.json").is_file() {
            return Ok(Ok(folder));
        }
        let archive = place.join(format!("{name}.tar.zst"));
        if archive.is_file() {
            let Some(cache) = &places.unpacked else {
                let problem = "nowhere to unpack it: neither XDG_CACHE_HOME nor HOME is set";
                return Err(Error::file(&archive, problem));
            };
            return unpacked(&archive, name, cache).map(Ok);
        }
        tried.push(format!("there is no {}", archive.display()));
    }
    Ok(Err(tried))
}

/// The folder in `cache` that holds what `archive` holds.
fn unpacked(archive: &Path, name: &str, cache: &Path) -> Result<PathBuf> {
    static UNPACKINGS: AtomicU32 = AtomicU32::new(0);

    let bytes = fs::read(archive).map_err(|e| Error::file(archive, e))?;
    let folder = cache.join(format!("{name}-{:016x}", fingerprint(&bytes)));
    if folder.is_dir() {
        return Ok(folder);
    }
    let cannot = |e: std::io::Error| {
        let problem = format!(
            "cannot unpack {} here: {e}; XDG_CACHE_HOME may name another folder",
            archive.display()
        );
        Error::file(cache, problem)
    };
    let own = UNPACKINGS.fetch_add(1, Ordering::Relaxed);
    let partial = cache.join(format!(".{name}.{}.{own}.partial", std::process::id()));
    fs::create_dir_all(cache).map_err(cannot)?;
    // What a process of the same number left behind when it was killed.
    let _ = fs::remove_dir_all(&partial);
    let done = fs::create_dir(&partial)
        .map_err(cannot)
        .and_then(|()| unpack(archive, &bytes, &partial, &cannot))
        .and_then(|()| match fs::rename(&partial, &folder) {
            // Somebody else was faster; theirs has the same fingerprint.
            Err(_) if folder.is_dir() => Ok(()),
            other => other.map_err(cannot),
        });
    let _ = fs::remove_dir_all(&partial);
    done.map(|()| folder)
}

fn unpack(
    archive: &Path,
    bytes: &[u8],
    into: &Path,
    cannot: &dyn Fn(std::io::Error) -> Error,
) -> Result<()> {
    let damaged = |e: &dyn std::fmt::Display| Error::file(archive, format!("is damaged: {e}"));
    let plain = ruzstd::decoding::StreamingDecoder::new(bytes).map_err(|e| damaged(&e))?;
    let mut tar = tar::Archive::new(plain);
    let mut files = 0;
    for entry in tar.entries().map_err(|e| damaged(&e))? {
        let mut entry = entry.map_err(|e| damaged(&e))?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        // A model is a flat folder: the name alone says where a file goes.
        let path = entry.path().map_err(|e| damaged(&e))?.into_owned();
        let name = path.file_name().ok_or_else(|| damaged(&"a file without a name"))?;
        let mut content = Vec::new();
        entry.read_to_end(&mut content).map_err(|e| damaged(&e))?;
        let mut file = fs::File::create(into.join(name)).map_err(cannot)?;
        file.write_all(&content).and_then(|()| file.sync_all()).map_err(cannot)?;
        files += 1;
    }
    if files == 0 {
        return Err(damaged(&"it holds no file"));
    }
    Ok(())
}

/// A number that differs between archives, for the names of folders.
fn fingerprint(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    words.fold(bytes.len() as u64, |hash, word| {
        (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    })
}
