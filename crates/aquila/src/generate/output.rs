//! Where answers are written.
//!
//! A regular file appears under its name only when it is complete; until then, and if something
//! goes wrong, whole lines are in a file beside it whose name ends in `.partial`.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write, stdout};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// The output of a batch.
pub struct Output {
    name: String,
    writer: Box<dyn Write>,
    /// The unfinished file, and the bytes of its whole lines; none for pipes, devices and
    /// standard output.
    partial: Option<Partial>,
    lines: u64,
}

struct Partial {
    path: PathBuf,
    file: File,
    whole: u64,
}

impl Output {
    /// Opens the output; an existing file is replaced at the end.
    pub fn create(name: &str) -> Result<Self> {
        let output = |writer, partial| Self { name: name.into(), writer, partial, lines: 0 };
        if name == "-" {
            return Ok(output(Box::new(stdout()), None));
        }
        if Path::new(name).metadata().is_ok_and(|m| !m.is_file()) {
            let file =
                OpenOptions::new().write(true).open(name).map_err(|e| Error::file(name, e))?;
            return Ok(output(Box::new(file), None));
        }
        let path = PathBuf::from(format!("{name}.partial"));
        let failed = |e| Error::file(path.display(), e);
        let file = File::create(&path).map_err(failed)?;
        let writer = Box::new(BufWriter::new(file.try_clone().map_err(failed)?));
        Ok(output(writer, Some(Partial { path: path.clone(), file, whole: 0 })))
    }

    /// Writes one line, whole or not at all.
    pub fn write(&mut self, value: &Value) -> Result<()> {
        let line = format!("{value}\n");
        let written = self.writer.write_all(line.as_bytes()).and_then(|()| self.writer.flush());
        match (written, &mut self.partial) {
            (Ok(()), partial) => {
                self.lines += 1;
                if let Some(partial) = partial {
                    partial.whole += line.len() as u64;
                }
                Ok(())
            }
            (Err(error), None) => Err(Error::file(&self.name, error)),
            (Err(error), Some(partial)) => {
                // Nothing half-written stays; if even this fails, the error at hand says more.
                let _ = partial.file.set_len(partial.whole);
                Err(Error::Other(format!(
                    "{}: {error}; the {} whole lines before it are in that file",
                    partial.path.display(),
                    self.lines
                )))
            }
        }
    }

    /// Puts the complete file under its name.
    pub fn finish(self) -> Result<()> {
        if let Some(partial) = self.partial {
            partial.file.sync_all().map_err(|e| Error::file(partial.path.display(), e))?;
            std::fs::rename(&partial.path, &self.name).map_err(|e| Error::file(&self.name, e))?;
        }
        Ok(())
    }
}
