//! `aquila chat`: a conversation in the terminal.

mod conversation;
mod interrupt;
mod line;
mod reply;

use std::process::ExitCode;

use clap::Args;

use self::conversation::Conversation;
use self::interrupt::Interrupt;
use self::line::{Input, Line};
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::Result;
use crate::flags::{EngineFlags, ModelFlags, SamplingFlags};
use crate::start::start;

const HELP: &str = "\
/clear   begin a new conversation
/undo    take the last question and its answer back
/help    these lines
/exit    leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next.";

/// Talk to a model in the terminal.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Chat {
    #[command(flatten)]
    model: ModelFlags,

    /// What the model is told before the conversation begins
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

impl Chat {
    /// Runs until the user leaves.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let mut defaults = self.sampling.params()?;
        let max_tokens = defaults.max_tokens.take();
        let generator = start(&self.model, &self.engine, defaults, algorithms, true)?;
        let mut conversation = Conversation::new(generator, self.system.clone(), max_tokens)?;
        let interrupt = Interrupt::listen()?;
        let mut line = Line::open()?;
        line.say(&format!("{}: ask away; /help lists what else you can type", self.model.name()));
        loop {
            let text = match line.read()? {
                Input::Text(text) => text,
                Input::Interrupted => continue,
                Input::End => return Ok(ExitCode::SUCCESS),
            };
            match text.trim() {
                "" => (),
                "/exit" | "/quit" => return Ok(ExitCode::SUCCESS),
                "/help" => line.say(HELP),
                "/clear" => conversation.clear(),
                "/undo" => conversation.undo(),
                command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                    line.say(&format!("{command} is no command; /help lists them"));
                }
                question => match conversation.ask(question, &interrupt) {
                    Ok(status) => line.say(&status),
                    Err(error) => line.say(&format!("not answered: {error}")),
                },
            }
        }
    }
}
