//! What a pass of a model leaves of all its rows, for heads that draft from it and for clients
//! that ask for it: the residual stream at chosen boundaries of layers or after the final norm, or
//! which experts each row went to.
//!
//! Boundary 0 is before the first layer, where the stream is the embedding; boundary l is where
//! layer l - 1, counted from 0, ends.
//!
//! The invariant: row r of the pass is row r of the capture, whatever is captured.

use aquila_compute::Backend;

use crate::{Error, ModelSpec, Result};

/// Where a pass leaves something of all its rows.
pub struct Capture<B: Backend> {
    what: What,
    capacity: usize,
    rows: B::Rows,
}

enum What {
    /// The stream at these boundaries, side by side in the order in which they were named.
    Boundaries(Vec<usize>, usize),
    /// What the language-model head reads.
    Final,
    /// The ids of each row's experts, the likeliest first, as numbers: as many columns a layer as
    /// a row has experts, zeros where a layer has none.
    Experts(usize),
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
        let rows = backend.rows(capacity, boundaries.len() * spec.hidden_size)?;
        let what = What::Boundaries(boundaries.to_vec(), spec.hidden_size);
        Ok(Self { what, capacity, rows })
    }

    pub(crate) fn of_final(backend: &B, spec: &ModelSpec, capacity: usize) -> Result<Self> {
        let rows = backend.rows(capacity, spec.hidden_size)?;
        Ok(Self { what: What::Final, capacity, rows })
    }

    pub(crate) fn of_experts(backend: &B, spec: &ModelSpec, capacity: usize) -> Result<Self> {
        let per_token = spec
            .experts_per_token()
            .ok_or_else(|| Error::Plan("capture of experts of a model without any".into()))?;
        let rows = backend.rows(capacity, spec.layers.len() * per_token)?;
        Ok(Self { what: What::Experts(per_token), capacity, rows })
    }

    /// What the last pass left: row r of the pass is row r here, as wide as all boundaries together.
    pub fn rows(&self) -> &B::Rows {
        &self.rows
    }

    /// The captured rows, to be moved.
    pub fn rows_mut(&mut self) -> &mut B::Rows {
        &mut self.rows
    }

    /// The captured rows, without the capture.
    pub fn into_rows(self) -> B::Rows {
        self.rows
    }

    /// How many rows a pass may have.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where the stream after the final norm goes, if that is what is taken.
    pub(crate) fn final_rows(&mut self) -> Option<&mut B::Rows> {
        matches!(self.what, What::Final).then_some(&mut self.rows)
    }

    /// Where the experts of `layer` go, and the first column of them, if that is what is taken.
    pub(crate) fn expert_columns(&mut self, layer: usize) -> Option<(&mut B::Rows, usize)> {
        match self.what {
            What::Experts(per_token) => Some((&mut self.rows, layer * per_token)),
            _ => None,
        }
    }

    /// Takes the stream at `boundary`, if it is one of the chosen.
    pub(crate) fn take(
        &mut self,
        backend: &B,
        boundary: usize,
        residual: &B::Rows,
        rows: usize,
    ) -> Result<()> {
        let What::Boundaries(boundaries, width) = &self.what else { return Ok(()) };
        for (place, _) in boundaries.iter().enumerate().filter(|(_, b)| **b == boundary) {
            backend.copy_columns(residual, rows, place * width, &mut self.rows)?;
        }
        Ok(())
    }
}
