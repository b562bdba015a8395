//! The suffix automaton of a corpus: every context that occurs in it, what follows, and how often.
//!
//! Its one invariant: the contexts of a state end at the same places of the text, so what follows
//! one of them follows all. Each state knows the first of those places; the token there in the
//! text is its first way on and is not kept again, and most states have no other.

use super::MatchType;
use super::grow::{Child, Source};
use super::links::{Key, Links};

const NONE: u32 = u32::MAX;
const ROOT: u32 = 0;
/// Stands between documents; no vocabulary has it.
const BOUNDARY: u32 = u32::MAX;
/// Tokens of a context that are looked up: a match that long is as good as unique.
const WINDOW: usize = 32;
/// The longest text: there are fewer than two states for each token, and they are numbered in u32.
pub(super) const MOST_TOKENS: usize = 1 << 30;

#[derive(Debug, Clone, Copy)]
struct State {
    /// The state of the longest suffix of its contexts that ends at more places.
    link: u32,
    /// Tokens of its longest context.
    len: u32,
    /// Where its contexts end first: the token that follows there.
    end: u32,
    /// What that token leads to.
    next: u32,
    /// The first of its other ways on, if any.
    edge: u32,
}

/// A way on beside the first.
#[derive(Debug, Clone, Copy)]
struct Edge {
    state: u32,
    token: u32,
    target: u32,
    /// While it is built, the state's next edge; then, how often it is taken.
    more: u32,
}

/// An automaton that is being built, token by token.
#[derive(Debug)]
pub(super) struct Growing {
    text: Vec<u32>,
    states: Vec<State>,
    edges: Vec<Edge>,
    links: Links,
    last: u32,
}

impl Growing {
    /// Of an empty text.
    pub fn new() -> Self {
        let root = State { link: NONE, len: 0, end: 0, next: NONE, edge: NONE };
        let (text, edges) = (Vec::new(), Vec::new());
        Self { text, states: vec![root], edges, links: Links::with_room(0), last: ROOT }
    }

    /// Ends a document: nothing is matched across.
    pub fn end_document(&mut self) {
        if self.text.last().is_some_and(|&token| token != BOUNDARY) {
            self.push(BOUNDARY);
        }
    }

    /// Takes in the next token.
    pub fn push(&mut self, token: u32) {
        let end = self.text.len() as u32 + 1;
        self.text.push(token);
        let new = self.states.len() as u32;
        let len = self.states[self.last as usize].len + 1;
        self.states.push(State { link: ROOT, len, end, next: NONE, edge: NONE });
        // The last state's contexts first ended here, so the new token is its first way on.
        self.states[self.last as usize].next = new;
        let mut at = self.states[self.last as usize].link;
        self.last = new;
        let found = loop {
            if at == NONE {
                return;
            }
            match self.step(at, token) {
                Some(found) => break found,
                None => self.add_edge(at, token, new),
            }
            at = self.states[at as usize].link;
        };
        let len = self.states[at as usize].len + 1;
        if self.states[found as usize].len == len {
            self.states[new as usize].link = found;
            return;
        }
        // Only the shorter contexts of `found` end here too: they part from it.
        let parted = self.states.len() as u32;
        let State { edge: mut copied, .. } = self.states[found as usize];
        self.states.push(State { len, edge: NONE, ..self.states[found as usize] });
        while copied != NONE {
            let Edge { token, target, more, .. } = self.edges[copied as usize];
            self.add_edge(parted, token, target);
            copied = more;
        }
        self.states[found as usize].link = parted;
        self.states[new as usize].link = parted;
        while at != NONE && self.step(at, token) == Some(found) {
            self.redirect(at, token, parted);
            at = self.states[at as usize].link;
        }
    }

    fn step(&self, state: u32, token: u32) -> Option<u32> {
        step(&self.text, &self.states, &self.edges, &self.links, state, token)
    }

    fn add_edge(&mut self, state: u32, token: u32, target: u32) {
        let number = self.edges.len() as u32;
        let more = std::mem::replace(&mut self.states[state as usize].edge, number);
        self.edges.push(Edge { state, token, target, more });
        self.links.insert(number + 1, key_of(&self.edges));
    }

    fn redirect(&mut self, state: u32, token: u32, target: u32) {
        let from = &mut self.states[state as usize];
        if self.text[from.end as usize] == token {
            from.next = target;
        } else if let Some(number) = self.links.find((state, token), key_of(&self.edges)) {
            self.edges[number as usize - 1].target = target;
        }
    }

    /// The automaton of all that was pushed.
    pub fn finish(mut self) -> Automaton {
        self.text.shrink_to_fit();
        self.states.shrink_to_fit();
        self.edges.shrink_to_fit();
        let counts = counts(&self.states, self.text.len());
        for edge in &mut self.edges {
            edge.more = counts[edge.target as usize];
        }
        self.edges.sort_unstable_by_key(|e| (e.state, std::cmp::Reverse(e.more), e.token));
        self.links = Links::with_room(self.edges.len());
        for number in (0..self.edges.len()).rev() {
            self.states[self.edges[number].state as usize].edge = number as u32;
            self.links.insert(number as u32 + 1, key_of(&self.edges));
        }
        let Self { text, states, edges, links, .. } = self;
        Automaton { text, states, edges, links, counts }
    }
}

/// At how many places the contexts of each state end: one for a state of a whole prefix, and those
/// of all states that link to it.
fn counts(states: &[State], tokens: usize) -> Vec<u32> {
    let mut starts = vec![0u32; tokens + 2];
    for state in states {
        starts[state.len as usize + 1] += 1;
    }
    for len in 1..starts.len() {
        starts[len] += starts[len - 1];
    }
    let mut by_len = vec![0u32; states.len()];
    for (number, state) in states.iter().enumerate() {
        let start = &mut starts[state.len as usize];
        by_len[*start as usize] = number as u32;
        *start += 1;
    }
    let mut counts: Vec<u32> =
        states.iter().map(|state| u32::from(state.len == state.end)).collect();
    for &number in by_len.iter().rev() {
        let link = states[number as usize].link;
        if link != NONE {
            counts[link as usize] += counts[number as usize];
        }
    }
    counts
}

/// The suffix automaton of a text.
#[derive(Debug)]
pub(super) struct Automaton {
    text: Vec<u32>,
    states: Vec<State>,
    /// By state, the most frequent first.
    edges: Vec<Edge>,
    links: Links,
    counts: Vec<u32>,
}

impl Automaton {
    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        (self.text.capacity() + self.counts.capacity()) * size_of::<u32>()
            + self.states.capacity() * size_of::<State>()
            + self.edges.capacity() * size_of::<Edge>()
            + self.links.bytes()
    }

    /// The places of the contexts that end `tokens` and occur in the text, with their lengths: the
    /// longest first, then each that occurs at more places than the one before it.
    pub fn matches(&self, tokens: &[u32]) -> Vec<(usize, u32)> {
        let (mut state, mut length) = (ROOT, 0);
        for &token in &tokens[tokens.len().saturating_sub(WINDOW)..] {
            loop {
                match step(&self.text, &self.states, &self.edges, &self.links, state, token) {
                    Some(next) => {
                        state = next;
                        length += 1;
                        break;
                    }
                    None if state == ROOT => break,
                    None => {
                        state = self.states[state as usize].link;
                        length = self.states[state as usize].len as usize;
                    }
                }
            }
        }
        let mut matches = Vec::new();
        while state != ROOT {
            matches.push((length, state));
            state = self.states[state as usize].link;
            length = self.states[state as usize].len as usize;
        }
        matches
    }
}

impl Source for Automaton {
    /// A corpus has no recency: the most frequent come first in either order.
    fn children(&self, place: u32, most: usize, _: MatchType, found: &mut Vec<Child>) {
        found.clear();
        let state = &self.states[place as usize];
        if let Some(&token) = self.text.get(state.end as usize) {
            let count = self.counts[state.next as usize];
            found.push(Child { token, count, place: state.next });
        }
        if state.edge != NONE {
            let edges = &self.edges[state.edge as usize..];
            // One more than wanted, since the boundary between documents is none.
            for edge in edges.iter().take_while(|edge| edge.state == place).take(most + 1) {
                found.push(Child { token: edge.token, count: edge.more, place: edge.target });
            }
        }
        found.retain(|child| child.token != BOUNDARY);
        found.sort_by_key(|child| std::cmp::Reverse(child.count));
        found.truncate(most);
    }
}

fn step(
    text: &[u32],
    states: &[State],
    edges: &[Edge],
    links: &Links,
    state: u32,
    token: u32,
) -> Option<u32> {
    let from = &states[state as usize];
    if text.get(from.end as usize) == Some(&token) {
        return Some(from.next);
    }
    if from.edge == NONE {
        return None;
    }
    let number = links.find((state, token), key_of(edges))?;
    Some(edges[number as usize - 1].target)
}

/// The way of the edge with a number; numbers in the table begin with 1.
fn key_of(edges: &[Edge]) -> impl Fn(u32) -> Key {
    |number| {
        let edge = &edges[number as usize - 1];
        (edge.state, edge.token)
    }
}
