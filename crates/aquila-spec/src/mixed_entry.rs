//! Mixes by name: that of a model's algorithm, and `+NGRAM`.

use std::sync::Arc;

use aquila_compute::Backend;
use aquila_model::{Decoder, Needs};

use crate::ngram::{Ngram, NgramEntry, NgramSources};
use crate::{
    Algorithm, Allowance, AskedShape, DraftFlag, DraftFor, DraftOption, Entry, LoadOn, Opened,
    Opening, Result, Shape, TrustedNgrams,
};

/// An algorithm, mixed with n-grams.
pub(crate) struct MixedEntry {
    name: &'static str,
    model: Arc<dyn Entry>,
}

impl MixedEntry {
    /// Of `model` and n-grams. Names live as long as the program: this keeps one for each algorithm
    /// that is registered.
    pub fn of(model: Arc<dyn Entry>) -> Self {
        let name = format!("{}+{}", model.name(), NgramEntry.name()).leak();
        Self { name, model }
    }

    /// The name of what is mixed with n-grams.
    pub fn model(&self) -> &'static str {
        self.model.name()
    }
}

impl Entry for MixedEntry {
    fn name(&self) -> &'static str {
        self.name
    }

    fn draft_for(&self, model: &str) -> DraftFor {
        self.model.draft_for(model)
    }

    fn takes(&self) -> &'static [DraftFlag] {
        self.model.takes()
    }

    fn options(&self) -> &'static [DraftOption] {
        self.model.options()
    }

    fn drafts_from_ngrams(&self) -> bool {
        true
    }

    fn shape(&self, asked: AskedShape) -> Result<Shape> {
        self.model.shape(asked)
    }

    fn largest(&self, asked: AskedShape) -> Result<Shape> {
        self.model.largest(asked)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn Opened>> {
        let ngram = NgramSources::of(opening)?;
        Ok(Box::new(OpenedMix { name: self.name, model: self.model.open(opening)?, ngram }))
    }
}

/// Both sides, before they take any memory.
struct OpenedMix {
    name: &'static str,
    model: Box<dyn Opened>,
    ngram: NgramSources,
}

impl Opened for OpenedMix {
    fn most_steps(&self) -> Option<usize> {
        self.model.most_steps()
    }

    fn needs(&self, allowance: &Allowance) -> Needs {
        self.model.needs(allowance) + self.ngram.needs(allowance)
    }
}

impl<B: Backend> LoadOn<B> for OpenedMix
where
    dyn Opened: LoadOn<B>,
{
    fn load(
        &self,
        backend: &B,
        target: &Decoder<B>,
        allowance: &Allowance,
    ) -> Result<Algorithm<B>> {
        let NgramSources { settings, corpora } = &self.ngram;
        let ngram = Ngram::new(settings.clone(), corpora.clone())?;
        let model = LoadOn::<B>::load(&*self.model, backend, target, allowance)?;
        Ok(model.behind(self.name, TrustedNgrams::new(ngram)))
    }
}
