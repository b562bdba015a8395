//! Attention in two launches: splits of fixed blocks of positions, then their merge.
//!
//! The one invariant: which blocks a split takes follows from their positions alone. How many
//! splits have work is read on the device, so the launches never change with the lengths.

use std::sync::{Mutex, PoisonError};

use super::arguments;
use super::device::{Device, Memory};
use super::kernels::Kernels;
use super::memory::{CudaKv, CudaPlan, CudaRows};
use crate::{AttentionParams, Error, HeadShape, Result};

/// Splits of one row; `SPLITS` in `kernels.cu`.
const SPLITS: usize = 32;
/// Query heads of one thread block at most; `HEADS` in `kernels.cu`.
const HEADS: usize = 8;
/// Rows of one launch; later rows of a pass use the same working memory again.
const TILE: usize = 64;

/// Working memory of attention, made at the first pass that needs it.
#[derive(Default)]
pub(super) struct Attention {
    working: Mutex<Option<Working>>,
}

#[derive(Clone)]
struct Working {
    /// Sums of the splits, `TILE * heads * SPLITS` rows of the head's width.
    parts: Memory,
    /// The largest score and the total of each split.
    stats: Memory,
    heads: usize,
    width: usize,
}

impl Attention {
    /// Working memory for `heads`, made larger where it is too small. A graph that names the
    /// smaller one keeps it.
    fn working(&self, device: &Device, heads: HeadShape) -> Result<Working> {
        let mut working = self.working.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(working) = working.as_ref()
            && working.heads >= heads.heads
            && working.width >= heads.q_width()
        {
            return Ok(working.clone());
        }
        device.outside_capture("the first attention of its size (run the pass once before)")?;
        let (count, width) = working.as_ref().map_or((heads.heads, heads.q_width()), |w| {
            (w.heads.max(heads.heads), w.width.max(heads.q_width()))
        });
        let made = Working {
            parts: device.allocate("attention", TILE * SPLITS * width * 4)?,
            stats: device.allocate("attention", TILE * SPLITS * count * 2 * 4)?,
            heads: count,
            width,
        };
        *working = Some(made.clone());
        Ok(made)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend(
        &self,
        device: &Device,
        kernels: &Kernels,
        qkv: &CudaRows,
        AttentionParams { heads, scale, .. }: AttentionParams,
        plan: &CudaPlan,
        kv: &CudaKv,
        layer: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        fits(heads, kv)?;
        qkv.hold("attention's queries", plan.rows, heads.qkv_width())?;
        out.hold("attention's result", plan.rows, heads.q_width())?;
        let offset = kv.layer(layer)?;
        let working = self.working(device, heads)?;
        let per_block = heads.group().min(HEADS);
        let blocks = heads.kv_heads * heads.group().div_ceil(per_block);
        let shared = 2 * per_block * heads.head_dim * 4;
        for first in (0..plan.rows).step_by(TILE) {
            let rows = TILE.min(plan.rows - first);
            let arguments = arguments::Attend {
                plan: plan.parts(),
                qkv: qkv.memory.at(0),
                keys: kv.keys.at(offset),
                values: kv.values.at(offset),
                parts: working.parts.at(0),
                stats: working.stats.at(0),
                out: out.memory.at(0),
                heads: heads.heads as u32,
                kv_heads: heads.kv_heads as u32,
                head_dim: heads.head_dim as u32,
                qkv_stride: qkv.stride as u32,
                out_stride: out.stride as u32,
                slots: kv.shape.slots as u32,
                first_row: first as u32,
                heads_per_block: per_block as u32,
                scale,
            };
            let names = [
                plan.memory(),
                &qkv.memory,
                &kv.keys,
                &kv.values,
                &working.parts,
                &working.stats,
                &out.memory,
            ];
            let split = kernels.attend.of(kv.bf16());
            // SAFETY: sizes were checked above, the plan when it was placed, and slots are clamped
            // in the kernel.
            unsafe {
                device.launch(split, [SPLITS, blocks, rows], 256, shared, &arguments, &names)?;
                let merge = &kernels.attend_merge;
                device.launch(merge, [heads.heads, rows, 1], 128, 0, &arguments, &names)?;
            }
        }
        Ok(())
    }
}

/// Refuses heads that the store of keys and values was not made for.
pub(super) fn fits(heads: HeadShape, kv: &CudaKv) -> Result<()> {
    if (heads.kv_heads, heads.head_dim) != (kv.shape.kv_heads, kv.shape.head_dim)
        || heads.kv_heads == 0
        || !heads.heads.is_multiple_of(heads.kv_heads)
    {
        return Err(Error::Tensor(format!("{heads:?} do not fit a store of {:?}", kv.shape)));
    }
    // Queries and sums of a thread block lie in its shared memory, 48 KiB with the scores.
    if heads.head_dim > 512 {
        return Err(Error::Unavailable(format!(
            "heads of width {} are not available on CUDA: 512 at most",
            heads.head_dim
        )));
    }
    Ok(())
}
