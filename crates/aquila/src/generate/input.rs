//! The lines of an input file.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, stdin};

use aquila_engine::Speculation;
use aquila_text::{Prompt, SamplingParams, speculation};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The longest line that is read; what is longer gets an error of its own.
const MAX_LINE: u64 = 64 << 20;

/// A request as its line gives it.
pub struct Line {
    /// What names the request in the output.
    pub id: Value,
    /// Its number, from 1.
    pub number: u64,
    /// Its length, with blank lines before it.
    pub bytes: u64,
    /// What is asked, or what is wrong with the line.
    pub ask: std::result::Result<Ask, String>,
}

/// A prompt and its settings.
pub struct Ask {
    pub prompt: Prompt,
    pub params: SamplingParams,
    pub speculation: Speculation,
    pub priority: Option<i64>,
}

/// An input that is read line by line.
pub struct Lines {
    path: String,
    /// The bytes of the whole input, if it is a file.
    size: Option<u64>,
    reader: Box<dyn BufRead + Send>,
    number: u64,
}

impl Lines {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &str) -> Result<Self> {
        if path == "-" {
            let reader = Box::new(BufReader::new(stdin()));
            return Ok(Self { path: "standard input".into(), size: None, reader, number: 0 });
        }
        let failed = |e| Error::file(format!("--input {path}"), e);
        let file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        let size = metadata.is_file().then_some(metadata.len());
        Ok(Self { path: path.into(), size, reader: Box::new(BufReader::new(file)), number: 0 })
    }

    /// Bytes of the whole input, if it is a file.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// The next line that is not blank.
    pub fn next(&mut self) -> Result<Option<Line>> {
        let failed = |path: &str, e| Error::file(path, e);
        let mut bytes = 0;
        loop {
            let mut text = Vec::new();
            let limited = &mut (&mut self.reader).take(MAX_LINE);
            let read = limited.read_until(b'\n', &mut text).map_err(|e| failed(&self.path, e))?;
            if read == 0 {
                return Ok(None);
            }
            bytes += read as u64;
            self.number += 1;
            let number = self.number;
            let whole = text.last() == Some(&b'\n') || (read as u64) < MAX_LINE;
            if !whole {
                let rest = self.reader.skip_until(b'\n').map_err(|e| failed(&self.path, e))?;
                bytes += rest as u64;
                let why = format!("line {number}: longer than {} MiB", MAX_LINE >> 20);
                return Ok(Some(Line { id: number.into(), number, bytes, ask: Err(why) }));
            }
            // Some editors begin a file with a mark that is no part of its text.
            let text = text.strip_prefix(b"\xef\xbb\xbf").filter(|_| number == 1).unwrap_or(&text);
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let (id, ask) = parse(text);
            return Ok(Some(Line {
                id: id.unwrap_or(number.into()),
                number,
                bytes,
                ask: ask.map_err(|why| format!("line {number}: {why}")),
            }));
        }
    }
}

/// Reads one line: its id, if it has one, and what it asks.
fn parse(text: &[u8]) -> (Option<Value>, std::result::Result<Ask, String>) {
    match serde_json::from_slice(text) {
        Ok(Value::Object(mut object)) => (object.remove("id"), ask(object)),
        Ok(_) => (None, Err("not a JSON object".into())),
        Err(error) => {
            // Its place in the file is said already, so only the column is news.
            let (line, column) = (error.line(), error.column());
            let why = error.to_string();
            let why = why.trim_end_matches(&format!(" at line {line} column {column}"));
            (None, Err(format!("not JSON: {why} at column {column}")))
        }
    }
}

fn ask(mut object: Map<String, Value>) -> std::result::Result<Ask, String> {
    let mut given = |key: &str| object.remove(key).filter(|value| !value.is_null());
    let prompt = match (given("prompt"), given("prompt_ids")) {
        (Some(Value::String(text)), None) => Prompt::Text(text),
        (Some(_), None) => return Err("prompt: expected a string".into()),
        (None, Some(ids)) => Prompt::Ids(
            serde_json::from_value(ids).map_err(|_| "prompt_ids: expected a list of token ids")?,
        ),
        (Some(_), Some(_)) => return Err("prompt and prompt_ids exclude each other".into()),
        (None, None) => return Err("prompt or prompt_ids is missing".into()),
    };
    let params = match given("sampling") {
        None => SamplingParams::default(),
        Some(Value::Object(sampling)) => {
            SamplingParams::from_json(&sampling).map_err(|e| format!("sampling.{e}"))?
        }
        Some(_) => return Err("sampling: expected an object".into()),
    };
    let speculation = match given("speculative") {
        Some(value) => speculation(&value).map_err(|e| e.to_string())?,
        None => Speculation::Free,
    };
    let whole = |value: Value| value.as_i64().ok_or("priority: expected a whole number");
    let priority = given("priority").map(whole).transpose()?;
    match object.keys().next() {
        Some(key) => Err(format!(
            "{key}: no such key; there are id, prompt or prompt_ids, priority, speculative, and \
             sampling for settings"
        )),
        None => Ok(Ask { prompt, params, speculation, priority }),
    }
}
