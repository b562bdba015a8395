//! Which kernel computes a projection. It changes the speed and never the bits.

use std::sync::{Mutex, PoisonError};

use super::arguments;
use super::contract::{GROUP, PAIR, SLICES};
use super::device::{Device, Memory};
use super::kernels::{Kernels, MIDDLE_ROWS, MIDDLE_THREADS, TensorProjections};
use super::memory::CudaVector;
use super::rows::CudaRows;
use super::weight::{CudaWeight, Layout, TILE};
use crate::{Accumulate, Error, Result};

/// Rows that the kernels for few rows take at most.
const SKINNY_ROWS: usize = 16;
/// Bytes of one stage of a warp's ring; `STAGE_BYTES` in `project_skinny.cu`.
const STAGE_BYTES: usize = 4096;
/// Stages beyond these do not make a ring faster.
const STAGES: usize = 4;
/// Rows at most that `project_skinny.cu` norms itself. Every thread block reads all of them as f32, so
/// from twice as many on a norm of its own is expected to be as fast.
const NORMED_ROWS: usize = 4;
/// Rows beyond which `project_many.cu` is faster than `project_middle.cu`.
const MOST_MIDDLE_ROWS: usize = 384;
/// Outputs of one unit of `project_middle.cu`, and stages of its ring at most.
const UNIT_OUTPUTS: usize = 64;
const VISITS: usize = 8;
/// Of each size of `MIDDLE_ROWS`: bytes of one stage, and buffers of a unit's sums.
const VISIT_BYTES: [usize; 3] = [16 << 10, 16 << 10, 8 << 10];
const BUFFERS: [usize; 3] = [4, 4, 2];
/// Rows and tiles of outputs of a thread block of `project_many.cu`, its stages, the blocks of inputs of
/// one, and its threads.
const MANY_ROWS: usize = 128;
const MANY_TILES: usize = 8;
const MANY_STAGES: usize = 6;
const MANY_BLOCKS: usize = 2;
const MANY_THREADS: u32 = 384;
/// Rows of the small tile of `project_wide.cu`, and outputs of both tiles.
const WIDE_ROWS: [usize; 2] = [64, 128];
const WIDE_OUTPUTS: [usize; 2] = [32, 128];
/// Stages of `project_wide.cu`, and bytes between rows of 32 inputs in them.
const WIDE_STAGES: usize = 4;
const ROW_BYTES: usize = 80;

/// Sums of groups that wait for the others, and how many have arrived.
#[derive(Clone)]
struct Partials {
    sums: Memory,
    arrivals: Memory,
    bytes: usize,
}

/// What the projections of one device share.
pub(super) struct Projections {
    multiprocessors: usize,
    /// Bytes of shared memory that a thread block may have.
    shared_bytes: usize,
    partials: Mutex<Option<Partials>>,
}

/// One projection of some rows.
pub(super) struct Projection<'a> {
    pub(super) weight: &'a CudaWeight,
    pub(super) bias: Option<&'a CudaVector>,
    pub(super) input: &'a CudaRows,
    /// Weight and epsilon of a norm of the input, where [`Projections::norms`] allows it.
    pub(super) norm: Option<(&'a CudaVector, f32)>,
    pub(super) rows: usize,
    pub(super) accumulate: Accumulate,
}

impl Projections {
    pub(super) fn new(multiprocessors: usize, shared_bytes: usize) -> Self {
        Self { multiprocessors, shared_bytes, partials: Mutex::default() }
    }

    /// Makes room for the sums that a projection needs, so that no pass has to.
    pub(super) fn prepare(&self, device: &Device, weight: &CudaWeight) -> Result<()> {
        if weight.layout != Layout::Tiles || weight.groups() == 1 {
            return Ok(());
        }
        let outputs = weight.outputs.next_multiple_of(UNIT_OUTPUTS);
        let bytes = weight.groups() * outputs * MIDDLE_ROWS[2] * 4;
        let mut partials = self.partials.lock().unwrap_or_else(PoisonError::into_inner);
        if partials.as_ref().is_none_or(|partials| partials.bytes < bytes) {
            *partials = Some(Partials {
                sums: device.allocate("sums of projections", bytes)?,
                // One for each thread block that adds the sums of a column, a cluster's at the least.
                arrivals: device
                    .allocate("sums of projections", 4 * self.multiprocessors.max(SLICES))?,
                bytes,
            });
        }
        Ok(())
    }

    /// Whether gates and ups can be multiplied where they are summed up.
    pub(super) fn gates(&self, kernels: &Kernels, weight: &CudaWeight, rows: usize) -> bool {
        let kernels = &kernels.project_tensor;
        weight.layout == Layout::Tiles
            && weight.outputs.is_multiple_of(2 * TILE)
            && (rows <= SKINNY_ROWS && kernels.skinny.is_some()
                || kernels.middle.is_some() && kernels.many.is_some())
    }

    /// Whether rows can be normed where they are projected.
    pub(super) fn norms(
        &self,
        kernels: &Kernels,
        weight: &CudaWeight,
        norm: &CudaVector,
        rows: usize,
    ) -> bool {
        weight.layout == Layout::Tiles
            && weight.groups() == 1
            && norm.len == weight.inputs
            && rows <= NORMED_ROWS
            && kernels.project_tensor.skinny.is_some()
    }

    /// Projects, and gates what comes out where asked to.
    pub(super) fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        projection: &Projection<'_>,
        gated: bool,
        out: &mut CudaRows,
    ) -> Result<()> {
        let &Projection { weight, bias, input, norm, rows, accumulate } = projection;
        let outputs = if gated { weight.outputs / 2 } else { weight.outputs };
        input.hold("a projection's input", rows, weight.inputs)?;
        out.hold("a projection's result", rows, outputs)?;
        if weight.inputs < input.width && !weight.inputs.is_multiple_of(PAIR) {
            return Err(Error::Tensor(format!(
                "a projection of {} inputs does not fit rows of {}",
                weight.inputs, input.width
            )));
        }
        if bias.is_some_and(|bias| bias.len < weight.outputs) {
            return Err(Error::Tensor(format!("a bias of less than {} values", weight.outputs)));
        }
        if norm.is_some_and(|(norm, _)| !self.norms(kernels, weight, norm, rows)) {
            return Err(Error::Tensor(format!("no kernel norms {rows} rows that it projects")));
        }
        if rows == 0 {
            return Ok(());
        }
        match weight.layout {
            Layout::Plain { bf16 } => {
                let arguments = arguments::PlainProject {
                    input: input.parts(),
                    out: out.parts(),
                    weight: weight.memory.at(0),
                    bias: bias.map_or(0, |bias| bias.memory.at(0)),
                    inputs: weight.inputs as u32,
                    outputs: weight.outputs as u32,
                    rows: rows as u32,
                    add: u32::from(accumulate == Accumulate::Add),
                };
                let grid = [weight.outputs.div_ceil(32), rows.div_ceil(8), 1];
                let names = names(projection, out);
                let kernel = kernels.project_plain.of(bf16);
                // SAFETY: input, bias and result were checked.
                unsafe { device.launch(kernel, grid, 256, 0, &arguments, &names) }
            }
            Layout::Tiles => {
                self.by_tensor_cores(device, &kernels.project_tensor, projection, gated, out)
            }
        }
    }

    fn by_tensor_cores(
        &self,
        device: &Device,
        kernels: &TensorProjections,
        projection: &Projection<'_>,
        gated: bool,
        out: &mut CudaRows,
    ) -> Result<()> {
        let &Projection { weight, bias, input, norm, rows, accumulate } = projection;
        let partials = match weight.groups() {
            1 => None,
            _ => self.partials.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        let mut arguments = arguments::Project {
            input: input.parts(),
            out: out.parts(),
            weight: weight.memory.at(0),
            bias: bias.map_or(0, |bias| bias.memory.at(0)),
            norm: norm.map_or(0, |(norm, _)| norm.memory.at(0)),
            partial: partials.as_ref().map_or(0, |partials| partials.sums.at(0)),
            arrivals: partials.as_ref().map_or(0, |partials| partials.arrivals.at(0)),
            inputs: weight.inputs as u32,
            outputs: weight.outputs as u32,
            rows: rows as u32,
            add: u32::from(accumulate == Accumulate::Add),
            stages: 0,
            last_pass: 1,
            epsilon: norm.map_or(0.0, |(_, epsilon)| epsilon),
        };
        let mut names = names(projection, out);
        names.extend(partials.iter().flat_map(|partials| [&partials.sums, &partials.arrivals]));
        let tiles = weight.outputs.div_ceil(TILE);
        let groups = weight.groups();

        if let (Some(skinny), true) = (&kernels.skinny, rows <= SKINNY_ROWS) {
            let tokens = rows.div_ceil(8);
            let units = if gated { tiles / 2 } else { tiles };
            let sums = 2 * SLICES * (if gated { 2 } else { 1 }) * tokens * 128 * 4;
            let blocks = weight.inputs.div_ceil(PAIR).div_ceil(groups).min(GROUP);
            let fixed = sums + (SLICES * 8 + 2) * 8 + rows * (blocks * 2 * PAIR + 16);
            let stages = (self.shared_bytes - fixed) / (SLICES * STAGE_BYTES);
            arguments.stages = stages.min(STAGES) as u32;
            let shared = fixed + arguments.stages as usize * SLICES * STAGE_BYTES;
            let columns = (self.multiprocessors / groups).clamp(1, units);
            let kernel = &skinny[usize::from(gated)][tokens - 1];
            let grid = [columns * groups, 1, 1];
            // SAFETY: input, norm, bias and result were checked; partial sums were made room for
            // when the weight was packed; a group's inputs leave room for a ring.
            return unsafe { device.launch(kernel, grid, 256, shared, &arguments, &names) };
        }
        if let (Some((middle, clusters)), true) = (&kernels.middle, rows <= MOST_MIDDLE_ROWS) {
            for first in (0..rows).step_by(MIDDLE_ROWS[2]) {
                let count = MIDDLE_ROWS[2].min(rows - first);
                let size = MIDDLE_ROWS.iter().position(|&most| count <= most).unwrap_or(2);
                let of_row = BUFFERS[size] * UNIT_OUTPUTS * 4 + GROUP / SLICES * 2 * PAIR;
                let barriers = (4 * VISITS + 2 * BUFFERS[size] + 1) * 8;
                let fixed = MIDDLE_ROWS[size] * of_row + barriers;
                let stages = ((self.shared_bytes - fixed) / VISIT_BYTES[size]).min(VISITS);
                let shared = fixed + stages * VISIT_BYTES[size];
                let units = tiles.div_ceil(UNIT_OUTPUTS / TILE);
                let columns = (clusters / groups).clamp(1, units);
                (arguments.input, arguments.out) = (input.parts_from(first), out.parts_from(first));
                (arguments.rows, arguments.stages) = (count as u32, stages as u32);
                arguments.last_pass = u32::from(first + count == rows);
                let kernel = &middle[usize::from(gated)][size];
                let grid = [columns * groups * SLICES, 1, 1];
                // SAFETY: as above, with these rows.
                unsafe {
                    device.launch(kernel, grid, MIDDLE_THREADS, shared, &arguments, &names)?;
                }
            }
            return Ok(());
        }
        if let Some(many) = &kernels.many {
            let kernel = &many[usize::from(gated)][usize::from(groups > 1)];
            let units = if gated {
                (tiles / 2).div_ceil(MANY_TILES / 2)
            } else {
                tiles.div_ceil(MANY_TILES)
            };
            // Thread blocks that read the same weights run at the same time.
            let grid = [rows.div_ceil(MANY_ROWS), units, 1];
            let ups = if gated { MANY_ROWS * MANY_TILES / 2 * TILE * 4 } else { 0 };
            let stage = (MANY_TILES * TILE + MANY_ROWS) * MANY_BLOCKS * 2 * PAIR;
            let shared = MANY_STAGES * (stage + 2 * 8) + ups;
            // SAFETY: input, bias and result were checked.
            return unsafe {
                device.launch(kernel, grid, MANY_THREADS, shared, &arguments, &names)
            };
        }
        if gated {
            return Err(Error::Device("gates of many rows are not computed in one launch".into()));
        }
        let size = usize::from(rows > WIDE_ROWS[0]);
        let kernel = &kernels.wide[size][usize::from(groups > 1)];
        let (tile_rows, tile_outputs) = (WIDE_ROWS[size], WIDE_OUTPUTS[size]);
        let grid = [weight.outputs.div_ceil(tile_outputs), rows.div_ceil(tile_rows), 1];
        let shared = WIDE_STAGES * (tile_rows * ROW_BYTES + tile_outputs * 2 * PAIR);
        // SAFETY: input, bias and result were checked.
        unsafe { device.launch(kernel, grid, 256, shared, &arguments, &names) }
    }
}

/// The memory that a projection names.
fn names<'a>(projection: &Projection<'a>, out: &'a CudaRows) -> Vec<&'a Memory> {
    let rows = projection.input.memory().chain(out.memory());
    let vectors = [projection.bias, projection.norm.map(|(norm, _)| norm)];
    let vectors = vectors.into_iter().flatten().map(|vector| &vector.memory);
    rows.chain([&projection.weight.memory]).chain(vectors).collect()
}
