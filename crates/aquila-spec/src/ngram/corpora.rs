//! Named corpora, which come and go while requests are served.
//!
//! Its one invariant: a round sees the corpora of one moment, whole ones only. A corpus is seen
//! once it is finished, and one that is removed lives on for the rounds that have it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::automaton::{Automaton, Growing, MOST_TOKENS};

/// Why corpora were not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CorpusError {
    /// The name is taken.
    #[error("there is a corpus {0:?} already: remove it first, or choose another name")]
    Exists(String),
    /// No such corpus.
    #[error("there is no corpus {0:?}")]
    Unknown(String),
    /// Removed before it was finished.
    #[error("the corpus {0:?} was removed while it was loaded")]
    Removed(String),
    /// Nothing in it.
    #[error("the corpus {0:?} has no tokens")]
    Empty(String),
    /// No room.
    #[error(
        "there is no room for the corpus {name:?}: all corpora together may have {most} tokens; \
         remove one, or allow more"
    )]
    Full {
        /// The corpus.
        name: String,
        /// The tokens that all may have.
        most: usize,
    },
}

/// A corpus that drafts come from.
#[derive(Debug)]
pub struct Corpus {
    name: String,
    tokens: usize,
    pub(super) automaton: Automaton,
}

impl Corpus {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many tokens it has.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.automaton.bytes()
    }
}

/// All corpora, shared by those who change them and those who draft.
#[derive(Debug)]
pub struct Corpora {
    most_tokens: usize,
    vocabulary: usize,
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By name.
    finished: Arc<Vec<Arc<Corpus>>>,
    loading: BTreeMap<String, Loading>,
    loads: u64,
}

#[derive(Debug)]
struct Loading {
    /// Tells it from later ones of the same name.
    load: u64,
    tokens: usize,
}

impl State {
    fn tokens(&self) -> usize {
        let finished: usize = self.finished.iter().map(|corpus| corpus.tokens).sum();
        finished + self.loading.values().map(|loading| loading.tokens).sum::<usize>()
    }
}

impl Corpora {
    /// The most tokens of all corpora together, by default.
    pub const MOST_TOKENS: usize = 10_000_000;

    /// None yet, and room for `most_tokens` in all, of a model that knows `vocabulary` of them.
    pub fn new(most_tokens: usize, vocabulary: usize) -> Arc<Self> {
        let (most_tokens, state) = (most_tokens.min(MOST_TOKENS), RwLock::default());
        Arc::new(Self { most_tokens, vocabulary, state })
    }

    /// The corpora of this moment, by name.
    pub fn snapshot(&self) -> Arc<Vec<Arc<Corpus>>> {
        self.read().finished.clone()
    }

    /// The tokens that all corpora together may have.
    pub fn most_tokens(&self) -> usize {
        self.most_tokens
    }

    /// Bytes that the finished corpora take.
    pub fn bytes(&self) -> usize {
        self.snapshot().iter().map(|corpus| corpus.bytes()).sum()
    }

    /// Begins a corpus. No draft sees it until it is finished; its name is taken from now on.
    pub fn load(self: &Arc<Self>, name: &str) -> Result<Load, CorpusError> {
        let mut state = self.write();
        let taken = state.finished.iter().any(|corpus| corpus.name == name);
        if taken || state.loading.contains_key(name) {
            return Err(CorpusError::Exists(name.into()));
        }
        if state.tokens() >= self.most_tokens {
            return Err(CorpusError::Full { name: name.into(), most: self.most_tokens });
        }
        state.loads += 1;
        let load = state.loads;
        state.loading.insert(name.into(), Loading { load, tokens: 0 });
        let (corpora, name) = (self.clone(), name.into());
        Ok(Load { corpora, name, load, tokens: 0, truncated: false, growing: Growing::new() })
    }

    /// Removes a corpus. One that is being loaded never appears: its load ends with an error.
    pub fn remove(&self, name: &str) -> Result<(), CorpusError> {
        let mut state = self.write();
        if state.loading.remove(name).is_some() {
            return Ok(());
        }
        let kept = state.finished.iter().filter(|corpus| corpus.name != name);
        let kept: Vec<_> = kept.cloned().collect();
        if kept.len() == state.finished.len() {
            return Err(CorpusError::Unknown(name.into()));
        }
        state.finished = Arc::new(kept);
        Ok(())
    }

    // Nobody panics while holding the lock, so what a poisoned one guards is whole.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A corpus that is being loaded. Dropped before it is finished, it was never there.
#[derive(Debug)]
pub struct Load {
    corpora: Arc<Corpora>,
    name: String,
    load: u64,
    tokens: usize,
    truncated: bool,
    growing: Growing,
}

impl Load {
    /// Takes in more of a document, as far as there is room. Says whether more is wanted: not once
    /// the corpora are full, nor once this one was removed.
    pub fn push(&mut self, tokens: &[u32]) -> bool {
        let taken = {
            let mut state = self.corpora.write();
            let room = self.corpora.most_tokens.saturating_sub(state.tokens());
            match state.loading.get_mut(&self.name) {
                Some(loading) if loading.load == self.load => {
                    let taken = tokens.len().min(room);
                    loading.tokens += taken;
                    taken
                }
                _ => return false,
            }
        };
        for &token in &tokens[..taken] {
            // What the model does not know is never matched nor drafted: as good as an end.
            if (token as usize) < self.corpora.vocabulary {
                self.growing.push(token);
            } else {
                self.growing.end_document();
            }
        }
        self.tokens += taken;
        self.truncated |= taken < tokens.len();
        !self.truncated
    }

    /// Ends a document: nothing is matched across its end.
    pub fn end_document(&mut self) {
        self.growing.end_document();
    }

    /// Tokens taken in so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether tokens were left out for want of room.
    pub fn truncated(&self) -> bool {
        self.truncated
    }

    /// Shows the corpus to the rounds that begin from now on.
    pub fn finish(mut self) -> Result<Arc<Corpus>, CorpusError> {
        if self.tokens == 0 {
            return Err(CorpusError::Empty(self.name.clone()));
        }
        let growing = std::mem::replace(&mut self.growing, Growing::new());
        let (name, tokens, automaton) = (self.name.clone(), self.tokens, growing.finish());
        let corpus = Arc::new(Corpus { name, tokens, automaton });
        let mut state = self.corpora.write();
        if state.loading.get(&self.name).is_none_or(|loading| loading.load != self.load) {
            return Err(CorpusError::Removed(self.name.clone()));
        }
        state.loading.remove(&self.name);
        let mut finished = state.finished.to_vec();
        let place = finished.partition_point(|other| other.name < corpus.name);
        finished.insert(place, corpus.clone());
        state.finished = Arc::new(finished);
        drop(state);
        Ok(corpus)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let mut state = self.corpora.write();
        if state.loading.get(&self.name).is_some_and(|loading| loading.load == self.load) {
            state.loading.remove(&self.name);
        }
    }
}
