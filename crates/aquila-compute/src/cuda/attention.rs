//! Attention: in one launch by plain arithmetic; by tensor cores in blocks of positions, which the
//! same launch merges or, of long contexts, a second one.
//!
//! The one invariant: which positions form a block follows from the positions alone. Which rows are
//! there and what they see is read on the device, where the work is divided, so the launches never
//! change with the lengths.

use std::sync::{Mutex, PoisonError};

use super::Arithmetic;
use super::arguments;
use super::contract::{BLOCK, STEP};
use super::device::{Device, Memory};
use super::kernels::{Kernel, Kernels};
use super::memory::CudaKv;
use super::plan::CudaPlan;
use super::rows::CudaRows;
use crate::{AttentionParams, Error, HeadShape, Result};

/// Threads of a thread block, and heads that one of `attend_merge` takes: one for each warp.
const THREADS: usize = 128;
const MERGED_HEADS: usize = THREADS / 32;
/// Blocks of one row that a thread block merges at most, `ATTEND_MERGED` in `attend_work.cuh`; those of
/// longer contexts have a launch of their own.
const MERGED_BLOCKS: usize = 32;
/// Rows of which one thread block takes 16 queries at a time at most; of more it takes 64 where a
/// request has more than 16.
const FEW_ROWS: usize = 64;
/// Rows of one launch, and bytes of shared memory that each of them takes.
const MOST_ROWS: usize = 512;
const ROW_BYTES: usize = 24;
/// Columns that a kernel for heads of any width has in shared memory.
const COLUMNS: usize = 128;
/// Bytes by which shared memory is given out.
const SHARED_UNIT: usize = 128;
/// Bytes that the blocks of one launch may take.
const WORKING: usize = 256 << 20;

/// What attention on one device shares.
pub(super) struct Attention {
    multiprocessors: usize,
    shared: SharedMemory,
    /// `WORKING`, or less in checks.
    pub(super) most_bytes: usize,
    working: Mutex<Option<Working>>,
}

/// The shared memory of a multiprocessor.
#[derive(Clone, Copy)]
pub(super) struct SharedMemory {
    pub(super) bytes: usize,
    /// What a thread block may have of it, and what each takes beside that.
    pub(super) of_block: usize,
    pub(super) reserved: usize,
}

impl SharedMemory {
    /// How many thread blocks have room that ask for `bytes`.
    fn blocks(self, kernel: &Kernel, bytes: usize) -> usize {
        let declared = self.of_block.saturating_sub(kernel.shared_bytes);
        self.bytes / (bytes + declared + self.reserved).next_multiple_of(SHARED_UNIT)
    }
}

#[derive(Clone)]
pub(super) struct Working {
    /// Sums of values of each block, and its largest score and total.
    parts: Memory,
    stats: Memory,
    /// Blocks that are done, by row and key head; zeros between launches.
    arrivals: Memory,
    /// Where the blocks of each row lie, for the launch that merges them.
    places: Memory,
    /// Blocks and values that fit.
    blocks: usize,
    values: usize,
}

/// How tensor cores attend: the kernel, and what a thread block takes.
struct Tiles<'a> {
    kernel: &'a Kernel,
    /// Thread blocks that a multiprocessor runs at a time, as their registers allow.
    together: usize,
    /// Rows of one request that go together, and how many times that each of them is taken.
    rows: usize,
    key_heads: usize,
    /// Shared memory, without what each row takes.
    bytes: usize,
    /// Whether a thread block can merge all blocks of its rows itself, and takes 64 queries at a time.
    whole: bool,
    many: bool,
}

impl<'a> Tiles<'a> {
    /// So many times 16 queries at a time.
    fn new(kernels: &'a Kernels, heads: HeadShape, many: bool) -> Option<Self> {
        let of_width = &kernels.attend_tensor;
        let (kernel, columns, width) = match (heads.head_dim, many) {
            (64, _) => (&of_width.of_64[usize::from(many)], 64, 64),
            (128, _) => (&of_width.of_128[usize::from(many)], 128, 128),
            (_, true) => return None,
            (width, false) => (&of_width.of_any, COLUMNS, width.next_multiple_of(COLUMNS)),
        };
        let queries = STEP * if many { 4 } else { 1 };
        let cuts = heads.group().div_ceil(queries);
        Some(Self {
            kernel,
            together: if many { 2 } else { 3 },
            rows: queries / heads.group().div_ceil(cuts),
            key_heads: heads.kv_heads * cuts,
            // Keys and values, weights and queries, all in bfloat16.
            bytes: 2 * (2 * BLOCK * columns + queries * (BLOCK + width)),
            whole: matches!(heads.head_dim, 64 | 128),
            many,
        })
    }

    fn bytes(&self, rows: usize) -> usize {
        self.bytes + rows * ROW_BYTES
    }
}

/// Rows of a launch that leave no more blocks than there is room for where no two requests share what
/// they see. Of rows that leave more, a thread block has all blocks.
fn likely_to_fit(plan: &CudaPlan, kv: &CudaKv, blocks: usize, room: usize) -> usize {
    let of_requests = kv.shape.slots.div_ceil(BLOCK) + plan.requests;
    let most = (plan.rows * blocks).min(plan.rows.div_ceil(plan.requests) * of_requests);
    plan.rows.div_ceil(most.div_ceil(room).max(1))
}

/// Blocks of `width` values that there is room for, and values, where a row may need so many blocks.
fn room(blocks: usize, width: usize) -> (usize, usize) {
    let blocks = blocks.max(WORKING / (4 * width));
    (blocks, blocks * width)
}

impl Attention {
    pub(super) fn new(multiprocessors: usize, shared: SharedMemory) -> Self {
        Self { multiprocessors, shared, most_bytes: WORKING, working: Mutex::default() }
    }

    /// Bytes of working memory for rows that see up to `positions` positions.
    pub(super) fn bytes(heads: HeadShape, positions: usize) -> usize {
        let of_row = positions.div_ceil(BLOCK).max(MOST_ROWS);
        let (blocks, values) = room(heads.heads * of_row, heads.head_dim);
        4 * values + 3 * 4 * blocks + 4 * MOST_ROWS
    }

    /// Makes the working memory of heads of this width, with the KV pool, so that no pass does later.
    pub(super) fn prepare(&self, device: &Device, head_dim: usize) -> Result<()> {
        self.working(device, WORKING / (4 * head_dim), head_dim).map(|_| ())
    }

    /// Working memory for `blocks` blocks of `width` values: what `prepare` made, unless a single row
    /// needs more. A graph that names what was there before keeps it.
    fn working(&self, device: &Device, blocks: usize, width: usize) -> Result<Working> {
        let mut working = self.working.lock().unwrap_or_else(PoisonError::into_inner);
        let fits =
            |working: &&Working| working.blocks >= blocks && working.values >= blocks * width;
        if let Some(working) = working.as_ref().filter(fits) {
            return Ok(working.clone());
        }
        device.outside_capture("the first attention of its size (run the pass once before)")?;
        let (blocks, values) = room(blocks, width);
        let made = Working {
            parts: device.allocate_uncompared("attention", values * 4)?,
            stats: device.allocate_uncompared("attention", blocks * 2 * 4)?,
            // There is room for a block of each row.
            arrivals: device.allocate("attention", blocks * 4)?,
            places: device.allocate_uncompared("attention", MOST_ROWS * 4)?,
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
            places: 0,
            heads: heads.heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            slots: kv.shape.slots as u32,
            first_row: 0,
            rows: 0,
            room: 0,
            window: window.map_or(u32::MAX, |window| window.try_into().unwrap_or(u32::MAX)),
            scale,
        };
        let mut held = Vec::new();
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
        let few = Tiles::new(kernels, heads, false).expect("16 queries of any width");
        let many = Tiles::new(kernels, heads, true).filter(|many| {
            let bytes = many.bytes(plan.rows.min(MOST_ROWS));
            let queries = plan.rows.div_ceil(plan.requests) * heads.group();
            plan.rows > FEW_ROWS && queries > STEP && bytes <= many.kernel.shared_bytes
        });
        let tiles = many.unwrap_or(few);
        // Of 64 queries merging takes longer than waiting for the last, so each row's blocks stay with one
        // thread block where the fewest that there can be keep the device busy.
        let fewest = plan.rows.div_ceil(tiles.rows) * tiles.key_heads;
        let whole = tiles.many && fewest >= self.multiprocessors;
        // The device knows what the rows see, and whether there is room for that.
        let room = (self.most_bytes / (4 * heads.q_width())).max(blocks);
        let together = match (whole, tiles.whole) {
            (true, _) => MOST_ROWS,
            (false, true) => likely_to_fit(plan, kv, blocks, room),
            (false, false) => room / blocks,
        };
        let together = together.clamp(1, plan.rows.clamp(1, MOST_ROWS));
        // Of longer contexts one thread block would merge too much.
        let merges = !whole && blocks > MERGED_BLOCKS;
        if !whole {
            let blocks = heads.heads * room.max(MOST_ROWS);
            let working = self.working(device, blocks, heads.head_dim)?;
            (arguments.parts, arguments.stats) = (working.parts.at(0), working.stats.at(0));
            (arguments.arrivals, arguments.room) = (working.arrivals.at(0), room as u32);
            if merges {
                arguments.places = working.places.at(0);
            }
            held.extend([working.parts, working.stats, working.arrivals, working.places]);
        }
        names.extend(&held);
        for first in (0..plan.rows).step_by(together) {
            let rows = together.min(plan.rows - first);
            (arguments.first_row, arguments.rows) = (first as u32, rows as u32);
            let bytes = tiles.bytes(rows);
            let at_a_time = tiles.together.min(self.shared.blocks(tiles.kernel, bytes)).max(1);
            let units = rows * tiles.key_heads * blocks;
            let grid = [units.min(at_a_time * self.multiprocessors), 1, 1];
            // SAFETY: sizes were checked above, the plan when it was placed, and the kernels keep to
            // the room that there is.
            unsafe {
                let threads = THREADS as u32;
                device.launch(tiles.kernel, grid, threads, bytes, &arguments, &names)?;
                if merges {
                    let grid = [heads.heads.div_ceil(MERGED_HEADS), rows, 1];
                    device.launch(&kernels.attend_merge, grid, threads, 0, &arguments, &names)?;
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
    Ok(())
}
