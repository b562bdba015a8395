//! NGRAM by name.

use std::sync::Arc;

use aquila_compute::Backend;
use aquila_model::{Decoder, Needs};

use super::{Corpora, Ngram, NgramScope, NgramSettings};
use crate::{
    Algorithm, Allowance, AskedShape, DraftFor, Entry, LoadOn, MOST_STEPS, Opened, Opening, Result,
    Shape,
};

/// Where n-grams are drafted from, and how.
#[derive(Debug, Clone)]
pub struct NgramSources {
    /// How they are kept and drafted from.
    pub settings: NgramSettings,
    /// Texts beside those of requests.
    pub corpora: Arc<Corpora>,
}

/// NGRAM by name.
pub(crate) struct NgramEntry;

impl Entry for NgramEntry {
    fn name(&self) -> &'static str {
        "NGRAM"
    }

    fn draft_for(&self, _model: &str) -> DraftFor {
        DraftFor::Nothing
    }

    /// As deep as there are nodes, where no flag says.
    fn shape(&self, asked: AskedShape) -> Result<Shape> {
        let topk = asked.topk.unwrap_or(NgramSettings::default().max_bfs_breadth);
        let nodes = asked.nodes.unwrap_or(NgramSettings::NODES);
        let steps = asked.steps.unwrap_or(nodes.saturating_sub(1).min(MOST_STEPS));
        let most = Shape::most_nodes(steps, topk);
        Ok(Shape::new(steps, topk, asked.nodes.unwrap_or(nodes.min(most)))?.without_rows())
    }

    fn largest(&self, asked: AskedShape) -> Result<Shape> {
        self.shape(asked)
    }

    fn drafts_from_ngrams(&self) -> bool {
        true
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn Opened>> {
        Ok(Box::new(NgramSources::of(opening)?))
    }
}

impl NgramSources {
    /// Those that an algorithm is opened on, or the default ones.
    pub(crate) fn of(opening: &Opening<'_>) -> Result<Self> {
        let sources = opening.ngram.cloned().unwrap_or_else(|| NgramSources {
            settings: NgramSettings::default(),
            corpora: Corpora::new(Corpora::MOST_TOKENS, opening.target.spec().vocab_size),
        });
        sources.settings.check()?;
        Ok(sources)
    }
}

impl Opened for NgramSources {
    /// A trie that all share is there in full sooner or later; one of a request has as many
    /// n-grams for each token as it is deep.
    fn needs(&self, _allowance: &Allowance) -> Needs {
        let NgramSettings { scope, capacity, max_trie_depth, .. } = self.settings;
        let (shared, own) = match scope {
            NgramScope::Server => (capacity, 0),
            NgramScope::Request => (0, max_trie_depth),
        };
        let bytes = |ngrams: usize| (ngrams * super::NGRAM_BYTES) as u64;
        let texts = self.corpora.bytes() as u64 + bytes(shared);
        Needs { kv_per_token: bytes(own), texts, ..Needs::default() }
    }
}

impl<B: Backend> LoadOn<B> for NgramSources {
    fn load(&self, _: &B, _: &Decoder<B>, _: &Allowance) -> Result<Algorithm<B>> {
        let ngram = Ngram::new(self.settings.clone(), self.corpora.clone());
        Ok(Algorithm::on_host("NGRAM", ngram?))
    }
}
