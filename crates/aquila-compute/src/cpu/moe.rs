//! A mixture of experts: which experts a row goes to, and what they make of it.

use super::CpuBackend;
use super::rows::CpuRows;
use super::share::check;
use super::weight::CpuWeight;
use crate::{Accumulate, Activation, Error, Result, reference};

/// The experts of one layer.
pub struct CpuExperts {
    gate_up: Vec<CpuWeight>,
    down: Vec<CpuWeight>,
}

impl CpuExperts {
    /// Refuses experts that differ in shape or format.
    pub(super) fn new(gate_up: Vec<CpuWeight>, down: Vec<CpuWeight>) -> Result<Self> {
        let (Some(up), Some(back)) = (gate_up.first(), down.first()) else {
            return Err(Error::Tensor("a mixture needs at least one expert".into()));
        };
        let shape = |w: &CpuWeight| (w.inputs(), w.outputs(), w.format());
        let alike = |all: &[CpuWeight]| all.iter().all(|w| shape(w) == shape(&all[0]));
        check(gate_up.len() == down.len() && alike(&gate_up) && alike(&down), || {
            "the experts of a layer must have one shape and one format".into()
        })?;
        check(up.outputs() == 2 * back.inputs() && up.format() == back.format(), || {
            format!(
                "an expert of {} gates and ups has a projection back of {} inputs",
                up.outputs(),
                back.inputs()
            )
        })?;
        Ok(Self { gate_up, down })
    }

    /// How many experts there are.
    pub fn count(&self) -> usize {
        self.down.len()
    }
}

/// Which experts each row goes to, and their weights.
pub struct CpuRouting {
    per_token: usize,
    /// Of each row one after the other, the likeliest expert first.
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl CpuRouting {
    pub(super) fn new(rows: usize, per_token: usize) -> Self {
        Self { per_token, ids: vec![0; rows * per_token], weights: vec![0.0; rows * per_token] }
    }

    /// How many experts a row goes to.
    pub fn per_token(&self) -> usize {
        self.per_token
    }

    /// The experts of a row, the likeliest first, and their weights.
    pub fn row(&self, row: usize) -> (&[u32], &[f32]) {
        let at = row * self.per_token..(row + 1) * self.per_token;
        (&self.ids[at.clone()], &self.weights[at])
    }

    pub(super) fn route(&mut self, logits: &CpuRows, rows: usize, normalize: bool) -> Result<()> {
        check(self.per_token <= logits.width(), || {
            format!("{} of {} experts cannot be chosen", self.per_token, logits.width())
        })?;
        let mut probabilities = vec![0.0; logits.width()];
        for row in 0..rows {
            reference::softmax(logits.row(row), &mut probabilities);
            let at = row * self.per_token..(row + 1) * self.per_token;
            let (ids, weights) = (&mut self.ids[at.clone()], &mut self.weights[at]);
            reference::choose_experts(&probabilities, normalize, ids, weights);
        }
        Ok(())
    }
}

impl CpuBackend {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_experts(
        &self,
        experts: &CpuExperts,
        activation: Activation,
        input: &CpuRows,
        rows: usize,
        routing: &CpuRouting,
        both: &mut CpuRows,
        activated: &mut CpuRows,
        accumulate: Accumulate,
        out: &mut CpuRows,
    ) -> Result<()> {
        let width = experts.down[0].outputs();
        let mut one = CpuRows::new(1, input.width())?;
        let mut made = CpuRows::new(1, width)?;
        let mut total = vec![0.0; width];
        for row in 0..rows {
            let (ids, weights) = routing.row(row);
            let mut routed: Vec<_> = ids.iter().zip(weights).collect();
            routed.sort_by_key(|(id, _)| **id);
            one.row_mut(0).copy_from_slice(input.row(row));
            total.fill(0.0);
            for (&id, &weight) in routed {
                let (gate_up, down) = (&experts.gate_up[id as usize], &experts.down[id as usize]);
                let set = (Accumulate::Set, None);
                self.run_product(gate_up, None, &one, 1, set, both)?;
                self.gate_rows(activation, both, 1, activated)?;
                self.run_product(down, None, activated, 1, set, &mut made)?;
                for (total, x) in total.iter_mut().zip(made.row(0)) {
                    *total = crate::math::fma(weight, *x, *total);
                }
            }
            for (out, &total) in out.row_mut(row).iter_mut().zip(&total) {
                reference::accumulate(total, None, accumulate, out);
            }
        }
        Ok(())
    }
}
