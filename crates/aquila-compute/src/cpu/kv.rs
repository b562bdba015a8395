//! The store of keys and values: `[layer][kv head][slot][element]`, keys and values apart.
//!
//! Neighbouring slots of one head lie side by side: with the heads of a slot between them, the
//! keys of a block would fall into few sets of the cache. A head takes a multiple of 16 elements,
//! the last of them zero for ever. Memory that no slot was written to is not backed.

use half::bf16;

use super::memory::{Region, Shared};
use super::simd::LANES;
use crate::{Error, KvDtype, KvShape, Result};

/// Keys and values of one group.
pub struct CpuKv {
    shape: KvShape,
    /// Elements of one head of one slot.
    width: usize,
    keys: Region,
    values: Region,
}

/// The store as tasks see it.
#[derive(Clone, Copy)]
pub(super) struct SharedKv {
    pub dtype: KvDtype,
    /// Elements of one head of one slot, and from slot to slot.
    pub width: usize,
    /// Elements from head to head.
    pub head_stride: usize,
    /// Elements before the layer in use.
    pub layer: usize,
    pub keys: Shared<u8>,
    pub values: Shared<u8>,
}

impl CpuKv {
    pub(super) fn new(shape: KvShape) -> Result<Self> {
        let width = shape.head_dim.next_multiple_of(LANES);
        let elements = [shape.layers, shape.slots, shape.kv_heads, width, shape.dtype.size()]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
            .ok_or_else(|| Error::OutOfMemory {
                what: "keys and values".into(),
                bytes: usize::MAX,
            })?;
        let keys = Region::new(elements, "keys")?;
        let values = Region::new(elements, "values")?;
        Ok(Self { shape, width, keys, values })
    }

    /// The sizes of the store.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// One layer, for tasks that read, or write slots of their own.
    pub(super) fn layer(&self, layer: usize) -> SharedKv {
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        SharedKv {
            dtype: self.shape.dtype,
            width: self.width,
            head_stride: self.shape.slots * self.width,
            layer: layer * self.shape.kv_heads * self.shape.slots * self.width,
            keys: Shared::new(self.keys.as_ptr().cast_mut()),
            values: Shared::new(self.values.as_ptr().cast_mut()),
        }
    }

    /// Copies a slot to another, in all layers.
    pub(super) fn move_slot(&mut self, from: u32, to: u32) {
        let slots = self.shape.slots;
        assert!((from as usize) < slots && (to as usize) < slots, "slots beyond the store");
        let bytes = self.width * self.shape.dtype.size();
        for head in 0..self.shape.layers * self.shape.kv_heads {
            let at = |slot: u32| (head * slots + slot as usize) * bytes;
            for region in [&mut self.keys, &mut self.values] {
                let base = region.as_mut_ptr();
                // SAFETY: both slots are within the region, which is borrowed for writing.
                unsafe { std::ptr::copy(base.add(at(from)), base.add(at(to)), bytes) }
            }
        }
    }
}

impl SharedKv {
    /// Writes the key and the value of one head to a slot.
    ///
    /// # Safety
    /// Slot and head are within the store, no other task touches the slot, and the store is
    /// borrowed for writing.
    pub(super) unsafe fn write(self, slot: u32, head: usize, key: &[f32], value: &[f32]) {
        let at = self.layer + head * self.head_stride + slot as usize * self.width;
        for (region, values) in [(self.keys, key), (self.values, value)] {
            // SAFETY: vouched for by the caller.
            unsafe {
                match self.dtype {
                    KvDtype::F32 => {
                        let to = region.get().cast::<f32>().add(at);
                        std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
                    }
                    KvDtype::Bf16 => {
                        let to = region.get().cast::<u16>().add(at);
                        for (i, &x) in values.iter().enumerate() {
                            to.add(i).write(bf16::from_f32(x).to_bits());
                        }
                    }
                }
            }
        }
    }
}
