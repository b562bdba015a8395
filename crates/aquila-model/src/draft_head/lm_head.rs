//! The language-model head that a draft borrows from its target: all of its rows, or those of the
//! tokens that are worth drafting (a token map, as FR-Spec publishes them).
//!
//! The invariant: the ids ascend, so tokens compare alike in both vocabularies.

use std::sync::Arc;

use aquila_compute::{Accumulate, Backend, DraftIds, HostTensor, Normed, WeightFormat};

use crate::{Checkpoint, Error, Result, memory};

/// A language-model head on a backend, shared with the model that it belongs to.
pub struct LmHead<B: Backend> {
    weight: Arc<B::Weight>,
    ids: Option<Vec<u32>>,
    vocabulary: usize,
}

impl<B: Backend> Clone for LmHead<B> {
    fn clone(&self) -> Self {
        let Self { weight, ids, vocabulary } = self;
        Self { weight: weight.clone(), ids: ids.clone(), vocabulary: *vocabulary }
    }
}

impl<B: Backend> LmHead<B> {
    /// A head with a row for each token of the vocabulary.
    pub(crate) fn whole(weight: Arc<B::Weight>, vocabulary: usize) -> Self {
        Self { weight, ids: None, vocabulary }
    }

    /// How many tokens it can tell.
    pub fn tokens(&self) -> usize {
        self.ids.as_ref().map_or(self.vocabulary, Vec::len)
    }

    /// Which tokens of the target its outputs are; none where they are all, in order.
    pub fn draft_ids(&self) -> Option<DraftIds<'_>> {
        let vocabulary = self.vocabulary;
        self.ids.as_deref().map(|ids| DraftIds { ids, vocabulary })
    }

    /// The logits of the first `rows` of `states`.
    pub(super) fn read_out(
        &self,
        backend: &B,
        states: &B::Rows,
        rows: usize,
        logits: &mut B::Rows,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        Ok(backend.project(&self.weight, None, states, rows, Accumulate::Set, logits)?)
    }

    /// The same of states that a norm comes before.
    pub(super) fn read_out_normed(
        &self,
        backend: &B,
        states: Normed<'_, B>,
        rows: usize,
        logits: &mut B::Rows,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        Ok(backend.project_normed(&self.weight, None, states, rows, Accumulate::Set, logits)?)
    }
}

/// Tokens of a target that are worth drafting, with where its language-model head is stored.
pub struct DraftTokens {
    ids: Vec<u32>,
    stored: HostTensor,
}

impl DraftTokens {
    /// `tokens` of `target`, in whatever order they are named; refuses what is no token of it, or
    /// is named twice.
    pub fn of(target: &Checkpoint, tokens: &[u32]) -> Result<Self> {
        let spec = target.spec();
        let ids = ascending(tokens, spec.vocab_size)?;
        Ok(Self { ids, stored: target.tensors().get(&spec.head().name)? })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.ids.len()
    }

    /// Their rows of the head. In the target's own `format`, a token gets the logit that the whole
    /// head would give it.
    pub fn lm_head<B: Backend>(&self, backend: &B, format: WeightFormat) -> Result<LmHead<B>> {
        let (vocabulary, _) = self.stored.matrix()?;
        let weight = backend.pack(&[rows_of(&self.stored, &self.ids)?], format)?;
        Ok(LmHead { weight: Arc::new(weight), ids: Some(self.ids.clone()), vocabulary })
    }

    /// Bytes of those rows once packed.
    pub fn weight_bytes(&self, format: WeightFormat) -> u64 {
        let columns = self.stored.shape().get(1).copied().unwrap_or_default();
        memory::matrix_bytes(self.ids.len(), columns, format)
    }
}

/// The tokens of a map in ascending order.
fn ascending(tokens: &[u32], vocabulary: usize) -> Result<Vec<u32>> {
    let refuse = |reason: String| Err(Error::Unsupported { origin: "token map".into(), reason });
    if tokens.is_empty() {
        return refuse("it names no token".into());
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
        return refuse(format!("{token} is no token of the target, which has {vocabulary}"));
    }
    let mut ids = tokens.to_vec();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => refuse(format!("it names token {} twice", pair[0])),
        None => Ok(ids),
    }
}

/// The chosen rows of a matrix.
fn rows_of(tensor: &HostTensor, rows: &[u32]) -> Result<HostTensor> {
    let (_, columns) = tensor.matrix()?;
    let stride = columns * tensor.dtype().size();
    let mut bytes = vec![0; rows.len() * stride];
    for (bytes, &row) in bytes.chunks_exact_mut(stride.max(1)).zip(rows) {
        tensor.read_bytes(row as usize * columns, bytes);
    }
    let shape = vec![rows.len(), columns];
    Ok(HostTensor::new(tensor.name(), tensor.dtype(), shape, bytes.into())?)
}
