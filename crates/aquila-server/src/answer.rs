//! From the engine's thread to the server's: answers piece by piece, or whole.

use std::sync::Arc;

use aquila_engine::{FinishReason, Token, TokenRows, Usage};
use aquila_text::{AnswerSink, Delta, End};
use tokio::sync::mpsc::{Sender, UnboundedSender};

use crate::metrics::Stopwatch;
use crate::returned::HeldRoom;

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

/// Room for the log-probabilities of an answer.
pub(crate) struct LogprobRoom {
    pub room: Option<Arc<HeldRoom>>,
    /// Answers that have the log-probabilities of the prompt.
    pub copies: usize,
}

impl LogprobRoom {
    /// Whether there is room for those of the prompt's tokens.
    fn prompt(&self, tokens: &[Token]) -> bool {
        self.room.as_ref().is_none_or(|room| room.take(tokens, self.copies))
    }

    /// Leaves the room to the request before its client hears of the end, and may ask again.
    fn leave(&mut self) {
        self.room = None;
    }

    /// Whether there is room for those of further tokens.
    fn tokens(&self, tokens: &[Token]) -> bool {
        self.room.as_ref().is_none_or(|room| room.take(tokens, 1))
    }
}

/// Hands an answer on piece by piece; gives it up if its client does not keep up.
pub(crate) struct Relay {
    pub index: usize,
    pub events: Sender<Event>,
    pub stopwatch: Stopwatch,
    pub room: LogprobRoom,
    /// Whether tokens are kept when they were handed on.
    pub keeps_tokens: bool,
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
        if self.room.prompt(&tokens) {
            self.send(StreamEvent::Prompt(tokens));
        }
    }

    fn delta(&mut self, delta: Delta) -> bool {
        self.stopwatch.tokens(delta.tokens.len());
        if !self.room.tokens(if self.keeps_tokens { &delta.tokens } else { &[] }) {
            return false;
        }
        self.send(StreamEvent::Delta(delta));
        !self.broken
    }

    fn end(mut self: Box<Self>, end: End) {
        self.stopwatch.end(&end);
        self.room.leave();
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
    pub room: LogprobRoom,
}

impl AnswerSink for Collector {
    fn prompt(&mut self, tokens: Vec<Token>) {
        if self.room.prompt(&tokens) {
            self.prompt = tokens;
        }
    }

    fn delta(&mut self, delta: Delta) -> bool {
        self.stopwatch.tokens(delta.tokens.len());
        if !self.room.tokens(&delta.tokens) {
            return false;
        }
        self.tokens.extend(delta.tokens);
        self.text.push_str(&delta.text);
        !self.done.is_closed()
    }

    fn end(mut self: Box<Self>, end: End) {
        self.stopwatch.end(&end);
        self.room.leave();
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
