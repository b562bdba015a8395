//! `aquila bench`: how fast the engine is on this machine.

mod decode;

use std::process::ExitCode;

use clap::{Args, Subcommand};

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
    Decode(decode::Decode),
}

impl Bench {
    /// Runs the command.
    pub fn run(&self) -> Result<ExitCode> {
        match &self.what {
            What::Decode(command) => command.run(),
        }
    }
}
