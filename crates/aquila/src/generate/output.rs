//! Where answers are written.
//!
//! A regular file appears under its name only when it is complete; until then, and if something
//! goes wrong, whole lines are in a file beside it whose name ends in `.partial`.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// The output of a batch.
pub struct Output {
    sink: Sink,
    lines: u64,
}

enum Sink {
    /// Standard output, a pipe or a device, by its name for people.
    Stream { name: String, writer: Box<dyn Write> },
    /// A file in the making.
    File(Partial),
}

struct Partial {
    /// Where it goes when it is complete.
    target: PathBuf,
    path: PathBuf,
    file: File,
    /// Bytes of its whole lines.
    whole: u64,
}

impl Output {
    /// Opens the output; an existing file is replaced at the end. `input` is refused as a target.
    pub fn create(name: &str, input: &str) -> Result<Self> {
        let sink = if name == "-" {
            Sink::Stream { name: "standard output".into(), writer: Box::new(stdout()) }
        } else if Path::new(name).metadata().is_ok_and(|m| !m.is_file()) {
            let file = OpenOptions::new().write(true).open(name);
            let file = file.map_err(|e| Error::file(format!("--output {name}"), e))?;
            Sink::Stream { name: name.into(), writer: Box::new(file) }
        } else {
            Sink::File(Partial::create(name, input)?)
        };
        Ok(Self { sink, lines: 0 })
    }

    /// What is written until the output is complete, if that is a file of its own.
    pub fn partial(&self) -> Option<&Path> {
        match &self.sink {
            Sink::Stream { .. } => None,
            Sink::File(partial) => Some(&partial.path),
        }
    }

    /// Writes one line, whole or not at all where that can be undone.
    pub fn write(&mut self, value: &Value) -> Result<()> {
        let line = format!("{value}\n");
        match &mut self.sink {
            Sink::Stream { name, writer } => {
                let written = writer.write_all(line.as_bytes()).and_then(|()| writer.flush());
                written.map_err(|e| Error::output(name, e))?;
            }
            Sink::File(partial) => partial.write(line.as_bytes())?,
        }
        self.lines += 1;
        Ok(())
    }

    /// Puts the complete file under its name.
    pub fn finish(self) -> Result<()> {
        let Sink::File(mut partial) = self.sink else { return Ok(()) };
        // A batch without a line has not emptied what an earlier run left.
        partial.write(&[])?;
        let kept = |e| {
            let Partial { target, path, .. } = &partial;
            let why = format!("{e}; the answers are complete in {}", path.display());
            Error::file(target.display(), std::io::Error::other(why))
        };
        partial.file.sync_all().map_err(kept)?;
        fs::rename(&partial.path, &partial.target).map_err(kept)
    }

    /// The error that ended the batch early, with where the answers so far are.
    pub fn interrupted(self, error: Error) -> Error {
        let Sink::File(partial) = self.sink else { return error };
        if self.lines == 0 {
            // An empty file helps nobody; one that an earlier run left does.
            if partial.file.metadata().is_ok_and(|m| m.len() == 0) {
                let _ = fs::remove_file(&partial.path);
            }
            return error;
        }
        let path = partial.path.display();
        Error::Other(format!("{error}; the {} lines before that are in {path}", self.lines))
    }
}

impl Partial {
    fn create(name: &str, input: &str) -> Result<Self> {
        if Path::new(name).file_name().is_none() {
            return Err(Error::Usage(format!("--output {name:?} names no file")));
        }
        // A link stays a link: what it points to is replaced.
        let target = fs::canonicalize(name).unwrap_or_else(|_| name.into());
        let path = PathBuf::from(format!("{}.partial", target.display()));
        if input != "-" && [&target, &path].iter().any(|path| is_same(path, input)) {
            return Err(Error::Usage(format!(
                "--output {name} would overwrite --input {input}: give it another name"
            )));
        }
        let failed = |e| Error::file(format!("--output: {}", path.display()), e);
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(failed)?;
        match file.try_lock() {
            // A file system without locks is no reason to refuse.
            Ok(()) | Err(TryLockError::Error(_)) => {}
            Err(TryLockError::WouldBlock) => {
                let why = "another process is writing it: wait, or give --output another name";
                return Err(failed(std::io::Error::other(why)));
            }
        }
        Ok(Self { target, path, file, whole: 0 })
    }

    fn write(&mut self, line: &[u8]) -> Result<()> {
        let begun = if self.whole == 0 { self.file.set_len(0) } else { Ok(()) };
        begun.and_then(|()| self.file.write_all(line)).map_err(|error| {
            // Nothing half-written stays; if even this fails, the error at hand says more.
            let _ = self.file.set_len(self.whole);
            Error::file(self.path.display(), error)
        })?;
        self.whole += line.len() as u64;
        Ok(())
    }
}

fn is_same(path: &Path, other: &str) -> bool {
    match (fs::canonicalize(path), fs::canonicalize(other)) {
        (Ok(path), Ok(other)) => path == other,
        _ => false,
    }
}
