//! `aquila bench`: how fast the engine is on this machine, or a server that this machine can reach.

mod decode;
mod prompts;
mod serve;
mod spec;
mod spread;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::Algorithms;
use crate::error::Result;

/// Measure how fast the engine or a server is.
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
    /// Send requests to a server with OpenAI's API, ours or another, and measure how it answers.
    Serve(Box<serve::Serve>),
}

impl Bench {
    /// Runs the command.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        match &self.what {
            What::Decode(command) => command.run(algorithms),
            What::Spec(command) => command.run(algorithms),
            What::Serve(command) => command.run(),
        }
    }
}
