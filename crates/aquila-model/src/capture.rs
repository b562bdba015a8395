//! Hidden states of a model, for heads that draft from them: the residual stream at chosen
//! boundaries of layers, or after the final norm.
//!
//! Boundary 0 is before the first layer, where the stream is the embedding; boundary l is where
//! layer l - 1, counted from 0, ends.
//!
//! The invariant: row r of the pass is row r of the capture, whatever is captured.

use aquila_compute::Backend;

use crate::{Error, ModelSpec, Result};

/// Where a pass leaves hidden states of all its rows: those at chosen boundaries, side by side in
/// the order in which they were named, or what the language-model head reads.
pub struct Capture<B: Backend> {
    /// Empty where the stream after the final norm is taken.
    boundaries: Vec<usize>,
    hidden_size: usize,
    capacity: usize,
    rows: B::Rows,
}

impl<B: Backend> Capture<B> {
    pub(crate) fn new(
        backend: &B,
        spec: &ModelSpec,
        boundaries: &[usize],
        capacity: usize,
    ) -> Result<Self> {
        if let Some(boundary) = boundaries.iter().find(|&&boundary| boundary > spec.layers.len()) {
            let layers = spec.layers.len();
            let problem = format!("capture at boundary {boundary} of a model of {layers} layers");
            return Err(Error::Plan(problem));
        }
        if boundaries.is_empty() {
            return Err(Error::Plan("capture at no boundary".into()));
        }
        Ok(Self {
            boundaries: boundaries.to_vec(),
            hidden_size: spec.hidden_size,
            capacity,
            rows: backend.rows(capacity, boundaries.len() * spec.hidden_size)?,
        })
    }

    pub(crate) fn of_final(backend: &B, spec: &ModelSpec, capacity: usize) -> Result<Self> {
        Ok(Self {
            boundaries: Vec::new(),
            hidden_size: spec.hidden_size,
            capacity,
            rows: backend.rows(capacity, spec.hidden_size)?,
        })
    }

    /// What the last pass left: row r of the pass is row r here, as wide as all boundaries together.
    pub fn rows(&self) -> &B::Rows {
        &self.rows
    }

    /// The same, to be moved about.
    pub fn rows_mut(&mut self) -> &mut B::Rows {
        &mut self.rows
    }

    /// The same, for good.
    pub fn into_rows(self) -> B::Rows {
        self.rows
    }

    /// How many rows a pass may have.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where the stream after the final norm goes, if that is what is taken.
    pub(crate) fn final_rows(&mut self) -> Option<&mut B::Rows> {
        self.boundaries.is_empty().then_some(&mut self.rows)
    }

    /// Takes the stream at `boundary`, if it is one of the chosen.
    pub(crate) fn take(
        &mut self,
        backend: &B,
        boundary: usize,
        residual: &B::Rows,
        rows: usize,
    ) -> Result<()> {
        for (place, _) in self.boundaries.iter().enumerate().filter(|(_, b)| **b == boundary) {
            backend.copy_columns(residual, rows, place * self.hidden_size, &mut self.rows)?;
        }
        Ok(())
    }
}
