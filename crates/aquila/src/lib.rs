//! The `aquila` command, as a library: a build with algorithms of its own registers them and calls
//! [`run`].
//!
//! Exit codes are listed in the help of every command.

mod after_help;
mod bench;
mod chat;
mod completions;
pub mod conformance;
mod costs;
mod doctor;
mod error;
mod find;
mod flags;
mod generate;
mod inspect;
mod log;
mod notice;
mod serve;
mod start;

use std::process::ExitCode;

use aquila_spec::Registry;
use clap::{CommandFactory, Parser, Subcommand};

use crate::after_help::AFTER_HELP;
use crate::notice::notice;

/// An LLM server whose heart is speculative decoding.
#[derive(Parser)]
#[command(name = "aquila", version = env!("AQUILA_VERSION"), propagate_version = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer prompts offline: a file of them, or one.
    Generate(Box<generate::Generate>),
    /// Measure how fast the engine or a server is.
    Bench(Box<bench::Bench>),
    /// Talk to a model in the terminal.
    Chat(Box<chat::Chat>),
    /// Serve a model over HTTP: OpenAI's API and SGLang's.
    Serve(Box<serve::Serve>),
    /// Say what a checkpoint is, and whether Aquila can serve it or draft with it.
    Inspect(Box<inspect::Inspect>),
    /// Say what this machine has to run models on, and what is missing.
    Doctor(doctor::Doctor),
    /// Hold draft algorithms to plain decoding: the same answers for all kinds of trees, and no slot
    /// lost.
    Conformance(conformance::Conformance),
    /// Print a script that completes commands and flags in a shell.
    Completions(completions::Completions),
}

/// The algorithms of this build.
pub type Algorithms = Registry;

/// Runs the command that the process was started with.
pub fn run(algorithms: &Algorithms) -> ExitCode {
    match flags::sglang::take(std::env::args_os(), Cli::command()) {
        Ok(taken) => {
            let command = Cli::parse_from(taken.args).command;
            if let Err(error) = log(&command) {
                return report(Err(error));
            }
            for note in taken.notes {
                notice(format_args!("note: {note}"));
            }
            let ended = run_command(command, algorithms);
            log::finish();
            report(ended)
        }
        Err(error) => report(Err(error)),
    }
}

/// Starts the log, as the command and the environment say.
fn log(command: &Command) -> error::Result<()> {
    match command {
        // Whoever serves wants to see how it goes; other commands print what they did.
        Command::Serve(serve) => {
            let unless_told = "warn,aquila_engine=info,aquila_server=info";
            log::start(serve.log_format(), serve.log_filter(), unless_told)
        }
        _ => log::start(flags::LogFormat::Text, None, "warn"),
    }
}

fn run_command(command: Command, algorithms: &Algorithms) -> error::Result<ExitCode> {
    match command {
        Command::Generate(command) => command.run(algorithms),
        Command::Bench(command) => command.run(algorithms),
        Command::Chat(command) => command.run(algorithms),
        Command::Serve(command) => command.run(algorithms),
        Command::Inspect(command) => command.run(algorithms),
        Command::Doctor(command) => command.run(),
        Command::Conformance(command) => command.run(algorithms),
        Command::Completions(command) => command.run(Cli::command()),
    }
}

/// The exit code; says what went wrong, if something did.
fn report(result: error::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            match &error {
                error::Error::ReaderLeft => {}
                error::Error::Listed(list) => notice(format_args!("{list}")),
                error => notice(format_args!("aquila: {error}")),
            }
            error.exit_code()
        }
    }
}
