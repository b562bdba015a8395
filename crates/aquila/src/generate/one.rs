//! One prompt, whose answer is printed as it comes.

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};

use aquila_text::{AnswerSink, Delta, End, Generator, Prompt, SamplingParams};

use super::answer::reason_name;
use crate::error::{Error, Result, SOME_FAILED};
use crate::notice::notice;

enum Event {
    Text(String),
    End(Box<End>),
}

struct Printer(Sender<Event>);

impl AnswerSink for Printer {
    fn delta(&mut self, delta: Delta) -> bool {
        self.0.send(Event::Text(delta.text)).is_ok()
    }

    fn end(self: Box<Self>, end: End) {
        // If nobody prints any more, there is nobody to tell.
        let _ = self.0.send(Event::End(Box::new(end)));
    }
}

/// Prints the answer to `prompt`.
pub fn answer(generator: &Generator, prompt: &str, quiet: bool) -> Result<ExitCode> {
    let params = generator.check(SamplingParams::default())?;
    let ids = generator.tokens(Prompt::Text(prompt.into()))?;
    let (events, inbox) = channel();
    generator.submit(ids, &params, None, |_| Box::new(Printer(events.clone())))?;
    // Only the engine holds the other end now, so that its end is noticed here.
    drop(events);
    let failed = |e| Error::output("standard output", e);
    let mut out = stdout().lock();
    for event in inbox {
        match event {
            Event::Text(text) => {
                out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(failed)?;
            }
            Event::End(end) => {
                writeln!(out, "{}", end.text).map_err(failed)?;
                if let Some(why) = end.reason.failure() {
                    Error::check(generator.engine())?;
                    notice(format_args!("aquila: {why}"));
                    return Ok(ExitCode::from(SOME_FAILED));
                }
                if !quiet {
                    notice(format_args!(
                        "{}: {} prompt tokens, {} answered",
                        reason_name(&end.reason),
                        end.usage.prompt_tokens,
                        end.usage.completion_tokens
                    ));
                }
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Err(Error::Other("the engine ended before the answer was complete".into()))
}
