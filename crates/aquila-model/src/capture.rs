//! Hidden states of a model, for heads that draft from them: the residual stream after chosen
//! layers, or after the final norm.
//!
//! The invariant: row r of the pass is row r of the capture, whatever is captured.

use aquila_compute::Backend;

use crate::{Error, ModelSpec, Result};

/// Where a pass leaves hidden states of all its rows: the outputs of chosen layers, side by side in
/// the order in which the layers were named, or what the language-model head reads.
pub struct Capture<B: Backend> {
    /// Empty where the stream after the final norm is taken.
    layers: Vec<usize>,
    hidden_size: usize,
    capacity: usize,
    rows: B::Rows,
}

impl<B: Backend> Capture<B> {
    pub(crate) fn new(
        backend: &B,
        spec: &ModelSpec,
        layers: &[usize],
        capacity: usize,
    ) -> Result<Self> {
        if let Some(layer) = layers.iter().find(|&&layer| layer >= spec.layers) {
            let problem = format!("capture of layer {layer}; the model has {}", spec.layers);
            return Err(Error::Plan(problem));
        }
        if layers.is_empty() {
            return Err(Error::Plan("capture of no layer".into()));
        }
        Ok(Self {
            layers: layers.to_vec(),
            hidden_size: spec.hidden_size,
            capacity,
            rows: backend.rows(capacity, layers.len() * spec.hidden_size)?,
        })
    }

    pub(crate) fn of_final(backend: &B, spec: &ModelSpec, capacity: usize) -> Result<Self> {
        Ok(Self {
            layers: Vec::new(),
            hidden_size: spec.hidden_size,
            capacity,
            rows: backend.rows(capacity, spec.hidden_size)?,
        })
    }

    /// What the last pass left: row r of the pass is row r here, as wide as all layers together.
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

    /// The layers whose outputs are taken, from 0; none where it is the stream after the final norm.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// How many rows a pass may have.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where the stream after the final norm goes, if that is what is taken.
    pub(crate) fn final_rows(&mut self) -> Option<&mut B::Rows> {
        self.layers.is_empty().then_some(&mut self.rows)
    }

    /// Takes the output of `layer`, if it is one of the chosen.
    pub(crate) fn take(
        &mut self,
        backend: &B,
        layer: usize,
        residual: &B::Rows,
        rows: usize,
    ) -> Result<()> {
        for (place, _) in self.layers.iter().enumerate().filter(|(_, l)| **l == layer) {
            backend.copy_columns(residual, rows, place * self.hidden_size, &mut self.rows)?;
        }
        Ok(())
    }
}
