//! The `aquila` command.
//!
//! Exit codes: 0 all went well, 1 it could not run, 2 the flags are wrong, 3 it ran but some
//! requests failed.

mod chat;
mod error;
mod flags;
mod generate;
mod inspect;
mod serve;
mod start;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// An LLM server whose heart is speculative decoding.
#[derive(Parser)]
#[command(name = "aquila", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer prompts offline: a file of them, or one.
    Generate(Box<generate::Generate>),
    /// Talk to a model in the terminal.
    Chat(Box<chat::Chat>),
    /// Serve a model over HTTP: OpenAI's API and SGLang's.
    Serve(Box<serve::Serve>),
    /// Say what a checkpoint is, and whether Aquila can serve it.
    Inspect(inspect::Inspect),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("AQUILA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let result = match Cli::parse().command {
        Command::Generate(command) => command.run(),
        Command::Chat(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Inspect(command) => command.run(),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("aquila: {error}");
            error.exit_code()
        }
    }
}
