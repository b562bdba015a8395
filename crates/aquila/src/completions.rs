//! `aquila completions`: what a shell needs to complete commands and flags.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::{Args, Command, ValueEnum};
use clap_complete::generate;
use clap_complete::shells::{Bash, Fish, Zsh};

use crate::error::{Error, Result};

/// Print a script that completes commands and flags in a shell.
#[derive(Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(ValueEnum, Debug, Clone, Copy)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl Completions {
    /// Prints the script for what `program` takes.
    pub fn run(&self, mut program: Command) -> Result<ExitCode> {
        let (name, mut script) = (program.get_name().to_owned(), Vec::new());
        match self.shell {
            Shell::Bash => generate(Bash, &mut program, name, &mut script),
            Shell::Zsh => generate(Zsh, &mut program, name, &mut script),
            Shell::Fish => generate(Fish, &mut program, name, &mut script),
        }
        let printed = stdout().write_all(&script);
        printed.map_err(|e| Error::output("standard output", e))?;
        Ok(ExitCode::SUCCESS)
    }
}
