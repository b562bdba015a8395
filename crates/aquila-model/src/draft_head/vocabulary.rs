//! The tokens that a head can draft, as tokens of its target.
//!
//! The invariant: a [`DraftVocabulary`] is ascending, so ids compare alike in both vocabularies.

use aquila_compute::{DType, HostTensor};

use super::Eagle3Spec;
use crate::source::TensorSource;
use crate::{Error, Result};

/// Which token of the target each draft token is: its number plus this.
const OFFSETS: &str = "d2t";
/// Which tokens of the target can be drafted.
const DRAFTABLE: &str = "t2d";

/// The target's ids of all draft tokens, and where the head keeps them.
pub(super) struct DraftVocabulary {
    /// Ids of the target, ascending.
    pub ids: Vec<u32>,
    /// For each of them the row of the stored head; none where rows are in that order.
    pub order: Option<Vec<usize>>,
}

impl DraftVocabulary {
    /// Reads and checks the mapping; none where the draft knows every token under its own id.
    pub fn read(spec: &Eagle3Spec, source: &dyn TensorSource) -> Result<Option<Self>> {
        let (draft, target) = (spec.draft_vocab_size, spec.layer.vocab_size);
        let found = if let Some(name) = stored_as(source, OFFSETS) {
            let tensor = fitting(source, &name, DType::I64, draft)?;
            Some(absolute(&tensor, target).map_err(|e| refusal(source, &name, e))?)
        } else if draft < target {
            let problem = format!("is missing; expected shape [{draft}]");
            return Err(Error::tensor(source.origin(), OFFSETS, problem));
        } else {
            None
        };
        if let Some(name) = stored_as(source, DRAFTABLE) {
            let tensor = fitting(source, &name, DType::Bool, target)?;
            let mut known = vec![found.is_none(); target];
            found.iter().flatten().for_each(|&id| known[id as usize] = true);
            let differs = tensor.bytes().iter().zip(&known).position(|(&b, &k)| (b != 0) != k);
            if let Some(id) = differs {
                let problem = format!("disagrees with {OFFSETS} about token {id}");
                return Err(refusal(source, &name, problem));
            }
        }
        let Some(ids) = found else { return Ok(None) };
        if ids.is_sorted() {
            let identity = ids.len() == target;
            return Ok((!identity).then_some(Self { ids, order: None }));
        }
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_unstable_by_key(|&row| ids[row]);
        let ids = order.iter().map(|&row| ids[row]).collect();
        Ok(Some(Self { ids, order: Some(order) }))
    }

    /// The mapping of random weights: ids spread evenly over those of the target.
    pub fn evenly_spread(spec: &Eagle3Spec) -> Result<HostTensor> {
        let (draft, target) = (spec.draft_vocab_size, spec.layer.vocab_size);
        let offset = |i: usize| (i * target / draft - i) as i64;
        let bytes: Vec<u8> = (0..draft).flat_map(|i| offset(i).to_le_bytes()).collect();
        Ok(HostTensor::new(OFFSETS, DType::I64, vec![draft], bytes.into())?)
    }
}

/// What a source calls a tensor, if it has it.
fn stored_as(source: &dyn TensorSource, name: &str) -> Option<String> {
    [name.to_owned(), format!("model.{name}")].into_iter().find(|name| source.contains(name))
}

fn refusal(source: &dyn TensorSource, name: &str, problem: String) -> Error {
    let info = source.info(name);
    Error::tensor(info.as_ref().map_or(source.origin(), |i| &i.origin), name, problem)
}

/// A vector of `length` elements of one type.
fn fitting(
    source: &dyn TensorSource,
    name: &str,
    dtype: DType,
    length: usize,
) -> Result<HostTensor> {
    let tensor = source.get(name)?;
    if tensor.dtype() != dtype || tensor.shape() != [length] {
        let problem = format!(
            "expected {dtype} of shape [{length}], found {} of {:?}",
            tensor.dtype(),
            tensor.shape()
        );
        return Err(refusal(source, name, problem));
    }
    Ok(tensor)
}

fn absolute(offsets: &HostTensor, vocabulary: usize) -> std::result::Result<Vec<u32>, String> {
    let mut taken = vec![false; vocabulary];
    let mut ids = Vec::with_capacity(offsets.len());
    let offsets = offsets.bytes();
    let (offsets, _) = offsets.as_chunks::<8>();
    for (draft, bytes) in offsets.iter().enumerate() {
        let id = (draft as i64).checked_add(i64::from_le_bytes(*bytes));
        let id = id.and_then(|id| usize::try_from(id).ok()).filter(|&id| id < vocabulary);
        let Some(id) = id else {
            return Err(format!(
                "draft token {draft} plus {} is no token of a vocabulary of {vocabulary}",
                i64::from_le_bytes(*bytes)
            ));
        };
        if std::mem::replace(&mut taken[id], true) {
            return Err(format!("draft token {draft} is token {id}, and so is another"));
        }
        ids.push(id as u32);
    }
    Ok(ids)
}
