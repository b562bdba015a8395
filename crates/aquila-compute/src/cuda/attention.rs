//! Attention: in one launch by plain arithmetic; by tensor cores in blocks of positions, which the
//! same launch merges or, of long contexts, a second one.
//!
//! The one invariant: which positions form a block follows from the positions alone. How many
//! blocks have work is read on the device, so the launches never change with the lengths.

use std::sync::{Mutex, PoisonError};

use super::Arithmetic;
use super::arguments;
use super::contract::BLOCK;
use super::device::{Device, Memory};
use super::kernels::Kernels;
use super::memory::CudaKv;
use super::plan::CudaPlan;
use super::rows::CudaRows;
use crate::{AttentionParams, Error, HeadShape, Result};

/// Query heads that one thread block serves; `QUERIES` in `attend.cu`.
const QUERIES: usize = 16;
/// Thread blocks that share the positions of one row and key head at most.
const SPLITS: usize = 64;
/// Bytes that the blocks of one launch may take; rows of a pass take turns beyond that.
const WORKING: usize = 64 << 20;

/// Working memory of attention.
#[derive(Default)]
pub(super) struct Attention {
    working: Mutex<Option<Working>>,
}

#[derive(Clone)]
struct Working {
    /// Sums of values of each block, and its largest score and total.
    parts: Memory,
    stats: Memory,
    /// Thread blocks that are done, by row and key head; zeros between launches.
    arrivals: Memory,
    /// Blocks and values that fit.
    blocks: usize,
    values: usize,
}

impl Attention {
    /// Bytes of working memory for passes of `rows` rows that see up to `positions` positions.
    pub(super) fn bytes(heads: HeadShape, positions: usize, rows: usize) -> usize {
        let of_row = heads.heads * positions.div_ceil(BLOCK).max(1);
        let together = (WORKING / (of_row * heads.head_dim * 4)).clamp(1, rows.max(1));
        together * of_row * (4 * heads.head_dim + 3 * 4)
    }

    /// Working memory for `blocks` blocks of `width` values, made larger where it is too small. A
    /// graph that names the smaller one keeps it.
    fn working(&self, device: &Device, blocks: usize, width: usize) -> Result<Working> {
        let mut working = self.working.lock().unwrap_or_else(PoisonError::into_inner);
        let values = blocks * width;
        if let Some(working) = working.as_ref()
            && working.blocks >= blocks
            && working.values >= values
        {
            return Ok(working.clone());
        }
        device.outside_capture("the first attention of its size (run the pass once before)")?;
        let (blocks, values) = working
            .as_ref()
            .map_or((blocks, values), |w| (w.blocks.max(blocks), w.values.max(values)));
        let made = Working {
            parts: device.allocate("attention", values * 4)?,
            stats: device.allocate("attention", blocks * 2 * 4)?,
            // There are no more key heads of a row than blocks of its heads.
            arrivals: device.allocate("attention", blocks * 4)?,
            blocks,
            values,
        };
        *working = Some(made.clone());
        Ok(made)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend(
        &self,
        device: &Device,
        kernels: &Kernels,
        arithmetic: Arithmetic,
        qkv: &CudaRows,
        AttentionParams { heads, scale, window }: AttentionParams,
        plan: &CudaPlan,
        kv: &CudaKv,
        layer: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        fits(heads, plan, kv)?;
        if window == Some(0) {
            return Err(Error::Tensor("a window must have at least one position".into()));
        }
        qkv.hold("attention's queries", plan.rows, heads.qkv_width())?;
        out.hold("attention's result", plan.rows, heads.q_width())?;
        let offset = kv.layer(layer)?;
        let mut arguments = arguments::Attend {
            plan: plan.parts(),
            qkv: qkv.parts(),
            out: out.parts(),
            keys: kv.keys.at(offset),
            values: kv.values.at(offset),
            parts: 0,
            stats: 0,
            arrivals: 0,
            heads: heads.heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            slots: kv.shape.slots as u32,
            first_row: 0,
            blocks: 0,
            window: window.map_or(u32::MAX, |window| window.try_into().unwrap_or(u32::MAX)),
            scale,
        };
        let mut names: Vec<&Memory> = plan.memory().into_iter().chain(qkv.memory()).collect();
        names.extend(out.memory().chain([&kv.keys, &kv.values]));
        if arithmetic == Arithmetic::Plain {
            let kernel = kernels.attend_plain.of(kv.bf16());
            let grid = [heads.heads, plan.rows, 1];
            // SAFETY: sizes were checked above, the plan when it was placed.
            return unsafe { device.launch(kernel, grid, 128, 0, &arguments, &names) };
        }

        // Positions of a window lie in one block more than they would fill.
        let within = window.map_or(usize::MAX, |window| (window - 1).div_ceil(BLOCK) + 1);
        let blocks = plan.longest.div_ceil(BLOCK).clamp(1, within);
        let of_row = heads.heads * blocks;
        let together = (WORKING / (of_row * heads.head_dim * 4)).clamp(1, plan.rows.max(1));
        let working = self.working(device, together * of_row, heads.head_dim)?;
        (arguments.parts, arguments.stats) = (working.parts.at(0), working.stats.at(0));
        arguments.blocks = blocks as u32;
        names.extend([&working.parts, &working.stats, &working.arrivals]);
        // Of longer contexts one thread block would merge too much.
        let merges = blocks <= SPLITS;
        if merges {
            arguments.arrivals = working.arrivals.at(0);
        }
        let key_heads = heads.kv_heads * heads.group().div_ceil(QUERIES);
        for first in (0..plan.rows).step_by(together) {
            let rows = together.min(plan.rows - first);
            arguments.first_row = first as u32;
            let grid = [blocks.min(SPLITS), key_heads, rows];
            // SAFETY: sizes were checked above, the plan when it was placed, and the working memory
            // has room for all blocks of these rows.
            unsafe {
                device.launch(&kernels.attend_tensor, grid, 128, 0, &arguments, &names)?;
                if !merges {
                    let merge = &kernels.attend_merge;
                    device.launch(merge, [heads.heads, rows, 1], 128, 0, &arguments, &names)?;
                }
            }
        }
        Ok(())
    }
}

/// Refuses heads that the store of keys and values was not made for, and slots that it lacks.
pub(super) fn fits(heads: HeadShape, plan: &CudaPlan, kv: &CudaKv) -> Result<()> {
    if (heads.kv_heads, heads.head_dim) != (kv.shape.kv_heads, kv.shape.head_dim)
        || heads.kv_heads == 0
        || !heads.heads.is_multiple_of(heads.kv_heads)
    {
        return Err(Error::Tensor(format!("{heads:?} do not fit a store of {:?}", kv.shape)));
    }
    if plan.slots > kv.shape.slots {
        return Err(Error::Tensor(format!(
            "a plan of {} slots for a store of {}",
            plan.slots, kv.shape.slots
        )));
    }
    // `PLAIN_WIDTH` in `plain.cu`.
    if heads.head_dim > 512 {
        return Err(Error::Unavailable(format!(
            "heads of width {} are not available on CUDA: 512 at most",
            heads.head_dim
        )));
    }
    Ok(())
}
