//! `aquila conformance`: the suite as a command, so that it runs where there is no toolchain.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::Args;

use super::check;
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};

/// Hold draft algorithms to plain decoding: the same answers for all kinds of trees, and no slot lost.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Conformance {
    /// The algorithms, as --speculative-algorithm takes them
    #[arg(required = true, value_name = "ALGORITHM")]
    algorithms: Vec<String>,

    /// Flags of the model, its device and the draft, behind `--`
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

impl Conformance {
    /// Prints what was found of each; exit code 1 if one does not conform.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        let mut conform = true;
        for name in &self.algorithms {
            let report = check(algorithms, name, &flags)?;
            let mut text: String =
                report.failures.iter().map(|failure| format!("{name}: {failure}\n")).collect();
            text += &match report.failures.len() {
                0 => format!(
                    "{name}: conforms: {} answers were those of plain decoding, no slot was lost, \
                     {:.2} tokens per verification; what is drafted for a request {} on others\n",
                    report.answers,
                    report.accept_length,
                    if report.invariant { "does not depend" } else { "depends" },
                ),
                failures => format!("{name}: does not conform: {failures} failures\n"),
            };
            conform &= report.failures.is_empty();
            let printed = stdout().write_all(text.as_bytes());
            printed.map_err(|error| Error::output("standard output", error))?;
        }
        Ok(if conform { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
