//! Drafts from n-grams: what followed the same tokens before, in prompts, answers and corpora.
//!
//! Its one invariant: a draft is a function of the texts that were read, in the order of their
//! tokens, and of the corpora. In the scope of a request, the only text is its own, so nothing
//! that others do, nor how its tokens were handed over, changes its drafts.
//!
//! - [`NgramSettings`]: how n-grams are kept and drafted from
//! - [`Ngram`]: the drafts of all requests; [`NgramSources`]: what it is opened on
//! - [`Guess`]: what n-grams say of a next token, and how well they know
//! - [`Corpora`], [`Corpus`] and [`Load`]: texts that come and go while requests are served
//! - `trie`: the n-grams of prompts and answers; `automaton`: those of a corpus; `links`: the
//!   table that both find their ways in
//! - `grow`: from matches to a tree

mod automaton;
mod corpora;
mod entry;
mod grow;
mod links;
mod settings;
mod trie;

use std::collections::HashMap;
use std::sync::Arc;

pub use corpora::{Corpora, Corpus, CorpusError, Load};
pub(crate) use entry::NgramEntry;
pub use entry::NgramSources;
pub use grow::Guess;
use grow::{Anchor, first_guess, grow};
pub use settings::{MOST_TRIE_DEPTH, MatchType, NgramError, NgramScope, NgramSettings};
use trie::{NGRAM_BYTES, TextCursor, Trie};

use crate::{DraftRequest, HostProposer, Shape, Tree};

/// The drafts of all requests, without any model.
#[derive(Debug)]
pub struct Ngram {
    settings: NgramSettings,
    corpora: Arc<Corpora>,
    /// The text of all, in the scope of the server.
    shared: Option<Trie>,
    requests: HashMap<u64, Text>,
}

/// What was read of a request.
#[derive(Debug)]
struct Text {
    cursor: TextCursor,
    /// Its n-grams, in the scope of requests.
    own: Option<Trie>,
}

impl Ngram {
    /// Over what requests will read, and over `corpora`.
    pub fn new(
        settings: NgramSettings,
        corpora: Arc<Corpora>,
    ) -> std::result::Result<Self, NgramError> {
        settings.check()?;
        let trie = |room| Trie::new(settings.max_trie_depth, settings.capacity, room);
        let shared = (settings.scope == NgramScope::Server).then(|| trie(settings.capacity));
        Ok(Self { settings, corpora, shared, requests: HashMap::new() })
    }

    /// What it was told.
    pub fn settings(&self) -> &NgramSettings {
        &self.settings
    }

    /// The corpora that it drafts from beside what requests read.
    pub fn corpora(&self) -> &Arc<Corpora> {
        &self.corpora
    }

    /// Reads what is new of a request: `tokens` is all of its text that is certain.
    pub fn read(&mut self, request: u64, tokens: &[u32]) {
        let Self { settings, shared, requests, .. } = self;
        let text = requests.entry(request).or_insert_with(|| {
            let own = || Trie::new(settings.max_trie_depth, settings.capacity, 0);
            Text { cursor: TextCursor::default(), own: shared.is_none().then(own) }
        });
        let Some(trie) = text.own.as_mut().or(shared.as_mut()) else { return };
        for &token in tokens.get(text.cursor.tokens..).unwrap_or_default() {
            trie.push(&mut text.cursor, token);
        }
    }

    /// How many of a request's tokens have been read.
    pub fn tokens_read(&self, request: u64) -> usize {
        self.requests.get(&request).map_or(0, |text| text.cursor.tokens)
    }

    /// The next token of a request by what was read, the corpora left out.
    pub fn guess(&self, request: u64) -> Option<Guess> {
        let text = self.requests.get(&request)?;
        let trie = text.own.as_ref().or(self.shared.as_ref())?;
        let &(length, place) = trie.matches(&text.cursor).first()?;
        let anchor = Anchor { source: trie, length, place };
        first_guess(&self.settings, &anchor)
    }

    /// The tree of a request whose text so far is `tokens`, the bonus last.
    pub fn tree(&mut self, request: u64, tokens: &[u32], shape: Shape) -> Tree {
        self.with_anchors(request, tokens, |settings, bonus, anchors| {
            grow(settings, shape, bonus, anchors)
        })
    }

    /// As [`Self::tree`], with what its first path begins with.
    pub fn tree_with_guess(
        &mut self,
        request: u64,
        tokens: &[u32],
        shape: Shape,
    ) -> (Tree, Option<Guess>) {
        self.with_anchors(request, tokens, |settings, bonus, anchors| {
            let first = anchors.first().and_then(|anchor| first_guess(settings, anchor));
            (grow(settings, shape, bonus, anchors), first)
        })
    }

    /// Reads what is new and hands over the places where a request's last tokens were seen before,
    /// the most trusted first.
    fn with_anchors<T>(
        &mut self,
        request: u64,
        tokens: &[u32],
        draft: impl FnOnce(&NgramSettings, u32, &[Anchor<'_>]) -> T,
    ) -> T {
        self.read(request, tokens);
        let corpora = self.corpora.snapshot();
        let mut anchors = Vec::new();
        if let Some(text) = self.requests.get(&request)
            && let Some(trie) = text.own.as_ref().or(self.shared.as_ref())
        {
            for (length, place) in trie.matches(&text.cursor) {
                anchors.push(Anchor { source: trie, length, place });
            }
        }
        for corpus in corpora.iter() {
            for (length, place) in corpus.automaton.matches(tokens) {
                anchors.push(Anchor { source: &corpus.automaton, length, place });
            }
        }
        // Stable: of equally long matches, those of prompts and answers first.
        anchors.sort_by_key(|anchor| std::cmp::Reverse(anchor.length));
        draft(&self.settings, tokens.last().copied().unwrap_or_default(), &anchors)
    }

    /// Forgets what a request alone has read. Should it come back, it is read from its beginning.
    pub fn forget(&mut self, request: u64) {
        self.requests.remove(&request);
    }

    /// N-grams that are kept now.
    pub fn kept(&self) -> usize {
        let own = self.requests.values().filter_map(|text| text.own.as_ref());
        own.chain(&self.shared).map(Trie::len).sum()
    }

    /// Bytes that n-grams and corpora take now.
    pub fn bytes(&self) -> usize {
        let own = self.requests.values().filter_map(|text| text.own.as_ref());
        own.chain(&self.shared).map(Trie::bytes).sum::<usize>() + self.corpora.bytes()
    }
}

impl HostProposer for Ngram {
    fn draft(&mut self, request: &DraftRequest<'_>) -> Option<Tree> {
        Some(self.tree(request.request, request.tokens, request.shape))
    }

    fn read(&mut self, request: u64, tokens: &[u32]) {
        Ngram::read(self, request, tokens);
    }

    fn leave(&mut self, request: u64, tokens: &[u32]) {
        // The end of an answer is drafted from as its beginning is, by whoever comes after.
        if self.shared.is_some() {
            Ngram::read(self, request, tokens);
        }
        self.forget(request);
    }

    fn begin_anew(&mut self) {
        let NgramSettings { max_trie_depth, capacity, .. } = self.settings;
        let trie = || Trie::new(max_trie_depth, capacity, capacity);
        self.shared = self.shared.take().map(|_| trie());
        self.requests.clear();
    }
}
