//! The store of keys and values: `[layer][kv head][slot][element]`, keys and values apart.
//!
//! Neighbouring slots of one head lie side by side: with the heads of a slot between them, the
//! keys of a block would fall into few sets of the cache. A head takes a multiple of 16 elements,
//! the last of them zero for ever. Memory that no slot was written to is not backed.

use std::ops::Range;

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

/// Which bytes of a store a part of it has: where they are in the store, and where in a copy.
struct Part<'a> {
    layers: Range<usize>,
    slots: &'a [u32],
    kv_heads: usize,
    /// Bytes of one head of one slot, in a copy.
    bytes: usize,
    /// The same in the store.
    stride: usize,
    /// Slots of the store.
    of: usize,
}

impl Part<'_> {
    /// Calls `copy` with the place in the store and in the copy of each head of each slot; `side`
    /// is 0 for keys and 1 for values.
    fn each(&self, side: usize, mut copy: impl FnMut(usize, usize)) {
        let Self { layers, slots, kv_heads, bytes, stride, of } = self;
        let row = kv_heads * bytes;
        for (index, layer) in layers.clone().enumerate() {
            let first = (2 * index + side) * slots.len() * row;
            for head in 0..*kv_heads {
                let store = (layer * kv_heads + head) * of;
                for (at, &slot) in slots.iter().enumerate() {
                    copy((store + slot as usize) * stride, first + at * row + head * bytes);
                }
            }
        }
    }
}

impl CpuKv {
    fn part<'a>(&self, layers: Range<usize>, slots: &'a [u32]) -> Part<'a> {
        let KvShape { slots: of, kv_heads, head_dim, dtype, .. } = self.shape;
        let (bytes, stride) = (head_dim * dtype.size(), self.width * dtype.size());
        Part { layers, slots, kv_heads, bytes, stride, of }
    }

    /// Copies rows out, in the order of [`Backend::read_slots`](crate::Backend::read_slots).
    pub(super) fn read_slots(
        &self,
        layers: Range<usize>,
        slots: &[u32],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        self.shape.check_part(&layers, slots)?;
        let part = self.part(layers, slots);
        let (start, bytes) = (out.len(), part.bytes);
        out.resize(start + part.layers.len() * slots.len() * self.shape.bytes_per_layer(), 0);
        let out = &mut out[start..];
        for (side, region) in [&self.keys, &self.values].into_iter().enumerate() {
            let store: &[u8] = region.as_ref();
            part.each(side, |from, to| {
                out[to..to + bytes].copy_from_slice(&store[from..from + bytes]);
            });
        }
        Ok(())
    }

    /// Copies rows in.
    pub(super) fn write_slots(
        &mut self,
        layers: Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()> {
        self.shape.check_bytes(&layers, slots, bytes)?;
        let part = self.part(layers, slots);
        for (side, region) in [&mut self.keys, &mut self.values].into_iter().enumerate() {
            let (store, length) = (region.as_mut_ptr(), region.bytes());
            part.each(side, |to, from| {
                let values = &bytes[from..from + part.bytes];
                assert!(to + values.len() <= length, "slots beyond the store");
                // SAFETY: within the region, which is borrowed for writing.
                unsafe {
                    std::ptr::copy_nonoverlapping(values.as_ptr(), store.add(to), values.len());
                }
            });
        }
        Ok(())
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
