//! Prompts to measure with: shipped ones, those of a file, or random tokens.
//!
//! The one invariant: the same flags give the same prompts in every run.

use serde_json::Value;

use crate::error::{Error, Result};

/// Beginnings of programs.
pub const CODE: &str = include_str!("code.jsonl");

/// A prompt of a file.
pub struct Written {
    /// What kind of text it is, where the file says so.
    pub kind: Option<String>,
    /// The text.
    pub prompt: String,
}

/// Reads JSON lines with "prompt" and "kind".
pub fn read(text: &str) -> Result<Vec<Written>> {
    let written = |(line, number): (&str, usize)| {
        let wrong = |why: &str| Error::Other(format!("line {number} of the prompts: {why}"));
        let line: Value = serde_json::from_str(line).map_err(|e| wrong(&e.to_string()))?;
        let prompt = line["prompt"].as_str().ok_or_else(|| wrong("it has no \"prompt\""))?;
        Ok(Written { kind: line["kind"].as_str().map(str::to_owned), prompt: prompt.to_owned() })
    };
    text.lines().zip(1..).map(written).collect()
}

/// Random numbers: prompts for models without a tokenizer, lengths, times between arrivals.
pub struct Random {
    /// The seed.
    pub state: u64,
}

impl Random {
    /// The next prompt.
    pub fn next(&mut self, tokens: usize, vocabulary: usize) -> Vec<u32> {
        (0..tokens).map(|_| self.below(vocabulary) as u32).collect()
    }

    /// A number below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        ((self.step() >> 33) % count as u64) as usize
    }

    /// A number from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.step() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn step(&mut self) -> u64 {
        // The high bits of a linear congruence are random enough for what is measured.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.state
    }
}
