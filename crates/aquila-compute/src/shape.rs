//! The sizes that operations need to know.

use std::ops::Range;

use crate::{Error, Result, math};

/// How projection weights are kept once packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// bfloat16 values; what is not bfloat16 in the checkpoint is rounded half to even.
    Bf16,
    /// float32 values.
    F32,
    /// 8-bit integers with one bfloat16 scale per output and group of 32 inputs; activations are
    /// quantized the same way, row by row, group by group.
    Int8,
}

/// Inputs that share one scale in [`WeightFormat::Int8`].
pub const INT8_GROUP: usize = 32;

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// float32, as computed.
    F32,
    /// bfloat16, rounded half to even when written.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 => 2,
        }
    }
}

/// The heads of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

impl HeadShape {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads together, and of all value heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a row that holds queries, keys and values, in that order.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Query heads that share one key and value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// What an attention layer computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParams {
    /// Its heads.
    pub heads: HeadShape,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
    /// How many positions a row sees at most, its own included; all up to its own where none.
    pub window: Option<usize>,
}

impl AttentionParams {
    /// The first position that a row sees that would see the first `len` ones without a window.
    pub fn first_seen(&self, len: usize) -> usize {
        self.window.map_or(0, |window| len.saturating_sub(window))
    }
}

/// What a gated unit makes of its gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// GELU by its approximation with tanh.
    GeluTanh,
}

/// The store of one group of keys and values: `layers` times `slots` rows of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Attention layers in the group.
    pub layers: usize,
    /// Slots; one holds the keys and values of one token in every layer of the group.
    pub slots: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// How an element is kept.
    pub dtype: KvDtype,
}

impl KvShape {
    /// Bytes that one slot takes over all layers, keys and values together.
    pub fn bytes_per_slot(&self) -> usize {
        self.layers * self.bytes_per_layer()
    }

    /// Bytes of one slot in one layer, keys and values together.
    pub fn bytes_per_layer(&self) -> usize {
        2 * self.kv_heads * self.head_dim * self.dtype.size()
    }

    /// Refuses layers or slots beyond the store.
    pub(crate) fn check_part(&self, layers: &Range<usize>, slots: &[u32]) -> Result<()> {
        if layers.end > self.layers || layers.start > layers.end {
            return Err(Error::Tensor(format!("layers {layers:?} of {}", self.layers)));
        }
        if let Some(slot) = slots.iter().find(|&&slot| slot as usize >= self.slots) {
            return Err(Error::Tensor(format!("slot {slot} of {}", self.slots)));
        }
        Ok(())
    }

    /// The same, and bytes that are not as many as such a part has.
    pub(crate) fn check_bytes(
        &self,
        layers: &Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()> {
        self.check_part(layers, slots)?;
        let wanted = layers.len() * slots.len() * self.bytes_per_layer();
        if bytes.len() != wanted {
            let there = bytes.len();
            return Err(Error::Tensor(format!("{there} bytes of keys and values, not {wanted}")));
        }
        Ok(())
    }
}

/// Cosines and sines of every position, for rotary embedding in the half-split form: of a head of
/// width d, element i < rotary/2 is rotated with element i + rotary/2.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Half the rotated width: how many angles a position has.
    pub half: usize,
    /// `positions * half` cosines.
    pub cos: Vec<f32>,
    /// `positions * half` sines.
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// The table for `positions` positions; angle i of position p is `p * frequencies[i]`, and both
    /// cosine and sine are multiplied by `scale`.
    pub fn new(positions: usize, frequencies: &[f64], scale: f64) -> Self {
        let half = frequencies.len();
        let mut cos = Vec::with_capacity(positions * half);
        let mut sin = Vec::with_capacity(positions * half);
        for position in 0..positions {
            for &frequency in frequencies {
                // References round the frequency and the angle to f32; so do we.
                let angle = f64::from(position as f32 * frequency as f32);
                let (s, c) = math::sin_cos(angle);
                cos.push((c * scale) as f32);
                sin.push((s * scale) as f32);
            }
        }
        Self { half, cos, sin }
    }

    /// How many positions the table covers.
    pub fn positions(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }
}
