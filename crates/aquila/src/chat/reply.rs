//! One answer, printed as it comes.

use std::io::{Write, stdout};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use aquila_engine::FinishReason;
use aquila_spec::SpecStats;
use aquila_text::{AnswerSink, CheckedParams, Delta, End, Generator};

use super::interrupt::Interrupt;
use crate::error::{Error, Result};

/// How often Ctrl-C is looked for while nothing comes.
const GLANCE: Duration = Duration::from_millis(50);

/// An answer that was printed.
pub struct Reply {
    pub text: String,
    pub prompt_tokens: usize,
    pub tokens: usize,
    /// From asking to the first token.
    pub first: Option<Duration>,
    /// From the first token to the last.
    pub writing: Duration,
    /// What speculation did.
    pub spec: SpecStats,
    /// Why it ended, if that is worth saying.
    pub note: Option<String>,
}

impl Reply {
    /// How fast it was written; one token says nothing about that.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let seconds = self.writing.as_secs_f64();
        (self.tokens > 1 && seconds > 0.0).then(|| (self.tokens - 1) as f64 / seconds)
    }
}

enum Event {
    Piece(Delta, Instant),
    End(End),
}

struct Teller(Sender<Event>);

impl AnswerSink for Teller {
    fn delta(&mut self, delta: Delta) -> bool {
        self.0.send(Event::Piece(delta, Instant::now())).is_ok()
    }

    fn end(self: Box<Self>, end: End) {
        // If nobody prints any more, there is nobody to tell.
        let _ = self.0.send(Event::End(end));
    }
}

/// Asks and prints the answer; Ctrl-C ends it where it is.
pub fn print(
    generator: &Generator,
    prompt: Vec<u32>,
    params: &CheckedParams,
    interrupt: &Interrupt,
) -> Result<Reply> {
    let (events, inbox) = channel();
    interrupt.forget();
    let asked = Instant::now();
    let prompt_tokens = prompt.len();
    let ids = generator.submit(prompt, params, None, |_| Box::new(Teller(events.clone())))?;
    drop(events);
    let mut reply = Reply {
        text: String::new(),
        prompt_tokens,
        tokens: 0,
        first: None,
        writing: Duration::ZERO,
        spec: SpecStats::default(),
        note: None,
    };
    let mut begun = None;
    let mut stopped = false;
    let end = loop {
        if interrupt.pressed() && !stopped {
            stopped = true;
            ids.iter().for_each(|&id| generator.engine().abort(id));
        }
        match inbox.recv_timeout(GLANCE) {
            Ok(Event::Piece(delta, at)) => {
                let begun = *begun.get_or_insert(at);
                reply.first = Some(begun - asked);
                reply.writing = at - begun;
                reply.tokens += delta.tokens.len();
                say(&mut reply.text, &delta.text)?;
            }
            Ok(Event::End(end)) => break end,
            Err(RecvTimeoutError::Timeout) => (),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Other("the engine ended before the answer did".into()));
            }
        }
    };
    say(&mut reply.text, &end.text)?;
    say(&mut String::new(), "\n")?;
    reply.spec = end.usage.spec;
    reply.note = match end.reason {
        FinishReason::Stop(_) => None,
        FinishReason::Length => Some("cut at its longest".into()),
        FinishReason::Abort(_) if stopped => Some("stopped".into()),
        FinishReason::Abort(why) | FinishReason::GrammarFailed(why) => Some(why),
    };
    Ok(reply)
}

fn say(text: &mut String, piece: &str) -> Result<()> {
    text.push_str(piece);
    let mut out = stdout().lock();
    let written = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| Error::file("standard output", error))
}
