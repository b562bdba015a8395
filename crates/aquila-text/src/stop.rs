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

/// Small, since there is one for each byte of the strings. States are numbered, the beginning is 0,
/// which is no state's child.
#[derive(Debug, Default)]
struct State {
    /// The byte that leads here.
    byte: u8,
    first_child: u32,
    /// The next child of the state that this is a child of.
    next_child: u32,
    fallback: u32,
    depth: u32,
    /// The longest stop string that ends here.
    complete: Option<u32>,
}

impl StopStrings {
    /// Compiles stop strings; an empty one is refused.
    pub fn new<S: Into<String>>(strings: impl IntoIterator<Item = S>) -> Result<Self> {
        let strings: Vec<String> = strings.into_iter().map(Into::into).collect();
        if strings.iter().any(String::is_empty) {
            return Err(Error::EmptyStop);
        }
        if strings.iter().map(String::len).sum::<usize>() >= u32::MAX as usize {
            return Err(Error::LongStops);
        }
        let mut automaton = Automaton { strings, states: vec![State::default()] };
        automaton.grow();
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
    fn state(&self, at: u32) -> &State {
        &self.states[at as usize]
    }

    /// The children of a state.
    fn children(&self, at: u32) -> impl Iterator<Item = u32> {
        let real = |child: u32| (child != 0).then_some(child);
        let first = real(self.state(at).first_child);
        std::iter::successors(first, move |&child| real(self.state(child).next_child))
    }

    fn child(&self, at: u32, byte: u8) -> Option<u32> {
        self.children(at).find(|&child| self.state(child).byte == byte)
    }

    /// Makes the states of all strings.
    fn grow(&mut self) {
        for which in 0..self.strings.len() {
            let mut at = 0;
            for index in 0..self.strings[which].len() {
                let byte = self.strings[which].as_bytes()[index];
                at = self.child(at, byte).unwrap_or_else(|| self.add(at, byte));
            }
            self.states[at as usize].complete.get_or_insert(which as u32);
        }
    }

    /// Adds a child to a state.
    fn add(&mut self, at: u32, byte: u8) -> u32 {
        let new = self.states.len() as u32;
        let parent = &mut self.states[at as usize];
        let (depth, next_child) = (parent.depth + 1, parent.first_child);
        parent.first_child = new;
        self.states.push(State { byte, depth, next_child, ..State::default() });
        new
    }

    /// Links every state to its longest proper suffix that is a state, shallow states first.
    fn link(&mut self) {
        let mut queue: Vec<u32> = self.children(0).collect();
        let mut next_in_queue = 0;
        while let Some(&at) = queue.get(next_in_queue) {
            next_in_queue += 1;
            let fallback = self.state(at).fallback;
            let mut next = self.state(at).first_child;
            while next != 0 {
                let child = next;
                self.states[child as usize].fallback = self.step(fallback, self.state(child).byte);
                queue.push(child);
                next = self.state(child).next_child;
            }
            let complete = self.state(at).complete.or(self.state(fallback).complete);
            self.states[at as usize].complete = complete;
        }
    }

    fn step(&self, mut at: u32, byte: u8) -> u32 {
        loop {
            match self.child(at, byte) {
                Some(next) => return next,
                None if at == 0 => return 0,
                None => at = self.state(at).fallback,
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
    state: u32,
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
            if let Some(which) = automaton.state(self.state).complete {
                let which = which as usize;
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
        let certain = self.held.len() - automaton.state(self.state).depth as usize;
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
