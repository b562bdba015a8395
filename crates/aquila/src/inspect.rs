//! `aquila inspect`: what a checkpoint is, and whether Aquila can serve it.

use std::io::{Write, stdout};
use std::process::ExitCode;

use aquila_model::Inspection;
use clap::Args;

use crate::error::{EXIT_CODES, Error, Result};
use crate::flags::ModelName;
use crate::start::find;

/// Say what a checkpoint is, and whether Aquila can serve it.
#[derive(Args)]
#[command(after_help = EXIT_CODES)]
pub struct Inspect {
    #[command(flatten)]
    model: ModelName,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    /// Prints the inspection; exit code 1 if the model cannot be served.
    pub fn run(&self) -> Result<ExitCode> {
        let inspection = Inspection::of(&find(self.model.name(), false)?)?;
        let text = if self.json {
            serde_json::to_string_pretty(&inspection).map_err(|e| Error::Other(e.to_string()))?
        } else {
            inspection.to_string()
        };
        let printed = writeln!(stdout(), "{}", text.trim_end());
        printed.map_err(|e| Error::output("standard output", e))?;
        Ok(if inspection.servable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
