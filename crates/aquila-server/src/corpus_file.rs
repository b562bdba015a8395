//! The files that corpora come from: which ones clients may name, and their lines.
//!
//! The invariant: only regular files are read, and to open one never blocks, whatever is there.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::corpus::CorpusTextError;

/// Bytes of the longest line.
const LONGEST_LINE: u64 = 16 << 20;

/// A folder that clients may name files of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorpusFolder(PathBuf);

impl CorpusFolder {
    /// The folder of this path.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        if !path.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self(path))
    }

    /// Opens the file that a client named, by its path in the folder or by its whole path. One
    /// that lies elsewhere, directly or behind a symlink, is refused in the words for one that
    /// does not exist, so that a client learns nothing about other folders.
    pub(crate) fn lines(&self, named: &Path) -> Result<Lines, CorpusTextError> {
        let outside = || CorpusTextError::Outside { path: named.into() };
        let path = self.0.join(named).canonicalize().map_err(|_| outside())?;
        if !path.starts_with(&self.0) || !path.symlink_metadata().is_ok_and(|file| file.is_file()) {
            return Err(outside());
        }
        let failed = |source| CorpusTextError::Read { path: named.into(), source };
        Ok(Lines::of(named, open_regular(&path).map_err(failed)?))
    }
}

/// Opens a regular file. Without blocking: to open a pipe waits for its writer, for ever.
fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    }
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok(file)
}

/// The lines of a file, none of them too long.
pub(crate) struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    number: usize,
    bytes: Vec<u8>,
}

impl Lines {
    /// Opens a file that the operator named.
    pub fn open(path: &Path) -> Result<Self, CorpusTextError> {
        let file = open_regular(path)
            .map_err(|source| CorpusTextError::Read { path: path.into(), source })?;
        Ok(Self::of(path, file))
    }

    fn of(path: &Path, file: File) -> Self {
        Self { path: path.into(), file: BufReader::new(file), number: 0, bytes: Vec::new() }
    }

    /// The next line with its end, if there is one.
    pub fn next(&mut self) -> Result<Option<&str>, CorpusTextError> {
        self.bytes.clear();
        self.number += 1;
        let mut limited = (&mut self.file).take(LONGEST_LINE);
        let read = limited
            .read_until(b'\n', &mut self.bytes)
            .map_err(|source| CorpusTextError::Read { path: self.path.clone(), source })?;
        if read as u64 == LONGEST_LINE && !self.bytes.ends_with(b"\n") {
            return Err(self.wrong("is longer than 16 MiB"));
        }
        if read == 0 {
            return Ok(None);
        }
        match std::str::from_utf8(&self.bytes) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(wrong(&self.path, self.number, "is not UTF-8")),
        }
    }

    pub fn wrong(&self, why: &'static str) -> CorpusTextError {
        wrong(&self.path, self.number, why)
    }
}

fn wrong(path: &Path, line: usize, why: &'static str) -> CorpusTextError {
    CorpusTextError::Line { path: path.into(), line, why }
}
