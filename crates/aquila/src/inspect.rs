//! `aquila inspect`: what a checkpoint is, and whether Aquila can serve it.

use std::process::ExitCode;

use aquila_model::{Inspection, resolve};
use clap::Args;

use crate::error::{Error, Result};

/// Say what a checkpoint is, and whether Aquila can serve it.
#[derive(Args)]
pub struct Inspect {
    /// A Hugging Face folder, a hub id, a shipped model or preset:NAME
    #[arg(value_name = "MODEL", default_value = "tiny")]
    model: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    /// Prints the inspection; exit code 1 if the model cannot be served.
    pub fn run(&self) -> Result<ExitCode> {
        let inspection = Inspection::of(&resolve(&self.model)?)?;
        if self.json {
            let text = serde_json::to_string_pretty(&inspection);
            println!("{}", text.map_err(|e| Error::Other(e.to_string()))?);
        } else {
            println!("{inspection}");
        }
        Ok(if inspection.servable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
