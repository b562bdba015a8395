//! `aquila bench`: how fast the engine is on this machine.

mod decode;
mod prompts;
mod spec;
mod spread;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::Algorithms;
use crate::error::Result;

/// Measure how fast the engine is on this machine.
#[derive(Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Decode a batch of equal requests; one JSON object a repetition on standard output.
    Decode(Box<decode::Decode>),
    /// Compare speculation with plain decoding, on the same prompts and in turns.
    Spec(Box<spec::Spec>),
}

impl Bench {
    /// Runs the command.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        match &self.what {
            What::Decode(command) => command.run(algorithms),
            What::Spec(command) => command.run(algorithms),
        }
    }
}
