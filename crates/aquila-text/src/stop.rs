//! Stop strings: where a growing text must end.
//!
//! The invariant: no part of a stop string is ever emitted, and nothing emitted is ever taken
//! back. A text ends at the match that completes first; of several that complete at the same
//! character, at the one that starts first. What may still become a match is held back, and that
//! is always less than the longest stop string.

use std::sync::Arc;

use crate::{Error, Result};

/// A set of stop strings, compiled once and shared by the matchers of many requests.
///
/// An Aho-Corasick automaton over bytes: a state stands for the longest suffix of the text that
/// begins some stop string, so its depth is exactly what must be held back.
#[derive(Debug, Clone)]
pub struct StopStrings(Arc<Automaton>);

#[derive(Debug)]
struct Automaton {
    strings: Vec<String>,
    states: Vec<State>,
}

#[derive(Debug, Default)]
struct State {
    children: Vec<(u8, usize)>,
    fallback: usize,
    depth: usize,
    /// The longest stop string that ends here.
    complete: Option<usize>,
}

impl State {
    fn child(&self, byte: u8) -> Option<usize> {
        self.children.iter().find(|(edge, _)| *edge == byte).map(|(_, next)| *next)
    }
}

impl StopStrings {
    /// Compiles stop strings; an empty one is refused.
    pub fn new<S: Into<String>>(strings: impl IntoIterator<Item = S>) -> Result<Self> {
        let strings: Vec<String> = strings.into_iter().map(Into::into).collect();
        if strings.iter().any(String::is_empty) {
            return Err(Error::EmptyStop);
        }
        let mut states = vec![State::default()];
        for (which, string) in strings.iter().enumerate() {
            let mut at = 0;
            for &byte in string.as_bytes() {
                at = match states[at].child(byte) {
                    Some(next) => next,
                    None => {
                        let next = states.len();
                        let depth = states[at].depth + 1;
                        states.push(State { depth, ..State::default() });
                        states[at].children.push((byte, next));
                        next
                    }
                };
            }
            states[at].complete.get_or_insert(which);
        }
        let mut automaton = Automaton { strings, states };
        automaton.link();
        Ok(Self(Arc::new(automaton)))
    }

    /// The stop strings, in the order they were given.
    pub fn strings(&self) -> &[String] {
        &self.0.strings
    }

    /// Whether there is nothing to stop at.
    pub fn is_empty(&self) -> bool {
        self.0.strings.is_empty()
    }

    /// A matcher at the beginning of a text.
    pub fn matcher(&self) -> StopMatcher {
        StopMatcher { stops: self.clone(), state: 0, held: String::new(), stopped: None }
    }
}

impl Automaton {
    /// Links every state to its longest proper suffix that is a state, shallow states first.
    fn link(&mut self) {
        let mut queue: Vec<usize> = self.states[0].children.iter().map(|(_, next)| *next).collect();
        let mut next_in_queue = 0;
        while let Some(&at) = queue.get(next_in_queue) {
            next_in_queue += 1;
            for (byte, child) in self.states[at].children.clone() {
                let fallback = self.step(self.states[at].fallback, byte);
                self.states[child].fallback = fallback;
                queue.push(child);
            }
            let fallback = self.states[at].fallback;
            self.states[at].complete = self.states[at].complete.or(self.states[fallback].complete);
        }
    }

    fn step(&self, mut at: usize, byte: u8) -> usize {
        loop {
            match self.states[at].child(byte) {
                Some(next) => return next,
                None if at == 0 => return 0,
                None => at = self.states[at].fallback,
            }
        }
    }
}

/// What a push made certain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Piece {
    /// Text that belongs to the answer, whatever comes.
    pub emit: String,
    /// The index of the stop string that ended the text, once one has.
    pub stopped: Option<usize>,
}

/// Follows one text as it grows, and says where it stops.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: StopStrings,
    state: usize,
    held: String,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// Takes the next piece of the text; after a stop, everything further is dropped.
    pub fn push(&mut self, text: &str) -> Piece {
        if self.stopped.is_some() {
            return Piece { emit: String::new(), stopped: self.stopped };
        }
        let automaton = &self.stops.0;
        let held_before = self.held.len();
        self.held.push_str(text);
        for (read, &byte) in text.as_bytes().iter().enumerate() {
            self.state = automaton.step(self.state, byte);
            if let Some(which) = automaton.states[self.state].complete {
                let end = held_before + read + 1;
                let start = end - automaton.strings[which].len();
                let mut emit = std::mem::take(&mut self.held);
                emit.truncate(start);
                self.stopped = Some(which);
                return Piece { emit, stopped: self.stopped };
            }
        }
        // A match begins with the first byte of a stop string, which begins a character, so this
        // is a character's boundary.
        let certain = self.held.len() - automaton.states[self.state].depth;
        let still_held = self.held.split_off(certain);
        let emit = std::mem::replace(&mut self.held, still_held);
        Piece { emit, stopped: None }
    }

    /// The stop string that ended the text, if one has.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// What is held back: text that may yet turn out to begin a stop string.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// Ends the text, and releases what was held back.
    pub fn finish(&mut self) -> String {
        self.state = 0;
        std::mem::take(&mut self.held)
    }
}
