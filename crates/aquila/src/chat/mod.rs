//! `aquila chat`: a conversation in the terminal.

mod command;
mod conversation;
mod interrupt;
mod line;
mod reply;
mod settings;

use std::process::ExitCode;

use clap::Args;

use self::command::{Command, HELP};
use self::conversation::Conversation;
use self::interrupt::Interrupt;
use self::line::{Input, Line};
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::Result;
use crate::flags::{EngineFlags, ModelFlags, SamplingFlags};
use crate::start::start;

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
        let name = self.model.name();
        let mut conversation =
            Conversation::new(generator, name.to_string(), self.system.clone(), max_tokens)?;
        let interrupt = Interrupt::listen()?;
        let mut line = Line::open()?;
        line.say(&format!("{}: ask away; /help lists what else you can type", self.model.name()));
        loop {
            let text = match line.read()? {
                Input::Text(text) => text,
                Input::Interrupted => continue,
                Input::End => return Ok(ExitCode::SUCCESS),
            };
            match Command::read(&text) {
                Command::Nothing => (),
                Command::Exit => return Ok(ExitCode::SUCCESS),
                Command::Help => line.say(HELP),
                Command::Reset => conversation.reset(),
                Command::Undo => conversation.undo(),
                Command::ShowSettings => line.say(&conversation.settings.list()),
                Command::Set(key, value) => match conversation.settings.set(key, value) {
                    Ok(()) => line.say(&format!("{key} is {value} from now on")),
                    Err(why) => line.say(&format!("not set: {why}")),
                },
                Command::System(text) => match conversation.set_system(text) {
                    Ok(()) => line.say(match text {
                        Some(_) => "the model is told so from now on",
                        None => "the model is told nothing first from now on",
                    }),
                    Err(error) => line.say(&format!("not set: {error}")),
                },
                Command::Save(path) => match conversation.save(&path) {
                    Ok(turns) => line.say(&format!("{turns} in {}", path.display())),
                    Err(error) => line.say(&format!("not saved: {error}")),
                },
                Command::Wrong(why) => line.say(&why),
                Command::Ask(question) => match conversation.ask(question, &interrupt) {
                    Ok(status) => line.say(&status),
                    Err(error) => line.say(&format!("not answered: {error}")),
                },
            }
            conversation.check_engine()?;
        }
    }
}
