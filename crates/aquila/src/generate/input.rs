//! The lines of an input file.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, stdin};

use aquila_text::{Prompt, SamplingParams};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The longest line that is read; what is longer gets an error of its own.
const MAX_LINE: u64 = 64 << 20;

/// A request as its line gives it.
pub struct Line {
    /// What names the request in the output.
    pub id: Value,
    /// What is asked, or what is wrong with the line.
    pub ask: std::result::Result<Ask, String>,
}

/// A prompt and its settings.
pub struct Ask {
    pub prompt: Prompt,
    pub params: SamplingParams,
}

/// An input that is read line by line.
pub struct Lines {
    path: String,
    /// The bytes of the whole input, if it is a file.
    size: Option<u64>,
    reader: Box<dyn BufRead>,
    number: u64,
    read: u64,
}

impl Lines {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &str) -> Result<Self> {
        let lines = |reader, size| Self { path: path.into(), size, reader, number: 0, read: 0 };
        if path == "-" {
            return Ok(lines(Box::new(BufReader::new(stdin())), None));
        }
        let file = File::open(path).map_err(|e| Error::file(path, e))?;
        let metadata = file.metadata().map_err(|e| Error::file(path, e))?;
        if metadata.is_dir() {
            return Err(Error::file(path, std::io::ErrorKind::IsADirectory.into()));
        }
        Ok(lines(Box::new(BufReader::new(file)), metadata.is_file().then_some(metadata.len())))
    }

    /// Bytes of the whole input, if it is a file.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Bytes read so far.
    pub fn position(&self) -> u64 {
        self.read
    }

    /// The next line that is not blank.
    pub fn next(&mut self) -> Result<Option<Line>> {
        loop {
            let mut bytes = Vec::new();
            let limited = &mut (&mut self.reader).take(MAX_LINE);
            let read =
                limited.read_until(b'\n', &mut bytes).map_err(|e| Error::file(&self.path, e))?;
            if read == 0 {
                return Ok(None);
            }
            self.read += read as u64;
            self.number += 1;
            let number = Value::from(self.number);
            if read as u64 == MAX_LINE && bytes.last() != Some(&b'\n') {
                self.skip_line()?;
                let why = format!("line {}: longer than {} MiB", self.number, MAX_LINE >> 20);
                return Ok(Some(Line { id: number, ask: Err(why) }));
            }
            if bytes.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let mut line = parse(&bytes, number);
            line.ask = line.ask.map_err(|why| format!("line {}: {why}", self.number));
            return Ok(Some(line));
        }
    }

    fn skip_line(&mut self) -> Result<()> {
        self.read += self.reader.skip_until(b'\n').map_err(|e| Error::file(&self.path, e))? as u64;
        Ok(())
    }
}

/// Reads one line; `number` names it if it has no id.
fn parse(bytes: &[u8], number: Value) -> Line {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(mut object)) => {
            let id = object.remove("id").unwrap_or(number);
            Line { id, ask: ask(object) }
        }
        Ok(_) => Line { id: number, ask: Err("not a JSON object".into()) },
        Err(error) => Line { id: number, ask: Err(format!("not JSON: {error}")) },
    }
}

fn ask(mut object: Map<String, Value>) -> std::result::Result<Ask, String> {
    let prompt = match (object.remove("prompt"), object.remove("prompt_ids")) {
        (Some(Value::String(text)), None) => Prompt::Text(text),
        (Some(_), None) => return Err("prompt: expected a string".into()),
        (None, Some(ids)) => Prompt::Ids(
            serde_json::from_value(ids).map_err(|_| "prompt_ids: expected a list of token ids")?,
        ),
        (Some(_), Some(_)) => return Err("give prompt or prompt_ids, not both".into()),
        (None, None) => return Err("prompt or prompt_ids is missing".into()),
    };
    let params = match object.remove("sampling") {
        None | Some(Value::Null) => SamplingParams::default(),
        Some(Value::Object(sampling)) => {
            SamplingParams::from_json(&sampling).map_err(|e| format!("sampling.{e}"))?
        }
        Some(_) => return Err("sampling: expected an object".into()),
    };
    match object.keys().next() {
        Some(key) => Err(format!("{key}: no such key")),
        None => Ok(Ask { prompt, params }),
    }
}
