//! `aquila generate`: answers prompts offline, a file of them or one.

mod answer;
mod batch;
mod feed;
mod input;
mod one;
mod output;

use std::process::ExitCode;

use aquila_text::SamplingParams;
use clap::Args;

use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags, SamplingFlags};
use crate::notice::notice;
use crate::start::start;

/// Answer prompts offline: a file of them, or one.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Generate {
    #[command(flatten)]
    model: ModelFlags,

    #[command(flatten)]
    prompts: PromptFlags,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

#[derive(Args)]
#[command(next_help_heading = "Prompts and answers")]
struct PromptFlags {
    /// One prompt; its answer is printed as it comes
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// Prompts, one JSON object a line: {"id", "prompt" or "prompt_ids", "sampling"}; - is
    /// standard input. An id may be any JSON and must be given once: of two lines with one id the
    /// second fails. A line without an id has its number, from 1
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    input: Option<String>,

    /// Answers, one JSON object a line, in the order of the prompts; - is standard output
    #[arg(long, value_name = "FILE", default_value = "-", conflicts_with = "prompt")]
    output: String,

    /// Print answers and errors only
    #[arg(long, short)]
    quiet: bool,
}

impl Generate {
    /// Runs the command.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let PromptFlags { prompt, input, output, quiet } = &self.prompts;
        let defaults = self.sampling.params()?;
        match (prompt, input) {
            (Some(prompt), _) => {
                self.sampling.refuse_for_one_prompt()?;
                let generator = start(&self.model, &self.engine, defaults, algorithms, *quiet)?;
                one::answer(&generator, prompt, *quiet)
            }
            (None, Some(input)) => self.batch(input, output, defaults, algorithms),
            (None, None) => Err(Error::Usage(
                "nothing to answer: give --prompt TEXT, or --input FILE (- is standard input)"
                    .into(),
            )),
        }
    }

    fn batch(
        &self,
        input: &str,
        output: &str,
        defaults: SamplingParams,
        algorithms: &Algorithms,
    ) -> Result<ExitCode> {
        let quiet = self.prompts.quiet;
        // Files first: a wrong path should not cost the loading of a model.
        let lines = input::Lines::open(input)?;
        let mut output = output::Output::create(output, input)?;
        let most = self.engine.max_queued_requests;
        // The batch itself waits where there is no room, so the engine need not refuse.
        let mut engine = self.engine.clone();
        engine.max_queued_requests = usize::MAX;
        let answered =
            start(&self.model, &engine, defaults, algorithms, quiet).and_then(|generator| {
                if let (Some(partial), false) = (output.partial(), quiet) {
                    notice(format_args!("output    {} until it is complete", partial.display()));
                }
                batch::answer(&generator, lines, &mut output, most, quiet)
            });
        match answered {
            Ok(code) => output.finish().map(|()| code),
            Err(error) => Err(output.interrupted(error)),
        }
    }
}
