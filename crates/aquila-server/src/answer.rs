//! From the engine's thread to the server's: answers piece by piece, or whole.

use aquila_engine::{FinishReason, Token, TokenRows, Usage};
use aquila_text::{AnswerSink, Delta, End};
use tokio::sync::mpsc::{Sender, UnboundedSender};

use crate::metrics::Stopwatch;

/// A complete answer.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The prompt's tokens, if their log-probabilities were asked for.
    pub prompt: Vec<Token>,
    pub tokens: Vec<Token>,
    pub text: String,
    pub reason: FinishReason,
    /// The stop string that ended it, if one did.
    pub stop: Option<String>,
    pub usage: Usage,
    /// Rows of its tokens, if they were asked for.
    pub rows: TokenRows,
}

/// What became of one of the answers that a request asked for.
#[derive(Debug)]
pub(crate) struct Event {
    /// Which of the answers.
    pub index: usize,
    pub event: StreamEvent,
}

#[derive(Debug)]
pub(crate) enum StreamEvent {
    /// The prompt's tokens with their log-probabilities.
    Prompt(Vec<Token>),
    Delta(Delta),
    End(End),
}

/// Hands an answer on piece by piece; gives it up if its client does not keep up.
pub(crate) struct Relay {
    pub index: usize,
    pub events: Sender<Event>,
    pub stopwatch: Stopwatch,
    /// Whether a piece did not get through; nothing is sent after that, so that a stream without
    /// an end is one whose client did not keep up.
    pub broken: bool,
}

impl Relay {
    fn send(&mut self, event: StreamEvent) {
        if !self.broken {
            self.broken = self.events.try_send(Event { index: self.index, event }).is_err();
        }
    }
}

impl AnswerSink for Relay {
    fn prompt(&mut self, tokens: Vec<Token>) {
        self.send(StreamEvent::Prompt(tokens));
    }

    fn delta(&mut self, delta: Delta) -> bool {
        self.stopwatch.tokens(delta.tokens.len());
        self.send(StreamEvent::Delta(delta));
        !self.broken
    }

    fn end(mut self: Box<Self>, end: End) {
        self.stopwatch.end(&end);
        self.send(StreamEvent::End(end));
    }
}

/// Keeps an answer until it is whole.
pub(crate) struct Collector {
    pub index: usize,
    pub prompt: Vec<Token>,
    pub tokens: Vec<Token>,
    pub text: String,
    pub done: UnboundedSender<(usize, Answer)>,
    pub stopwatch: Stopwatch,
}

impl AnswerSink for Collector {
    fn prompt(&mut self, tokens: Vec<Token>) {
        self.prompt = tokens;
    }

    fn delta(&mut self, delta: Delta) -> bool {
        self.stopwatch.tokens(delta.tokens.len());
        self.tokens.extend(delta.tokens);
        self.text.push_str(&delta.text);
        !self.done.is_closed()
    }

    fn end(mut self: Box<Self>, end: End) {
        self.stopwatch.end(&end);
        self.text.push_str(&end.text);
        let answer = Answer {
            prompt: self.prompt,
            tokens: self.tokens,
            text: self.text,
            reason: end.reason,
            stop: end.stop,
            usage: end.usage,
            rows: end.rows,
        };
        // Nobody waits for the answer of a client that left.
        let _ = self.done.send((self.index, answer));
    }
}
