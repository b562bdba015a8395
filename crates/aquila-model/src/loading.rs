//! Tensors of a checkpoint on their way to a backend.

use aquila_compute::{Backend, HostTensor, WeightFormat};

use crate::block::{Block, Linear};
use crate::layout::{Expected, LayerLayout, LinearLayout};
use crate::{Error, Result, TensorSource};

/// The longest context; its rotary table is made at load.
const LONGEST_CONTEXT: usize = 1 << 24;

/// How far loading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the checkpoint that are on the backend.
    pub done_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
}

/// Refuses contexts for which no rotary table is made.
pub(crate) fn check_positions(positions: usize) -> Result<()> {
    if (1..=LONGEST_CONTEXT).contains(&positions) {
        return Ok(());
    }
    let problem = format!("a context of {positions}; it may have 1 to {LONGEST_CONTEXT}");
    Err(Error::Plan(problem))
}

/// A load on its way.
pub(crate) struct Loading<'a, B: Backend> {
    pub backend: &'a B,
    pub source: &'a dyn TensorSource,
    pub format: WeightFormat,
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub progress: &'a mut dyn FnMut(Progress),
}

impl<B: Backend> Loading<'_, B> {
    /// A tensor, its shape as the checkpoint was checked for when it was opened.
    pub fn tensor(&mut self, expected: &Expected) -> Result<HostTensor> {
        let tensor = self.source.get(&expected.name)?;
        self.done_bytes += tensor.bytes().len() as u64;
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        (self.progress)(Progress { done_bytes, total_bytes });
        Ok(tensor)
    }

    fn tensors(&mut self, expected: &[Expected]) -> Result<Vec<HostTensor>> {
        expected.iter().map(|e| self.tensor(e)).collect()
    }

    pub fn vector(&mut self, expected: &[Expected]) -> Result<B::Vector> {
        let parts = self.tensors(expected)?;
        Ok(self.backend.vector(&parts)?)
    }

    pub fn weight(&mut self, expected: &[Expected]) -> Result<B::Weight> {
        let parts = self.tensors(expected)?;
        Ok(self.backend.pack(&parts, self.format)?)
    }

    pub fn linear(&mut self, layout: &LinearLayout) -> Result<Linear<B>> {
        let weight = self.weight(&layout.weights)?;
        let bias = match layout.biases.as_slice() {
            [] => None,
            biases => Some(self.vector(biases)?),
        };
        Ok(Linear { weight, bias })
    }

    /// A layer but for the norm of its input.
    pub fn block(&mut self, layout: &LayerLayout) -> Result<Block<B>> {
        Ok(Block {
            qkv: self.linear(&layout.qkv)?,
            qk_norms: match &layout.qk_norms {
                Some([q, k]) => Some([
                    self.vector(std::slice::from_ref(q))?,
                    self.vector(std::slice::from_ref(k))?,
                ]),
                None => None,
            },
            o: self.linear(&layout.o)?,
            post_norm: self.vector(std::slice::from_ref(&layout.post_norm))?,
            gate_up: self.linear(&layout.gate_up)?,
            down: self.linear(&layout.down)?,
        })
    }
}
