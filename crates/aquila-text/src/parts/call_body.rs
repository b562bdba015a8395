//! One call as models of all families write it: an object with a name and arguments.

use super::Part;
use super::json_scan::{JsonScan, Step};

/// The keys of arguments: Llama's models write the second.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// What became of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// All of it was taken, and more is to come.
    Going,
    /// The object ended after so many bytes of the piece, and it is a call.
    Call(usize),
    /// No call goes on like this; so many bytes of the piece were still JSON.
    NoCall(usize),
}

/// Which value of the object is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Name,
    Arguments,
    Other,
}

/// A call, as far as it has come.
#[derive(Debug, Clone)]
pub(super) struct CallBody {
    index: usize,
    scan: JsonScan,
    raw: String,
    at: At,
    /// Where the key or the value began that is being read.
    from: usize,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    /// Where arguments begin that were not handed out yet, once the call is certain.
    unsent: Option<usize>,
    begun: bool,
    has_arguments: bool,
}

impl CallBody {
    /// Before the object of the call `index`.
    pub fn new(index: usize) -> Self {
        Self {
            index,
            scan: JsonScan::new(),
            raw: String::new(),
            at: At::Other,
            from: 0,
            name: None,
            early: None,
            unsent: None,
            begun: false,
            has_arguments: false,
        }
    }

    /// Whether the call was announced.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// The object as far as it was taken.
    pub fn into_raw(self) -> String {
        self.raw
    }

    /// Takes the next piece; `tools` are the names that may be called.
    pub fn push(&mut self, piece: &str, tools: &[String], out: &mut Vec<Part>) -> Progress {
        let before = self.raw.len();
        self.raw.push_str(piece);
        for (taken, &byte) in piece.as_bytes().iter().enumerate() {
            let Some(step) = self.step(byte, before + taken, tools, out) else {
                self.raw.truncate(before + taken);
                self.send(before + taken, out);
                return Progress::NoCall(taken);
            };
            if step == Step::Done {
                self.raw.truncate(before + taken + 1);
                if !self.begun {
                    return Progress::NoCall(taken + 1);
                }
                out.push(Part::CallEnd { index: self.index });
                return Progress::Call(taken + 1);
            }
        }
        self.send(self.raw.len(), out);
        Progress::Going
    }

    /// Takes one byte, which stands at `at`.
    fn step(&mut self, byte: u8, at: usize, tools: &[String], out: &mut Vec<Part>) -> Option<Step> {
        let step = self.scan.step(byte)?;
        match step {
            Step::KeyBegins => self.from = at,
            Step::KeyEnds => {
                let key: String = serde_json::from_str(&self.raw[self.from..=at]).ok()?;
                self.at = match key.as_str() {
                    "name" if self.name.is_none() => At::Name,
                    key if ARGUMENTS.contains(&key) && !self.has_arguments => At::Arguments,
                    // A second name or second arguments say that this is no call.
                    "name" | "arguments" | "parameters" => return None,
                    _ => At::Other,
                };
            }
            Step::ValueBegins => {
                self.from = at;
                if self.at == At::Arguments {
                    if byte != b'{' {
                        return None;
                    }
                    self.has_arguments = true;
                    if let Some(name) = &self.name {
                        let name = name.clone();
                        self.begin(name, at, out);
                    }
                }
            }
            Step::ValueEnds if self.at == At::Name => {
                let name: String = serde_json::from_str(&self.raw[self.from..=at]).ok()?;
                if !tools.contains(&name) {
                    return None;
                }
                if let Some(early) = self.early.take() {
                    self.begin(name.clone(), at, out);
                    self.unsent = None;
                    out.push(Part::Arguments { index: self.index, piece: early });
                }
                self.name = Some(name);
            }
            Step::ValueEnds if self.at == At::Arguments => {
                self.send(at + 1, out);
                self.unsent = None;
                if !self.begun {
                    self.early = Some(self.raw[self.from..=at].to_owned());
                }
            }
            // A name or arguments that are numbers.
            Step::ValueEndedBefore if self.at != At::Other => return None,
            _ => {}
        }
        Some(step)
    }

    fn begin(&mut self, name: String, at: usize, out: &mut Vec<Part>) {
        self.begun = true;
        self.unsent = Some(at);
        out.push(Part::CallBegin { index: self.index, name });
    }

    /// Hands out the arguments up to here.
    fn send(&mut self, to: usize, out: &mut Vec<Part>) {
        if let Some(from) = self.unsent.filter(|&from| from < to) {
            let piece = self.raw[from..to].to_owned();
            out.push(Part::Arguments { index: self.index, piece });
            self.unsent = Some(to);
        }
    }
}
