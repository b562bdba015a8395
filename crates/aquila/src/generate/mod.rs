//! `aquila generate`: answers prompts offline, a file of them or one.

mod answer;
mod batch;
mod input;
mod one;
mod output;

use std::process::ExitCode;

use clap::Args;

use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags, SamplingFlags};
use crate::start::start;

/// Answer prompts offline: a file of them, or one.
#[derive(Args)]
pub struct Generate {
    #[command(flatten)]
    model: ModelFlags,

    /// Prompts, one JSON object a line: {"id", "prompt" or "prompt_ids", "sampling"}; - is
    /// standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    input: Option<String>,

    /// Answers, one JSON object a line, in the order of the prompts; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-", conflicts_with = "prompt")]
    output: String,

    /// One prompt; its answer is printed as it comes
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// Print answers and errors only
    #[arg(long, short)]
    quiet: bool,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

impl Generate {
    /// Runs the command.
    pub fn run(&self) -> Result<ExitCode> {
        let defaults = self.sampling.params()?;
        match (&self.prompt, &self.input) {
            (Some(prompt), _) => {
                let generator = start(&self.model, &self.engine, defaults, self.quiet)?;
                one::answer(&generator, prompt, self.quiet)
            }
            (None, Some(input)) => {
                // Files first: a wrong path should not cost the loading of a model.
                let lines = input::Lines::open(input)?;
                let mut output = output::Output::create(&self.output)?;
                let generator = start(&self.model, &self.engine, defaults, self.quiet)?;
                let code = batch::answer(&generator, lines, &mut output, self.quiet)?;
                output.finish()?;
                Ok(code)
            }
            (None, None) => Err(Error::Usage(
                "nothing to answer: give --prompt TEXT, or --input FILE (- is standard input)"
                    .into(),
            )),
        }
    }
}
